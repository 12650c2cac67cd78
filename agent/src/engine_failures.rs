//! Detection of an agent whose engines have all failed to start for good.
//!
//! In a batch job nobody is there to repair the cause, and the node is better given back. A flag that
//! vLLM does not have fails at every start, so nobody waits for another one. `Agent::run` waits for
//! this.

use crate::config::{AgentConfig, IfEnginesFail};
use crate::engine::diagnosis::{Diagnosis, FailureKind};
use crate::engine::{EngineStatus, Phase};
use crate::node::NodeState;

/// Failed starts that are enough. The pauses between them are one second and two.
const MAX_FAILED_STARTS: u32 = 3;

/// Failed starts that are enough on a GPU in use.
///
/// With their pauses they take a minute, in which GPU memory left full by the job before may be
/// freed.
const MAX_STARTS_ON_BUSY_GPU: u32 = 7;

/// Causes that lie in the command alone, so that every start fails.
const PERMANENT: [FailureKind; 3] = [FailureKind::BadFlag, FailureKind::BadValue, FailureKind::UnsupportedModel];

/// Whether this agent ends when its engines fail to start for such a cause.
pub(crate) fn ends_agent(config: &AgentConfig, is_in_job: bool, cause: FailureKind) -> bool {
    match config.if_engines_fail {
        IfEnginesFail::Auto => is_in_job || PERMANENT.contains(&cause),
        IfEnginesFail::End => true,
        IfEnginesFail::Retry => false,
    }
}

/// Resolves with the reason once no engine has ever been ready, all have failed to start for good,
/// and this ends the agent.
pub(crate) async fn wait_failed(state: &NodeState, config: &AgentConfig, is_in_job: bool) -> Diagnosis {
    let mut changes = state.changed();
    loop {
        let statuses: Vec<EngineStatus> = state.replicas().iter().map(|replica| replica.engine.status().borrow().clone()).collect();
        match judge(&statuses) {
            StartVerdict::Failed(diagnosis) if ends_agent(config, is_in_job, diagnosis.kind) => return diagnosis,
            StartVerdict::Serves => break,
            StartVerdict::Failed(_) | StartVerdict::Open => {}
        }
        if changes.changed().await.is_err() {
            break;
        }
    }
    std::future::pending().await
}

#[derive(Debug, PartialEq, Eq)]
enum StartVerdict {
    /// One engine has been ready, and later failures are another matter.
    Serves,
    Open,
    Failed(Diagnosis),
}

fn judge(statuses: &[EngineStatus]) -> StartVerdict {
    if statuses.iter().any(|status| matches!(status.phase, Phase::Ready | Phase::Sleeping)) {
        return StartVerdict::Serves;
    }
    // Only an operator brings back an engine that is out of service.
    let is_over = |status: &EngineStatus| has_failed(status) || status.phase == Phase::Quarantined;
    match statuses.iter().find(|status| has_failed(status)) {
        Some(EngineStatus { failure: Some(diagnosis), .. }) if statuses.iter().all(is_over) => StartVerdict::Failed(diagnosis.clone()),
        _ => StartVerdict::Open,
    }
}

/// Whether an engine has failed, judged between two starts, when the cause of the last failure is
/// known.
fn has_failed(status: &EngineStatus) -> bool {
    let Some(failure) = &status.failure else { return false };
    let limit = match failure.kind {
        FailureKind::GpuInUse => MAX_STARTS_ON_BUSY_GPU,
        kind if PERMANENT.contains(&kind) => 1,
        _ => MAX_FAILED_STARTS,
    };
    status.failed_starts >= limit
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::vllm::FrontEndInUse;

    fn status(phase: Phase, failed_starts: u32, kind: FailureKind) -> EngineStatus {
        EngineStatus {
            phase,
            epoch: 1,
            reason: String::new(),
            pid: None,
            restarts: failed_starts,
            hangs: 0,
            failed_starts,
            version: None,
            models: Arc::default(),
            ready_in: None,
            start: None,
            returns_in: None,
            progress: None,
            failure: Some(Diagnosis { kind, cause: "there is no such model".to_owned(), remedy: "check --model".to_owned() }),
            facts: crate::engine::startup_progress::LogFacts::default(),
            front_end: FrontEndInUse::default(),
            missing_routes: Arc::default(),
        }
    }

    #[test]
    fn engines_have_failed_after_three_starts_each_without_readiness() {
        let failed = |starts| status(Phase::Failed, starts, FailureKind::ModelMissing);
        let is_failed = |statuses: &[EngineStatus]| matches!(judge(statuses), StartVerdict::Failed(_));
        assert!(is_failed(&[failed(3)]) && is_failed(&[failed(3), failed(4)]));
        assert!(!is_failed(&[failed(2)]) && !is_failed(&[failed(3), failed(2)]) && !is_failed(&[]));
        // One engine tries for the fourth time while another one fails for the third.
        assert!(is_failed(&[status(Phase::Starting, 3, FailureKind::Unknown), failed(3)]));
        let ready = EngineStatus { failure: None, ..status(Phase::Ready, 0, FailureKind::Unknown) };
        assert_eq!(judge(&[failed(9), ready]), StartVerdict::Serves);
        let StartVerdict::Failed(diagnosis) = judge(&[failed(3)]) else { panic!("it has failed") };
        assert_eq!((diagnosis.cause.as_str(), diagnosis.remedy.as_str()), ("there is no such model", "check --model"));
    }

    #[test]
    fn a_quarantined_engine_neither_delays_nor_decides_the_verdict() {
        let quarantined = status(Phase::Quarantined, 0, FailureKind::Hardware);
        assert_eq!(judge(std::slice::from_ref(&quarantined)), StartVerdict::Open);
        assert!(matches!(judge(&[quarantined, status(Phase::Failed, 3, FailureKind::GpuMemory)]), StartVerdict::Failed(_)));
    }

    #[test]
    fn a_gpu_full_from_the_previous_job_gets_a_minute() {
        let busy = |starts| judge(&[status(Phase::Failed, starts, FailureKind::GpuInUse)]);
        assert_eq!(busy(6), StartVerdict::Open);
        assert!(matches!(busy(7), StartVerdict::Failed(_)));
    }

    #[test]
    fn failed_engines_end_agents_in_jobs_or_by_setting_or_if_every_start_would_fail() {
        let ends =
            |setting, is_in_job, cause| ends_agent(&AgentConfig { if_engines_fail: setting, ..AgentConfig::default() }, is_in_job, cause);
        let missing = FailureKind::ModelMissing;
        assert_eq!([false, true].map(|is_in_job| ends(IfEnginesFail::Auto, is_in_job, missing)), [false, true]);
        assert!(ends(IfEnginesFail::End, false, missing) && !ends(IfEnginesFail::Retry, true, FailureKind::BadFlag));
        assert!(ends(IfEnginesFail::Auto, false, FailureKind::BadFlag));
    }

    #[test]
    fn a_flag_that_the_engine_lacks_is_not_tried_again() {
        assert!(matches!(judge(&[status(Phase::Failed, 1, FailureKind::BadFlag)]), StartVerdict::Failed(_)));
        assert_eq!(judge(&[status(Phase::Failed, 1, FailureKind::GpuMemory)]), StartVerdict::Open);
    }
}
