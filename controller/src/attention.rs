//! Decides when to query the scheduler: at each step while something changes, and rarely while
//! everything is settled.
//!
//! Inputs that need no scheduler are checked in each step: the desired entries, the router's view
//! of the nodes, and whether another controller waits for this one's place.

use std::time::{Duration, Instant, SystemTime};

use hostler_cluster::{FleetEntry, Memory};
use hostler_proto::fleet::v1::ListResponse;

use crate::JobSettings;
use crate::status::EntryStatus;

/// Time before the end of a budget in which each step looks at it. Longer than the longest rest.
const BUDGET_NEAR: Duration = Duration::from_secs(300);

/// State seen without the scheduler; a change of it is a reason to query.
#[derive(Debug, PartialEq)]
pub(crate) struct Scene {
    pub(crate) entries: Vec<FleetEntry>,
    pub(crate) jobs: JobSettings,
    pub(crate) standby: Option<String>,
    nodes: Vec<NodeScene>,
    requests_wait: bool,
}

/// A node's name, whether its agent is attached, and the phases of its replicas.
type NodeScene = (String, bool, Vec<i32>);

impl Scene {
    pub(crate) fn new(entries: Vec<FleetEntry>, jobs: JobSettings, standby: Option<String>, listed: &ListResponse) -> Self {
        let phase = |replica: &hostler_proto::fleet::v1::Replica| replica.state.as_ref().map_or(0, |state| state.phase);
        let scene = |node: &hostler_proto::fleet::v1::Node| (node.name.clone(), node.attached, node.replicas.iter().map(phase).collect());
        let mut nodes: Vec<NodeScene> = listed.nodes.iter().map(scene).collect();
        nodes.sort_unstable();
        Self { entries, jobs, standby, nodes, requests_wait: listed.demand.iter().any(|demand| demand.waiting > 0) }
    }
}

/// Time of the last query, and the state seen then.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    last: Option<(Instant, Scene, bool)>,
}

impl Attention {
    /// Whether the scheduler must be queried now: something has changed or is on its way, or `rest`
    /// has passed since the last query.
    pub(crate) fn is_due(&self, scene: &Scene, rest: Duration, now: Instant) -> bool {
        let Some((at, seen, is_settled)) = &self.last else { return true };
        !is_settled || scene.requests_wait || seen != scene || now.duration_since(*at) >= rest
    }

    /// Notes a query, and whether everything is settled since.
    pub(crate) fn note(&mut self, scene: Scene, is_settled: bool, now: Instant) {
        self.last = Some((now, scene, is_settled));
    }
}

/// Whether an entry has the nodes it wants, and no job is on its way or leaving.
pub(crate) fn is_settled(memory: &Memory, status: &EntryStatus, now: SystemTime) -> bool {
    let has_all = status.ready == status.wanted && status.jobs.iter().all(|job| job.state == "ready");
    // Its end is seen within the step after it.
    let is_budget_near = status.budget.as_ref().is_some_and(|left| !left.is_over() && left.ends_in.is_some_and(|left| left < BUDGET_NEAR));
    memory.is_settled(now) && !is_budget_near && (has_all || status.given_up && status.jobs.is_empty())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use hostler_proto::fleet::v1::{ModelDemand, Node};

    use super::*;
    use crate::ClusterConfig;

    const REST: Duration = Duration::from_secs(60);

    fn scene(attached: bool, waiting: u32) -> Scene {
        let listed = ListResponse {
            nodes: vec![Node { name: "n".into(), attached, ..Node::default() }],
            demand: vec![ModelDemand { waiting, ..ModelDemand::default() }],
            ..ListResponse::default()
        };
        let jobs = JobSettings { program: PathBuf::new(), settings_file: None, engine_args: Vec::new(), cluster: ClusterConfig::default() };
        Scene::new(Vec::new(), jobs, None, &listed)
    }

    #[test]
    fn the_scheduler_is_asked_rarely_while_nothing_changes() {
        let (begin, mut attention) = (Instant::now(), Attention::default());
        let after = |seconds| begin + Duration::from_secs(seconds);
        assert!(attention.is_due(&scene(true, 0), REST, begin));
        attention.note(scene(true, 0), true, begin);
        assert!(!attention.is_due(&scene(true, 0), REST, after(59)) && attention.is_due(&scene(true, 0), REST, after(60)));
        assert!(attention.is_due(&scene(false, 0), REST, after(5)), "an agent is gone");
        assert!(attention.is_due(&scene(true, 1), REST, after(5)), "somebody waits");
        attention.note(scene(true, 0), false, after(60));
        assert!(attention.is_due(&scene(true, 0), REST, after(65)), "a job is on its way");
    }
}
