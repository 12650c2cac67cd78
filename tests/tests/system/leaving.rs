//! How agents leave a batch job: by which signals, in what time, with which exit code, and the
//! effect on streams and short requests.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hostler_proto::agent::v1::{Failure, Phase};
use rustix::process::Signal;

use crate::harness::{Answer, CHAT, Program, Scene, Workplace, chat, chat_stream, until};

/// Time longer than anything here needs.
const AMPLE: &str = "120s";

impl Scene {
    /// A place whose programs run in a job.
    async fn in_job() -> Self {
        let mut scene = Self::new().await;
        scene.place.environment.push(("PBS_JOBID", "12.head"));
        scene
    }

    fn named_agent(&self, node: &str, flags: &[&str]) -> Program {
        self.agent_with(node, flags, &["--sim-start-ms", "50", "--sim-step-ms", "10"])
    }

    fn agent_with(&self, node: &str, flags: &[&str], engine: &[&str]) -> Program {
        let router = self.router.agents.to_string();
        let mut arguments = vec!["agent", "--router", &router, "--node", node, "--engine", "simulated", "--replicas", "1"];
        arguments.extend(flags);
        arguments.push("--");
        arguments.extend(engine);
        self.place.start(node, &arguments)
    }

    /// Last failure of a replica that the router was told.
    async fn failure(&self, id: &str) -> Option<Failure> {
        let nodes = self.admin().nodes().await.unwrap();
        nodes.into_iter().flat_map(|node| node.replicas).find(|replica| replica.id == id)?.state?.failure
    }

    async fn until_draining(&self) {
        self.until_replicas("a drain", |replicas| replicas.iter().any(|replica| replica.phase == Phase::Draining)).await;
    }

    /// Waits for the agent's end and returns its exit code; nothing may be left of it.
    async fn exit_code(&self, agent: &mut Program) -> i32 {
        let code = agent.ended().await.code().unwrap_or_else(|| panic!("a signal ended it: {}", agent.stderr()));
        self.until_no_process_is_left().await;
        assert_eq!(self.place.left(), Vec::<PathBuf>::new());
        code
    }
}

/// Message of a broken stream's only error.
fn error_of(answer: &Answer) -> String {
    answer.assert_broken_stream();
    let error: serde_json::Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
    error["error"]["message"].as_str().unwrap().to_owned()
}

fn last_line(program: &Program) -> String {
    program.stderr().trim_end().lines().last().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_can_end_finish_despite_the_schedulers_signals() {
    let scene = Scene::in_job().await;
    let mut agent = scene.named_agent("n0", &["--leave-grace", AMPLE]);
    scene.ready(1).await;
    let mut stream = scene.router.edge().open(CHAT, &chat_stream(300)).await;
    stream.events(2).await;
    agent.signal(Signal::USR1);
    scene.until_draining().await;
    for signal in [Signal::USR1, Signal::TERM, Signal::TERM, Signal::USR1, Signal::TERM] {
        agent.signal(signal);
        // Pending signals of one kind merge, so wait between them.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stream.finish().await.assert_whole_stream();
    assert_eq!(scene.exit_code(&mut agent).await, 0, "{}", agent.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_cut_by_the_scheduler_names_its_job() {
    let scene = Scene::in_job().await;
    let mut agent = scene.named_agent("n0", &["--leave-grace", "2s", "--drain-timeout", AMPLE]);
    scene.ready(1).await;
    let mut stream = scene.router.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    // The warning leaves all the time of a drain; the scheduler's last signal does not.
    agent.signal(Signal::USR1);
    scene.until_draining().await;
    agent.signal(Signal::TERM);
    let error = error_of(&stream.finish().await);
    assert!(
        error.starts_with(
            "the pbs job 12.head is being ended by its scheduler: the answer was not complete in time; it could not be resumed: "
        ),
        "{error}"
    );
    assert_eq!(scene.exit_code(&mut agent).await, 5, "{}", agent.stderr());
    assert!(last_line(&agent).contains("before their answers were complete: 1;"), "{}", agent.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_outlasting_a_drain_hears_that_its_node_leaves() {
    let scene = Scene::new().await;
    let mut agent = scene.named_agent("n0", &["--drain-timeout", "300ms"]);
    scene.ready(1).await;
    let mut stream = scene.router.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    agent.signal(Signal::USR1);
    let error = error_of(&stream.finish().await);
    assert!(error.starts_with("node n0 is leaving: the answer was not complete in time; it could not be resumed: "), "{error}");
    assert_eq!(scene.exit_code(&mut agent).await, 5, "{}", agent.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_interrupt_stops_at_once_in_a_job_too() {
    let scene = Scene::in_job().await;
    let mut agent = scene.named_agent("n0", &["--leave-grace", AMPLE, "--drain-timeout", AMPLE]);
    scene.ready(1).await;
    let mut stream = scene.router.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    agent.signal(Signal::INT);
    scene.until_draining().await;
    agent.signal(Signal::INT);
    stream.finish().await.assert_broken_stream();
    assert_eq!(scene.exit_code(&mut agent).await, 5, "{}", agent.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_short_request_fails_when_one_job_of_two_ends() {
    let scene = Scene::in_job().await;
    let (mut leaving, _staying) = (scene.named_agent("n0", &["--leave-grace", "10s"]), scene.named_agent("n1", &[]));
    scene.ready(2).await;
    let edge = scene.router.edge();
    leaving.signal(Signal::TERM);
    let (mut answers, body) = (0, chat(5));
    until("the end of the job", async || {
        let (one, other) = tokio::join!(edge.post(CHAT, &body), edge.post(CHAT, &body));
        assert!(one.status == 200 && other.status == 200, "{} {}", one.text(), other.text());
        answers += 2;
        let left = scene.admin().nodes().await.unwrap().iter().all(|node| node.name != "n0");
        if left { Ok(()) } else { Err(format!("{answers} answers")) }
    })
    .await;
    assert_eq!(leaving.ended().await.code(), Some(0), "{}", leaving.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn up_in_a_job_ends_within_the_grace() {
    let mut place = Workplace::new();
    place.environment.extend([("PBS_JOBID", "12.head"), ("HOSTLER_AGENT_LEAVE_GRACE", "2s"), ("HOSTLER_ROUTER_DRAIN_TIMEOUT", AMPLE)]);
    let mut up = place.up(1, &["--sim-step-ms", "10"]);
    let edge = crate::harness::Endpoint::Tcp(up.address("edge").await);
    up.line("ready   1 of 1").await;
    let mut stream = edge.open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    up.signal(Signal::TERM);
    up.signal(Signal::TERM);
    assert!(error_of(&stream.finish().await).contains("the pbs job 12.head is being ended by its scheduler"));
    assert_eq!(up.ended().await.code(), Some(5), "{}", up.stderr());
    assert_eq!(place.left(), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_reaches_no_router_ends_and_says_why() {
    let place = Workplace::new();
    let arguments = ["agent", "--router", "127.0.0.1:1", "--engine", "simulated", "--node", "n0", "--attach-timeout", "500ms"];
    let mut agent = place.start("agent", &arguments);
    assert_eq!(agent.ended().await.code(), Some(3), "{}", agent.stderr());
    let reason = last_line(&agent);
    assert!(reason.starts_with("error: this agent has attached to no router within") && reason.contains("127.0.0.1:1"), "{reason}");
    assert_eq!(place.left(), Vec::<PathBuf>::new());
    assert_eq!(place.processes(), Vec::<u32>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_agent_of_a_node_ends_without_harm() {
    let scene = Scene::new().await;
    let logs = scene.place.path().join("logs");
    let logs = logs.to_str().unwrap();
    let mut first = scene.named_agent("n0", &["--log-dir", logs]);
    let before = scene.ready(1).await.remove(0);
    let router = scene.router.agents.to_string();
    let engine = ["--engine", "simulated", "--replicas", "1", "--attach-timeout", "20s", "--log-dir", logs];
    let mut second = scene.place.start("second", &[&["agent", "--router", &router, "--node", "n0"], &engine[..]].concat());
    assert_eq!(second.ended().await.code(), Some(3), "{}", second.stderr());
    assert!(last_line(&second).contains("another agent is attached as node `n0`"), "{}", second.stderr());
    // Two writers never share a file.
    let texts: Vec<String> = log_files(Path::new(logs)).iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert!(texts.iter().all(|text| text.matches("of this engine begins").count() == 1), "{texts:?}");
    assert!(second.stderr().contains("another engine's keeper writes to the log"), "{}", second.stderr());
    let after = scene.ready(1).await.remove(0);
    assert_eq!((after.pid, after.epoch), (before.pid, before.epoch));
    first.signal(Signal::TERM);
    assert_eq!(scene.exit_code(&mut first).await, 0, "{}", first.stderr());
}

fn log_files(logs: &Path) -> Vec<PathBuf> {
    fs::read_dir(logs).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_never_start_end_the_job_with_the_reason() {
    let scene = Scene::in_job().await;
    let mut agent = scene.agent_with("n0", &[], &["--sim-fail-start"]);
    assert_eq!(scene.exit_code(&mut agent).await, 4, "{}", agent.stderr());
    let failure = scene.failure("n0/0").await.expect("the last report has the failure");
    let message = agent.stderr();
    let last: Vec<&str> = message.trim_end().lines().rev().take(2).collect();
    assert_eq!(last[1], format!("error: no engine of this agent can be started: {}", failure.cause));
    assert_eq!(last[0], format!("what to do: {}", failure.remedy));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_engines_outside_of_a_job_are_retried() {
    let scene = Scene::new().await;
    let mut agent = scene.agent_with("n0", &[], &["--sim-fail-start"]);
    scene.until_replicas("the fourth start", |replicas| replicas.iter().any(|replica| replica.restarts >= 3)).await;
    agent.signal(Signal::TERM);
    assert_eq!(scene.exit_code(&mut agent).await, 0, "{}", agent.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_run_directory_is_restored_and_its_engine_returns() {
    let scene = Scene::in_job().await;
    // The engine's health is checked over an open connection; a test completion opens a new one.
    let mut agent = scene.named_agent("n0", &["--canary-interval", "2s"]);
    let before = scene.ready(1).await.remove(0);
    let own = Path::new(&before.socket).ancestors().nth(2).unwrap().to_owned();
    fs::remove_dir_all(own.parent().unwrap()).unwrap();
    let after = scene.until_replicas("another life", |replicas| replicas[0].is_ready() && replicas[0].epoch > before.epoch).await.remove(0);
    assert_eq!(after.socket, before.socket);
    let message = agent.stderr();
    assert!(
        message.contains("somebody removed the engine's directory") && message.contains("name a place that it leaves alone with --run-dir"),
        "{message}"
    );
    assert_eq!(scene.router.edge().post(CHAT, &chat(3)).await.status, 200);
    until("the admin socket", async || if own.join("admin.sock").exists() { Ok(()) } else { Err("there is none".to_owned()) }).await;
    // An agent that starts now does not mistake it for a dead one's.
    let mut other = scene.named_agent("n1", &[]);
    scene.ready(2).await;
    other.signal(Signal::TERM);
    assert_eq!(other.ended().await.code(), Some(0), "{}", other.stderr());
    assert!(own.join("lock").exists());
    agent.signal(Signal::TERM);
    assert_eq!(scene.exit_code(&mut agent).await, 0, "{}", agent.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plan_and_help_say_how_an_agent_leaves() {
    let mut place = Workplace::new();
    let plan = ["plan", "--engine", "simulated"];
    assert!(!place.run(&plan).await.stdout.contains("leaving"), "nobody ends it");
    let set = place.run(&[&plan[..], &["--leave-grace", "20s"]].concat()).await.stdout;
    assert!(set.contains("leaving    20.0 s from SIGTERM to the end (agent.leave_grace): answers may finish for"), "{set}");
    place.environment.push(("SLURM_JOB_ID", "77"));
    let job = place.run(&plan).await.stdout;
    assert!(job.contains("leaving    slurm job 77: ") && job.contains(" s from SIGTERM to the end"), "{job}");
    assert!(job.contains("after SIGUSR1 answers may finish for 30.0 s (agent.drain_timeout)"), "{job}");
    let help = place.run(&["agent", "--help"]).await.stdout;
    assert!(help.contains("Exit codes:") && help.contains("agent.if_engines_fail"), "{help}");
}
