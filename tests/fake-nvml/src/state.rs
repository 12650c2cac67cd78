//! State of the fake driver: a file of JSON beside the library, `<library>.json`, read anew for
//! each question.
//!
//! Tests write it, even while an agent runs. A test that wants a separate driver copies the
//! library: the name of the copy leads to the file.

use std::path::PathBuf;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct State {
    /// Devices in PCI order.
    pub devices: Vec<Device>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Device {
    pub uuid: String,
    pub name: String,
    pub memory: u64,
    /// Memory in use beside that of `processes`.
    pub used: u64,
    /// PCI address in the driver's format, with a domain of eight digits.
    pub pci: String,
    pub compute: (u32, u32),
    /// Indices of GPUs that are joined with this one by NVLink.
    pub links: Vec<u32>,
    /// CPUs next to the GPU.
    pub cpus: Vec<u32>,
    /// Slices of the GPU, which is in MIG mode if there are any.
    pub slices: Vec<Slice>,
    pub processes: Vec<Process>,
    pub utilisation: u32,
    pub milliwatts: u32,
    pub milliwatts_limit: u32,
    pub sm_mhz: u32,
    pub celsius: u32,
    /// Throttle reasons as the driver's bits.
    pub throttled: u64,
    pub corrected: u64,
    pub uncorrected: u64,
    pub remap_pending: bool,
    pub remap_failed: bool,
    /// All XIDs so far. A new one is sent to everyone that waits for events.
    pub xids: Vec<u64>,
    /// The GPU has fallen off the bus.
    pub lost: bool,
    pub needs_reset: bool,
    /// Whether questions about the GPU stay unanswered.
    pub hangs: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slice {
    pub uuid: String,
    pub memory: u64,
    pub used: u64,
    pub processes: Vec<Process>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Process {
    pub pid: u32,
    pub used: u64,
}

impl Default for Device {
    fn default() -> Self {
        Self {
            uuid: "GPU-0".to_owned(),
            name: "NVIDIA Fake 80GB".to_owned(),
            memory: 80 << 30,
            used: 1 << 30,
            pci: String::new(),
            compute: (9, 0),
            links: Vec::new(),
            cpus: Vec::new(),
            slices: Vec::new(),
            processes: Vec::new(),
            utilisation: 50,
            milliwatts: 300_000,
            milliwatts_limit: 700_000,
            sm_mhz: 1_980,
            celsius: 45,
            throttled: 0,
            corrected: 0,
            uncorrected: 0,
            remap_pending: false,
            remap_failed: false,
            xids: Vec::new(),
            lost: false,
            needs_reset: false,
            hangs: false,
        }
    }
}

impl State {
    /// Present state.
    ///
    /// A missing or invalid file means a driver without GPUs, and a line on standard error.
    pub(crate) fn now() -> Self {
        let read = || {
            let text = std::fs::read_to_string(path()?).map_err(|error| error.to_string())?;
            serde_json::from_str(&text).map_err(|error| error.to_string())
        };
        read().unwrap_or_else(|error: String| {
            eprintln!("fake NVML: {error}");
            Self::default()
        })
    }
}

/// File beside this very library, which the list of mapped files names.
fn path() -> Result<&'static PathBuf, String> {
    static PATH: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PATH.get_or_init(|| {
        let here = State::now as *const () as usize;
        let maps = std::fs::read_to_string("/proc/self/maps").map_err(|error| error.to_string())?;
        let library = maps.lines().find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (from, to) = range.split_once('-')?;
            let (from, to) = (usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?);
            (from..to).contains(&here).then(|| rest.find('/').map(|at| rest[at..].to_owned()))?
        });
        library.map(|library| PathBuf::from(library + ".json")).ok_or_else(|| "this library is not in the list of mapped files".to_owned())
    })
    .as_ref()
    .map_err(Clone::clone)
}
