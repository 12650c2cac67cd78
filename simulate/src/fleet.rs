//! A simulated fleet: its replicas, and a router's view of them.

use crate::blocks::CacheChanges;
use crate::engine::{EngineLoad, Hardware};
use crate::flag_values::{not_negative, share, zero_or_seconds};
use crate::random::{Random, whole};

/// What the replicas are, and how far away.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct SimulatedFleet {
    /// Replicas.
    #[arg(long, default_value_t = 8, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub replicas: u16,
    /// Seconds until the router knows what an engine says of its load and cache. Its own dispatches
    /// it knows at once, and answers pass through it.
    #[arg(long, default_value_t = 0.01, value_name = "SECONDS", value_parser = not_negative)]
    pub delay: f64,
    /// How much the speed of a replica varies: the deviation of the factor by which its steps take
    /// longer, drawn anew every 10 s.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = share)]
    pub noise: f64,
    /// Seconds that the batch job of each replica lasts; 0 for no end. One ends after the other, at
    /// equal intervals. It cuts the answers that have begun, and the next job's engine, whose cache
    /// is empty, takes over at once.
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS", value_parser = zero_or_seconds)]
    pub job: f64,
    /// Routers do not know when jobs end.
    #[arg(long)]
    pub hide_job_ends: bool,
    /// Each replica.
    #[command(flatten)]
    pub hardware: Hardware,
}

impl Default for SimulatedFleet {
    fn default() -> Self {
        Self { replicas: 8, delay: 0.01, noise: 0.0, job: 0.0, hide_job_ends: false, hardware: Hardware::default() }
    }
}

/// How long a replica keeps the speed that its noise gave it, like other work on a busy host that
/// comes and goes.
const NOISE_SECONDS: f64 = 10.0;

impl SimulatedFleet {
    /// When the first job of a replica ends; the others follow after [`Self::job`] seconds each.
    ///
    /// `None` if jobs do not end.
    pub(crate) fn first_job_end(&self, replica: usize) -> Option<f64> {
        (self.job > 0.0).then(|| self.job * (replica + 1) as f64 / f64::from(self.replicas))
    }

    /// Factor by which the steps of a replica take longer at that time.
    pub(crate) fn noise_factor(&self, replica: usize, now: f64) -> f64 {
        let period = u64::from(whole((now / NOISE_SECONDS).floor()));
        if self.noise > 0.0 { Random::new(((replica as u64) << 32) + period).factor(self.noise) } else { 1.0 }
    }
}

/// Report of an engine, once a step.
#[derive(Debug, Clone)]
pub(crate) struct ReplicaReport {
    pub(crate) load: EngineLoad,
    pub(crate) changes: CacheChanges,
    /// Changes among the copies in the host's memory.
    pub(crate) copy_changes: CacheChanges,
}

/// View of a router: its own requests at once, and the engines' reports when they arrive.
#[derive(Debug)]
pub(crate) struct FleetState {
    /// Requests that the router has sent to each replica and that have not ended.
    pub(crate) in_flight: Vec<u32>,
    pub(crate) loads: Vec<EngineLoad>,
    /// When the job of each replica ends; infinite if unknown.
    pub(crate) job_ends: Vec<f64>,
}
