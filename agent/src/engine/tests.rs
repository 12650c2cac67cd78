//! Whole engines: shells as processes, and a scripted socket as their HTTP side.

use std::ffi::OsString;

use rustix::process::{Pid, Signal, kill_process};
use zeromq::{PubSocket, Socket};

use super::*;
use crate::crashes::{Crash, RequestFingerprint};
use crate::engine_client::api_client::tests::Scripted;
use crate::process::orphans::{keepers_of, orphans};
use crate::traffic::RouterKey;

const MODELS: &str = r#"{"data":[{"id":"tiny"}]}"#;

pub(super) struct Fixture {
    pub(super) engine: Engine,
    status: watch::Receiver<EngineStatus>,
    tracker: TaskTracker,
    directory: PathBuf,
    _parent: tempfile::TempDir,
}

fn start(script: &str) -> Fixture {
    start_with(script, |_| {})
}

pub(super) fn start_with(script: &str, change: impl FnOnce(&mut EngineSpec)) -> Fixture {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let mut spec = EngineSpec {
        node: "n0".to_owned(),
        index: 0,
        command: CommandLine {
            container: Vec::new(),
            program: "/bin/sh".into(),
            arguments: vec![OsString::from("-c"), OsString::from(script)],
            set: vec![("VLLM_RPC_BASE_PATH", directory.clone().into())],
            unset: Vec::new(),
            withheld_routes: &[],
        },
        version: None,
        directory: directory.clone(),
        run_dirs: None,
        log: parent.path().join("e0.log"),
        startup_timeout: Duration::from_secs(60),
        drain_timeout: Duration::from_secs(60),
        stop_grace: Duration::from_millis(300),
        max_backoff: Duration::from_secs(300),
        probe_interval: Duration::from_millis(50),
        cache: cache::KvEventSource::Nothing { because: "it has no cache".to_owned() },
        keepers: crate::keeper::tests::program(parent.path()).into(),
        if_agent_dies: AgentDeathPolicy::Kill,
        cpu_binding: None,
        gpu_availability: None,
        fallback: None,
        start_order: Arc::new(StartOrder::unordered()),
        file_pool: None,
        file_log: None,
        stage: None,
        warm_starts: None,
        gang: None,
        may_fork: true,
        stall_timeout: Duration::from_secs(10),
        canary_interval: Duration::ZERO,
        attached_to: None,
    };
    change(&mut spec);
    let tracker = TaskTracker::new();
    let engine = Engine::start(spec, &tracker);
    Fixture { status: engine.status(), engine, tracker, directory, _parent: parent }
}

impl Fixture {
    pub(super) async fn until(&mut self, condition: impl Fn(&EngineStatus) -> bool) -> EngineStatus {
        let waiting = self.status.wait_for(|status| condition(status));
        match tokio::time::timeout(Duration::from_secs(20), waiting).await {
            Ok(status) => status.unwrap().clone(),
            Err(_) => panic!("still {:?}", self.engine.status().borrow()),
        }
    }

    pub(super) async fn phase(&mut self, phase: Phase) -> EngineStatus {
        self.until(|status| status.phase == phase).await
    }

    /// Plays the HTTP side of the present life until dropped.
    async fn serve(&mut self) -> Scripted {
        self.until(|status| status.pid.is_some()).await;
        Scripted::at(
            self.engine.socket(),
            Box::new(|path| match path {
                "/health" => Some((200, String::new())),
                "/v1/models" => Some((200, MODELS.to_owned())),
                _ => Some((200, "vllm:num_requests_running 1\n".to_owned())),
            }),
        )
    }

    /// Waits until every process of a stubborn engine exists and ignores SIGTERM.
    async fn all_processes(&mut self) -> Vec<i32> {
        self.until(|status| status.pid.is_some()).await;
        loop {
            let processes = self.processes();
            if processes.len() == 3 {
                return processes;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Every process that belongs to the engine, in its group or not.
    fn processes(&self) -> Vec<i32> {
        orphans(&self.directory)
    }
}

const STUBBORN: &str = "trap '' TERM; sleep 600 & sleep 600 & wait; wait";

#[tokio::test]
async fn an_engine_becomes_ready_and_reports_its_models_and_load() {
    let mut fixture = start("exec sleep 600");
    assert_eq!(fixture.phase(Phase::Starting).await.models.len(), 0);
    let _serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    assert_eq!(ready.models[0].id, "tiny");
    assert_eq!(ready.restarts, 0);
    assert!(ready.epoch > 1_500_000_000_000_000 && ready.ready_in.is_some());
    let mut samples = fixture.engine.samples();
    let sample = samples.wait_for(Option::is_some).await.unwrap().unwrap();
    assert_eq!(sample.metrics.running, 1);
    fixture.engine.stop().await;
    assert_eq!(fixture.phase(Phase::Stopped).await.pid, None);
    assert!(fixture.processes().is_empty() && !fixture.directory.exists());
}

#[tokio::test]
async fn a_suspension_during_a_start_does_not_shorten_its_time() {
    let mut fixture = start("exec sleep 600");
    let begun = fixture.until(|status| status.pid.is_some()).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(3600)).await;
    tokio::time::resume();
    let _serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    assert_eq!((ready.pid, ready.epoch, ready.restarts), (begun.pid, begun.epoch, 0));
    fixture.engine.stop().await;
}

#[tokio::test]
async fn a_zero_exit_is_a_crash_that_shows_last_lines() {
    let mut fixture = start("echo loading; echo no memory left >&2; exit 0");
    let failed = fixture.until(|status| status.reason.contains("next start")).await;
    assert_eq!(failed.phase, Phase::Failed);
    assert!(failed.reason.contains("exit status: 0"), "{}", failed.reason);
    assert!(failed.reason.contains("next start in 1 s"), "{}", failed.reason);
    assert!(failed.reason.ends_with("loading\nno memory left"), "{}", failed.reason);
    fixture.engine.restart();
    let again = fixture.until(|status| status.reason.contains("next start in 2 s")).await;
    assert_eq!(again.restarts, 1);
    assert!(again.epoch > failed.epoch);
    assert_eq!(fixture.engine.log_tail(2).0, ["loading", "no memory left"]);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn a_dead_leaders_processes_are_killed_before_the_next_life() {
    let mut fixture = start(STUBBORN);
    let serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    let before = fixture.all_processes().await;
    let leader = rustix::process::Pid::from_raw(ready.pid.unwrap().cast_signed()).unwrap();
    rustix::process::kill_process(leader, rustix::process::Signal::KILL).unwrap();
    fixture.phase(Phase::Failed).await;
    drop(serving);
    let next = fixture.until(|status| status.epoch > ready.epoch && status.pid.is_some()).await;
    assert!(fixture.processes().iter().all(|pid| !before.contains(pid)));
    assert_eq!(next.models[0].id, "tiny", "clients still learn what the engine does");
    assert_eq!(*fixture.engine.samples().borrow(), None);
    let _serving = fixture.serve().await;
    fixture.phase(Phase::Ready).await;
    fixture.engine.stop().await;
    assert!(fixture.processes().is_empty());
}

#[tokio::test]
async fn an_answer_complete_before_the_crash_blames_nobody() {
    let mut fixture = start("exec sleep 600");
    let _serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    let (broken, complete) = (RequestFingerprint(1), RequestFingerprint(2));
    let requests = [broken, complete].map(|fingerprint| {
        let request = fixture.engine.traffic().enter(RouterKey(1));
        request.mark_sent(ready.epoch, fingerprint);
        request.mark_prefilled();
        request
    });
    let mut crashes = fixture.engine.crashes().subscribe();
    let leader = rustix::process::Pid::from_raw(ready.pid.unwrap().cast_signed()).unwrap();
    rustix::process::kill_process(leader, rustix::process::Signal::SEGV).unwrap();
    fixture.phase(Phase::Failed).await;
    requests[0].mark_failed();
    drop(requests);
    assert!(tokio::time::timeout(Duration::from_secs(10), crashes.changed()).await.unwrap());
    assert_eq!(*fixture.engine.crashes().recent_crashes()[0].requests, [broken]);
    fixture.engine.stop().await;
}

/// Kills a process of an engine that handles a request, and returns the report of the crash.
async fn crash_by(fixture: &Fixture, victim: i32, signal: Signal) -> Crash {
    let request = fixture.engine.traffic().enter(RouterKey(1));
    request.mark_sent(fixture.status.borrow().epoch, RequestFingerprint(1));
    let mut crashes = fixture.engine.crashes().subscribe();
    kill_process(Pid::from_raw(victim).unwrap(), signal).unwrap();
    assert!(tokio::time::timeout(Duration::from_secs(10), crashes.changed()).await.unwrap());
    fixture.engine.crashes().recent_crashes().remove(0)
}

#[tokio::test]
async fn an_engine_killed_from_outside_blames_no_request() {
    let mut fixture = start("exec sleep 600");
    let _serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    let crash = crash_by(&fixture, ready.pid.unwrap().cast_signed(), Signal::KILL).await;
    assert_eq!((crash.epoch, &*crash.requests), (ready.epoch, &[][..]));
    fixture.engine.stop().await;
}

#[tokio::test]
async fn a_gpu_fault_soon_after_a_crash_excuses_its_requests() {
    let mut fixture = start("exec sleep 600");
    let _serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    let crash = crash_by(&fixture, ready.pid.unwrap().cast_signed(), Signal::BUS).await;
    assert_eq!(*crash.requests, [RequestFingerprint(1)]);
    let mut crashes = fixture.engine.crashes().subscribe();
    fixture.engine.quarantine("XID 79: GPU 0 has fallen off the bus".to_owned(), true);
    assert!(tokio::time::timeout(Duration::from_secs(10), crashes.changed()).await.unwrap());
    assert_eq!(*fixture.engine.crashes().recent_crashes()[0].requests, []);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_that_ends_while_its_agent_leaves_blames_nobody() {
    let mut fixture = start("exec sleep 600");
    let _serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    let now = tokio::time::Instant::now();
    let _request = fixture.engine.traffic().enter(RouterKey(1));
    fixture.engine.retire(LeaveDeadlines { drained_by: now + Duration::from_secs(60), stop: Duration::from_secs(1) });
    fixture.phase(Phase::Draining).await;
    // Terminate all processes, as a scheduler does at the end of a job.
    let crash = crash_by(&fixture, ready.pid.unwrap().cast_signed(), Signal::TERM).await;
    assert_eq!(*crash.requests, []);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn a_drain_lets_requests_finish_and_a_restart_undoes_it() {
    let mut fixture = start("exec sleep 600");
    let serving = fixture.serve().await;
    fixture.phase(Phase::Ready).await;
    let request = fixture.engine.traffic().enter(RouterKey(1));
    fixture.engine.drain();
    let draining = fixture.phase(Phase::Draining).await;
    assert!(draining.pid.is_some());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(fixture.processes().len(), 1);
    drop(request);
    assert_eq!(fixture.phase(Phase::Stopped).await.pid, None);
    drop(serving);
    fixture.engine.restart();
    let _serving = fixture.serve().await;
    assert_eq!(fixture.phase(Phase::Ready).await.restarts, 1);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn a_stop_ends_even_a_group_that_ignores_sigterm() {
    let mut fixture = start(STUBBORN);
    fixture.all_processes().await;
    fixture.engine.stop().await;
    assert_eq!(fixture.phase(Phase::Stopped).await.pid, None);
    assert!(fixture.processes().is_empty());
    fixture.tracker.close();
    let ended = tokio::time::timeout(Duration::from_secs(10), fixture.tracker.wait());
    ended.await.unwrap();
    fixture.engine.restart();
    assert!(fixture.processes().is_empty());
}

#[tokio::test]
async fn an_immediate_kill_leaves_nothing_and_prevents_another_life() {
    let mut fixture = start(STUBBORN);
    fixture.all_processes().await;
    fixture.engine.kill_now();
    fixture.until(|status| status.reason.contains("the agent is stopping")).await;
    assert!(fixture.processes().is_empty());
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_without_handles_is_stopped() {
    let mut fixture = start(STUBBORN);
    fixture.all_processes().await;
    let Fixture { engine, tracker, directory, _parent, .. } = fixture;
    drop(engine);
    tracker.close();
    tokio::time::timeout(Duration::from_secs(10), tracker.wait()).await.unwrap();
    assert!(orphans(&directory).is_empty());
}

#[tokio::test]
async fn a_quarantined_engine_finishes_its_requests_and_returns_when_released() {
    let mut fixture = start("exec sleep 600");
    let serving = fixture.serve().await;
    fixture.phase(Phase::Ready).await;
    let request = fixture.engine.traffic().enter(RouterKey(1));
    fixture.engine.quarantine("GPU 3 reports XID 79".to_owned(), false);
    let draining = fixture.phase(Phase::Draining).await;
    assert!(draining.reason.contains("GPU 3 reports XID 79") && draining.pid.is_some(), "{}", draining.reason);
    drop((request, serving));
    let out = fixture.phase(Phase::Quarantined).await;
    assert_eq!(out.reason, "GPU 3 reports XID 79; `hostler release` brings it back");
    fixture.until(|status| status.pid.is_none()).await;
    fixture.engine.restart();
    let refused = fixture.until(|status| status.reason.contains("a restart does not")).await;
    assert_eq!(refused.phase, Phase::Quarantined);
    assert!(fixture.processes().is_empty());
    fixture.engine.release();
    let _serving = fixture.serve().await;
    assert_eq!(fixture.phase(Phase::Ready).await.restarts, 1);
    fixture.engine.quarantine("GPU 3 is lost".to_owned(), true);
    fixture.until(|status| status.phase == Phase::Quarantined && status.pid.is_none()).await;
    assert!(fixture.processes().is_empty());
    fixture.engine.stop().await;
    assert_eq!(fixture.phase(Phase::Stopped).await.pid, None);
}

#[tokio::test]
async fn an_engine_failed_from_outside_restarts_after_a_pause() {
    let mut fixture = start(STUBBORN);
    let serving = fixture.serve().await;
    fixture.phase(Phase::Ready).await;
    fixture.engine.fail("GPU 0 was reset".to_owned());
    drop(serving);
    let failed = fixture.until(|status| status.reason.contains("next start in 1 s")).await;
    assert!(failed.reason.contains("GPU 0 was reset"), "{}", failed.reason);
    assert_eq!(failed.phase, Phase::Failed);
    assert!(failed.returns_in.is_some_and(|seconds| (1..10).contains(&seconds)), "the pause and the length of its start: {failed:?}");
    assert!(fixture.engine.crashes().recent_crashes().is_empty(), "no request was the cause");
    fixture.engine.release();
    fixture.until(|status| status.restarts == 1 && status.pid.is_some()).await;
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_sleeps_and_wakes() {
    let mut fixture = start("exec sleep 600");
    let _serving = fixture.serve().await;
    fixture.phase(Phase::Ready).await;
    fixture.engine.fall_asleep("an operator sent it to sleep".to_owned());
    let asleep = fixture.phase(Phase::Sleeping).await;
    assert!(asleep.reason.contains("an operator sent it to sleep") && asleep.pid.is_some());
    fixture.engine.wake_up();
    fixture.phase(Phase::Ready).await;
    fixture.engine.stop().await;
}

fn shell(script: &str) -> CommandLine {
    CommandLine {
        container: Vec::new(),
        program: "/bin/sh".into(),
        arguments: vec!["-c".into(), script.into()],
        set: Vec::new(),
        unset: Vec::new(),
        withheld_routes: &[],
    }
}

#[tokio::test]
async fn a_front_end_that_never_serves_is_replaced_for_good() {
    let mut fixture = start_with("echo no such file vllm-rs >&2; exit 127", |spec| {
        spec.command.set.push(("VLLM_USE_RUST_FRONTEND", "1".into()));
        spec.fallback = Some(shell("exec sleep 600"));
    });
    let next = fixture.until(|status| status.restarts == 1 && status.pid.is_some()).await;
    assert_eq!(next.front_end, FrontEndInUse::Python);
    let serving = fixture.serve().await;
    assert_eq!(fixture.phase(Phase::Ready).await.failure, None);
    fixture.engine.fail("gone".to_owned());
    drop(serving);
    let failed = fixture.until(|status| status.reason.contains("next start in 1 s")).await;
    assert_eq!(failed.front_end, FrontEndInUse::Python);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn a_front_end_lacking_a_route_is_replaced_before_serving() {
    let mut fixture = start_with("exec sleep 600", |spec| {
        spec.command.set.push(("VLLM_USE_RUST_FRONTEND", "1".into()));
        spec.fallback = Some(shell("exec sleep 600"));
    });
    assert_eq!(fixture.until(|status| status.pid.is_some()).await.front_end, FrontEndInUse::Rust);
    let lacks_metrics = Scripted::at(
        fixture.engine.socket(),
        Box::new(|path| match path {
            "/health" => Some((200, String::new())),
            "/v1/models" => Some((200, MODELS.to_owned())),
            _ => Some((404, String::new())),
        }),
    );
    let next = fixture.until(|status| status.restarts == 1 && status.pid.is_some()).await;
    drop(lacks_metrics);
    assert_eq!(next.front_end, FrontEndInUse::Python);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn engines_awaiting_a_permit_name_the_blocker_and_can_stop() {
    let gpu = || vec!["GPU-1".to_owned()];
    let start_order = Arc::new(StartOrder::new(vec![gpu(), gpu()], false, Duration::from_secs(600)));
    let first = start_order.acquire(0).await;
    let mut fixture = start_with("exec sleep 600", |spec| {
        spec.index = 1;
        spec.start_order = Arc::clone(&start_order);
        // The limit counts from the spawn, not from the wait.
        spec.startup_timeout = Duration::from_millis(300);
    });
    let waiting = fixture.until(|status| status.reason.contains("replica 0")).await;
    assert_eq!((waiting.phase, waiting.epoch), (Phase::Starting, 0));
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(fixture.status.borrow().phase, Phase::Starting);
    drop(first);
    fixture.until(|status| status.pid.is_some()).await;
    fixture.until(|status| status.phase == Phase::Failed).await;
    fixture.engine.stop().await;

    let permit = start_order.acquire(0).await;
    let mut fixture = start_with("exec sleep 600", |spec| {
        spec.index = 1;
        spec.start_order = Arc::clone(&start_order);
    });
    fixture.until(|status| status.reason.contains("replica 0")).await;
    fixture.engine.drain();
    assert_eq!(fixture.phase(Phase::Stopped).await.epoch, 0);
    drop(permit);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_with_a_killed_keeper_restarts_with_no_remains() {
    let mut fixture = start(STUBBORN);
    let before = fixture.all_processes().await;
    let keeper = keepers_of(&fixture.directory);
    assert_eq!(keeper.len(), 1);
    let request = fixture.engine.traffic().enter(crate::traffic::RouterKey(1));
    request.mark_sent(fixture.status.borrow().epoch, crate::crashes::RequestFingerprint(7));
    rustix::process::kill_process(rustix::process::Pid::from_raw(keeper[0]).unwrap(), rustix::process::Signal::KILL).unwrap();
    let failed = fixture.until(|status| status.reason.contains("next start")).await;
    assert!(failed.reason.contains("keeper was lost"), "{}", failed.reason);
    assert!(fixture.processes().iter().all(|pid| !before.contains(pid)));
    fixture.until(|status| status.restarts == 1 && status.pid.is_some()).await;
    assert_eq!(fixture.engine.crashes().recent_crashes(), [], "no request's doing");
    fixture.engine.stop().await;
    assert!(fixture.processes().is_empty());
}

#[tokio::test]
async fn a_start_reports_its_progress_and_its_log() {
    let mut fixture = start(
        "echo 'INFO 01-31 12:00:00 [core.py:1] Initializing a V1 LLM engine (v0.32.0)'; echo 'INFO GPU KV cache size: 123,456 tokens'; exec sleep 600",
    );
    let loading = fixture.until(|status| status.progress.is_some() && status.facts.kv_tokens.is_some()).await;
    assert_eq!((loading.phase, loading.facts.kv_tokens), (Phase::Loading, Some(123_456)));
    let _serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    assert_eq!((ready.progress, ready.facts.kv_tokens), (None, Some(123_456)));
    fixture.engine.stop().await;
}

#[test]
#[expect(clippy::disallowed_methods, reason = "there is no runtime left to sleep on")]
fn a_runtime_that_ends_kills_its_engine() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let fixture = runtime.block_on(async {
        let mut fixture = start(STUBBORN);
        fixture.all_processes().await;
        fixture
    });
    drop(runtime);
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while !fixture.processes().is_empty() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test]
async fn a_program_that_cannot_be_started_is_named() {
    let mut fixture = start_with("", |spec| spec.command.program = "/nonexistent/vllm".into());
    let failed = fixture.until(|status| status.reason.contains("next start in 1 s")).await;
    assert!(failed.reason.starts_with("cannot start /nonexistent/vllm"), "{}", failed.reason);
    assert_eq!(failed.pid, None);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engines_cache_is_known_only_while_it_serves() {
    let parent = tempfile::tempdir().unwrap();
    let live = parent.path().join("kv.sock");
    let mut events = PubSocket::new();
    events.bind(&format!("ipc://{}", live.display())).await.unwrap();
    let source = cache::KvEventSource::Sockets { live, replay: parent.path().join("replay.sock") };
    let mut fixture = start_with("exec sleep 600", |spec| spec.cache = source);
    assert!(!fixture.engine.cache().watch().borrow().exact);
    let _serving = fixture.serve().await;
    let ready = fixture.phase(Phase::Ready).await;
    let watch = fixture.engine.cache().watch().borrow().clone();
    assert_eq!((watch.exact, watch.reason.as_str(), watch.epoch), (true, "", ready.epoch));
    fixture.engine.drain();
    fixture.phase(Phase::Stopped).await;
    assert!(!fixture.engine.cache().watch().borrow().exact);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_serves_though_its_cache_cannot_be_followed() {
    let too_long = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
    let source = cache::KvEventSource::Sockets { live: too_long.clone(), replay: too_long };
    let mut fixture = start_with("exec sleep 600", |spec| spec.cache = source);
    let _serving = fixture.serve().await;
    fixture.phase(Phase::Ready).await;
    let watch = fixture.engine.cache().watch().borrow().clone();
    assert!(!watch.exact && watch.reason.contains("cannot be had"), "{}", watch.reason);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_overdue_start_is_killed_and_the_reason_says_so() {
    let mut fixture = start_with(STUBBORN, |spec| spec.startup_timeout = Duration::from_millis(200));
    let failed = fixture.until(|status| status.reason.contains("next start")).await;
    assert!(failed.reason.contains("not ready within 0.2 s") && failed.reason.contains("; next start in 1 s"), "{}", failed.reason);
    assert_eq!(failed.failure.unwrap().kind, diagnosis::FailureKind::StartupTimeout);
    assert!(fixture.processes().is_empty());
    fixture.engine.stop().await;
}

/// A process that says that it has imported everything, waits for its order, and becomes this.
fn spare(directory: &Path, then: &str) -> Arc<WarmStarts> {
    let script = format!("printf '\\n' >&0; order=$(tr '\\0' ' ' <&0); [ -n \"$order\" ] || exit 0; echo \"order: $order\"; {then}");
    let line = CommandLine {
        container: Vec::new(),
        program: "/bin/sh".into(),
        arguments: vec!["-c".into(), script.into()],
        set: vec![("VLLM_RPC_BASE_PATH", directory.join("spares").into())],
        unset: Vec::new(),
        withheld_routes: &[],
    };
    let keepers = crate::keeper::tests::program(directory);
    let process = crate::keeper::wire::ProcessSpec::new(&keepers, &line, &directory.join("spares"));
    Arc::new(WarmStarts::new(keepers.into(), process, true))
}

/// An engine that starts warm, with the task that keeps its spare.
fn start_warm(script: &str, then: &str) -> (Fixture, Arc<WarmStarts>, tokio_util::task::AbortOnDropHandle<()>) {
    let mut warm_starts = None;
    let fixture = start_with(script, |spec| {
        spec.warm_starts = warm_starts.insert(Some(spare(spec.directory.parent().unwrap(), then))).clone();
    });
    let warm_starts = warm_starts.flatten().unwrap();
    let tending = tokio::spawn(Arc::clone(&warm_starts).tend(tokio_util::sync::CancellationToken::new()));
    (fixture, warm_starts, tokio_util::task::AbortOnDropHandle::new(tending))
}

async fn spare_waits(warm_starts: &WarmStarts) {
    while !warm_starts.has_waiting_spare() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn an_engine_that_was_killed_starts_from_the_spare() {
    let (mut fixture, warm_starts, _tending) = start_warm("exec sleep 600", "exec sleep 600");
    let serving = fixture.serve().await;
    let first = fixture.phase(Phase::Ready).await;
    spare_waits(&warm_starts).await;
    kill_process(Pid::from_raw(first.pid.unwrap().cast_signed()).unwrap(), Signal::KILL).unwrap();
    fixture.phase(Phase::Failed).await;
    drop(serving);
    fixture.until(|status| status.epoch > first.epoch && status.pid.is_some()).await;
    let serving = fixture.serve().await;
    fixture.phase(Phase::Ready).await;
    let printed = fixture.engine.log_tail(5).0.join("\n");
    assert!(printed.contains("it starts from the spare") && printed.contains("order: 1 3 /bin/sh -c exec sleep 600"), "{printed}");
    let processes = fixture.processes();
    assert!(!processes.is_empty(), "they are found although they began in another directory");
    spare_waits(&warm_starts).await;
    drop(serving);
    fixture.engine.stop().await;
    fixture.phase(Phase::Stopped).await;
    assert!(orphans(&fixture.directory).is_empty());
}

#[tokio::test]
async fn an_engine_that_does_not_start_warm_starts_plainly_and_so_do_all_after_it() {
    let (mut fixture, warm_starts, _tending) = start_warm("exec sleep 600", "echo cannot share; exit 3");
    let failed = fixture.until(|status| status.reason.contains("next start")).await;
    assert!(failed.reason.contains("cannot share"), "{}", failed.reason);
    fixture.engine.restart();
    let _serving = fixture.serve().await;
    fixture.phase(Phase::Ready).await;
    assert!(warm_starts.take().is_none(), "no start is warm any more");
    assert!(!warm_starts.has_waiting_spare());
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_that_starts_in_neither_way_keeps_its_warm_starts() {
    let (mut fixture, warm_starts, _tending) = start_warm("echo no such flag; exit 2", "exit 3");
    fixture.until(|status| status.reason.contains("exit status: 3")).await;
    fixture.engine.restart();
    fixture.until(|status| status.reason.contains("exit status: 2")).await;
    assert!(warm_starts.take().is_some());
    fixture.engine.stop().await;
}
