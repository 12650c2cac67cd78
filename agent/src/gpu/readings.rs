//! State of the GPUs at one moment: the figures that the driver gives once a second.

/// All GPUs of this host that engines run on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuReadings {
    /// Readings in the order of discovery, one for each GPU.
    pub readings: Vec<GpuReading>,
}

/// Reading of one GPU or slice; values that the driver does not report are `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuReading {
    pub uuid: String,
    /// Memory in use by any process.
    pub memory_used_bytes: Option<u64>,
    /// Percent of the last second in which a kernel ran.
    pub utilisation: Option<u32>,
    pub watts: Option<f32>,
    /// Power limit at which the clocks are lowered.
    pub watts_limit: Option<f32>,
    /// Clock of the multiprocessors.
    pub sm_mhz: Option<u32>,
    pub celsius: Option<u32>,
    /// Why the clocks are held down, in words.
    pub throttled: Vec<&'static str>,
    /// Corrected memory errors since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Uncorrected memory errors since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    /// Rows of the memory will be replaced at the next reset.
    pub remap_pending: bool,
    /// A row of the memory could not be replaced.
    pub remap_failed: bool,
    /// Last XID seen; 0 for none.
    pub last_xid: u32,
}

impl GpuReadings {
    #[must_use]
    pub fn of(&self, uuid: &str) -> Option<&GpuReading> {
        self.readings.iter().find(|reading| reading.uuid == uuid)
    }
}
