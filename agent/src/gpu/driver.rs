//! Interface to NVIDIA's driver for the rest of the agent: the results of opening it, and a place
//! for further questions.
//!
//! A call into the driver may hang forever; it then blocks only its own thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::Nvml;
use tokio::sync::{oneshot, watch};

use super::driver_thread::{DriverThread, DriverTimeout};
use super::locality::GpuLocality;
use super::nvml::{self, LibraryError};
use super::{Gpu, GpuReadings, NvlinkTopology};

/// Time limit for opening the driver.
///
/// The driver normally answers within 20 ms; with a lost GPU it may never answer.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

const LIBRARY: &str = "libnvidia-ml.so.1";

/// Why the driver names no GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriverError {
    /// There is no driver, so this host has no GPUs.
    Absent,
    /// A driver exists but does not work. Continuing without GPUs would be a guess.
    Broken(String),
}

/// The driver and the results of opening it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct GpuDriver {
    shared: Arc<DriverShared>,
}

#[derive(Debug)]
struct DriverShared {
    version: String,
    gpus: Vec<Gpu>,
    links: NvlinkTopology,
    whole_gpus: Vec<WholeGpu>,
    readings: watch::Sender<Arc<GpuReadings>>,
}

/// A whole GPU with the thread that asks the driver about it.
#[derive(Debug)]
pub(crate) struct WholeGpu {
    pub(crate) gpu: Gpu,
    locality: GpuLocality,
    thread: DriverThread,
}

impl GpuDriver {
    /// Loads the driver's library, or another one in its place, and finds GPUs, within
    /// `OPEN_TIMEOUT`.
    ///
    /// # Errors
    /// When there is no driver, or it does not work.
    pub async fn open(library: Option<&Path>) -> Result<Self, DriverError> {
        let library: PathBuf = library.map_or_else(|| LIBRARY.into(), Path::to_owned);
        let (answer, answered) = oneshot::channel();
        // Avoid a thread of the runtime, because the program waits for those when it exits.
        let spawned = std::thread::Builder::new().name("gpu-discovery".to_owned()).spawn(move || {
            let _ = answer.send(discover(&library));
        });
        if let Err(error) = spawned {
            return Err(DriverError::Broken(format!("no thread could be started to ask it: {error}")));
        }
        match tokio::time::timeout(OPEN_TIMEOUT, answered).await {
            Ok(Ok(shared)) => Ok(Self { shared: Arc::new(shared?) }),
            Ok(Err(_)) => Err(DriverError::Broken("asking it failed".to_owned())),
            Err(_) => Err(DriverError::Broken("it does not answer".to_owned())),
        }
    }

    #[must_use]
    pub fn version(&self) -> &str {
        &self.shared.version
    }

    /// Every GPU that describes itself, in PCI order. A divided GPU is represented by its slices.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.shared.gpus
    }

    /// NVLink connections between the GPUs.
    #[must_use]
    pub fn links(&self) -> &NvlinkTopology {
        &self.shared.links
    }

    /// Readings of the watched GPUs, once a second.
    #[must_use]
    pub fn readings(&self) -> watch::Receiver<Arc<GpuReadings>> {
        self.shared.readings.subscribe()
    }

    pub(crate) fn readings_sender(&self) -> &watch::Sender<Arc<GpuReadings>> {
        &self.shared.readings
    }

    /// Whole GPU with this UUID.
    pub(crate) fn whole_gpu(&self, uuid: &str) -> Option<&WholeGpu> {
        self.shared.whole_gpus.iter().find(|whole| whole.gpu.uuid == uuid)
    }

    /// Locality of a GPU on this host.
    pub(super) fn locality(&self, gpu: &Gpu) -> GpuLocality {
        self.whole_gpu(gpu.whole_uuid()).map(|whole| whole.locality.clone()).unwrap_or_default()
    }
}

impl WholeGpu {
    /// Asks the driver about this GPU; `DriverTimeout` if the driver does not answer in time.
    pub(crate) async fn ask<T: Send + 'static>(&self, question: impl FnOnce(&Arc<Nvml>) -> T + Send + 'static) -> Result<T, DriverTimeout> {
        self.thread.call(question).await
    }
}

fn discover(library: &Path) -> Result<DriverShared, DriverError> {
    let driver = nvml::load(library).map_err(|error| match error {
        LibraryError::Absent => DriverError::Absent,
        LibraryError::Broken(reason) => DriverError::Broken(reason),
    })?;
    let driver = Arc::new(driver);
    let count = driver.device_count().map_err(|error| DriverError::Broken(format!("it cannot count its GPUs: {error}")))?;
    let (mut gpus, mut wholes) = (Vec::new(), Vec::new());
    for index in 0..count {
        match nvml::describe(&driver, index) {
            Ok((whole, mut visible)) => {
                let thread = DriverThread::start(format!("gpu-{index}"), Arc::clone(&driver));
                let thread = thread.map_err(|error| DriverError::Broken(format!("no thread could be started to ask it: {error}")))?;
                let neighbourhood = GpuLocality::of(&whole.pci, nvml::read_local_cpus(&driver, index));
                wholes.push(WholeGpu { gpu: whole, locality: neighbourhood, thread });
                gpus.append(&mut visible);
            }
            // One lost GPU must not hide the others. If it was requested by name, `select` reports
            // it as missing.
            Err(error) => tracing::warn!(gpu = index, %error, "a GPU does not describe itself and is left out"),
        }
    }
    let undivided: Vec<Gpu> = gpus.iter().filter(|gpu| gpu.slice.is_none()).cloned().collect();
    let links = nvml::links(&driver, &undivided);
    let version = driver.sys_driver_version().unwrap_or_default();
    Ok(DriverShared { version, gpus, links, whole_gpus: wholes, readings: watch::Sender::new(Arc::default()) })
}

#[cfg(test)]
mod tests;
