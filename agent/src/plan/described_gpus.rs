//! GPUs that are described instead of found, so that a login node can plan for a compute node.
//!
//! `4x80` is four of 80 GiB, `2x3g.40gb` two MIG slices, and commas separate several kinds.

use crate::gpu::{Gpu, MigSlice, NvlinkTopology};
use crate::sizes::scaled;

/// Share of the memory in a slice's name that it really has.
///
/// The name rounds up: `1g.10gb` has 9.5 to 9.75 GiB, `3g.40gb` 39.2 to 39.6.
const SLICE_MEMORY_FACTOR: f64 = 0.95;

/// Most GPUs in a description, more than one host has.
const MAX_GPUS: u32 = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DescribedGpus {
    pub gpus: Vec<Gpu>,
    pub links: NvlinkTopology,
}

/// A description that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{part:?} describes no GPUs: write COUNTxGIB, as 4x80, or COUNTxSLICE, as 2x3g.40gb; several kinds are separated by commas")]
pub struct GpuDescriptionError {
    pub part: String,
}

/// Parses a description.
///
/// GPUs of one kind are joined by NVLink in domains of this size; 0 or 1 joins none.
///
/// # Errors
/// When the description cannot be parsed.
pub fn parse_gpus(text: &str, domain: u32) -> Result<DescribedGpus, GpuDescriptionError> {
    let mut gpus: Vec<Gpu> = Vec::new();
    let mut pairs = Vec::new();
    for part in text.split(',').map(str::trim) {
        let unreadable = || GpuDescriptionError { part: part.to_owned() };
        let (number, size) = part.split_once(['x', 'X']).ok_or_else(unreadable)?;
        let number: u32 = number.trim().parse().ok().filter(|number| (1..=MAX_GPUS).contains(number)).ok_or_else(unreadable)?;
        let (gib, sliced) = parse_size(size.trim()).ok_or_else(unreadable)?;
        let first = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
        for position in 0..number {
            let index = first + position;
            let memory_bytes = scaled(1 << 30, if sliced { gib * SLICE_MEMORY_FACTOR } else { gib });
            let slice = sliced.then(|| MigSlice { parent: format!("GPU-{first}"), position });
            let (uuid, name) = match sliced {
                true => (format!("MIG-{index}"), format!("MIG {}", size.trim())),
                false => (format!("GPU-{index}"), format!("GPU of {gib} GiB")),
            };
            if !sliced && domain > 1 {
                let start = first + position / domain * domain;
                pairs.extend((start..index).map(|other| (format!("GPU-{other}"), uuid.clone())));
            }
            gpus.push(Gpu { index, uuid, name, memory_bytes, slice, ..Gpu::default() });
        }
    }
    Ok(DescribedGpus { gpus, links: NvlinkTopology::between(pairs) })
}

/// Parses a size, and returns its GiB and whether it is a slice: `80`, `80GB`, `80GiB`, `3g.40gb`.
fn parse_size(text: &str) -> Option<(f64, bool)> {
    let lower = text.to_lowercase();
    let (number, sliced) = match lower.split_once("g.") {
        Some((parts, memory)) => {
            parts.parse::<u32>().ok()?;
            (memory.to_owned(), true)
        }
        None => (lower, false),
    };
    let number = ["gib", "gb", "g"].iter().find_map(|unit| number.strip_suffix(unit)).unwrap_or(&number).trim().to_owned();
    number.parse::<f64>().ok().filter(|gib| (1.0..=10_000.0).contains(gib)).map(|gib| (gib, sliced))
}

#[cfg(test)]
mod tests;
