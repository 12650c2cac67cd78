//! One thread for the driver calls about one GPU. A call that the driver never answers blocks only
//! this thread; the caller gets an error after `CALL_TIMEOUT`.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use nvml_wrapper::Nvml;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Time limit for a driver call. Calls take milliseconds; beyond this the driver hangs.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Calls that may queue while the driver hangs.
const MAX_QUEUED_CALLS: usize = 4;

type DriverCall = Box<dyn FnOnce(&Arc<Nvml>) + Send>;

/// The driver does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DriverTimeout;

/// A thread that ends with its last question once this is dropped.
#[derive(Debug)]
pub(super) struct DriverThread {
    calls: SyncSender<DriverCall>,
}

impl DriverThread {
    pub(super) fn start(name: String, driver: Arc<Nvml>) -> std::io::Result<Self> {
        let (questions, waiting): (_, Receiver<DriverCall>) = sync_channel(MAX_QUEUED_CALLS);
        std::thread::Builder::new().name(name).spawn(move || {
            for question in waiting {
                question(&driver);
            }
        })?;
        Ok(Self { calls: questions })
    }

    pub(super) async fn call<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Arc<Nvml>) -> T + Send + 'static,
    ) -> Result<T, DriverTimeout> {
        let (answer, answered) = oneshot::channel();
        let question: DriverCall = Box::new(move |driver| {
            let _ = answer.send(question(driver));
        });
        self.calls.try_send(question).map_err(|_| DriverTimeout)?;
        // Only a call that panicked sends no answer.
        timeout(CALL_TIMEOUT, answered).await.ok().and_then(Result::ok).ok_or(DriverTimeout)
    }
}
