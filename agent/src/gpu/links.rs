//! NVLink topology. Layouts need it: a replica of several GPUs stays within one NVLink domain.

use super::Gpu;

/// Pairs of GPUs that are joined by NVLink, directly or through switches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvlinkTopology {
    /// UUIDs of whole GPUs, the lesser first.
    pairs: Vec<(String, String)>,
}

impl NvlinkTopology {
    /// Creates links between these pairs of whole GPUs, by UUID.
    #[must_use]
    pub fn between(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        let ordered = |(one, other): (String, String)| if one <= other { (one, other) } else { (other, one) };
        Self { pairs: pairs.into_iter().map(ordered).collect() }
    }

    /// Whether all these GPUs reach each other over NVLink.
    ///
    /// A single GPU does; slices never do, not even those of one GPU.
    #[must_use]
    pub fn is_one_domain(&self, gpus: &[Gpu]) -> bool {
        let joined = |one: &Gpu, other: &Gpu| {
            let (one, other) = if one.uuid <= other.uuid { (&one.uuid, &other.uuid) } else { (&other.uuid, &one.uuid) };
            self.pairs.iter().any(|(first, second)| first == one && second == other)
        };
        gpus.iter().enumerate().all(|(at, gpu)| gpus[at + 1..].iter().all(|other| joined(gpu, other)))
    }
}
