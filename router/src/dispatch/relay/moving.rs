//! Moves a stream to another engine before its own one is gone.
//!
//! Drains, restarts, sleep and the end of a job thus take as long as the moves, not as long as the
//! answers. A stream whose agent has fallen silent moves too, once nothing comes any more. The old
//! engine continues the stream until another one has begun.

use std::fmt;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::resuming::Loss;
use super::{Relay, RelayState};
use crate::direct_writing::AnswerPipeline;
use crate::dispatch::resume::{Departure, Destinations, ResumedAnswer};
use crate::fleet::{Fleet, MoveTurn, Replica};
use crate::outcome::LossCause;

/// A stream that would end within this time stays.
const STAY: Duration = Duration::from_secs(2);

/// Silence after which a stream whose agent is silent moves. Without the agent's word nobody knows
/// whether its engine computes.
const SILENCE: Duration = Duration::from_secs(1);

/// How often a stream that cannot move yet, or should stay for now, checks again.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Pause before a stream that could not be moved tries again. Each further failure doubles it.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Most doublings of the retry pause, which reaches about a minute.
const MAX_DOUBLINGS: u32 = 6;

/// Ends when the stream should move and it is its turn.
pub(super) struct MoveWatch(Pin<Box<dyn Future<Output = MoveTurn> + Send>>);

impl fmt::Debug for MoveWatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("MoveWatch").finish_non_exhaustive()
    }
}

/// The facts about a stream that may have to move.
struct MovableStream {
    replica: Arc<Replica>,
    pipeline: Arc<AnswerPipeline>,
    destinations: Destinations,
    max_tokens: Option<u64>,
    /// When this engine began the stream, and how many tokens it had then.
    begun: (Instant, u64),
}

impl MovableStream {
    /// Waits until the stream should leave its replica and it is its turn.
    async fn await_turn(self, fleet: Fleet, delay: Duration) -> MoveTurn {
        if !delay.is_zero() {
            sleep(delay).await;
        }
        let moves = &self.replica.local_load.stream_moves;
        loop {
            let mut change = pin!(moves.change());
            change.as_mut().enable();
            let present = fleet.view().present(&self.replica).filter(|present| present.epoch == self.replica.epoch).cloned();
            let Some(leaving) = present.filter(|present| present.is_leaving()) else {
                change.await;
                continue;
            };
            let is_possible = self.destinations.exist(&fleet.view(), &self.replica, Instant::now());
            if is_possible && self.is_better_off_elsewhere(&leaving) {
                return moves.await_turn().await;
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Whether the stream should move: a draining replica's if it does not end soon, a silent
    /// agent's if nothing comes.
    fn is_better_off_elsewhere(&self, leaving: &Replica) -> bool {
        let flow = self.pipeline.lock();
        if !leaving.is_being_emptied() {
            return flow.last_progress_at.elapsed() >= SILENCE;
        }
        let emitted = flow.token_record.as_ref().map_or(0, |record| record.emitted_tokens());
        drop(flow);
        let (begun_at, emitted_before) = self.begun;
        let own = u32::try_from(emitted.saturating_sub(emitted_before)).unwrap_or(u32::MAX);
        let Some(remaining) = self.max_tokens.map(|most| most.saturating_sub(emitted)).filter(|_| own > 0) else { return true };
        (begun_at.elapsed() / own).saturating_mul(u32::try_from(remaining).unwrap_or(u32::MAX)) > STAY
    }
}

/// A move under way.
#[derive(Debug)]
pub(super) struct Move {
    begun_at: Instant,
    cause: LossCause,
    _turn: MoveTurn,
}

impl Relay {
    /// Lets a stream that can be continued move when its replica leaves, not before `delay`.
    ///
    /// A stream that would be replayed stays as long as it can, because its replay starts with the
    /// first token.
    pub(super) fn watch_for_move(&mut self, delay: Duration) {
        let Some(resumption) = self.resumption.as_ref().filter(|resumption| resumption.is_allowed()) else { return };
        let Some(sampling) = resumption.sampling() else { return };
        let flow = self.pipeline.lock();
        if flow.token_record.as_ref().is_none_or(|record| record.has_given_up()) {
            return;
        }
        let emitted = flow.token_record.as_ref().map_or(0, |record| record.emitted_tokens());
        drop(flow);
        let stream = MovableStream {
            replica: self.context.replica.clone(),
            pipeline: self.pipeline.clone(),
            destinations: resumption.destinations(),
            max_tokens: sampling.max_tokens(),
            begun: (Instant::now(), emitted),
        };
        self.move_watch = Some(MoveWatch(Box::pin(stream.await_turn(resumption.fleet().clone(), delay))));
    }

    /// Begins to move the stream if it is time to. Returns whether it did.
    pub(super) fn poll_move(&mut self, context: &mut Context<'_>) -> bool {
        let Some(watch) = &mut self.move_watch else { return false };
        let Poll::Ready(turn) = watch.0.as_mut().poll(context) else { return false };
        self.move_watch = None;
        self.exchange.detach();
        // An end that the lane's task found before this counts.
        if self.pipeline.lock().failure.is_none() {
            self.begin_move(turn);
        }
        true
    }

    fn begin_move(&mut self, turn: MoveTurn) {
        let Some((resumption, known)) = self.take_resumption() else {
            // The next events may show where the stream can be cut.
            self.watch_for_move(RETRY_INTERVAL);
            return self.stay();
        };
        let Some(request) = self.rest_of(&resumption, known.as_ref()).flatten() else {
            self.resumption = Some(resumption);
            return self.stay();
        };
        let replica = &self.context.replica;
        let is_being_emptied = resumption.fleet().view().present(replica).is_some_and(|present| present.is_being_emptied());
        let cause = if is_being_emptied { LossCause::Draining } else { LossCause::Silent };
        let watch = resumption.second_watch();
        self.context.log_entry.record_search();
        let moving = resumption.start(Departure::Move, Some(request), replica, watch);
        self.state = RelayState::Moving(moving, Move { begun_at: Instant::now(), cause, _turn: turn });
    }

    /// Continues with the engine that has the stream.
    fn stay(&mut self) {
        self.state = RelayState::Streaming;
        let flow = self.pipeline.lock();
        self.is_direct_writing_pending = flow.direct_writer.is_some();
    }

    /// Ends the move: another engine has begun, or none will. Returns the bytes to send.
    pub(super) fn finish_move(&mut self, resumed: ResumedAnswer, until: &Move) -> Bytes {
        let ResumedAnswer { resumption, crash_watch, outcome } = resumed;
        let replica = self.context.replica.clone();
        self.resumption = Some(resumption);
        match outcome {
            Ok(begun) => {
                replica.local_load.stream_moves.record_move();
                self.context.crash_watch = crash_watch;
                let loss = Loss { cause: until.cause, message: "the stream was moved to another engine".into(), at: until.begun_at };
                self.continue_with(*begun, &loss)
            }
            Err(reason) => {
                tracing::info!(replica = %replica.id, reason, "a stream could not be moved to another engine and stays");
                self.stay();
                let delay = RETRY_INTERVAL * 2_u32.pow(self.failed_moves.min(MAX_DOUBLINGS));
                self.failed_moves += 1;
                self.watch_for_move(delay);
                Bytes::new()
            }
        }
    }
}
