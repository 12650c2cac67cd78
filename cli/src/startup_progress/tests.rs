use hostler_proto::agent::v1::{Failure, Phase, Progress, ReplicaState};

use super::*;
use crate::ps::tests::node;

fn replica(state: ReplicaState) -> Vec<Replica> {
    node("n0", state, |_| {}).replicas
}

fn loading(stage: &str, percent: u32, seconds_left: u32) -> Vec<Replica> {
    let progress = Some(Progress { stage: stage.into(), percent, seconds_left });
    replica(ReplicaState { phase: Phase::Loading.into(), progress, ..ReplicaState::default() })
}

fn failed(cause: &str, remedy: &str) -> Vec<Replica> {
    let failure = Some(Failure { kind: "flag".into(), cause: cause.into(), remedy: remedy.into() });
    replica(ReplicaState { phase: Phase::Failed.into(), failure, ..ReplicaState::default() })
}

#[test]
fn a_stage_is_reported_at_its_start_and_periodically() {
    let (mut start, began) = (StartupProgress::default(), Instant::now());
    let at = |seconds| began + Duration::from_secs(seconds);
    assert_eq!(start.lines(&loading("loading weights", 10, 60), at(0)), ["n0/0  loading weights 10 %, about 60 s left"]);
    assert!(start.lines(&loading("loading weights", 12, 58), at(29)).is_empty());
    assert_eq!(start.lines(&loading("loading weights", 45, 20), at(30)), ["n0/0  loading weights 45 %, about 20 s left"]);
    assert!(start.lines(&loading("loading weights", 45, 20), at(90)).is_empty());
    assert_eq!(start.lines(&loading("compiling", 60, 0), at(91)), ["n0/0  compiling 60 %"]);
}

#[test]
fn silent_or_serving_replicas_report_no_progress() {
    let mut start = StartupProgress::default();
    assert!(start.lines(&replica(ReplicaState::default()), Instant::now()).is_empty());
    assert!(start.lines(&replica(ReplicaState { phase: Phase::Ready.into(), ..ReplicaState::default() }), Instant::now()).is_empty());
}

#[test]
fn a_replica_that_waits_for_others_says_for_whom() {
    let mut start = StartupProgress::default();
    let mut lines = |reason: &str| {
        let waiting = replica(ReplicaState { phase: Phase::Starting.into(), reason: reason.into(), ..ReplicaState::default() });
        start.lines(&waiting, Instant::now())
    };
    assert!(lines("the engine's process has started").is_empty());
    assert_eq!(
        lines("waits for http://h:1, which is not ours: cannot connect"),
        ["n0/0  waits for http://h:1, which is not ours: cannot connect"]
    );
    assert!(lines("waits for http://h:1, which is not ours: cannot connect").is_empty());
    assert_eq!(lines("waits for http://h:1, which is not ours"), ["n0/0  waits for http://h:1, which is not ours"]);
}

#[test]
fn a_failure_is_reported_once_with_its_remedy() {
    let (mut start, began) = (StartupProgress::default(), Instant::now());
    let lines = start.lines(&failed("unrecognized arguments: --bogus", "drop --bogus"), began);
    assert_eq!(lines, ["n0/0  failed: unrecognized arguments: --bogus", "  do    drop --bogus", "  log   hostler logs n0/0"]);
    assert!(start.lines(&failed("unrecognized arguments: --bogus", "drop --bogus"), began + REPEAT_INTERVAL * 3).is_empty());
    assert_eq!(
        start.lines(&failed("no such model", ""), began + REPEAT_INTERVAL * 4),
        ["n0/0  failed: no such model", "  log   hostler logs n0/0"]
    );
}

#[test]
fn a_quarantined_replica_says_why() {
    let state = ReplicaState { phase: Phase::Quarantined.into(), reason: "XID 79 on GPU 0\nmore".into(), ..ReplicaState::default() };
    assert_eq!(StartupProgress::default().lines(&replica(state), Instant::now()), ["n0/0  quarantined: XID 79 on GPU 0"]);
}
