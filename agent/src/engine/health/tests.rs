//! Readiness and loss of health, against an engine that answers by a script.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::task::AbortOnDropHandle;

use super::super::{EngineStatus, FrontEndInUse, LogFacts, Phase};
use super::*;
use crate::bridge::AttachTarget;
use crate::engine_client::api_client::tests::Scripted;
use crate::probe::EngineMetrics;
use crate::probe::LoadSample;
use crate::traffic::Traffic;
use crate::traffic::{EngineWait, InFlight, RouterKey};

const MODELS: &str = r#"{"object":"list","data":[{"id":"a", "max_model_len": 64},{"id":"b"}]}"#;

/// Next event within a generous time. The clock runs by itself, so a bug cannot hang the test.
async fn next(events: &mut mpsc::Receiver<HealthEvent>) -> Option<HealthEvent> {
    tokio::time::timeout(Duration::from_secs(60), events.recv()).await.unwrap()
}

/// A subject, and the handles that the supervisor, the probe and the relays hold.
pub(in super::super) struct Watched {
    pub(in super::super) subject: MonitoredEngine,
    pub(in super::super) status: watch::Sender<EngineStatus>,
    pub(in super::super) samples: watch::Sender<Option<LoadSample>>,
    pub(in super::super) desired: watch::Sender<DesiredAdapters>,
}

impl Watched {
    /// A ready engine without processes, requests and orders.
    pub(in super::super) fn at(socket: &Path) -> Self {
        let model = ModelCard { id: "tiny".to_owned(), raw: Bytes::new() };
        let status = watch::Sender::new(EngineStatus {
            phase: Phase::Ready,
            epoch: 1,
            reason: String::new(),
            pid: None,
            restarts: 0,
            hangs: 0,
            failed_starts: 0,
            version: None,
            models: [model].into(),
            ready_in: None,
            start: None,
            returns_in: None,
            progress: None,
            failure: None,
            facts: LogFacts::default(),
            front_end: FrontEndInUse::Python,
            missing_routes: [].into(),
        });
        let (samples, desired) = (watch::Sender::new(None), watch::Sender::new(DesiredAdapters::default()));
        let subject = MonitoredEngine {
            socket: socket.to_owned(),
            traffic: Traffic::new(),
            samples: samples.subscribe(),
            status: status.subscribe(),
            stall_timeout: Duration::from_secs(10),
            canary_interval: Duration::ZERO,
            desired_adapters: desired.subscribe(),
            gang: None,
            uses_gpus: true,
            may_sleep: false,
            attached_to: None,
        };
        Self { subject, status, samples, desired }
    }

    pub(in super::super) fn has_phase(&self, phase: Phase) {
        self.status.send_modify(|status| status.phase = phase);
    }

    pub(in super::super) fn has_group(&self, pid: u32) {
        self.status.send_modify(|status| status.pid = Some(pid));
    }

    pub(in super::super) fn says(&self, figures: EngineMetrics) {
        self.samples.send_replace(Some(LoadSample { metrics: figures, at: Instant::now(), is_stale: false }));
    }

    pub(in super::super) fn enter(&self) -> InFlight {
        self.subject.traffic.enter(RouterKey(1))
    }
}

/// A request that the engine has received whole.
pub(in super::super) fn waits(in_flight: &InFlight) -> EngineWait<'_> {
    let mut wait = in_flight.track_wait();
    wait.begin();
    wait
}

#[test]
fn a_model_card_is_kept_byte_for_byte() {
    let models = parse_models(MODELS.as_bytes()).unwrap();
    assert_eq!(models.len(), 2);
    assert_eq!(models[0].id, "a");
    assert_eq!(models[0].raw, r#"{"id":"a", "max_model_len": 64}"#);
    assert!(parse_models(b"{}").is_err());
    assert!(parse_models(b"[1,2").is_err());
}

#[tokio::test]
async fn a_ready_engine_is_healthy_and_names_a_model() {
    let mut left = 2;
    let engine = Scripted::start(Box::new(move |path| match path {
        "/health" if left > 0 => {
            left -= 1;
            Some((503, String::new()))
        }
        "/health" => Some((200, String::new())),
        _ => Some((200, MODELS.to_owned())),
    }));
    let (sender, mut events) = mpsc::channel(8);
    let watching = tokio::spawn(watch(Watched::at(&engine.socket).subject, sender));
    assert_eq!(next(&mut events).await, Some(HealthEvent::Loading));
    let models = parse_models(MODELS.as_bytes()).unwrap();
    assert_eq!(next(&mut events).await, Some(HealthEvent::Ready(models)));
    watching.abort();
    let requests = engine.requests.lock().clone();
    assert_eq!(requests, ["/health", "/health", "/health", "/v1/models", "/metrics"]);
}

#[tokio::test]
async fn an_attached_engine_that_is_none_says_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("bridge");
    let reason_at = async |target: &str| {
        let (sender, mut events) = mpsc::channel(8);
        let subject = MonitoredEngine { attached_to: Some(AttachTarget::parse(target).unwrap()), ..Watched::at(&socket).subject };
        let watching = AbortOnDropHandle::new(tokio::spawn(watch(subject, sender)));
        loop {
            match next(&mut events).await {
                Some(HealthEvent::NotReady(reason)) => return (reason, watching),
                Some(HealthEvent::Loading) => {}
                other => panic!("{other:?}"),
            }
        }
    };
    let (absent, _) = reason_at(&format!("unix:{}", folder.path().join("nobody").display())).await;
    assert!(absent.starts_with("cannot connect: No such file"), "{absent}");
    for (answer, words) in
        [((503, ""), "/health has status 503"), ((404, ""), "/v1/models has status 404"), ((200, "a page"), "/v1/models is not")]
    {
        let _ = std::fs::remove_file(&socket);
        let _server = Scripted::at(&socket, Box::new(move |_| Some((answer.0, answer.1.to_owned()))));
        let (reason, _) = reason_at(&format!("unix:{}", socket.display())).await;
        assert!(reason.starts_with(words), "{reason}");
    }
}

/// Events before readiness, and requested paths, of an engine whose front-end lacks the route
/// `lacking`.
async fn probe_without(lacking: &'static str, front_end: FrontEndInUse) -> (Vec<HealthEvent>, Vec<String>) {
    let engine = Scripted::start(Box::new(move |path| match path {
        "/health" => Some((200, String::new())),
        "/v1/models" => Some((200, MODELS.to_owned())),
        path if path == lacking => Some((404, String::new())),
        "/tokenize" => Some((405, String::new())),
        _ => Some((200, String::new())),
    }));
    let watched = Watched::at(&engine.socket);
    watched.status.send_modify(|status| status.front_end = front_end);
    let (sender, mut events) = mpsc::channel(8);
    let watching = tokio::spawn(watch(watched.subject, sender));
    let mut reported = Vec::new();
    while !matches!(reported.last(), Some(HealthEvent::Ready(_))) {
        reported.push(next(&mut events).await.unwrap());
    }
    watching.abort();
    let requests = engine.requests.lock().clone();
    (reported, requests)
}

#[tokio::test]
async fn a_rust_front_end_without_tokenize_is_reported_before_readiness() {
    let (reported, _) = probe_without("/tokenize", FrontEndInUse::Rust).await;
    assert!(matches!(&reported[1], HealthEvent::LacksRoute(reason) if reason.contains("no /tokenize")), "{reported:?}");
    let (reported, _) = probe_without("/metrics", FrontEndInUse::Rust).await;
    assert!(matches!(&reported[1], HealthEvent::LacksRoute(reason) if reason.contains("no /metrics")), "{reported:?}");
    let (reported, requests) = probe_without("/nothing", FrontEndInUse::Rust).await;
    assert_eq!(reported.len(), 3, "a route that wants POST is there: {reported:?}");
    assert!(requests.contains(&"/tokenize".to_owned()));
}

#[tokio::test]
async fn missing_client_routes_of_a_rust_front_end_are_reported() {
    let (reported, _) = probe_without("/v1/messages", FrontEndInUse::Rust).await;
    assert_eq!(reported[1], HealthEvent::MissingRoutes(vec!["/v1/messages"]), "{reported:?}");
    let (reported, requests) = probe_without("/v1/messages", FrontEndInUse::Python).await;
    assert!(reported.len() == 2 && !requests.contains(&"/v1/messages".to_owned()), "{reported:?} {requests:?}");
}

#[tokio::test]
async fn a_python_front_end_is_not_asked_for_tokenize() {
    let (reported, requests) = probe_without("/tokenize", FrontEndInUse::Python).await;
    assert_eq!(reported.len(), 2, "{reported:?}");
    assert!(!requests.contains(&"/tokenize".to_owned()));
}

#[test]
fn only_consecutive_bad_answers_count() {
    let reply = |status| Ok(ApiReply { status, body: Bytes::new(), is_from_router: false });
    let (good, bad) = (reply(StatusCode::OK), reply(StatusCode::SERVICE_UNAVAILABLE));
    let mut tally = HealthFailures::default();
    for answer in [&bad, &bad, &good, &bad, &Err(FetchError::Broken("torn".to_owned()))] {
        assert_eq!(tally.record(answer), None);
    }
    let reason = EndCause::Unhealthy { checks: 3, reason: "status 503".to_owned() };
    assert_eq!(tally.record(&bad), Some(reason));
}

#[tokio::test]
async fn an_engine_that_turns_unhealthy_is_reported_once() {
    let mut health = [200].into_iter();
    let engine = Scripted::start(Box::new(move |path| match path {
        "/health" => Some((health.next().unwrap_or(503), String::new())),
        _ => Some((200, MODELS.to_owned())),
    }));
    let (sender, mut events) = mpsc::channel(8);
    let watching = tokio::spawn(watch(Watched::at(&engine.socket).subject, sender));
    let mut all = Vec::new();
    while let Some(item) = next(&mut events).await {
        all.push(item);
    }
    assert_eq!(all.len(), 3);
    assert!(matches!(&all[2], HealthEvent::Unhealthy(cause) if cause.to_string().contains("503")));
    watching.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_engine_without_its_core_fails_at_one_bad_answer() {
    let core = Resting::called("VLLM::EngineCore");
    let pid = core.pid();
    let ended = Arc::new(AtomicBool::new(false));
    let front_end_knows = Arc::clone(&ended);
    let engine = Scripted::start(Box::new(move |path| match path {
        "/health" if front_end_knows.load(Ordering::Relaxed) => Some((503, String::new())),
        "/health" => Some((200, String::new())),
        _ => Some((200, MODELS.to_owned())),
    }));
    let watched = Watched::at(&engine.socket);
    watched.has_group(pid);
    let (sender, mut events) = mpsc::channel(8);
    let watching = tokio::spawn(watch(watched.subject, sender));
    assert_eq!(next(&mut events).await, Some(HealthEvent::Loading));
    assert!(matches!(next(&mut events).await, Some(HealthEvent::Ready(_))));
    // The models are read again after several good answers, so by then the processes are known.
    assert!(matches!(next(&mut events).await, Some(HealthEvent::Models(_))));
    drop(core);
    ended.store(true, Ordering::Relaxed);
    let before = Instant::now();
    let expected = EndCause::ProcessLost { process: format!("VLLM::EngineCore (pid {pid})"), health: "status 503".to_owned() };
    assert_eq!(next(&mut events).await, Some(HealthEvent::Unhealthy(expected)));
    assert!(before.elapsed() <= HEALTH_INTERVAL * 2, "{:?}", before.elapsed());
    watching.await.unwrap();
}

#[tokio::test]
async fn health_checks_end_when_nobody_listens() {
    let directory = tempfile::tempdir().unwrap();
    let (sender, events) = mpsc::channel(8);
    drop(events);
    let watching = watch(Watched::at(&directory.path().join("s")).subject, sender);
    tokio::time::timeout(Duration::from_secs(10), watching).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_healthy_engine_that_gives_no_token_is_reported() {
    let engine = Scripted::start(Box::new(|path| match path {
        "/health" => Some((200, String::new())),
        "/v1/models" => Some((200, MODELS.to_owned())),
        _ => None,
    }));
    let watched = Watched::at(&engine.socket);
    let resting = Resting::start();
    watched.has_group(resting.pid());
    let in_flight = watched.enter();
    let _wait = waits(&in_flight);
    let (sender, mut events) = mpsc::channel(8);
    let begun = Instant::now();
    let watching = tokio::spawn(watch(watched.subject, sender));
    assert_eq!(next(&mut events).await, Some(HealthEvent::Loading));
    assert!(matches!(next(&mut events).await, Some(HealthEvent::Ready(_))));
    let reason = loop {
        match next(&mut events).await.unwrap() {
            HealthEvent::Unhealthy(cause) => break cause.to_string(),
            other => assert!(matches!(other, HealthEvent::Models(_)), "{other:?}"),
        }
    };
    assert!(reason.starts_with("no token for 10.") && reason.ends_with("a test completion got no answer within 5 s"), "{reason}");
    assert!(begun.elapsed() < Duration::from_secs(17), "{:?}", begun.elapsed());
    watching.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn models_are_read_again_right_after_an_adapter_order() {
    let engine = Scripted::start(Box::new(|path| match path {
        "/health" => Some((200, String::new())),
        _ => Some((200, MODELS.to_owned())),
    }));
    let Watched { subject, desired, status: _status, samples: _samples } = Watched::at(&engine.socket);
    let (sender, mut events) = mpsc::channel(8);
    let watching = tokio::spawn(watch(subject, sender));
    assert_eq!(next(&mut events).await, Some(HealthEvent::Loading));
    assert!(matches!(next(&mut events).await, Some(HealthEvent::Ready(models)) if models.len() == 2));
    let before = Instant::now();
    desired.send_modify(|desired| desired.unloading = Some("b".to_owned()));
    assert!(matches!(next(&mut events).await, Some(HealthEvent::Models(models)) if models.len() == 1 && models[0].id == "a"));
    assert!(before.elapsed() < Duration::from_secs(1));
    watching.abort();
}

/// An idle process in its own group, until dropped.
pub(in super::super) struct Resting(std::process::Child);

impl Resting {
    pub(in super::super) fn start() -> Self {
        Self::called("sleep")
    }

    #[expect(clippy::disallowed_methods, reason = "the clock of the runtime is paused, and this is about a real process")]
    fn called(title: &str) -> Self {
        use std::os::unix::process::CommandExt;
        let resting = Self(std::process::Command::new("/bin/sleep").arg0(title).arg("600").process_group(0).spawn().unwrap());
        // While the process loads its libraries it may wait for the disk, which counts as
        // computing.
        let is_asleep = || std::fs::read_to_string(format!("/proc/{}/stat", resting.pid())).is_ok_and(|stat| stat.contains(") S "));
        for _ in 0..1000 {
            if is_asleep() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        resting
    }

    pub(in super::super) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
