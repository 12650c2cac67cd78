//! Interprets a host's answers for a model served from this machine alone, and says what to do. Pure;
//! `hostler doctor` gathers the answers.

use std::path::PathBuf;

use hostler_proto::fleet::v1::Replica;

use super::findings::{CheckResult, check_model, check_proxy, check_router_socket, check_run_dir, check_stage};
use crate::local_fleet::{LocalFleet, OtherRouter};

/// Facts about a host. An error says what to do if that is already known.
#[derive(Debug)]
pub(super) struct MachineFacts {
    /// What is up already.
    pub(super) up: Vec<LocalFleet>,
    /// Routers that were started otherwise.
    pub(super) others: Vec<OtherRouter>,
    /// The router's addresses that other programs have, with the flag of each.
    pub(super) taken: Vec<(&'static str, String)>,
    /// Words about the engine that would be started.
    pub(super) engine: Result<MachineEngine, String>,
    /// Names of the GPUs, or why there are none; `None` if engines need none.
    pub(super) gpus: Option<Result<Vec<String>, String>>,
    /// Whether a named model exists; an inner `Some` says what is unknown about it.
    pub(super) model: Option<Result<Option<String>, String>>,
    pub(super) proxy: Option<(&'static str, String)>,
    pub(super) no_proxy: String,
    pub(super) run_dir: Result<PathBuf, String>,
    /// Where models are copied to, if they are.
    pub(super) stage: Option<Result<String, String>>,
    pub(super) router_socket: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MachineEngine {
    /// Its program, or its release and image.
    Vllm(String),
    /// Because nothing else is there, or it is chosen.
    Simulated,
    Attached,
    /// vLLM is there, and no model is named yet.
    NoModel,
}

/// All findings, in the order in which they matter.
pub(super) fn examine_machine(facts: &MachineFacts) -> Vec<CheckResult> {
    let up = facts.up.iter().map(check_up);
    let others = facts.others.iter().map(|router| CheckResult::note("up", router.describe()));
    let nothing_up = (facts.up.is_empty() && facts.others.is_empty())
        .then(|| CheckResult::ok("up", "nothing yet: `hostler up MODEL` serves one from this machine"));
    // What is up has these addresses itself.
    let taken = facts.taken.iter().filter(|_| facts.up.is_empty() && facts.others.is_empty()).map(|(flag, address)| {
        CheckResult::problem(
            "address",
            format!("{address} is in use by another program"),
            format!("end it, or choose another with {flag} HOST:PORT"),
        )
    });
    let rest = [
        Some(check_engine(&facts.engine)),
        check_model(facts.model.as_ref()),
        facts.gpus.as_ref().map(check_gpus),
        Some(check_proxy(facts.proxy.as_ref(), &facts.no_proxy)),
        Some(check_run_dir(&facts.run_dir)),
        facts.stage.as_ref().map(check_stage),
        Some(check_router_socket(&facts.router_socket)),
    ];
    let findings = facts.up.iter().flat_map(|fleet| &fleet.findings).map(CheckResult::of_fleet);
    up.chain(others).chain(nothing_up).chain(findings).chain(taken).chain(rest.into_iter().flatten()).collect()
}

fn check_up(fleet: &LocalFleet) -> CheckResult {
    let LocalFleet { record, replicas, .. } = fleet;
    let ready = replicas.iter().filter(|replica| replica.is_ready()).count();
    let text = format!("{}: {ready} of {} replicas ready at {}", fleet.describe(), replicas.len(), record.router.base_url);
    if let Some(silence) = &fleet.silence {
        return CheckResult::problem("up", format!("{} at {} does not answer: {silence}", fleet.describe(), record.router.base_url), "");
    }
    if fleet.is_taken_down() {
        return CheckResult::ok("up", format!("{}: its process goes on as a router at {}", fleet.describe(), record.router.base_url));
    }
    let down = replicas.iter().find(|replica| !replica.is_ready() && !replica.is_coming());
    match down {
        Some(replica) => {
            let (cause, remedy) = match &replica.state().failure {
                Some(failure) => (failure.cause.clone(), failure.remedy.clone()),
                None => (replica.first_reason().to_owned(), String::new()),
            };
            let remedy = if remedy.is_empty() { format!("`hostler logs {}` shows its last lines", replica.id) } else { remedy };
            CheckResult::problem("up", format!("{text}; {} is {}: {cause}", replica.id, replica.phase().as_str()), remedy)
        }
        None if replicas.is_empty() || replicas.iter().any(Replica::is_coming) => {
            CheckResult::note("up", format!("{text}; `hostler wait` waits for the rest"))
        }
        None => CheckResult::ok("up", text),
    }
}

fn check_engine(engine: &Result<MachineEngine, String>) -> CheckResult {
    let subject = "engine";
    match engine {
        Ok(MachineEngine::Vllm(found)) => CheckResult::ok(subject, found),
        Ok(MachineEngine::Attached) => CheckResult::ok(subject, "another server's, by agent.attach"),
        Ok(MachineEngine::NoModel) => CheckResult::ok(subject, "vLLM is there: `hostler up MODEL` names the model"),
        Ok(MachineEngine::Simulated) => {
            CheckResult::note(subject, "simulated, whose words mean nothing: name a model, and have `vllm` in the PATH, for real answers")
        }
        Err(error) => CheckResult::problem(subject, error, ""),
    }
}

fn check_gpus(gpus: &Result<Vec<String>, String>) -> CheckResult {
    match gpus {
        Ok(names) => {
            let kinds: std::collections::BTreeSet<&str> = names.iter().map(String::as_str).collect();
            CheckResult::ok("gpu", format!("{} × {}", names.len(), kinds.into_iter().collect::<Vec<_>>().join(", ")))
        }
        // vLLM runs on CPUs too.
        Err(reason) => CheckResult::note("gpu", format!("none: {reason}; vLLM would have to run on the CPU")),
    }
}

#[cfg(test)]
mod tests {
    use hostler_proto::agent::v1::{Failure, Phase, ReplicaState};
    use hostler_proto::fleet::v1::FleetFinding;

    use super::*;
    use crate::local_fleet::tests::fleet;

    fn healthy() -> MachineFacts {
        MachineFacts {
            up: Vec::new(),
            others: Vec::new(),
            taken: Vec::new(),
            engine: Ok(MachineEngine::Vllm("/venv/bin/vllm".into())),
            gpus: Some(Ok(vec!["NVIDIA L4".into(), "NVIDIA L4".into()])),
            model: Some(Ok(None)),
            proxy: None,
            no_proxy: String::new(),
            run_dir: Ok("/tmp/hostler-1000".into()),
            stage: None,
            router_socket: "/run/user/1000/hostler/router-65535.sock".into(),
        }
    }

    fn page(facts: &MachineFacts) -> String {
        examine_machine(facts).iter().flat_map(CheckResult::lines).collect::<Vec<_>>().join("\n")
    }

    fn replica(phase: Phase) -> Replica {
        Replica { id: "n0/0".into(), state: Some(ReplicaState { phase: phase.into(), ..ReplicaState::default() }), ..Replica::default() }
    }

    #[test]
    fn a_machine_that_can_serve_has_no_problems() {
        insta::assert_snapshot!(page(&healthy()), @r"
        ok       up         nothing yet: `hostler up MODEL` serves one from this machine
        ok       engine     /venv/bin/vllm
        ok       model      it is there
        ok       gpu        2 × NVIDIA L4
        ok       proxy      none is set
        ok       sockets    an agent's fit into /tmp/hostler-1000
        ok       sockets    the router's fits into /run/user/1000/hostler
        ");
    }

    #[test]
    fn an_address_of_another_program_is_a_problem_unless_it_is_that_of_what_is_up() {
        let taken = || vec![("--listen", "127.0.0.1:8000".to_owned())];
        let page_of = |up| page(&MachineFacts { taken: taken(), up, ..healthy() });
        assert!(page_of(Vec::new()).contains("127.0.0.1:8000 is in use by another program"));
        assert!(!page_of(vec![fleet(7, vec![replica(Phase::Ready)])]).contains("in use"));
    }

    #[test]
    fn a_failed_engine_of_what_is_up_is_a_problem_with_its_remedy() {
        let mut failed = replica(Phase::Failed);
        failed.state.as_mut().unwrap().failure = Some(Failure { kind: "k".into(), cause: "no memory".into(), remedy: "use less".into() });
        let found = page(&MachineFacts { up: vec![fleet(7, vec![replica(Phase::Ready), failed])], ..healthy() });
        assert!(found.contains("1 of 2 replicas ready at http://127.0.0.1:7/v1; n0/0 is failed: no memory"), "{found}");
        assert!(found.contains("what to do: use less"), "{found}");
    }

    #[test]
    fn what_clients_of_a_running_fleet_suffer_is_a_problem() {
        let mut up = fleet(7, vec![replica(Phase::Ready)]);
        let (evidence, advice) = ("40 of the 41 requests failed".to_owned(), "add replicas".to_owned());
        up.findings.push(FleetFinding { kind: "requests-fail".into(), evidence, advice });
        let found = page(&MachineFacts { up: vec![up], ..healthy() });
        assert!(found.contains("problem  fleet      40 of the 41 requests failed"), "{found}");
        assert!(found.contains("what to do: add replicas"), "{found}");
    }

    #[test]
    fn simulated_engines_are_noted() {
        let found = page(&MachineFacts { engine: Ok(MachineEngine::Simulated), gpus: None, ..healthy() });
        assert!(found.contains("note     engine     simulated, whose words mean nothing"), "{found}");
    }
}
