//! Tracks what a connection to a listener waits for, and since when: a request's head, the client
//! to read, or the next request.
//!
//! The HTTP library's own timer covers only the head, only after it knows the protocol, and counts
//! idle connections as slow heads. Here each wait has its own limit, and the connection's task
//! checks them now and then. An HTTP/2 stream whose client reads nothing of it is reset, and its
//! neighbours go on.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};
use hyper::rt::Executor;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy)]
pub struct ConnectionTimeouts {
    /// Limit for the head of a request, and for the first request.
    pub head: Duration,
    /// Limit for the next request on an idle connection.
    pub idle: Duration,
    /// Limit for the client to read anything of its answers.
    pub stall: Duration,
}

/// How long a connection may be without a request, or leave a local answer unread, while few places
/// are left. Who may ask nothing of an engine holds no place by asking the router.
pub const CROWDED_PATIENCE: Duration = Duration::from_secs(1);

/// Few places are left if fewer than one in this many are free.
const CROWDED_DIVISOR: usize = 8;

/// The places of a listener's connections. A client that takes many of them and asks nothing keeps
/// none for long.
#[derive(Debug)]
pub struct ConnectionPlaces {
    free: Arc<Semaphore>,
    most: usize,
}

impl ConnectionPlaces {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { free: Arc::new(Semaphore::new(most)), most })
    }

    pub async fn take(&self) -> OwnedSemaphorePermit {
        self.free.clone().acquire_owned().await.expect("the semaphore is never closed")
    }

    fn is_crowded(&self) -> bool {
        self.free.available_permits() < self.most.div_ceil(CROWDED_DIVISOR)
    }
}

/// The waits of one connection. Times are milliseconds since it began; 0 means no wait.
///
/// Each answer has its own wait: over HTTP/2, an answer that the client reads would otherwise hide
/// another that it does not read, which would be held for ever.
#[derive(Debug)]
pub struct ConnectionClock {
    started_at: Instant,
    timeouts: ConnectionTimeouts,
    places: Option<Arc<ConnectionPlaces>>,
    head_since: AtomicU64,
    idle_since: AtomicU64,
    /// Requests whose answers have not ended, the newest last.
    open: Mutex<Vec<Arc<OpenAnswer>>>,
    /// Part of an answer of ours is still to be written.
    is_answering: AtomicBool,
    has_streams: AtomicBool,
}

#[derive(Debug, Default)]
struct OpenAnswer {
    /// Since when the client has been due to read.
    client_since: AtomicU64,
    /// Whether this process makes the answer, such as a refusal, and no engine does.
    is_local: AtomicBool,
    /// The task of an HTTP/2 stream. Aborting the task resets the stream.
    stream: OnceLock<AbortHandle>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overdue {
    Head,
    Idle,
    /// The client reads nothing of the connection's only answer.
    Stalled,
}

impl ConnectionClock {
    /// The clock of a connection that takes one of these places.
    pub fn new(limits: ConnectionTimeouts, places: Option<Arc<ConnectionPlaces>>) -> Arc<Self> {
        Arc::new(Self {
            started_at: Instant::now(),
            timeouts: limits,
            places,
            head_since: AtomicU64::new(1),
            idle_since: AtomicU64::new(0),
            open: Mutex::default(),
            is_answering: AtomicBool::new(false),
            has_streams: AtomicBool::new(false),
        })
    }

    /// How often [`Self::find_overdue`] is worth calling.
    pub fn check_interval(&self) -> Duration {
        let shortest = self.timeouts.head.min(self.timeouts.idle).min(self.timeouts.stall);
        (shortest / 4).clamp(Duration::from_millis(20), Duration::from_millis(2500))
    }

    pub fn head_timeout(&self) -> Duration {
        self.timeouts.head
    }

    /// Records whether part of a head has come. Until the first request is taken, its head is
    /// waited for in any case.
    pub fn set_reading_head(&self, reading: bool) {
        let never_asked = self.idle_since.load(Ordering::Relaxed) == 0 && self.open.lock().is_empty();
        if !reading && !never_asked {
            self.head_since.store(0, Ordering::Relaxed);
        } else if self.head_since.load(Ordering::Relaxed) == 0 {
            self.head_since.store(self.now(), Ordering::Relaxed);
        }
    }

    pub fn open_request(self: &Arc<Self>) -> OpenRequest {
        self.head_since.store(0, Ordering::Relaxed);
        self.is_answering.store(true, Ordering::Relaxed);
        let answering = Arc::<OpenAnswer>::default();
        self.open.lock().push(answering.clone());
        OpenRequest { clock: self.clone(), answering }
    }

    /// Whether the connection has turned out to speak HTTP/2.
    pub fn has_streams(&self) -> bool {
        self.has_streams.load(Ordering::Relaxed)
    }

    /// Whether the library is writing an answer of ours, and not its own.
    pub fn is_answering(&self) -> bool {
        self.is_answering.load(Ordering::Relaxed)
    }

    /// Records that the library has written all that it had.
    pub fn record_flush(&self) {
        if self.is_answering() && self.open.lock().is_empty() {
            self.is_answering.store(false, Ordering::Relaxed);
        }
    }

    /// The connection's wait that has lasted too long, if any. A stream's own wait ends only that
    /// stream.
    pub fn find_overdue(&self) -> Option<Overdue> {
        let passed = |since: &AtomicU64, limit: Duration| {
            let since = since.load(Ordering::Relaxed);
            since > 0 && self.now().saturating_sub(since) > u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
        };
        let is_crowded = self.places.as_ref().is_some_and(|places| places.is_crowded());
        let patience = |limit: Duration| if is_crowded { limit.min(CROWDED_PATIENCE) } else { limit };
        let open = self.open.lock();
        if !open.is_empty() {
            let stall = |answering: &OpenAnswer| {
                if answering.is_local.load(Ordering::Relaxed) { patience(self.timeouts.stall) } else { self.timeouts.stall }
            };
            let mut stalled = open.iter().filter(|answering| passed(&answering.client_since, stall(answering)));
            return stalled.any(|answering| !answering.abort_stream()).then_some(Overdue::Stalled);
        }
        if passed(&self.head_since, patience(self.timeouts.head)) {
            return Some(Overdue::Head);
        }
        passed(&self.idle_since, patience(self.timeouts.idle)).then_some(Overdue::Idle)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }
}

impl OpenAnswer {
    /// Ends the answer's stream. `false` if it has none of its own and the connection must end.
    fn abort_stream(&self) -> bool {
        self.stream.get().inspect(|stream| stream.abort()).is_some()
    }
}

/// Runs each stream of an HTTP/2 connection as a separate task.
#[derive(Debug, Clone)]
pub struct StreamExecutor(pub Arc<ConnectionClock>);

impl<F> Executor<F> for StreamExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    /// hyper calls this right after it has given the request to the service, so the newest request
    /// is this stream's.
    fn execute(&self, stream: F) {
        self.0.has_streams.store(true, Ordering::Relaxed);
        let newest = self.0.open.lock().last().cloned();
        let task = tokio::spawn(stream);
        if let Some(newest) = newest {
            // Other tasks of the library (upgrades, which the edge does not have) belong to a
            // request that already has its task.
            let _ = newest.stream.set(task.abort_handle());
        }
    }
}

#[derive(Debug)]
pub struct OpenRequest {
    clock: Arc<ConnectionClock>,
    answering: Arc<OpenAnswer>,
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.clock.open.lock().retain(|answering| !Arc::ptr_eq(answering, &self.answering));
        self.clock.idle_since.store(self.clock.now(), Ordering::Relaxed);
    }
}

/// An answer's body that tells the clock what the connection waits for: the client after each
/// piece, the engine while there is none.
#[derive(Debug)]
pub struct TimedBody<B> {
    body: B,
    open: OpenRequest,
}

impl<B> TimedBody<B> {
    /// The wait for the client begins here: with a closed window the body is not even polled.
    /// `is_local` says that this process makes the answer, and no engine.
    pub fn new(body: B, is_local: bool, open: OpenRequest) -> Self {
        open.answering.is_local.store(is_local, Ordering::Relaxed);
        open.answering.client_since.store(open.clock.now(), Ordering::Relaxed);
        Self { body, open }
    }
}

impl<B: Body + Unpin> Body for TimedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let timed = self.get_mut();
        let polled = Pin::new(&mut timed.body).poll_frame(context);
        let OpenRequest { clock, answering } = &timed.open;
        answering.client_since.store(if polled.is_ready() { clock.now() } else { 0 }, Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::task::Waker;

    use bytes::Bytes;
    use futures_util::stream;
    use http_body_util::{Full, StreamBody};
    use tokio::time::advance;

    use super::*;

    const LIMITS: ConnectionTimeouts =
        ConnectionTimeouts { head: Duration::from_secs(10), idle: Duration::from_secs(75), stall: Duration::from_secs(300) };

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_requests_is_overdue_after_the_limit() {
        let clock = ConnectionClock::new(LIMITS, None);
        advance(LIMITS.head).await;
        assert_eq!(clock.find_overdue(), None);
        advance(Duration::from_millis(2)).await;
        assert_eq!(clock.find_overdue(), Some(Overdue::Head));
        clock.set_reading_head(false);
        assert_eq!(clock.find_overdue(), Some(Overdue::Head), "blank lines and prefaces are no request");
    }

    #[tokio::test(start_paused = true)]
    async fn connections_without_requests_are_overdue_soon_where_crowded() {
        let places = ConnectionPlaces::new(16);
        let mut taken = Vec::new();
        for _ in 0..14 {
            taken.push(places.take().await);
        }
        let clock = || ConnectionClock::new(LIMITS, Some(places.clone()));
        let (silent, idle, asking) = (clock(), clock(), clock());
        drop(idle.open_request());
        let _open = asking.open_request();
        advance(CROWDED_PATIENCE + Duration::from_millis(2)).await;
        assert_eq!((silent.find_overdue(), idle.find_overdue()), (None, None), "an eighth is free");
        taken.push(places.take().await);
        assert_eq!((silent.find_overdue(), idle.find_overdue()), (Some(Overdue::Head), Some(Overdue::Idle)));
        assert_eq!(asking.find_overdue(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unread_refusal_holds_no_place_where_crowded() {
        let places = ConnectionPlaces::new(1);
        let _taken = places.take().await;
        let begin = |is_local| {
            let clock = ConnectionClock::new(LIMITS, Some(places.clone()));
            let body = TimedBody::new(Full::new(Bytes::from_static(b"who are you?")), is_local, clock.open_request());
            (clock, body)
        };
        let (refused, streaming) = (begin(true), begin(false));
        advance(CROWDED_PATIENCE + Duration::from_millis(2)).await;
        assert_eq!(refused.0.find_overdue(), Some(Overdue::Stalled));
        assert_eq!(streaming.0.find_overdue(), None, "an engine has worked for it");
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_has_longer_than_a_slow_head() {
        let clock = ConnectionClock::new(LIMITS, None);
        drop(clock.open_request());
        advance(Duration::from_secs(60)).await;
        assert_eq!(clock.find_overdue(), None);
        clock.set_reading_head(true);
        advance(Duration::from_secs(8)).await;
        clock.set_reading_head(true);
        advance(Duration::from_secs(3)).await;
        assert_eq!(clock.find_overdue(), Some(Overdue::Head), "a head that drips in is counted from its first byte");
        clock.set_reading_head(false);
        advance(Duration::from_secs(5)).await;
        assert_eq!(clock.find_overdue(), Some(Overdue::Idle));
    }

    #[tokio::test(start_paused = true)]
    async fn slow_engines_are_waited_for_and_stalled_clients_are_not() {
        let clock = ConnectionClock::new(LIMITS, None);
        let open = clock.open_request();
        advance(Duration::from_secs(3600)).await;
        assert_eq!(clock.find_overdue(), None, "the answer has not begun");
        let mut timed = TimedBody::new(Full::new(Bytes::from_static(b"piece")), false, open);
        let mut context = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut timed).poll_frame(&mut context).is_ready());
        advance(LIMITS.stall + Duration::from_millis(2)).await;
        assert_eq!(clock.find_overdue(), Some(Overdue::Stalled));
        drop(timed);
        assert_eq!(clock.find_overdue(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn one_answer_being_read_does_not_hide_a_stalled_one() {
        let clock = ConnectionClock::new(LIMITS, None);
        let untouched = TimedBody::new(Full::new(Bytes::from_static(b"never asked for")), false, clock.open_request());
        let mut taken = TimedBody::new(StreamBody::new(stream::pending::<Result<Frame<Bytes>, Infallible>>()), false, clock.open_request());
        let mut context = Context::from_waker(Waker::noop());
        advance(LIMITS.stall / 2).await;
        assert!(Pin::new(&mut taken).poll_frame(&mut context).is_pending());
        advance(LIMITS.stall / 2 + Duration::from_millis(2)).await;
        assert_eq!(clock.find_overdue(), Some(Overdue::Stalled));
        drop(untouched);
        assert_eq!(clock.find_overdue(), None);
        drop(taken);
        assert_eq!(clock.find_overdue(), None, "it is idle since just now");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_stream_ends_without_its_connection() {
        let clock = ConnectionClock::new(LIMITS, None);
        let untouched = TimedBody::new(Full::new(Bytes::from_static(b"never asked for")), false, clock.open_request());
        let (ended, end) = tokio::sync::oneshot::channel::<Infallible>();
        StreamExecutor(clock.clone()).execute(async move {
            let _both = (untouched, ended);
            std::future::pending::<()>().await;
        });
        let neighbour = clock.open_request();
        StreamExecutor(clock.clone()).execute(std::future::pending::<()>());
        advance(LIMITS.stall + Duration::from_millis(2)).await;
        assert_eq!(clock.find_overdue(), None, "the connection goes on");
        assert!(end.await.is_err(), "the stream's task was ended");
        assert_eq!(clock.open.lock().len(), 1, "its neighbour is there");
        drop(neighbour);
    }
}
