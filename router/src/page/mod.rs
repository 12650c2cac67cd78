//! The page for people at `/` of the admin listener: the fleet as it changes, the reasons of
//! placements, and orders. `AdminGuard` has already decided who may call; the page's files
//! (`assets`) show nothing of the fleet.

mod assets;
mod history;
mod live;
mod picture;
mod routes;
mod sections;

use std::sync::Arc;
use std::time::SystemTime;

use tokio_util::sync::CancellationToken;

use crate::background::BackgroundTasks;
use crate::keys::PageSessions;
use crate::operators::Operators;
use history::{History, SAMPLE_INTERVAL};
use live::Live;
pub(crate) use routes::page_routes;

/// The state that the page's routes share.
#[derive(Debug)]
pub(crate) struct Page {
    calls: Operators,
    sessions: PageSessions,
    live: Live,
    history: History,
    /// Cancelled when the page serves nobody any more.
    end: CancellationToken,
}

impl Page {
    /// Starts the page's two tasks. One samples the fleet every ten seconds, for lines that reach
    /// back before somebody opened the page. The other gathers every second while somebody looks.
    pub(crate) fn start(calls: Operators, tasks: &BackgroundTasks, end: CancellationToken) -> Arc<Self> {
        let sessions = calls.page_sessions.clone();
        let page = Arc::new(Self { calls, sessions, live: Live::default(), history: History::default(), end });
        let sampled = page.clone();
        tasks.spawn(async move {
            loop {
                tokio::time::sleep(SAMPLE_INTERVAL).await;
                sampled.calls.sample_ends();
                sampled.history.sample(&sampled.calls, SystemTime::now());
            }
        });
        let gathered = page.clone();
        tasks.spawn(async move { gathered.live.gather_while_watched(&gathered.calls, &gathered.history).await });
        page
    }
}

#[cfg(test)]
mod tests;
