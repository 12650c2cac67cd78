//! Calls to NVIDIA's driver through its library NVML. Each call blocks, perhaps forever, so calls
//! run on their own threads (`driver_thread`).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, P2pCapabilitiesIndex, P2pStatus, TemperatureSensor};
use nvml_wrapper::enums::device::{SampleValue, UsedGpuMemory};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING};
use nvml_wrapper::{Device, EventSet, Nvml};
use tokio::sync::mpsc;

use super::links::NvlinkTopology;
use super::{Gpu, GpuReading, MigSlice};

/// How long one call waits for an event.
///
/// The driver may spin meanwhile: with 580.159 on H200s, waiting threads took a whole core all the
/// time. So calls only collect past events, which stay in their set until they are read.
const EVENT_WAIT_MS: u32 = 1;

/// How often events are collected, and how often it is checked whether anybody still listens.
const EVENT_INTERVAL: Duration = Duration::from_millis(200);

/// Watched events: XIDs, uncorrected memory errors, and two that the wrapper does not name: the GPU
/// is unavailable, and its recovery action has changed.
///
/// The agent reads their meaning from the GPU.
const EVENTS: u64 = EventTypes::CRITICAL_XID_ERROR.bits() | EventTypes::DOUBLE_BIT_ECC_ERROR.bits() | 0x4000 | 0x8000;

/// Events that drivers of all ages report.
const BASIC_EVENTS: u64 = EventTypes::CRITICAL_XID_ERROR.bits() | EventTypes::DOUBLE_BIT_ECC_ERROR.bits();

/// CPUs in one word of the driver's mask.
const CPUS_PER_MASK_WORD: usize = 64;

/// Most CPUs of a host.
const MAX_CPUS: usize = 4096;

/// Kernel part of the driver, if it is loaded and this process may see it.
const DRIVER_DEVICE: &str = "/dev/nvidiactl";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LibraryError {
    Absent,
    Broken(String),
}

pub(super) fn load(library: &Path) -> Result<Nvml, LibraryError> {
    let loaded = Nvml::builder().lib_path(library.as_os_str()).init();
    loaded.map_err(|error| classify_load_error(&error, library.is_absolute(), Path::new(DRIVER_DEVICE).exists()))
}

/// Interprets a failure to load the library.
///
/// Hosts without GPUs, such as login nodes, may have the library anyway. A container with GPUs may
/// lack it, and running on the CPU there would be a surprise.
fn classify_load_error(error: &NvmlError, named: bool, has_driver: bool) -> LibraryError {
    match error {
        NvmlError::LibloadingError(_) if has_driver && !named => {
            let reason = format!(
                "its library libnvidia-ml.so.1 is missing although {DRIVER_DEVICE} is there (a container gets it with \
                 NVIDIA_DRIVER_CAPABILITIES=compute,utility; HOSTLER_NVML_LIB names it elsewhere)"
            );
            LibraryError::Broken(reason)
        }
        NvmlError::LibloadingError(_) => LibraryError::Absent,
        NvmlError::DriverNotLoaded if !has_driver && !named => LibraryError::Absent,
        other => LibraryError::Broken(format!("it cannot be used: {other}")),
    }
}

/// A whole GPU with its slices, which are listed in its place.
pub(super) fn describe(driver: &Nvml, index: u32) -> Result<(Gpu, Vec<Gpu>), NvmlError> {
    let device = driver.device_by_index(index)?;
    let compute = device.cuda_compute_capability().ok();
    let compute = compute.and_then(|capability| Some((u32::try_from(capability.major).ok()?, u32::try_from(capability.minor).ok()?)));
    let whole = Gpu {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        memory_bytes: memory(&device).unwrap_or(0),
        pci: device.pci_info().map(|pci| sysfs_address(&pci.bus_id)).unwrap_or_default(),
        compute,
        slice: None,
    };
    let divided = device.mig_mode().is_ok_and(|mode| mode.current == 1);
    let slices = if divided { slices(&device, &whole) } else { Vec::new() };
    if divided && slices.is_empty() {
        tracing::warn!(gpu = index, "the GPU is in MIG mode without any slice and is left out: `nvidia-smi mig -cgi` makes slices");
    }
    Ok(if divided { (whole, slices) } else { (whole.clone(), vec![whole]) })
}

fn slices(device: &Device<'_>, whole: &Gpu) -> Vec<Gpu> {
    let places = device.mig_device_count().unwrap_or(0);
    let slice = |position: u32| {
        let slice = device.mig_device_by_index(position).ok()?;
        Some(Gpu {
            uuid: slice.uuid().ok()?,
            name: slice.name().unwrap_or_else(|_| whole.name.clone()),
            memory_bytes: memory(&slice).unwrap_or(0),
            slice: Some(MigSlice { parent: whole.uuid.clone(), position }),
            ..whole.clone()
        })
    };
    // Places without a slice answer with an error.
    (0..places).filter_map(slice).collect()
}

/// Memory of a GPU; `None` for a GPU that shares its host's memory, because it has none of its own.
fn memory(device: &Device<'_>) -> Option<u64> {
    device.memory_info().ok().map(|memory| memory.total)
}

/// Address in the format of sysfs, which writes the PCI domain with four digits; the driver uses
/// eight.
pub(super) fn sysfs_address(bus_id: &str) -> String {
    let address = bus_id.to_lowercase();
    match address.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 && domain.starts_with("0000") => format!("{}:{rest}", &domain[4..]),
        _ => address,
    }
}

/// Pairs of these whole GPUs that are joined by NVLink, directly or through switches.
pub(super) fn links(driver: &Nvml, wholes: &[Gpu]) -> NvlinkTopology {
    let device = |gpu: &Gpu| driver.device_by_index(gpu.index).ok();
    let joined = |one: &Gpu, other: &Gpu| {
        let (Some(one), Some(other)) = (device(one), device(other)) else { return false };
        matches!(one.p2p_status(&other, P2pCapabilitiesIndex::NvLink), Ok(P2pStatus::Ok))
    };
    let mut pairs = Vec::new();
    for (at, one) in wholes.iter().enumerate() {
        pairs.extend(wholes[at + 1..].iter().filter(|other| joined(one, other)).map(|other| (one.uuid.clone(), other.uuid.clone())));
    }
    NvlinkTopology::between(pairs)
}

/// CPUs next to a GPU according to the driver; empty if it does not say.
pub(super) fn read_local_cpus(driver: &Nvml, index: u32) -> Vec<u32> {
    let Ok(words) = driver.device_by_index(index).and_then(|device| device.cpu_affinity(MAX_CPUS / CPUS_PER_MASK_WORD)) else {
        return Vec::new();
    };
    let cpus = words.iter().enumerate().flat_map(|(at, word)| {
        (0..CPUS_PER_MASK_WORD).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * CPUS_PER_MASK_WORD + bit)
    });
    cpus.filter_map(|cpu| u32::try_from(cpu).ok()).collect()
}

/// Condition of a whole GPU beyond its figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuHealth {
    /// The GPU answers.
    Reachable,
    /// The GPU has fallen off the bus.
    Lost,
    /// The GPU does not work until it is reset.
    NeedsReset,
}

/// Reads a whole GPU and creates a reading for each of `gpus`, which are the GPU itself or its
/// slices.
///
/// The last XID is not known here.
pub(crate) fn read(driver: &Nvml, index: u32, gpus: &[Gpu]) -> (GpuHealth, Vec<GpuReading>) {
    let mut standing = GpuHealth::Reachable;
    let whole = match driver.device_by_index(index) {
        Ok(device) => read_whole(&device, &mut standing),
        Err(error) => {
            update_health(&error, &mut standing);
            GpuReading::default()
        }
    };
    let of = |gpu: &Gpu| {
        let mut reading = GpuReading { uuid: gpu.uuid.clone(), ..whole.clone() };
        if let Some(slice) = &gpu.slice {
            let device = driver.device_by_index(index).and_then(|whole| whole.mig_device_by_index(slice.position)?.memory_info());
            reading.memory_used_bytes = device.ok().map(|memory| memory.used);
            // The driver measures utilisation only for whole GPUs.
            reading.utilisation = None;
        }
        reading
    };
    (standing, gpus.iter().map(of).collect())
}

fn update_health(error: &NvmlError, standing: &mut GpuHealth) {
    match error {
        NvmlError::GpuLost => *standing = GpuHealth::Lost,
        NvmlError::ResetRequired => *standing = GpuHealth::NeedsReset,
        _ => {}
    }
}

fn read_whole(device: &Device<'_>, standing: &mut GpuHealth) -> GpuReading {
    let mut note_error = |error: NvmlError| update_health(&error, standing);
    let milliwatts = |power: u32| f32::from(u16::try_from(power / 100).unwrap_or(u16::MAX)) / 10.0;
    let count = |kind: MemoryError| device.total_ecc_errors(kind, EccCounter::Volatile).ok();
    let (remap_pending, remap_failed) = row_remap_state(device);
    GpuReading {
        uuid: String::new(),
        memory_used_bytes: device.memory_info().map_err(&mut note_error).ok().map(|memory| memory.used),
        utilisation: device.utilization_rates().map_err(&mut note_error).ok().map(|rates| rates.gpu),
        watts: device.power_usage().map_err(&mut note_error).ok().map(milliwatts),
        watts_limit: device.enforced_power_limit().ok().map(milliwatts),
        sm_mhz: device.clock_info(Clock::SM).ok(),
        celsius: device.temperature(TemperatureSensor::Gpu).map_err(&mut note_error).ok(),
        throttled: device.current_throttle_reasons().map(throttle_reasons).unwrap_or_default(),
        ecc_corrected: count(MemoryError::Corrected),
        ecc_uncorrected: count(MemoryError::Uncorrected),
        remap_pending,
        remap_failed,
        last_xid: 0,
    }
}

/// Reasons that cost speed, in words. An idle GPU has low clocks only because nothing demands more.
fn throttle_reasons(reasons: ThrottleReasons) -> Vec<&'static str> {
    let words = [
        (ThrottleReasons::SW_POWER_CAP, "power limit"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake of the server"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature, by the hardware"),
        (ThrottleReasons::HW_SLOWDOWN, "slowed down by the hardware"),
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "clocks set by an administrator"),
        (ThrottleReasons::SYNC_BOOST, "clocks of a group of GPUs"),
    ];
    words.into_iter().filter(|(reason, _)| reasons.contains(*reason)).map(|(_, word)| word).collect()
}

/// Whether rows of the GPU's memory wait for a reset to be replaced, and whether one could not be
/// replaced.
fn row_remap_state(device: &Device<'_>) -> (bool, bool) {
    let fields = [FieldId(NVML_FI_DEV_REMAPPED_PENDING), FieldId(NVML_FI_DEV_REMAPPED_FAILURE)];
    let values = device.field_values_for(&fields).unwrap_or_default();
    let is_set = |at: usize| {
        let Some(Ok(sample)) = values.get(at) else { return false };
        match sample.value {
            Ok(SampleValue::U32(value)) => value != 0,
            Ok(SampleValue::U64(value)) => value != 0,
            _ => false,
        }
    };
    (is_set(0), is_set(1))
}

/// A process that uses a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GpuProcess {
    pub(super) pid: u32,
    /// Memory that the process holds, if the driver knows.
    pub(super) bytes: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct GpuUsage {
    /// Processes that compute there, as far as the driver shows them.
    pub(super) processes: Vec<GpuProcess>,
    /// All available memory, and the part in use by any process.
    pub(super) memory: Option<(u64, u64)>,
}

pub(super) fn read_usage(driver: &Nvml, gpu: &Gpu) -> (GpuHealth, GpuUsage) {
    let mut standing = GpuHealth::Reachable;
    let whole = driver.device_by_index(gpu.index);
    let device = match &gpu.slice {
        Some(slice) => whole.and_then(|whole| whole.mig_device_by_index(slice.position)),
        None => whole,
    };
    let device = device.inspect_err(|error| update_health(error, &mut standing)).ok();
    let found = device.as_ref().map(Device::running_compute_processes).transpose().unwrap_or_else(|error| {
        update_health(&error, &mut standing);
        None
    });
    // Memory reserved by the driver counts as neither available nor used.
    let memory =
        device.and_then(|device| device.memory_info().ok()).map(|memory| (memory.total.saturating_sub(memory.reserved), memory.used));
    let bytes = |memory: UsedGpuMemory| match memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    };
    let process = |process: nvml_wrapper::struct_wrappers::device::ProcessInfo| GpuProcess {
        pid: process.pid,
        bytes: bytes(process.used_gpu_memory),
    };
    (standing, GpuUsage { processes: found.unwrap_or_default().into_iter().map(process).collect(), memory })
}

/// An event that the driver reports unasked: an XID, or another change.
pub(crate) type GpuEvent = Option<u64>;

/// Forwards the events of one GPU until nobody listens.
///
/// A set of events belongs to one thread, so each GPU has a thread for this. The thread also
/// identifies the GPU, which a lost GPU may not be able to do itself.
pub(crate) fn forward_events(driver: &Arc<Nvml>, index: u32, events: &mpsc::Sender<GpuEvent>) {
    let set = match register_events(driver, index, EVENTS).or_else(|_| register_events(driver, index, BASIC_EVENTS)) {
        Ok(set) => set,
        Err(error) => {
            tracing::warn!(gpu = index, %error, "the driver does not tell of faults of this GPU; only its readings do");
            return;
        }
    };
    let pause = || {
        #[expect(clippy::disallowed_methods, reason = "this thread is no runtime's")]
        std::thread::sleep(EVENT_INTERVAL);
    };
    while !events.is_closed() {
        let event = match set.wait(EVENT_WAIT_MS) {
            Ok(event) => match event.event_data {
                Some(XidError::Value(xid)) => Some(xid),
                Some(XidError::Unknown) | None => None,
            },
            Err(NvmlError::Timeout) => {
                pause();
                continue;
            }
            Err(error) => {
                tracing::debug!(gpu = index, %error, "waiting for events of a GPU");
                pause();
                None
            }
        };
        // If the queue is full of events, one more adds no information.
        let _ = events.try_send(event);
    }
}

fn register_events<'a>(driver: &'a Nvml, index: u32, events: u64) -> Result<EventSet<'a>, NvmlError> {
    let set = driver.create_event_set()?;
    driver.device_by_index(index)?.register_events(EventTypes::from_bits_retain(events), set).map_err(|error| error.error)
}

#[cfg(test)]
mod tests;
