//! Interprets a host's answers for a fleet of batch jobs, and says what to do. Pure;
//! `hostler doctor` gathers the answers.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hostler_boot::socket::MAX_PATH_BYTES;
use hostler_proto::fleet::v1::FleetFinding;
use hostler_scheduler::Scheduler;
use hostler_tls::BACKDATE_SECONDS;

use crate::controller_service::ControllerService;
use crate::env::bypasses_proxy;

/// Largest tolerated clock difference: a fifth of the one at which certificates are rejected.
const MAX_CLOCK_DIFFERENCE: u64 = BACKDATE_SECONDS / 5;

/// Facts about a host. An error says what to do if that is already known.
#[derive(Debug, Clone)]
pub(super) struct HostFacts {
    /// Batch job in which this process runs.
    pub(super) job: Option<String>,
    /// Scheduler that answered.
    pub(super) scheduler: Result<Scheduler, String>,
    /// Folder of the authority.
    pub(super) fleet: Result<PathBuf, String>,
    pub(super) state: Result<PathBuf, String>,
    /// Why this folder's fleet does not belong to this host's scheduler.
    pub(super) other_scheduler: Option<String>,
    /// Treatment of long-running processes on this host, if it is a login node and the controller
    /// would be such a process.
    pub(super) process_limit: Option<String>,
    /// Service that restarts the controller on this host, if any; `None` if the controller does not
    /// run as a process here.
    pub(super) service: Option<Option<ControllerService>>,
    /// Why no node could run a job with these settings.
    pub(super) obstacle: Option<String>,
    /// What the router of the running fleet finds wrong.
    pub(super) router_findings: Vec<FleetFinding>,
    /// Seconds by which this host's clock is ahead of the state folder's.
    pub(super) clock_ahead: Option<i64>,
    /// Variable that names a proxy, and its value.
    pub(super) proxy: Option<(&'static str, String)>,
    pub(super) no_proxy: String,
    pub(super) engine: InstalledEngine,
    /// Whether a named model exists; an inner `Some` says what is unknown about it.
    pub(super) model: Option<Result<Option<String>, String>>,
    pub(super) run_dir: Result<PathBuf, String>,
    /// Where models are copied to, inside a job.
    pub(super) stage: Option<Result<String, String>>,
    pub(super) router_socket: PathBuf,
    /// GPUs, inside a job that needs some.
    pub(super) gpus: Option<Result<Vec<String>, String>>,
}

/// Engine that a job would find.
#[derive(Debug, Clone)]
pub(super) enum InstalledEngine {
    Simulated,
    /// Its program, or its release and image.
    Vllm(String),
    /// No vLLM answers in the image, with what to do.
    Refused(String),
    /// None of these programs is there to run the image.
    NoRuntime(Vec<String>),
    Missing {
        program: String,
        error: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Ok,
    /// The verdict depends on facts that only the user knows.
    Note,
    Problem,
}

/// Finding about one subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CheckResult {
    subject: &'static str,
    pub(super) verdict: Verdict,
    text: String,
    /// Remedy; empty if the text contains it, or there is none.
    remedy: String,
}

impl CheckResult {
    pub(super) fn ok(subject: &'static str, text: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Ok, text: text.into(), remedy: String::new() }
    }

    pub(super) fn note(subject: &'static str, text: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Note, text: text.into(), remedy: String::new() }
    }

    pub(super) fn problem(subject: &'static str, text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Problem, text: text.into(), remedy: remedy.into() }
    }

    /// What is wrong about a running fleet is a problem.
    pub(super) fn of_fleet(finding: &FleetFinding) -> Self {
        Self::problem("fleet", finding.evidence.clone(), finding.advice.clone())
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let word = match self.verdict {
            Verdict::Ok => "ok",
            Verdict::Note => "note",
            Verdict::Problem => "problem",
        };
        let remedy = Some(&self.remedy).filter(|remedy| !remedy.is_empty());
        let second = remedy.map(|remedy| format!("{:<9}{:<11}what to do: {remedy}", "", ""));
        std::iter::once(format!("{word:<9}{:<11}{}", self.subject, self.text)).chain(second).collect()
    }
}

/// All findings, in the order in which they matter.
pub(super) fn examine(facts: &HostFacts) -> Vec<CheckResult> {
    let found = [
        Some(check_scheduler(facts)),
        Some(check_fleet(facts)),
        Some(check_state(facts)),
        check_resources(facts),
        check_controller(facts),
        check_service(facts),
        check_clock(facts),
        Some(check_proxy(facts.proxy.as_ref(), &facts.no_proxy)),
        Some(check_engine(facts)),
        check_model(facts.model.as_ref()),
        check_gpus(facts),
        Some(check_run_dir(&facts.run_dir)),
        facts.stage.as_ref().map(check_stage),
        Some(check_router_socket(&facts.router_socket)),
    ];
    let serving = facts.router_findings.iter().map(CheckResult::of_fleet);
    found.into_iter().flatten().chain(serving).collect()
}

fn check_scheduler(facts: &HostFacts) -> CheckResult {
    let subject = "scheduler";
    match (&facts.scheduler, &facts.job) {
        (Ok(scheduler), None) => CheckResult::ok(subject, format!("{} answers", scheduler.as_str())),
        (Ok(scheduler), Some(job)) => CheckResult::ok(subject, format!("{} answers; this is inside of {job}", scheduler.as_str())),
        // The agent learns from the scheduler's answer when the job ends.
        (Err(error), Some(job)) => CheckResult::note(subject, format!("inside of {job} an agent does not know when the job ends: {error}")),
        (Err(error), None) => CheckResult::problem(subject, error, ""),
    }
}

fn check_fleet(facts: &HostFacts) -> CheckResult {
    match &facts.fleet {
        Ok(folder) => CheckResult::ok("fleet", format!("its authority is in {}", folder.display())),
        Err(error) => CheckResult::problem("fleet", error, ""),
    }
}

fn check_state(facts: &HostFacts) -> CheckResult {
    match (&facts.state, &facts.other_scheduler) {
        (Ok(_), Some(error)) => CheckResult::problem("state", error, ""),
        (Ok(folder), None) => CheckResult::ok("state", format!("{} is yours alone; compute nodes have to see it too", folder.display())),
        (Err(error), _) => CheckResult::problem("state", error, ""),
    }
}

fn check_controller(facts: &HostFacts) -> Option<CheckResult> {
    let limit = facts.process_limit.as_ref()?;
    let text = format!(
        "this host ends processes of users ({limit}); where the controller cannot stay, cluster.controller = \"job\" has it in a job"
    );
    Some(CheckResult::note("controller", text))
}

fn check_resources(facts: &HostFacts) -> Option<CheckResult> {
    let obstacle = facts.obstacle.as_ref()?;
    Some(CheckResult::problem(
        "resources",
        obstacle,
        "mend cluster.resources, cluster.queue and cluster.options: such a job would wait for ever",
    ))
}

fn check_service(facts: &HostFacts) -> Option<CheckResult> {
    let subject = "controller";
    Some(match facts.service? {
        Some(ControllerService::Crontab) => CheckResult::ok(subject, "a line of your crontab starts it again on this host"),
        Some(ControllerService::Timer { lingers: true }) => {
            CheckResult::ok(subject, "a timer of your systemd starts it again on this host")
        }
        Some(ControllerService::Timer { lingers: false }) => CheckResult::note(
            subject,
            "a timer of your systemd starts it again while you are logged in; for always, ask the site's support for `loginctl enable-linger`",
        ),
        None => {
            CheckResult::note(subject, "nothing starts it again when this host restarts or it is killed: `hostler init --service` does")
        }
    })
}

fn check_clock(facts: &HostFacts) -> Option<CheckResult> {
    let ahead = facts.clock_ahead?;
    Some(if ahead.unsigned_abs() <= MAX_CLOCK_DIFFERENCE {
        CheckResult::ok("clock", "it agrees with the clock of the state folder's file system")
    } else {
        let side = if ahead > 0 { "ahead of" } else { "behind" };
        CheckResult::problem(
            "clock",
            format!("this host is {} s {side} the state folder's file system", ahead.unsigned_abs()),
            format!("tell the site's support: certificates are refused where clocks differ by {BACKDATE_SECONDS} s"),
        )
    })
}

/// `proxy` is the variable that names one, and its value.
pub(super) fn check_proxy(proxy: Option<&(&'static str, String)>, no_proxy: &str) -> CheckResult {
    match proxy {
        None => CheckResult::ok("proxy", "none is set"),
        Some((name, _)) if bypasses_proxy(no_proxy) => CheckResult::ok("proxy", format!("{name} is set, and localhost excepted")),
        Some((name, proxy)) => CheckResult::problem(
            "proxy",
            format!("{name} has clients ask {} for localhost", without_user(proxy)),
            "`eval \"$(hostler env)\"` excepts localhost in a shell, as `export no_proxy=localhost,127.0.0.1` does",
        ),
    }
}

/// Proxy address without its user part, which may hold a password.
fn without_user(proxy: &str) -> &str {
    proxy.rsplit_once('@').map_or(proxy, |(_, address)| address)
}

fn check_engine(facts: &HostFacts) -> CheckResult {
    let subject = "engine";
    match &facts.engine {
        InstalledEngine::Simulated => CheckResult::ok(subject, "simulated engines need nothing"),
        InstalledEngine::Vllm(path) => CheckResult::ok(subject, format!("jobs find {path}")),
        InstalledEngine::Refused(error) if facts.job.is_some() => CheckResult::problem(subject, error, ""),
        InstalledEngine::Refused(error) => CheckResult::problem(
            subject,
            error,
            "login nodes may allow less than compute nodes: ask inside of a job too, as in `qsub -I` or `srun --pty`",
        ),
        InstalledEngine::NoRuntime(names) => CheckResult::problem(
            subject,
            format!("a login shell finds no `{}` after the lines of cluster.setup, to run agent.image", names.join("`, no `")),
            "let cluster.setup load its module, or name the program with agent.container",
        ),
        InstalledEngine::Missing { program, error } => {
            let detail = if error.is_empty() { String::new() } else { format!(" ({error})") };
            CheckResult::problem(
                subject,
                format!("a login shell finds no `{program}` after the lines of cluster.setup{detail}"),
                "install it with `pip install vllm`, and let cluster.setup load its module or activate its environment",
            )
        }
    }
}

pub(super) fn check_model(model: Option<&Result<Option<String>, String>>) -> Option<CheckResult> {
    Some(match model? {
        Ok(None) => CheckResult::ok("model", "it is there"),
        Ok(Some(unknown)) => CheckResult::note("model", unknown),
        Err(error) => CheckResult::problem("model", error, ""),
    })
}

fn check_gpus(facts: &HostFacts) -> Option<CheckResult> {
    Some(match facts.gpus.as_ref()? {
        Ok(names) => {
            let kinds: std::collections::BTreeSet<&str> = names.iter().map(String::as_str).collect();
            CheckResult::ok("gpu", format!("{} × {}", names.len(), kinds.into_iter().collect::<Vec<_>>().join(", ")))
        }
        Err(reason) => CheckResult::problem(
            "gpu",
            format!("none in this job: {reason}"),
            "ask for GPUs in cluster.resources; those of other makers than NVIDIA are not seen",
        ),
    })
}

pub(super) fn check_run_dir(run_dir: &Result<PathBuf, String>) -> CheckResult {
    match run_dir {
        Ok(folder) => CheckResult::ok("sockets", format!("an agent's fit into {}", folder.display())),
        Err(error) => CheckResult::problem("sockets", error, ""),
    }
}

/// What cannot be staged is served all the same.
pub(super) fn check_stage(stage: &Result<String, String>) -> CheckResult {
    match stage {
        Ok(place) => CheckResult::ok("stage", place.clone()),
        Err(error) => CheckResult::note("stage", error.clone()),
    }
}

pub(super) fn check_router_socket(path: &Path) -> CheckResult {
    match path.as_os_str().as_bytes().len().saturating_sub(MAX_PATH_BYTES) {
        0 => CheckResult::ok("sockets", format!("the router's fits into {}", path.parent().unwrap_or(path).display())),
        excess => CheckResult::problem(
            "sockets",
            format!("{} is too long for a Unix socket by {excess} bytes", path.display()),
            "set router.operators_socket to a shorter path, in a folder of your own with mode 700",
        ),
    }
}

#[cfg(test)]
mod tests;
