//! The page for people at `/` of the admin listener: the fleet as it changes, the reasons of
//! placements, and orders. `AdminGuard` has already decided who may call; the page's files
//! (`assets`) show nothing of the fleet.

mod assets;
mod chat;
mod live;
mod picture;
mod routes;
mod sections;
mod usage;

use std::path::PathBuf;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::background::BackgroundTasks;
use crate::keys::PageSessions;
use crate::operators::Operators;
pub(crate) use chat::{EdgePlace, PageChat, chat_routes};
use live::Live;
pub(crate) use routes::page_routes;
use usage::UsageReader;

/// The state that the page's routes share.
#[derive(Debug)]
pub(crate) struct Page {
    calls: Operators,
    sessions: PageSessions,
    live: Live,
    usage: UsageReader,
    /// Cancelled when the page serves nobody any more.
    end: CancellationToken,
}

impl Page {
    /// Starts the page's task, which gathers every second while somebody looks.
    pub(crate) fn start(calls: Operators, usage_dir: PathBuf, tasks: &BackgroundTasks, end: CancellationToken) -> Arc<Self> {
        let sessions = calls.page_sessions.clone();
        let page = Arc::new(Self { calls, sessions, live: Live::default(), usage: UsageReader::new(usage_dir), end });
        let gathered = page.clone();
        tasks.spawn(async move { gathered.live.gather_while_watched(&gathered.calls).await });
        page
    }
}

#[cfg(test)]
mod tests;
