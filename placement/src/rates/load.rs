//! Seconds to load a token from the tiers behind a GPU's memory: assumed, and learned from what
//! first tokens took.

use super::learner::{MAX_LOAD_SHARE, gain_factor, positive};

/// Bytes that a GPU reads from its host's memory in a second: 34 to 37 GB/s were seen on an H100
/// over PCIe 5, in transfers of the engine's own size.
const HOST_BYTES_PER_SECOND: f64 = 30e9;

/// Bytes that an engine reads from files in a second: 4.0 GB/s were seen from `/dev/shm`, with 16
/// threads and files of 34 MB (vLLM 0.33).
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
    /// are unknown. Every GPU has its own link to the host's memory; a file has the parts of all.
    #[must_use]
    pub fn new(token_bytes: u64, gpus: u32) -> Self {
        let bytes = if token_bytes == 0 { DEFAULT_TOKEN_BYTES } else { token_bytes } as f64;
        Self { load: bytes / HOST_BYTES_PER_SECOND, read: bytes * f64::from(gpus.max(1)) / FILE_BYTES_PER_SECOND }
    }

    /// The rates of a replica whose loads have taken so many times as long.
    #[must_use]
    pub fn scaled(self, factors: LoadFactors) -> Self {
        Self { load: self.load * factors.load, read: self.read * factors.read }
    }
}

/// Exponent with which a sample's factor moves the learned one. One that took as long as three
/// expected loads adds a tenth.
const GAIN: f64 = 0.1;

/// Bounds of the learned factors: from twice the speed of PCIe 6 to a shared disk.
const FACTOR_BOUNDS: (f64, f64) = (0.125, 16.0);

/// How many times as long as assumed a replica's loads take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadFactors {
    load: f64,
    read: f64,
}

/// A first token for which tokens were loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadSample {
    /// Expected seconds until the tokens were loaded.
    pub load_seconds: f64,
    /// Expected seconds for everything else.
    pub other_seconds: f64,
    /// Seconds from dispatch to the first token.
    pub actual_seconds: f64,
    pub loaded: u32,
    /// Those of the loaded tokens that were read from files before.
    pub read: u32,
}

impl Default for LoadFactors {
    fn default() -> Self {
        Self { load: 1.0, read: 1.0 }
    }
}

impl LoadFactors {
    /// Learns from a first token, if most of the time to it was expected to be for loading.
    ///
    /// The factor of reading files learns where at least half of the tokens came from files: they
    /// take several times as long.
    pub fn learn(&mut self, seen: &LoadSample) {
        let took = (seen.actual_seconds - seen.other_seconds).max(seen.actual_seconds / 10.0);
        let factor = took / seen.load_seconds;
        let share = seen.load_seconds / (seen.load_seconds + seen.other_seconds);
        if positive(factor) && share >= MAX_LOAD_SHARE {
            let learned = if seen.read >= seen.loaded.div_ceil(2) { &mut self.read } else { &mut self.load };
            let (least, most) = FACTOR_BOUNDS;
            *learned = (*learned * gain_factor(factor, GAIN)).clamp(least, most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: LoadSample = LoadSample { load_seconds: 0.4, other_seconds: 0.1, actual_seconds: 0.5, loaded: 8_000, read: 0 };

    /// Factors after many loads that took `times` as long as the rates said at the time.
    fn learned(sample: LoadSample, times: f64) -> LoadFactors {
        let mut factors = LoadFactors::default();
        for _ in 0..200 {
            let scale = if sample.read > 0 { factors.read } else { factors.load };
            let load_seconds = sample.load_seconds * scale;
            factors.learn(&LoadSample { load_seconds, actual_seconds: sample.other_seconds + sample.load_seconds * times, ..sample });
        }
        factors
    }

    #[test]
    fn loads_become_as_long_as_they_have_been_and_each_tier_by_itself() {
        let near = |value: f64, expected: f64| assert!((value / expected - 1.0).abs() < 0.01, "{value}, not {expected}");
        let from_files = LoadSample { read: 6_000, ..SAMPLE };
        for (sample, times, expected) in [(SAMPLE, 3.0, (3.0, 1.0)), (SAMPLE, 0.5, (0.5, 1.0)), (from_files, 4.0, (1.0, 4.0))] {
            let factors = learned(sample, times);
            near(factors.load, expected.0);
            near(factors.read, expected.1);
            let rates = LoadRates::default().scaled(factors);
            near(rates.load, LoadRates::default().load * expected.0);
            near(rates.read, LoadRates::default().read * expected.1);
        }
    }

    #[test]
    fn first_tokens_that_waited_for_something_else_teach_nothing_about_loading() {
        let mut factors = LoadFactors::default();
        for other_seconds in [0.5, f64::NAN, f64::INFINITY] {
            factors.learn(&LoadSample { other_seconds, actual_seconds: 5.0, ..SAMPLE });
        }
        factors.learn(&LoadSample { load_seconds: 0.0, other_seconds: 0.0, ..SAMPLE });
        assert_eq!(factors, LoadFactors::default());
    }

    #[test]
    fn a_factor_stays_within_bounds() {
        assert!(learned(SAMPLE, 1e9).load <= 16.0);
        assert!(learned(SAMPLE, 1e-9).load >= 0.125);
    }
}
