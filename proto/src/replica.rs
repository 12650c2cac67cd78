//! What readers of a replica's description ask of it, whether they print it, draw it or sort by it.

use std::sync::LazyLock;

use crate::agent::v1::{EngineLoad, Gpu, GpuReading, Job, Load, Phase, Progress, ReplicaState, Start};
use crate::fleet::v1::{Cache, GoneJob, ListResponse, Node, Replica};

/// The state of a replica whose router sends none.
static NO_STATE: LazyLock<ReplicaState> = LazyLock::new(ReplicaState::default);

static NO_CACHE: LazyLock<Cache> = LazyLock::new(Cache::default);

static NO_JOB: LazyLock<Job> = LazyLock::new(Job::default);

static NO_READING: LazyLock<GpuReading> = LazyLock::new(GpuReading::default);

impl Phase {
    /// Word for people and scripts.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            // An engine without a reported phase is starting.
            Self::Unspecified | Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Quarantined => "quarantined",
            Self::Sleeping => "sleeping",
            Self::Suspect => "suspect",
        }
    }
}

impl Replica {
    /// The agent's report of the replica; all defaults if the message has none.
    #[must_use]
    pub fn state(&self) -> &ReplicaState {
        self.state.as_ref().unwrap_or(&NO_STATE)
    }

    /// The engine's stage of life, or `Suspect` if the agent is silent.
    #[must_use]
    pub fn phase(&self) -> Phase {
        if self.suspect { Phase::Suspect } else { self.state().phase() }
    }

    /// Whether the replica is about to serve, or may be.
    #[must_use]
    pub fn is_coming(&self) -> bool {
        matches!(self.phase(), Phase::Unspecified | Phase::Starting | Phase::Loading | Phase::Suspect)
    }

    /// Whether the replica serves requests.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.phase() == Phase::Ready
    }

    /// The requests that the agent has counted; zeros if the message has none.
    #[must_use]
    pub fn load(&self) -> Load {
        self.load.unwrap_or_default()
    }

    /// The engine's own figures; `None` before its agent has read any.
    #[must_use]
    pub fn engine(&self) -> Option<EngineLoad> {
        self.load().engine
    }

    /// The router's knowledge of the replica's cached blocks.
    #[must_use]
    pub fn cache(&self) -> &Cache {
        self.cache.as_ref().unwrap_or(&NO_CACHE)
    }

    /// The names by which requests can ask for the replica's models.
    pub fn model_ids(&self) -> impl Iterator<Item = &str> + Clone {
        self.state().models.iter().map(|model| model.id.as_str())
    }

    /// The engine's release, and that it is simulated; empty before it has said its release.
    #[must_use]
    pub fn engine_words(&self) -> String {
        let ReplicaState { engine_version, is_simulated, .. } = self.state();
        let parts = [engine_version.as_str(), if *is_simulated { "simulated" } else { "" }];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// First line of the reason for the phase.
    #[must_use]
    pub fn first_reason(&self) -> &str {
        self.state().reason.lines().next().unwrap_or_default()
    }
}

impl Start {
    /// The parts of the start in order, with the seconds of each. An agent from before there were
    /// parts names none.
    #[must_use]
    pub fn parts(&self) -> Vec<(&str, f32)> {
        let mut parts: Vec<(&str, f32)> = Vec::new();
        for stage in self.stages.iter().filter(|stage| !stage.part.is_empty()) {
            match parts.iter_mut().find(|(part, _)| *part == stage.part) {
                Some((_, seconds)) => *seconds += stage.seconds,
                None => parts.push((&stage.part, stage.seconds)),
            }
        }
        parts
    }
}

impl ListResponse {
    /// Each replica with its node.
    pub fn replicas(&self) -> impl Iterator<Item = (&Node, &Replica)> {
        self.nodes.iter().flat_map(|node| node.replicas.iter().map(move |replica| (node, replica)))
    }

    /// The replica of this name, with its node.
    #[must_use]
    pub fn find_replica(&self, id: &str) -> Option<(&Node, &Replica)> {
        self.replicas().find(|(_, replica)| replica.id == id)
    }

    /// Gives silent replicas their phase, as JSON shows it.
    pub fn mark_suspects(&mut self) {
        for replica in self.nodes.iter_mut().flat_map(|node| &mut node.replicas) {
            let phase = replica.phase();
            replica.state.get_or_insert_default().set_phase(phase);
        }
    }
}

impl GoneJob {
    /// The job, with the times that it had left when it went.
    #[must_use]
    pub fn job(&self) -> &Job {
        self.job.as_ref().unwrap_or(&NO_JOB)
    }
}

impl Gpu {
    /// The driver's reading of the GPU; nothing if the message has none.
    #[must_use]
    pub fn reading(&self) -> &GpuReading {
        self.reading.as_ref().unwrap_or(&NO_READING)
    }
}

impl Progress {
    /// `loading weights 45 %, about 20 s left`.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Self { stage, percent, seconds_left } = self;
        let left = if *seconds_left > 0 { format!(", about {seconds_left} s left") } else { String::new() };
        format!("{stage} {percent} %{left}")
    }
}
