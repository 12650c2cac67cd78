//! Figures of several GPUs combined: those of a replica, a node or a fleet.

use hostler_proto::agent::v1::Gpu;

/// Combined figures of several GPUs. A figure that one GPU does not report is unknown for all.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GpuTotal {
    pub(crate) count: usize,
    pub(crate) name: String,
    /// Memory in bytes.
    pub(crate) memory: u64,
    pub(crate) memory_used: Option<u64>,
    /// Mean utilisation in percent.
    pub(crate) utilisation: Option<u32>,
    /// Temperature of the hottest GPU.
    pub(crate) celsius: Option<u32>,
    pub(crate) watts: Option<f32>,
}

impl GpuTotal {
    /// Combines these GPUs; `None` if there are none.
    pub(crate) fn of<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> Option<Self> {
        let gpus: Vec<&Gpu> = gpus.collect();
        let percents: Option<u32> = gpus.iter().map(|gpu| gpu.reading().utilisation).sum();
        Some(Self {
            count: gpus.len(),
            name: gpus.first()?.name.clone(),
            memory: gpus.iter().map(|gpu| gpu.memory_bytes).sum(),
            memory_used: gpus.iter().map(|gpu| gpu.reading().memory_used_bytes).sum(),
            utilisation: percents.map(|sum| sum / u32::try_from(gpus.len()).unwrap_or(u32::MAX).max(1)),
            celsius: gpus.iter().filter_map(|gpu| gpu.reading().celsius).max(),
            watts: gpus.iter().map(|gpu| gpu.reading().watts).sum(),
        })
    }
}
