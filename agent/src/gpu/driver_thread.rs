//! One thread for the questions to the driver about one GPU. A question that the driver never answers holds up this thread alone; who asked
//! is told after `CALL_TIMEOUT`.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use nvml_wrapper::Nvml;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How long the driver may take to answer. It takes milliseconds; beyond this it hangs.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Questions that wait while the driver hangs.
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
        // Only a question that panicked sends no answer.
        timeout(CALL_TIMEOUT, answered).await.ok().and_then(Result::ok).ok_or(DriverTimeout)
    }
}
