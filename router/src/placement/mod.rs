//! Which replica a request goes to, and why. Pure: it reads no clock, takes no lock and awaits nothing.

/// What the choice knows of one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Its index in the fleet view.
    pub replica: usize,
    /// Requests that this router has in flight there.
    pub own: u32,
    /// Requests that other routers have in flight there, as last reported.
    pub others: u32,
    /// Requests running and waiting in the engine, as last reported.
    pub engine: u32,
    /// Its lease has lapsed or its last request failed: it is used when nothing else is left.
    pub doubtful: bool,
}

impl Candidate {
    /// Requests ahead of a new one. An engine that hangs reports nothing and looks idle, so our own count is a floor.
    #[must_use]
    pub fn work(&self) -> u32 {
        self.own.saturating_add(self.others).max(self.engine)
    }
}

/// The replica chosen, and the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Index in the fleet view.
    pub replica: usize,
    /// Why this one.
    pub reason: Reason,
}

/// Why a replica was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reason {
    /// Requests ahead of this one on the chosen replica.
    pub work: u32,
    /// Replicas that could have been chosen.
    pub candidates: usize,
    /// Those among them that had as little work.
    pub tied: usize,
    /// All candidates were doubtful.
    pub last_resort: bool,
}

/// The candidate with the least work; among equals one at random, so that several routers do not all pick the first. `None` without candidates.
#[must_use]
pub fn place(candidates: &[Candidate], random: &mut fastrand::Rng) -> Option<Placement> {
    let rank = |candidate: &Candidate| (candidate.doubtful, candidate.work());
    let best = candidates.iter().map(rank).min()?;
    let tied = candidates.iter().filter(|candidate| rank(candidate) == best).count();
    let chosen = candidates.iter().filter(|candidate| rank(candidate) == best).nth(random.usize(..tied))?;
    let reason = Reason { work: best.1, candidates: candidates.len(), tied, last_resort: best.0 };
    Some(Placement { replica: chosen.replica, reason })
}

#[cfg(test)]
mod tests;
