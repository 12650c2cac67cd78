//! GPUs that `agent.gpus` or `CUDA_VISIBLE_DEVICES` allows, read as CUDA reads that variable.
//!
//! Batch systems assign GPUs to a job through it. This module is pure.

use super::Gpu;

/// What is wrong with a list of GPUs; its subject is the setting or the variable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VisibleDevicesError {
    /// The scheduler gave this job no GPU.
    #[error("is set but names no GPU, so this job has none: ask the scheduler for GPUs, unset the variable, or use --engine simulated")]
    Nothing,
    #[error("names `{entry}`, but the GPUs of this host are {known}")]
    Unknown { entry: String, known: String },
    #[error("names `{entry}`, which is the beginning of several UUIDs")]
    Ambiguous { entry: String },
}

/// GPUs that a value of the variable allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuSelection {
    /// GPUs in the variable's order; all if it is not set.
    pub gpus: Vec<Gpu>,
    /// Entry that matches no GPU here and ends the list; for the log.
    pub unknown_entry: Option<String>,
}

/// GPUs that a value of `CUDA_VISIBLE_DEVICES` allows.
///
/// Entries are positions in PCI order or prefixes of UUIDs, including those of MIG slices. The list
/// ends where CUDA ends it: at an entry that is empty, negative or not here. A divided GPU stands
/// for all its slices. CUDA would show a process only the first slice, but each engine is its own
/// process.
///
/// # Errors
/// When the value allows no GPU, or begins with one that does not exist.
pub(crate) fn select(devices: &[Gpu], visible: Option<&str>) -> Result<GpuSelection, VisibleDevicesError> {
    let Some(visible) = visible else {
        return Ok(GpuSelection { gpus: devices.to_vec(), unknown_entry: None });
    };
    let mut gpus: Vec<Gpu> = Vec::new();
    for entry in visible.split(',').map(str::trim) {
        // Slurm writes `NoDevFiles` for a job without GPUs.
        if entry.is_empty() || entry.starts_with('-') || entry == "NoDevFiles" {
            break;
        }
        let found = find(devices, entry)?;
        if found.is_empty() && gpus.is_empty() {
            return Err(VisibleDevicesError::Unknown { entry: entry.to_owned(), known: describe(devices) });
        }
        if found.is_empty() {
            return Ok(GpuSelection { gpus, unknown_entry: Some(entry.to_owned()) });
        }
        for gpu in found {
            if !gpus.contains(gpu) {
                gpus.push(gpu.clone());
            }
        }
    }
    if gpus.is_empty() {
        return Err(VisibleDevicesError::Nothing);
    }
    Ok(GpuSelection { gpus, unknown_entry: None })
}

/// Devices that one entry means: a GPU, a slice, or all slices of a GPU.
fn find<'a>(devices: &'a [Gpu], entry: &str) -> Result<Vec<&'a Gpu>, VisibleDevicesError> {
    let position = entry.parse::<u32>().ok();
    let is_meant = |gpu: &Gpu| match position {
        Some(position) => gpu.index == position,
        None => gpu.uuid.starts_with(entry) || gpu.whole_uuid().starts_with(entry),
    };
    let found: Vec<&Gpu> = devices.iter().filter(|gpu| is_meant(gpu)).collect();
    let names_a_slice = position.is_none() && entry.starts_with("MIG-");
    let one_whole = found.windows(2).all(|pair| pair[0].whole_uuid() == pair[1].whole_uuid());
    if (names_a_slice && found.len() > 1) || !one_whole {
        return Err(VisibleDevicesError::Ambiguous { entry: entry.to_owned() });
    }
    Ok(found)
}

pub(crate) fn describe(devices: &[Gpu]) -> String {
    if devices.is_empty() {
        return "none at all".to_owned();
    }
    let named: Vec<String> = devices.iter().map(|gpu| format!("{} ({})", gpu.index, gpu.uuid)).collect();
    named.join(", ")
}

#[cfg(test)]
mod tests;
