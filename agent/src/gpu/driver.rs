//! NVIDIA's driver as the rest of the agent knows it: what it found when it was opened, and a place for further questions. A call into it
//! may hang for ever; it holds up a thread of its own and nothing else.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::Nvml;
use tokio::sync::{oneshot, watch};

use super::binding::Neighbourhood;
use super::questions::{self, NoLibrary};
use super::thread::{Silent, Thread};
use super::{Gpu, Links, Readings};

/// The driver normally answers within 20 ms; one with a lost GPU may never do.
const OPEN_DEADLINE: Duration = Duration::from_secs(30);

/// The driver's library.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Why the driver names no GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoDriver {
    /// There is none, so this is a host without GPUs.
    Absent,
    /// There is one that does not work: to go on without GPUs would be a guess.
    Broken(String),
}

/// The driver with what it found when it was opened. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Driver {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    version: String,
    gpus: Vec<Gpu>,
    links: Links,
    wholes: Vec<Whole>,
    readings: watch::Sender<Arc<Readings>>,
}

/// A whole GPU with the thread for questions about it.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) gpu: Gpu,
    neighbourhood: Neighbourhood,
    thread: Thread,
}

impl Driver {
    /// Loads the driver's library, or another one in its place, and looks for GPUs. Takes 30 s at most.
    ///
    /// # Errors
    /// When there is no driver, or it does not work.
    pub async fn open(library: Option<&Path>) -> Result<Self, NoDriver> {
        let library: PathBuf = library.map_or_else(|| LIBRARY.into(), Path::to_owned);
        let (answer, answered) = oneshot::channel();
        // Not one of the runtime's threads: the end of the program waits for those.
        let asked = std::thread::Builder::new().name("gpu-discovery".to_owned()).spawn(move || {
            let _ = answer.send(find(&library));
        });
        if let Err(error) = asked {
            return Err(NoDriver::Broken(format!("no thread could be started to ask it: {error}")));
        }
        match tokio::time::timeout(OPEN_DEADLINE, answered).await {
            Ok(Ok(shared)) => Ok(Self { shared: Arc::new(shared?) }),
            Ok(Err(_)) => Err(NoDriver::Broken("asking it failed".to_owned())),
            Err(_) => Err(NoDriver::Broken("it does not answer".to_owned())),
        }
    }

    /// The driver's version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.shared.version
    }

    /// Every GPU that describes itself, or its slices where it is divided, in PCI order.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.shared.gpus
    }

    /// Which of them reach each other over NVLink.
    #[must_use]
    pub fn links(&self) -> &Links {
        &self.shared.links
    }

    /// How the GPUs do that are watched, once a second.
    #[must_use]
    pub fn readings(&self) -> watch::Receiver<Arc<Readings>> {
        self.shared.readings.subscribe()
    }

    pub(super) fn readings_out(&self) -> &watch::Sender<Arc<Readings>> {
        &self.shared.readings
    }

    /// The whole GPU with this UUID.
    pub(super) fn whole(&self, uuid: &str) -> Option<&Whole> {
        self.shared.wholes.iter().find(|whole| whole.gpu.uuid == uuid)
    }

    /// Where a GPU is on this host.
    pub(super) fn neighbourhood(&self, gpu: &Gpu) -> Neighbourhood {
        self.whole(gpu.whole()).map(|whole| whole.neighbourhood.clone()).unwrap_or_default()
    }
}

impl Whole {
    /// Asks about this GPU; `Silent` when the driver does not answer within ten seconds.
    pub(super) async fn ask<T: Send + 'static>(&self, question: impl FnOnce(&Arc<Nvml>) -> T + Send + 'static) -> Result<T, Silent> {
        self.thread.ask(question).await
    }
}

fn find(library: &Path) -> Result<Shared, NoDriver> {
    let driver = questions::load(library).map_err(|error| match error {
        NoLibrary::Absent => NoDriver::Absent,
        NoLibrary::Broken(reason) => NoDriver::Broken(reason),
    })?;
    let driver = Arc::new(driver);
    let count = driver.device_count().map_err(|error| NoDriver::Broken(format!("it cannot count its GPUs: {error}")))?;
    let (mut gpus, mut wholes) = (Vec::new(), Vec::new());
    for index in 0..count {
        match questions::describe(&driver, index) {
            Ok((whole, mut visible)) => {
                let thread = Thread::start(format!("gpu-{index}"), Arc::clone(&driver));
                let thread = thread.map_err(|error| NoDriver::Broken(format!("no thread could be started to ask it: {error}")))?;
                let neighbourhood = Neighbourhood::of(&whole.pci, questions::near_cpus(&driver, index));
                wholes.push(Whole { gpu: whole, neighbourhood, thread });
                gpus.append(&mut visible);
            }
            // One GPU that is lost must not hide the others; where it was asked for by name, `select` says that it is not there.
            Err(error) => tracing::warn!(gpu = index, %error, "a GPU does not describe itself and is left out"),
        }
    }
    let undivided: Vec<Gpu> = gpus.iter().filter(|gpu| gpu.slice.is_none()).cloned().collect();
    let links = questions::links(&driver, &undivided);
    let version = driver.sys_driver_version().unwrap_or_default();
    Ok(Shared { version, gpus, links, wholes, readings: watch::Sender::new(Arc::default()) })
}

#[cfg(test)]
mod tests;
