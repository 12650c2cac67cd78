//! How GPUs do at one moment: the figures that the driver gives once a second.

/// All GPUs of this host that engines run on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuReadings {
    /// One for each GPU, in the order of discovery.
    pub readings: Vec<GpuReading>,
}

/// One GPU, or one slice. What the driver does not say is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuReading {
    pub uuid: String,
    /// Memory in use, by anybody.
    pub memory_used_bytes: Option<u64>,
    /// Percent of the last second in which a kernel ran.
    pub utilisation: Option<u32>,
    pub watts: Option<f32>,
    /// Power at which its clocks are lowered.
    pub watts_limit: Option<f32>,
    /// Clock of its multiprocessors.
    pub sm_mhz: Option<u32>,
    pub celsius: Option<u32>,
    /// Why its clocks are held down, in words.
    pub throttled: Vec<&'static str>,
    /// Corrected memory errors since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Uncorrected memory errors since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    /// Rows of its memory are to be replaced at its next reset.
    pub remap_pending: bool,
    /// A row of its memory could not be replaced.
    pub remap_failed: bool,
    /// The last XID that was seen; 0 for none.
    pub last_xid: u32,
}

impl GpuReadings {
    #[must_use]
    pub fn of(&self, uuid: &str) -> Option<&GpuReading> {
        self.readings.iter().find(|reading| reading.uuid == uuid)
    }
}
