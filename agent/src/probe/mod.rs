//! Watches how loaded one engine is: reads its figures over its own socket, often while it works and rarely while it is idle, and publishes the latest sample.

mod metrics;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::sync::watch;
use tokio::time::Instant;

pub use self::metrics::{Details, Figures};
use crate::engine::http::{Client, GetError};
use crate::traffic::Traffic;

/// How long one reading may take.
const READ_DEADLINE: Duration = Duration::from_secs(5);

/// An idle engine is read this many times less often.
const IDLE_FACTOR: u32 = 10;

/// What was last read from an engine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// The figures.
    pub figures: Figures,
    /// When they were read.
    pub at: Instant,
    /// A later reading failed; the figures are the last that are known.
    pub stale: bool,
}

impl Sample {
    fn is_busy(&self) -> bool {
        self.figures.running > 0 || self.figures.waiting > 0
    }
}

/// Reads one engine until dropped. `interval` is the time between two readings of a busy engine; a request that arrives at an idle one is seen at once.
pub(crate) async fn watch(socket: &Path, traffic: &Arc<Traffic>, interval: Duration, samples: &watch::Sender<Option<Sample>>) {
    let mut reader = Reader::new(socket, metrics::filtered_path());
    let mut failing = false;
    loop {
        let outcome = reader.read().await.map(|page| metrics::read(&page));
        match (&outcome, failing) {
            (Err(error), false) => {
                tracing::warn!(socket = %socket.display(), %error, "cannot read the engine's metrics; its load is judged by the last ones");
            }
            (Ok(_), true) => {
                tracing::info!(socket = %socket.display(), "the engine's metrics can be read again");
            }
            _ => {}
        }
        failing = outcome.is_err();
        publish(samples, outcome.ok());
        let busy = samples.borrow().is_some_and(|sample| sample.is_busy());
        tokio::time::sleep(interval).await;
        if !busy && traffic.total() == 0 {
            let rest = interval * (IDLE_FACTOR - 1);
            // Either ends the pause: the time, or a request.
            let _ = tokio::time::timeout(rest, traffic.busy()).await;
        }
    }
}

fn publish(samples: &watch::Sender<Option<Sample>>, figures: Option<Figures>) {
    samples.send_if_modified(|sample| match (figures, sample) {
        (Some(figures), sample) => {
            // The size of the cache never changes, and not every reading tells it.
            let known = sample.map(|sample| sample.figures).unwrap_or_default();
            *sample = Some(Sample {
                figures: Figures {
                    kv_blocks: figures.kv_blocks.or(known.kv_blocks),
                    block_size: figures.block_size.or(known.block_size),
                    ..figures
                },
                at: Instant::now(),
                stale: false,
            });
            true
        }
        (None, Some(sample)) => !std::mem::replace(&mut sample.stale, true),
        (None, None) => false,
    });
}

/// Why a reading failed.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    /// No answer.
    #[error(transparent)]
    Get(#[from] GetError),
    /// The engine refused.
    #[error("the metrics page has status {}", .0.as_u16())]
    Status(StatusCode),
}

/// Knows which of the two pages this engine has: the filtered one, or the whole.
#[derive(Debug)]
struct Reader {
    client: Client,
    path: String,
}

impl Reader {
    fn new(socket: &Path, path: String) -> Self {
        Self { client: Client::new(socket), path }
    }

    async fn read(&mut self) -> Result<String, ReadError> {
        const WHOLE: &str = "/metrics";
        let mut reply = self.client.get(&self.path, READ_DEADLINE).await?;
        // vLLM's Rust front-end has the whole page only.
        if reply.status == StatusCode::NOT_FOUND && self.path != WHOLE {
            reply = self.client.get(WHOLE, READ_DEADLINE).await?;
            if reply.status == StatusCode::OK {
                WHOLE.clone_into(&mut self.path);
            }
        }
        if reply.status != StatusCode::OK {
            return Err(ReadError::Status(reply.status));
        }
        Ok(String::from_utf8_lossy(&reply.body).into_owned())
    }
}

/// Reads the details of one engine, when asked.
#[derive(Debug)]
pub(crate) struct DetailReader {
    reader: Reader,
}

impl DetailReader {
    /// For the engine at this socket.
    pub(crate) fn new(socket: &Path) -> Self {
        Self { reader: Reader::new(socket, metrics::detailed_path()) }
    }

    /// The details now; `None` when the engine does not tell, which `watch` has a word about.
    pub(crate) async fn read(&mut self) -> Option<Details> {
        self.reader.read().await.ok().map(|page| metrics::read_details(&page))
    }

    /// To be called when another life of the engine begins: it may have the other front-end, and other pages.
    pub(crate) fn forget(&mut self) {
        self.reader.path = metrics::detailed_path();
    }
}

#[cfg(test)]
mod tests;
