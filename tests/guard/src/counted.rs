//! A thread with a separate runtime for the counted work, and the marks between which callgrind
//! counts it.

use std::hint::black_box;
use std::sync::mpsc;
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// Mark at which callgrind forgets the earlier cost of this thread.
#[inline(never)]
pub(crate) fn counting_begins() {
    black_box("begins");
}

/// Mark at which callgrind writes down the cost of this thread.
#[inline(never)]
pub(crate) fn counting_ends() {
    black_box("ends");
}

/// A thread that runs one future, and the channel to it.
#[derive(Debug)]
pub(crate) struct CountedThread {
    handle: Handle,
    _thread: JoinHandle<()>,
}

impl CountedThread {
    /// Runs the future that `work` creates on a separate thread, until the process ends.
    pub(crate) fn start<F: Future<Output = ()>>(work: impl FnOnce() -> F + Send + 'static) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let thread = std::thread::Builder::new().name("counted".into()).spawn(move || {
            // Make equal choices in each run.
            fastrand::seed(1);
            runtime.block_on(work());
        })?;
        Ok(Self { handle, _thread: thread })
    }

    /// Holds the thread until the guard is dropped.
    ///
    /// Then it finds all events of its sockets at once, and so does the same work in each run,
    /// whichever event came first.
    pub(crate) async fn pause(&self) -> ThreadPause {
        let (release, released) = mpsc::channel::<()>();
        // The loop ends when the guard is dropped; nothing is sent.
        self.on_it(|| (), move || while released.recv().is_ok() {}).await;
        ThreadPause { _release: release }
    }

    /// Begins counting.
    pub(crate) async fn begin(&self) {
        self.on_it(counting_begins, || ()).await;
    }

    /// Stops counting.
    pub(crate) async fn end(&self) {
        self.on_it(counting_ends, || ()).await;
    }

    /// Runs both on the thread, and returns after the first.
    async fn on_it(&self, first: impl FnOnce() + Send + 'static, then: impl FnOnce() + Send + 'static) {
        let (done, is_done) = oneshot::channel();
        self.handle.spawn(async move {
            first();
            let _ = done.send(());
            then();
        });
        is_done.await.expect("the thread runs until the process ends");
    }
}

/// Guard of [`CountedThread::pause`].
#[derive(Debug)]
pub(crate) struct ThreadPause {
    _release: mpsc::Sender<()>,
}

/// Runs a case on this thread, which is not counted.
pub(crate) fn drive(case: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    Builder::new_current_thread().enable_all().build()?.block_on(case)
}

/// Sends everything ready on this thread: the connections' tasks are a few turns behind.
pub(crate) async fn flush() {
    for _ in 0..16 {
        tokio::task::yield_now().await;
    }
}
