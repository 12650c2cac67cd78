//! What a client connection is waiting for, and since when: a request's head, the client to take what it was sent, or the next request.
//!
//! The HTTP library's own timer covers the first of these, only after it knows the protocol, and counts idle connections as slow
//! heads. Here each wait has its own limit. The connection's task asks now and then whether one has passed.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

/// How long each wait may last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// For a request's head, and for the first request.
    pub(super) head: Duration,
    /// For the next request.
    pub(super) idle: Duration,
    /// For the client to take anything of its answers.
    pub(super) stall: Duration,
}

/// One connection's waits. Moments are milliseconds since it began, and 0 means that this is not waited for.
#[derive(Debug)]
pub(super) struct Clock {
    began: Instant,
    limits: Limits,
    head: AtomicU64,
    client: AtomicU64,
    idle: AtomicU64,
    /// Requests whose answers have not ended.
    open: AtomicU32,
}

/// Why a connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The head of a request did not come.
    Head,
    /// No further request came.
    Idle,
    /// The client takes nothing.
    Stalled,
}

impl Clock {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        let (head, client, idle, open) = (AtomicU64::new(1), AtomicU64::new(0), AtomicU64::new(0), AtomicU32::new(0));
        Arc::new(Self { began: Instant::now(), limits, head, client, idle, open })
    }

    /// How often it is worth asking.
    pub(super) fn tick(&self) -> Duration {
        let shortest = self.limits.head.min(self.limits.idle).min(self.limits.stall);
        (shortest / 4).clamp(Duration::from_millis(20), Duration::from_millis(2500))
    }

    /// Whether part of a head has come. Until the first request is taken its head is waited for, whatever comes instead.
    pub(super) fn reading_head(&self, reading: bool) {
        let never_asked = self.idle.load(Ordering::Relaxed) == 0 && self.open.load(Ordering::Relaxed) == 0;
        if !reading && !never_asked {
            self.head.store(0, Ordering::Relaxed);
        } else if self.head.load(Ordering::Relaxed) == 0 {
            self.head.store(self.now(), Ordering::Relaxed);
        }
    }

    /// A request has been taken; it is open until the guard is dropped.
    pub(super) fn open(self: &Arc<Self>) -> Open {
        self.head.store(0, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        Open(self.clone())
    }

    /// Whether a wait has lasted too long.
    pub(super) fn overdue(&self) -> Option<Overdue> {
        let passed = |since: &AtomicU64, limit: Duration| {
            let since = since.load(Ordering::Relaxed);
            since > 0 && self.now().saturating_sub(since) > u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
        };
        if self.open.load(Ordering::Relaxed) > 0 {
            return passed(&self.client, self.limits.stall).then_some(Overdue::Stalled);
        }
        if passed(&self.head, self.limits.head) {
            return Some(Overdue::Head);
        }
        passed(&self.idle, self.limits.idle).then_some(Overdue::Idle)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }
}

/// A request that is not yet answered to its end.
#[derive(Debug)]
pub(super) struct Open(Arc<Clock>);

impl Drop for Open {
    fn drop(&mut self) {
        let clock = &self.0;
        clock.open.fetch_sub(1, Ordering::Relaxed);
        clock.client.store(0, Ordering::Relaxed);
        clock.idle.store(clock.now(), Ordering::Relaxed);
    }
}

/// An answer's body that tells the clock who is being waited for: after a piece was given it is the client, and while there is none the engine.
#[derive(Debug)]
pub(super) struct Timed<B> {
    pub(super) body: B,
    pub(super) open: Open,
}

impl<B: Body + Unpin> Body for Timed<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let timed = self.get_mut();
        let polled = Pin::new(&mut timed.body).poll_frame(context);
        let clock = &timed.open.0;
        clock.client.store(if polled.is_ready() { clock.now() } else { 0 }, Ordering::Relaxed);
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
    use std::task::Waker;

    use bytes::Bytes;
    use http_body_util::Full;
    use tokio::time::advance;

    use super::*;

    const LIMITS: Limits = Limits { head: Duration::from_secs(10), idle: Duration::from_secs(75), stall: Duration::from_secs(300) };

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_asks_nothing_is_overdue_after_the_head_limit() {
        let clock = Clock::new(LIMITS);
        advance(LIMITS.head).await;
        assert_eq!(clock.overdue(), None);
        advance(Duration::from_millis(2)).await;
        assert_eq!(clock.overdue(), Some(Overdue::Head));
        clock.reading_head(false);
        assert_eq!(clock.overdue(), Some(Overdue::Head), "blank lines and prefaces are no request");
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_has_longer_than_a_slow_head() {
        let clock = Clock::new(LIMITS);
        drop(clock.open());
        advance(Duration::from_secs(60)).await;
        assert_eq!(clock.overdue(), None);
        clock.reading_head(true);
        advance(Duration::from_secs(8)).await;
        clock.reading_head(true);
        advance(Duration::from_secs(3)).await;
        assert_eq!(clock.overdue(), Some(Overdue::Head), "a head that drips in is counted from its first byte");
        clock.reading_head(false);
        advance(Duration::from_secs(5)).await;
        assert_eq!(clock.overdue(), Some(Overdue::Idle));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_engine_is_waited_for_and_a_client_that_takes_nothing_is_not() {
        let clock = Clock::new(LIMITS);
        let mut timed = Timed { body: Full::new(Bytes::from_static(b"piece")), open: clock.open() };
        advance(Duration::from_secs(3600)).await;
        assert_eq!(clock.overdue(), None, "the answer has not begun");
        let mut context = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut timed).poll_frame(&mut context).is_ready());
        advance(LIMITS.stall + Duration::from_millis(2)).await;
        assert_eq!(clock.overdue(), Some(Overdue::Stalled));
        drop(timed);
        assert_eq!(clock.overdue(), None);
    }
}
