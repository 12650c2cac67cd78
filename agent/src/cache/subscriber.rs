//! Subscriber to the cache events of one life of an engine, which updates a `CacheLog`.
//!
//! It requests missing messages again. If the engine cannot resend them, everything is forgotten
//! and the cache counts as unknown. The subscriber ends with the supervisor's task that runs it.

use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage};

use super::KvEventSource;
use super::kv_event::{self, KvEventError, ReplayMessage};
use super::log::CacheLogWriter;

/// Time limit for connecting to an engine that has reported itself ready.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for the engine to send missed messages again.
///
/// The engine polls the replay socket at least every tenth of a second.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(2);

const RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// Minimum time between two warnings of one life.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Point from which an engine's events must be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FollowFrom {
    /// The life has just begun, and has stored nothing yet.
    Now,
    /// Another agent followed the engine before and has died.
    FirstEvent,
}

/// Follows one life of an engine for as long as it is polled.
///
/// Sends `joined` once no event can be missed unnoticed, or once that is known to be impossible;
/// the log says which.
pub(crate) async fn follow(source: &KvEventSource, log: CacheLogWriter, engine: u32, since: FollowFrom, joined: oneshot::Sender<()>) {
    let (live, replay) = match source {
        KvEventSource::Sockets { live, replay } => (live, replay),
        KvEventSource::Nothing { because } => return log.mark_unknown(because),
    };
    let mut joined = Some(joined);
    let mut subscriber = Subscriber { log, replay, engine, next: 0, last_live: None, resets: 0, warned: None };
    loop {
        let because = match timeout(CONNECT_TIMEOUT, EventConnection::open(live)).await {
            Ok(Ok(connection)) => {
                subscriber.log.mark_exact();
                if since == FollowFrom::FirstEvent && joined.is_some() {
                    subscriber.replay_all().await;
                }
                // If this fails, the supervisor has gone and ends this task.
                let _ = joined.take().map(|joined| joined.send(()));
                subscriber.run(connection).await
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()),
        };
        let because = format!("the engine's cache events cannot be had: {because}");
        subscriber.log.mark_unknown(&because);
        // The next message makes the subscriber request everything again.
        subscriber.next = 0;
        drop(joined.take());
        // The engine may have died. Then this task is about to end, and no warning is due.
        sleep(RECONNECT_DELAY).await;
        subscriber.warn(&format!("{because}; requests are placed without them"));
    }
}

struct EventConnection {
    socket: SubSocket,
    fate: Pin<Box<dyn Stream<Item = SocketEvent> + Send>>,
}

impl EventConnection {
    async fn open(path: &Path) -> Result<Self, ZmqError> {
        let mut socket = SubSocket::new();
        let fate = Box::pin(socket.monitor());
        socket.connect(&endpoint(path)).await?;
        socket.subscribe("").await?;
        Ok(Self { socket, fate })
    }

    /// Next message, or the reason why there will be none.
    async fn next(&mut self) -> Result<ZmqMessage, String> {
        loop {
            // Both can be cancelled without losing a message.
            tokio::select! {
                biased;
                message = self.socket.recv() => return message.map_err(|error| error.to_string()),
                event = self.fate.next() => match event {
                    Some(SocketEvent::Disconnected(_)) | None => return Err("the engine closed the connection".to_owned()),
                    Some(_) => {}
                },
            }
        }
    }
}

fn endpoint(path: &Path) -> String {
    format!("ipc://{}", path.display())
}

struct Subscriber<'a> {
    log: CacheLogWriter,
    replay: &'a Path,
    engine: u32,
    /// Sequence number of the next message to apply.
    next: u64,
    last_live: Option<u64>,
    resets: u64,
    warned: Option<Instant>,
}

impl Subscriber<'_> {
    /// Reads until the connection ends, and returns why.
    async fn run(&mut self, mut connection: EventConnection) -> String {
        loop {
            match connection.next().await {
                Ok(message) => self.receive_live(message).await,
                Err(because) => return because,
            }
        }
    }

    async fn receive_live(&mut self, message: ZmqMessage) {
        let (sequence, payload) = match kv_event::parse_live(&message.into_vec()) {
            Ok(live) => live,
            // The sequence number is unknown, too. If the message had one, the next message shows
            // the gap.
            Err(error) => return self.count_malformed(&error),
        };
        let repeated = self.last_live.replace(sequence) == Some(sequence);
        if sequence == 0 && self.next > 0 && !repeated {
            self.log.count(|counters| counters.gaps += 1);
            self.log.restart();
            self.resets += 1;
            self.warn("the engine counts its cache events from the beginning; what is cached is learned anew");
            self.next = 0;
        }
        if sequence > self.next {
            self.fill_gap(sequence).await;
        }
        if sequence >= self.next {
            self.apply_message(sequence, &payload);
        }
    }

    /// Applies the message with the next number, or a later one if the messages between are lost.
    fn apply_message(&mut self, sequence: u64, payload: &Bytes) {
        if sequence > self.next {
            self.reset_log("cache events are lost");
        }
        self.next = sequence.saturating_add(1);
        match kv_event::parse_events(payload) {
            Ok(events) => self.log.apply(&events),
            Err(error) => {
                self.count_malformed(&error);
                self.reset_log("cache events cannot be read");
            }
        }
    }

    /// Requests the messages missing before `until`.
    ///
    /// Meanwhile live messages wait in the engine's queue, which is bounded; the messages it drops
    /// are the next gap.
    async fn fill_gap(&mut self, until: u64) {
        self.log.count(|counters| counters.gaps += 1);
        let before = self.resets;
        let outcome = timeout(REPLAY_TIMEOUT, self.request_replay(until)).await;
        match outcome {
            Ok(Ok(())) if self.resets == before && self.next >= until => {
                self.log.count(|counters| counters.replays += 1);
            }
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.warn(&format!("missed cache events cannot be had again: {error}")),
            Err(_) => self.warn("missed cache events were not sent again in time"),
        }
    }

    /// Requests everything that the engine still has, from its first message on.
    ///
    /// Live messages wait meanwhile.
    async fn replay_all(&mut self) {
        let because = match timeout(REPLAY_TIMEOUT, self.request_replay(u64::MAX)).await {
            // If the engine keeps only some messages, the first one shows the gap, and all blocks
            // are forgotten.
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "they were not sent in time".to_owned(),
        };
        self.reset_log(&format!("earlier cache events cannot be had: {because}"));
    }

    /// Each request has its own socket, so that a late answer to an earlier one is not mistaken for
    /// its own.
    async fn request_replay(&mut self, until: u64) -> Result<(), ReplayError> {
        let mut socket = DealerSocket::new();
        socket.connect(&endpoint(self.replay)).await?;
        let request = vec![Bytes::new(), Bytes::copy_from_slice(&self.next.to_be_bytes())];
        socket.send(ZmqMessage::try_from(request).map_err(|_| ZmqError::NoMessage)?).await?;
        loop {
            match kv_event::parse_replay(&socket.recv().await?.into_vec())? {
                ReplayMessage::End => return Ok(()),
                ReplayMessage::Batch(sequence, payload) if sequence >= self.next => self.apply_message(sequence, &payload),
                ReplayMessage::Batch(..) => {}
            }
            // The message at hand is the next one, and newer ones are on their way.
            if self.next >= until {
                return Ok(());
            }
        }
    }

    fn count_malformed(&mut self, error: &KvEventError) {
        self.log.count(|counters| counters.malformed += 1);
        self.warn(&format!("the engine sent {error}"));
    }

    /// Forgets all blocks. A wrong cache report is worse than none.
    fn reset_log(&mut self, because: &str) {
        self.log.reset(&format!("{because}: what is cached is not known until the engine clears its cache or starts anew"));
        self.resets += 1;
        self.warn(&format!("{because}; requests are placed by their text until the engine clears its cache or starts anew"));
    }

    fn warn(&mut self, text: &str) {
        if self.warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL) {
            self.warned = Some(Instant::now());
            tracing::warn!(engine = self.engine, "{text}");
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum ReplayError {
    #[error(transparent)]
    Socket(#[from] ZmqError),
    #[error("the answer is {0}")]
    Wire(#[from] KvEventError),
}

#[cfg(test)]
mod tests;
