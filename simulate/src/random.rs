//! Random numbers of workloads and fleets, from a seed.

pub(crate) struct Random(fastrand::Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Number from 0 up to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        self.0.f64()
    }

    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Log-normal number, bounded, with this mean before the bounds, and this deviation of the
    /// logarithm.
    pub(crate) fn log_normal(&mut self, mean: f64, deviation: f64, least: f64, most: f64) -> u32 {
        whole((mean * self.factor(deviation)).clamp(least, most))
    }

    /// Log-normal factor, 1 in the mean, with this deviation of the logarithm.
    pub(crate) fn factor(&mut self, deviation: f64) -> f64 {
        let normal = (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos();
        (deviation * normal - deviation * deviation / 2.0).exp()
    }

    /// Index drawn in proportion to its weight.
    pub(crate) fn one_of(&mut self, weights: &[f64]) -> usize {
        let mut left = self.unit() * weights.iter().sum::<f64>();
        weights
            .iter()
            .position(|weight| {
                left -= weight;
                left < 0.0
            })
            .unwrap_or(0)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "lengths are bounded far below 2^32, and `as` saturates")]
pub(crate) fn whole(length: f64) -> u32 {
    length.round() as u32
}
