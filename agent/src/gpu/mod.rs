//! GPUs of this host: their properties, which of them this process may use, and their state.
//!
//! All communication with NVIDIA's driver is in this module, on its own threads. Nothing on the
//! path of a request calls the driver.

mod availability;
mod cpu_binding;
mod driver;
mod driver_thread;
mod links;
mod locality;
pub(crate) mod nvml;
mod readings;
pub(crate) mod visible;

pub(crate) use availability::{GpuAvailability, StartObstacle};
pub(crate) use cpu_binding::{CpuBinding, plan_cpu_bindings};
pub(crate) use driver::{DriverError, GpuDriver};
pub(crate) use links::NvlinkTopology;
pub(crate) use readings::{GpuReading, GpuReadings};

/// One GPU, or one slice of a GPU, as the driver describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Position in PCI order, which is the driver's order and not CUDA's default one.
    ///
    /// A slice has the position of its GPU.
    pub index: u32,
    /// The driver's name for this one device, `GPU-…` or `MIG-…`.
    pub uuid: String,
    pub name: String,
    /// Memory of the device; 0 if the driver does not report it.
    pub memory_bytes: u64,
    /// PCI bus address as sysfs writes it, `0000:1b:00.0`; empty if the driver does not report it.
    pub pci: String,
    /// CUDA compute capability, major and minor.
    pub compute: Option<(u32, u32)>,
    /// Slice of a divided GPU; `None` for a whole GPU.
    pub slice: Option<MigSlice>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigSlice {
    /// UUID of the GPU that was sliced.
    pub parent: String,
    pub position: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("GPU {index} is divided into MIG slices, which this vLLM cannot be given ({uuid}): use vLLM 0.24 or newer, or whole GPUs")]
pub struct MigSliceNeedsUuid {
    pub index: u32,
    pub uuid: String,
}

impl Gpu {
    /// Entry for this device in an engine's `CUDA_VISIBLE_DEVICES`.
    ///
    /// `takes_uuid` says whether the engine accepts anything but numbers there. The number is valid
    /// with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    ///
    /// # Errors
    /// For a slice that would need a number.
    pub fn visible_entry(&self, takes_uuid: bool) -> Result<String, MigSliceNeedsUuid> {
        match (&self.slice, takes_uuid) {
            (_, true) => Ok(self.uuid.clone()),
            (None, false) => Ok(self.index.to_string()),
            (Some(_), false) => Err(MigSliceNeedsUuid { index: self.index, uuid: self.uuid.clone() }),
        }
    }

    /// UUID of the whole GPU that this is or is a slice of.
    ///
    /// Faults, links and CPUs belong to the whole GPU.
    #[must_use]
    pub fn whole_uuid(&self) -> &str {
        self.slice.as_ref().map_or(&self.uuid, |slice| &slice.parent)
    }
}
