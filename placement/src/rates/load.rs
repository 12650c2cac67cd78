//! Seconds to load a token from the tiers behind a GPU's memory.

/// Bytes that a GPU reads from its host's memory in a second: 34 to 37 GB/s were seen on an H100
/// over PCIe 5, in transfers of the engine's own size.
const HOST_BYTES_PER_SECOND: f64 = 30e9;

/// Bytes that an engine reads from files in a second: 4.0 GB/s were seen from `/dev/shm` (vLLM 0.33,
/// 16 threads, files of 34 MB).
const FILE_BYTES_PER_SECOND: f64 = 4e9;

/// Bytes of a token's keys and values if they are not known: 32 layers, eight heads of 128, 16
/// bits.
const DEFAULT_TOKEN_BYTES: u64 = 128 << 10;

/// Seconds for one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadRates {
    /// From the host's memory to the GPUs.
    pub load: f64,
    /// From a file to the host's memory.
    pub read: f64,
}

/// Rates of one GPU whose tokens take an unknown number of bytes.
impl Default for LoadRates {
    fn default() -> Self {
        Self::new(0, 1)
    }
}

impl LoadRates {
    /// Rates of an engine with so many GPUs, on each of which a token takes so many bytes; 0 bytes
    /// are unknown. Every GPU has its own link to the host's memory, and a file has the parts of all.
    #[must_use]
    pub fn new(token_bytes: u64, gpus: u32) -> Self {
        let bytes = if token_bytes == 0 { DEFAULT_TOKEN_BYTES } else { token_bytes } as f64;
        Self { load: bytes / HOST_BYTES_PER_SECOND, read: bytes * f64::from(gpus.max(1)) / FILE_BYTES_PER_SECOND }
    }
}
