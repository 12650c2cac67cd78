//! Load of one engine: the probe reads its metrics over its own socket, often while it works and
//! rarely while it is idle, and publishes the latest sample.

mod metrics;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::sync::watch;
use tokio::time::Instant;

pub(crate) use self::metrics::{EngineDetails, EngineMetrics};
use crate::engine_client::{ApiClient, FetchError};
use crate::traffic::Traffic;

const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// An idle engine is read this many times less often.
const IDLE_FACTOR: u32 = 10;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadSample {
    pub metrics: EngineMetrics,
    pub at: Instant,
    /// A later reading failed, so these are the last known metrics.
    pub is_stale: bool,
}

impl LoadSample {
    fn is_busy(&self) -> bool {
        self.metrics.running > 0 || self.metrics.waiting > 0
    }
}

/// Reads one engine until dropped.
///
/// `interval` is the time between two readings of a busy engine. When a request reaches an idle
/// one, the next reading follows at once.
pub(crate) async fn watch(socket: &Path, traffic: &Arc<Traffic>, interval: Duration, samples: &watch::Sender<Option<LoadSample>>) {
    let mut reader = MetricsReader::new(socket, metrics::filtered_path());
    let mut failing = false;
    loop {
        let outcome = reader.read().await.map(|page| metrics::parse_metrics(&page));
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
        if !busy && traffic.in_flight() == 0 {
            let rest = interval * (IDLE_FACTOR - 1);
            // The pause ends with the time or with a request.
            let _ = tokio::time::timeout(rest, traffic.wait_busy()).await;
        }
    }
}

fn publish(samples: &watch::Sender<Option<LoadSample>>, figures: Option<EngineMetrics>) {
    samples.send_if_modified(|sample| match (figures, sample) {
        (Some(figures), sample) => {
            // The size of the cache never changes, and not every reading has it.
            let known = sample.map(|sample| sample.metrics).unwrap_or_default();
            *sample = Some(LoadSample {
                metrics: EngineMetrics {
                    kv_blocks: figures.kv_blocks.or(known.kv_blocks),
                    block_size: figures.block_size.or(known.block_size),
                    ..figures
                },
                at: Instant::now(),
                is_stale: false,
            });
            true
        }
        (None, Some(sample)) => !std::mem::replace(&mut sample.is_stale, true),
        (None, None) => false,
    });
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Get(#[from] FetchError),
    #[error("the metrics page has status {}", .0.as_u16())]
    Status(StatusCode),
}

/// Remembers which page this engine has: the filtered one, or only the whole.
#[derive(Debug)]
struct MetricsReader {
    client: ApiClient,
    path: String,
}

impl MetricsReader {
    fn new(socket: &Path, path: String) -> Self {
        Self { client: ApiClient::new(socket), path }
    }

    async fn read(&mut self) -> Result<String, ReadError> {
        const WHOLE: &str = "/metrics";
        let mut reply = self.client.get(&self.path, READ_TIMEOUT).await?;
        // vLLM's Rust front-end has only the whole page.
        if reply.status == StatusCode::NOT_FOUND && self.path != WHOLE {
            reply = self.client.get(WHOLE, READ_TIMEOUT).await?;
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

#[derive(Debug)]
pub(crate) struct DetailReader {
    reader: MetricsReader,
}

impl DetailReader {
    pub(crate) fn new(socket: &Path) -> Self {
        Self { reader: MetricsReader::new(socket, metrics::detailed_path()) }
    }

    /// Reads the details now; `None` if the engine does not report them, which `watch` logs.
    pub(crate) async fn read(&mut self) -> Option<EngineDetails> {
        self.reader.read().await.ok().map(|page| metrics::parse_details(&page))
    }

    /// Resets the reader when another life of the engine begins, because it may have the other
    /// front-end, and other pages.
    pub(crate) fn reset(&mut self) {
        self.reader.path = metrics::detailed_path();
    }
}

#[cfg(test)]
mod tests;
