//! Randomness of a workload.
//!
//! Each number of a load has separate draws for each purpose, so that a conversation does not
//! change because an earlier one took more of them.

/// Purpose of a sequence; no two purposes share a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Gap = 1,
    Shape = 2,
    Words = 3,
    System = 4,
    Block = 5,
}

/// One sequence of draws.
#[derive(Debug, Clone)]
pub(super) struct Draw(fastrand::Rng);

impl Draw {
    pub(super) fn new(seed: u64, purpose: Purpose, number: u64) -> Self {
        Self(fastrand::Rng::with_seed(mix(mix(seed ^ mix(purpose as u64)) ^ number)))
    }

    /// Number from 0 up to 1.
    pub(super) fn unit(&mut self) -> f64 {
        self.0.f64()
    }

    /// Number with this mean: the time between independent events.
    pub(super) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Number between the two, both ends included.
    pub(super) fn between(&mut self, least: u32, most: u32) -> u32 {
        self.0.u32(least..=most.max(least))
    }

    /// Draws eight independent bytes.
    pub(super) fn bytes(&mut self) -> [u8; 8] {
        self.0.u64(..).to_le_bytes()
    }
}

/// Scatters numbers that are close to each other; distinct numbers stay distinct (the last steps of
/// `SplitMix64`).
pub(super) fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Picks one of several, the k-th with a frequency of 1/k to the power of a skew.
#[derive(Debug, Clone)]
pub(super) struct Zipf {
    /// Share of the first k, for each k.
    up_to: Vec<f64>,
}

impl Zipf {
    /// Creates a distribution over `count` items, at least one.
    pub(super) fn new(count: u32, skew: f64) -> Self {
        let mut sum = 0.0;
        let sums: Vec<f64> = (1..=count.max(1))
            .map(|rank| {
                sum += f64::from(rank).powf(-skew);
                sum
            })
            .collect();
        Self { up_to: sums.into_iter().map(|up_to| up_to / sum).collect() }
    }

    /// Item at this point between 0 and 1.
    pub(super) fn pick(&self, place: f64) -> usize {
        self.up_to.partition_point(|up_to| *up_to <= place).min(self.up_to.len() - 1)
    }
}
