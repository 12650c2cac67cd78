//! The viewers' data, once a second. It is gathered and written as JSON once for all viewers, and
//! only while there are any. Each viewer gets the whole picture first and then changes; a viewer
//! that is too slow gets the whole picture again.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt, unfold};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::sections::Sections;
use crate::keys::PageSessions;
use crate::operators::Operators;

const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// Most viewers. Each costs a connection, and 2.1 kB a second for each busy replica with a GPU.
const MAX_VIEWERS: usize = 64;

/// The fleet at one moment.
#[derive(Debug)]
pub(super) struct Tick {
    /// A running number.
    pub(super) number: u64,
    at: Instant,
    /// The whole picture, and the changes since the tick before, as events.
    pub(super) whole: Bytes,
    pub(super) changes: Bytes,
}

#[derive(Debug)]
pub(super) struct Live {
    /// `None` before anybody has looked, and after the last viewer has gone.
    ticks: watch::Sender<Option<Arc<Tick>>>,
    viewer_came: Notify,
    places: Arc<Semaphore>,
}

impl Default for Live {
    fn default() -> Self {
        Self { ticks: watch::Sender::new(None), viewer_came: Notify::new(), places: Arc::new(Semaphore::new(MAX_VIEWERS)) }
    }
}

impl Live {
    /// Gathers ticks while there are viewers. Never ends.
    pub(super) async fn gather_while_watched(&self, calls: &Operators) {
        let mut sections = Sections::default();
        let mut number = 0;
        loop {
            if self.ticks.receiver_count() == 0 {
                self.ticks.send_replace(None);
                sections = Sections::default();
                self.viewer_came.notified().await;
                continue;
            }
            number += 1;
            let (whole, changes) = sections.gather(calls, number, SystemTime::now());
            self.ticks.send_replace(Some(Arc::new(Tick { number, at: Instant::now(), whole, changes })));
            sleep(TICK_INTERVAL).await;
        }
    }

    /// The events for one more viewer, until its session or the router ends. `None` if there are
    /// too many.
    pub(super) fn watch(
        &self,
        sessions: PageSessions,
        session: String,
        end: CancellationToken,
    ) -> Option<impl Stream<Item = Result<Bytes, Infallible>> + use<>> {
        let place = self.places.clone().try_acquire_owned().ok()?;
        let mut ticks = self.ticks.subscribe();
        // A tick that was gathered lately for another viewer will do. An older one is left from
        // earlier viewers.
        if ticks.borrow().as_ref().is_some_and(|tick| tick.at.elapsed() < 2 * TICK_INTERVAL) {
            ticks.mark_changed();
        }
        self.viewer_came.notify_one();
        let viewer = Viewer { ticks, seen: None, sessions, session, _place: place };
        let events = unfold(viewer, |mut viewer| async {
            let event = viewer.next_event().await?;
            Some((Ok(event), viewer))
        });
        Some(events.take_until(end.cancelled_owned()))
    }
}

struct Viewer {
    ticks: watch::Receiver<Option<Arc<Tick>>>,
    /// The viewer's latest tick.
    seen: Option<u64>,
    sessions: PageSessions,
    session: String,
    _place: OwnedSemaphorePermit,
}

impl Viewer {
    async fn next_event(&mut self) -> Option<Bytes> {
        loop {
            self.ticks.changed().await.ok()?;
            let Some(tick) = self.ticks.borrow_and_update().clone() else { continue };
            self.sessions.rights(&self.session)?;
            let follows = self.seen.replace(tick.number).is_some_and(|seen| seen + 1 == tick.number);
            return Some(if follows { tick.changes.clone() } else { tick.whole.clone() });
        }
    }
}
