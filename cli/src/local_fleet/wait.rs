//! `hostler wait` where no fleet of jobs is up: waits until what `hostler up` starts on this
//! machine serves, for scripts.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use hostler_proto::fleet::v1::Replica;
use tokio::time::sleep;

use super::{LocalFleet, describe_all, describe_nothing_up, find_called, find_local_fleets};
use crate::output::{complain, say};
use crate::startup_progress::StartupProgress;

const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Time in which a `hostler up` that a script has just started may appear. It has its sockets
/// within a second on an idle machine.
const APPEAR_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum LocalWaitError {
    #[error("{name} does not serve: {cause}")]
    Failing { name: String, cause: String },
    #[error("the `hostler up` that was to serve has ended; what it said last is the reason")]
    Ended,
    #[error("{name} was not ready within {}; it goes on starting: `hostler wait` waits again, `hostler down` ends it", humantime::format_duration(*timeout))]
    Late { name: String, timeout: Duration },
}

impl LocalWaitError {
    /// Exit code for scripts, as for a fleet of jobs.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Failing { .. } | Self::Ended => 3,
            Self::Late { .. } => 4,
        }
    }
}

/// Waits until a replica serves this model; without a name, any.
///
/// # Errors
/// `LocalWaitError` when that does not happen in time, or not at all; another error when nothing is
/// up.
pub(crate) async fn wait(name: Option<&str>, timeout: Duration) -> anyhow::Result<()> {
    let shown = name.unwrap_or("the model").to_owned();
    match tokio::time::timeout(timeout, until_ready(name, &shown)).await {
        Ok(ended) => ended,
        Err(_) => {
            let fleets = find_local_fleets().await;
            let is_known = name.is_none_or(|name| fleets.iter().any(|fleet| fleet.is_called(name)));
            ensure!(is_known && !fleets.is_empty(), "{shown} is not up here; up is {}", describe_all(&fleets));
            Err(LocalWaitError::Late { name: shown, timeout }.into())
        }
    }
}

async fn until_ready(name: Option<&str>, shown: &str) -> anyhow::Result<()> {
    let (began, mut has_appeared, mut progress) = (Instant::now(), false, StartupProgress::default());
    let mut said = None;
    loop {
        let fleets = find_local_fleets().await;
        if fleets.is_empty() {
            if has_appeared {
                return Err(LocalWaitError::Ended.into());
            }
            if began.elapsed() >= APPEAR_TIMEOUT {
                bail!(describe_nothing_up().await);
            }
        }
        has_appeared |= !fleets.is_empty();
        name.map(|name| find_called(&fleets, name)).transpose()?;
        let replicas: Vec<Replica> = fleets.iter().flat_map(|fleet| fleet.replicas.clone()).collect();
        progress.lines(&replicas, Instant::now()).iter().for_each(|line| say(line));
        let silence = fleets.iter().find_map(|fleet| fleet.silence.clone());
        if silence != said {
            silence.iter().for_each(|silence| complain(silence));
            said = silence;
        }
        match judge(&fleets, name) {
            LocalOutlook::Ready(line) => {
                say(&line);
                return Ok(());
            }
            LocalOutlook::Unknown(_) if began.elapsed() < APPEAR_TIMEOUT => {}
            LocalOutlook::Unknown(cause) | LocalOutlook::Failing(cause) => {
                return Err(LocalWaitError::Failing { name: shown.to_owned(), cause }.into());
            }
            LocalOutlook::Coming => {}
        }
        sleep(POLL_INTERVAL).await;
    }
}

#[derive(Debug, PartialEq, Eq)]
enum LocalOutlook {
    Coming,
    /// With the line that says so.
    Ready(String),
    /// With the first cause.
    Failing(String),
    /// Nothing that is up has this name, or will have it. With what is up.
    Unknown(String),
}

/// What is to be expected of these fleets for this model. An engine says its model's names only
/// when it answers.
fn judge(fleets: &[LocalFleet], name: Option<&str>) -> LocalOutlook {
    let live: Vec<&LocalFleet> = fleets.iter().filter(|fleet| !fleet.is_taken_down() && !fleet.record.is_leaving).collect();
    let has_name = |replica: &Replica| name.is_none_or(|name| replica.model_ids().any(|model| model == name));
    for fleet in &live {
        let is_called = name.is_some_and(|name| fleet.is_called(name));
        if let Some(ready) = fleet.replicas.iter().find(|replica| replica.is_ready() && (is_called || has_name(replica))) {
            let model = name.or_else(|| ready.model_ids().next()).unwrap_or_default();
            return LocalOutlook::Ready(format!("ready     {model} at {}", fleet.record.router.base_url));
        }
    }
    let called: Vec<&LocalFleet> = live.iter().copied().filter(|fleet| name.is_some_and(|name| fleet.is_called(name))).collect();
    let meant = if called.is_empty() { live.clone() } else { called };
    let is_coming = |fleet: &&LocalFleet| fleet.replicas.is_empty() || fleet.replicas.iter().any(Replica::is_coming);
    if meant.is_empty() || meant.iter().any(is_coming) {
        return LocalOutlook::Coming;
    }
    let replicas = meant.iter().flat_map(|fleet| &fleet.replicas);
    let cause = replicas.filter(|replica| !replica.is_ready()).find_map(|replica| {
        let failure = replica.state().failure.as_ref().map(|failure| format!("{}; {}", failure.cause, failure.remedy));
        failure.or_else(|| Some(format!("{} is {}: {}", replica.id, replica.phase().as_str(), replica.first_reason())))
    });
    cause.map_or_else(|| LocalOutlook::Unknown(format!("up is {}", describe_all(fleets))), LocalOutlook::Failing)
}

#[cfg(test)]
mod tests {
    use hostler_proto::agent::v1::{Failure, Model, Phase, ReplicaState};

    use super::*;
    use crate::local_fleet::tests::{fleet, joined};

    fn replica(phase: Phase, model: &str) -> Replica {
        let models = Some(model).filter(|model| !model.is_empty()).map(|id| Model { id: id.into(), ..Model::default() });
        let state = ReplicaState { phase: phase.into(), models: models.into_iter().collect(), ..ReplicaState::default() };
        Replica { id: "n0/0".into(), state: Some(state), ..Replica::default() }
    }

    #[test]
    fn a_wait_ends_when_a_replica_serves_the_named_model() {
        let one = [fleet(7, vec![replica(Phase::Ready, "tiny"), replica(Phase::Loading, "")])];
        assert_eq!(judge(&one, Some("tiny")), LocalOutlook::Ready("ready     tiny at http://127.0.0.1:7/v1".into()));
        assert_eq!(judge(&one, None), judge(&one, Some("tiny")));
        assert_eq!(judge(&one, Some("other")), LocalOutlook::Coming, "the second may be it");
    }

    #[test]
    fn a_wait_gives_up_when_no_replica_comes_any_more() {
        let others = [fleet(7, vec![replica(Phase::Ready, "tiny")])];
        let LocalOutlook::Unknown(cause) = judge(&others, Some("other")) else { panic!("it never comes") };
        assert!(cause.contains("up is tiny"), "{cause}");
        let mut failed = replica(Phase::Failed, "");
        let failure = Failure { kind: "k".into(), cause: "no memory".into(), remedy: "use less".into() };
        failed.state.as_mut().unwrap().failure = Some(failure);
        assert_eq!(judge(&[fleet(7, vec![failed])], None), LocalOutlook::Failing("no memory; use less".into()));
        assert_eq!(judge(&[], None), LocalOutlook::Coming, "it may still appear");
    }

    #[test]
    fn a_wait_for_a_model_beside_others_sees_its_own_engines_alone() {
        let first = fleet(7, vec![replica(Phase::Loading, "")]);
        let beside = |phase, model| [first.clone(), joined(8, &first, "b", vec![replica(phase, model)])];
        assert_eq!(judge(&beside(Phase::Loading, ""), Some("b")), LocalOutlook::Coming);
        assert_eq!(judge(&beside(Phase::Ready, "b"), Some("b")), LocalOutlook::Ready("ready     b at http://127.0.0.1:7/v1".into()));
        assert!(matches!(judge(&beside(Phase::Failed, ""), Some("b")), LocalOutlook::Failing(_)), "the first may come still");
    }
}
