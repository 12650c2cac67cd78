//! Predicts when a replica that takes no requests will take them, from its agent's reports or its
//! controller's announcements.

use std::time::Duration;

use super::replica_status::{Phase, ReplicaStatus};

/// When requests can be sent to a replica, the soonest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Arrival {
    /// Within this time, as far as is known.
    Within(Duration),
    /// The replica starts, or will start, and nobody can tell yet how long that takes.
    Starting,
    /// Nothing says that the replica will ever take requests.
    Unknown,
}

impl Arrival {
    /// The arrival of a replica whose agent can be reached or not. `lease_left` is how long its
    /// last report still counts: if engines are kept, the next agent takes them over within a
    /// lease.
    pub(super) fn of_replica(status: &ReplicaStatus, is_reachable: bool, lease_left: Duration) -> Self {
        match status.phase {
            _ if !is_reachable && lease_left.is_zero() => Self::Unknown,
            Phase::Ready if is_reachable => Self::Within(Duration::ZERO),
            Phase::Ready => Self::Within(lease_left),
            Phase::Starting | Phase::Loading => status.start_left.map_or(Self::Starting, Self::Within),
            // The agent says so if the replica had served and starts again.
            Phase::Draining | Phase::Failed => status.start_left.map_or(Self::Unknown, Self::Within),
            Phase::Stopped | Phase::Quarantined | Phase::Sleeping => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_starting_or_briefly_lost_replica_is_expected() {
        const NONE: Duration = Duration::ZERO;
        let (two, minute) = (Duration::from_secs(2), Duration::from_secs(60));
        for (phase, start_left, is_reachable, lease_left, arrival) in [
            (Phase::Ready, None, true, NONE, Arrival::Within(NONE)),
            (Phase::Ready, None, false, two, Arrival::Within(two)),
            (Phase::Ready, None, false, NONE, Arrival::Unknown),
            (Phase::Starting, None, true, two, Arrival::Starting),
            (Phase::Loading, None, true, NONE, Arrival::Starting),
            (Phase::Loading, Some(minute), true, two, Arrival::Within(minute)),
            (Phase::Loading, Some(minute), false, two, Arrival::Within(minute)),
            (Phase::Loading, Some(minute), false, NONE, Arrival::Unknown),
            // In a crash loop the replica is coming only while the next life starts.
            (Phase::Failed, None, true, two, Arrival::Unknown),
            (Phase::Failed, Some(minute), true, two, Arrival::Within(minute)),
            (Phase::Failed, Some(minute), false, NONE, Arrival::Unknown),
            (Phase::Draining, None, true, two, Arrival::Unknown),
            (Phase::Draining, Some(minute), true, two, Arrival::Within(minute)),
            (Phase::Stopped, None, true, two, Arrival::Unknown),
            (Phase::Quarantined, None, true, two, Arrival::Unknown),
            (Phase::Sleeping, None, true, two, Arrival::Unknown),
        ] {
            let status = ReplicaStatus { phase, start_left, ..ReplicaStatus::default() };
            let found = Arrival::of_replica(&status, is_reachable, lease_left);
            assert_eq!(found, arrival, "{phase:?}, {start_left:?}, {is_reachable}, {lease_left:?}");
        }
        assert!(Arrival::Within(minute) < Arrival::Starting && Arrival::Starting < Arrival::Unknown);
    }
}
