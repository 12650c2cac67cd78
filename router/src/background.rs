//! The tasks that a router runs beside its requests. All end with the router, which waits for them.

use std::future::Future;
use std::time::Duration;

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Clones share the tasks.
#[derive(Debug, Clone, Default)]
pub(crate) struct BackgroundTasks {
    end: CancellationToken,
    tasks: TaskTracker,
}

impl BackgroundTasks {
    /// Starts a task. When all tasks must end, it is dropped at its next await point.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let end = self.end.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = task => {}
                () = end.cancelled() => {}
            }
        });
    }

    /// Cancelled when all tasks must end.
    #[must_use]
    pub(crate) fn end(&self) -> &CancellationToken {
        &self.end
    }

    /// Tells all tasks to end and waits until they have, at most `limit`.
    pub(crate) async fn finish(&self, limit: Duration) {
        self.end.cancel();
        self.tasks.close();
        if timeout(limit, self.tasks.wait()).await.is_err() {
            tracing::warn!(tasks = self.tasks.len(), "leaving with tasks that do not end");
        }
    }
}
