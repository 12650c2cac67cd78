use std::collections::{HashMap, VecDeque};
use std::iter;
use std::path::PathBuf;
use std::time::Duration;

use hostler_api::Route;
use hostler_placement::affinity::CacheIndex;
use hostler_prompt::Dialect as FrontEnd;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::agent::v1::{Frame, FrameBatch};
use hostler_proto::lane::{Fault, ResponseHead, StreamFault};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tokio::time::sleep;

use super::*;
use crate::access_log::AccessEntry;
use crate::admission::{Admission, UsageEstimate};
use crate::background::BackgroundTasks;
use crate::crash_suspects::CrashSuspects;
use crate::dispatch::{Refusal, Relay, RetryBudgets, Work};
use crate::event_log::EventLog;
use crate::fleet::tests::{ReplicaChange, attach, fleet, ready, state};
use crate::fleet::{EngineLaunch, Phase, ReplicaStatus};
use crate::keys::Caller;
use crate::lanes::Lane;
use crate::placement::{Placer, PrefillWindows, QueueLimits, QueueShare, RequestQueue};
use crate::prompt::Prompts;
use crate::resume_tier::NotResumed;
use crate::resumption::StreamApi;
use crate::resumption::samples::answer;
use crate::resumption::{RecordMemory, ReplayApi, ReplayPlan, SEAM, ask_for_tokens};

const CHAT: &str = "/v1/chat/completions";

const TEXTS: [&str; 6] = ["Hey", "", "\u{1f980}", " \\\"quo", "", "end"];

mod moves;
mod replays;
mod waits;

/// How an engine ends a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    Fault(Fault),
    EngineError,
    Abort,
    Incomplete,
    /// The stream is lost with half of the next event, within a multi-byte character if it has one.
    WithinEvent,
    Silence,
    /// The rest comes so many seconds later.
    Stall(u64),
    /// The engine cannot do what it is asked, but lives.
    EngineRefusal,
}

/// Replicas of one node whose engines answer alike. The first attempts end as the script says, each
/// after so many events.
struct Fixture {
    dispatch: Arc<Dispatch>,
    admission: Admission,
    lane: Arc<Lane>,
    script: Arc<Mutex<VecDeque<(usize, Death)>>>,
    /// Requests that were sent to engines.
    seen: Arc<Mutex<Vec<(RequestHead, Bytes)>>>,
    tasks: BackgroundTasks,
}

impl Fixture {
    async fn start(replicas: u32, script: &[(usize, Death)]) -> Self {
        Self::start_with(&vec![FrontEnd::Python; replicas as usize], script).await
    }

    /// Starts a replica with each of these front-ends.
    async fn start_with(front_ends: &[FrontEnd], script: &[(usize, Death)]) -> Self {
        let told_by = front_ends.to_vec();
        Self::start_telling(front_ends, script, move |head, body, attempt| {
            let name = if attempt == 0 { "cmpl-r1" } else { "cmpl-other" };
            answer(told_by[head.replica as usize], &head.path, body, name, &TEXTS)
        })
        .await
    }

    /// Starts replicas whose engines answer as `tell` does.
    async fn start_telling(
        front_ends: &[FrontEnd],
        script: &[(usize, Death)],
        tell: impl Fn(&RequestHead, &[u8], usize) -> Vec<String> + Send + Sync + 'static,
    ) -> Self {
        let launches = front_ends.iter().map(|dialect| EngineLaunch { dialect: *dialect, ..EngineLaunch::default() });
        Self::start_states(launches.map(started).collect(), script, tell).await
    }

    /// Starts a replica in each of these states.
    async fn start_states(
        states: Vec<ReplicaStatus>,
        script: &[(usize, Death)],
        tell: impl Fn(&RequestHead, &[u8], usize) -> Vec<String> + Send + Sync + 'static,
    ) -> Self {
        let fleet = fleet();
        let replica = |(index, state)| ReplicaChange { state: Some(state), ..ready(index) };
        let lane = attach(&fleet, 1, (0..).zip(states).map(replica).collect()).await;
        let prompts = Prompts::new(PathBuf::new(), 1);
        let windows = PrefillWindows::from_now(Duration::ZERO);
        let placer = Arc::new(Placer::new(fleet.clone(), Arc::new(CacheIndex::new()), prompts, Arc::default(), windows));
        let limits = QueueLimits { max_requests: 100, max_bytes: 1 << 20, max_wait: Duration::from_secs(60) };
        let tasks = BackgroundTasks::default();
        let dispatch = Arc::new(Dispatch {
            queue: RequestQueue::start(placer.clone(), limits, &tasks, hostler_boot::Shutdown::new()),
            fleet,
            placer,
            retries: RetryBudgets::default(),
            crash_suspects: CrashSuspects::new(Duration::from_secs(600), EventLog::default()),
            metrics: Arc::default(),
            answer_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(10),
            record_memory: RecordMemory::default(),
        });
        let script = Arc::new(Mutex::new(script.iter().copied().collect()));
        let fixture = Self { dispatch, admission: Admission::new(10), lane, script, seen: Arc::default(), tasks };
        fixture.tasks.spawn(serve_with(fixture.lane.clone(), fixture.script.clone(), fixture.seen.clone(), tell));
        fixture
    }

    /// The text that the client of a stream gets, and how it ends.
    async fn stream(&self, path: &str, body: &str) -> (String, Result<(), String>) {
        let permit = self.admission.admit(&Caller::anonymous("".into()), UsageEstimate::default()).unwrap();
        let answer = self.dispatch.send(request(path, body), permit).await.unwrap_or_else(|refusal: Refusal| panic!("{refusal}"));
        read(answer.body).await
    }

    /// Nothing is left of requests that have ended.
    fn assert_idle(&self) {
        assert_eq!((self.admission.in_flight(), self.lane.open_request_count(), self.dispatch.record_memory.taken()), (0, 0, 0));
        assert!(self.dispatch.fleet.view().replicas.iter().all(|replica| replica.local_load.in_flight() == 0));
    }
}

/// A ready replica whose engine was started like this.
fn started(launch: EngineLaunch) -> ReplicaStatus {
    ReplicaStatus { launch: Some(launch), ..state(Phase::Ready, "m") }
}

/// Reads an answer to its end.
async fn read(mut relay: Box<Relay>) -> (String, Result<(), String>) {
    let mut output = String::new();
    while let Some(frame) = relay.frame().await {
        match frame {
            Ok(frame) => output.push_str(std::str::from_utf8(&frame.into_data().unwrap()).unwrap()),
            Err(broken) => return (output, Err(broken.message)),
        }
    }
    (output, Ok(()))
}

fn request(path: &str, body: &str) -> Box<OutboundRequest> {
    let sampling = StreamApi::for_route(Route::of(path)).map(|api| Sampling::parse(api, body.as_bytes()));
    let is_continued = matches!(sampling, Some(Ok(_)));
    let body = if is_continued { ask_for_tokens(body.as_bytes()) } else { Bytes::from(body.to_owned()) };
    let placement_request = PlacementRequest {
        model: Some("m".into()),
        path: path.into(),
        body: body.clone(),
        prompt_parts: vec![body.slice(1..3)],
        is_stream: true,
        ..PlacementRequest::default()
    };
    let resume_plan = match sampling {
        Some(Ok(sampling)) => ResumePlan::Continue(Box::new(sampling)),
        Some(Err(unfit)) if !unfit.may_be_replayed => ResumePlan::None(unfit.reason),
        _ => match ReplayApi::for_route(Route::of(path)) {
            Some(api) => ResumePlan::Replay(Box::new(ReplayPlan::new(api, &placement_request, iter::once(1..3).collect()))),
            None => ResumePlan::None(NotResumed::Route),
        },
    };
    Box::new(OutboundRequest {
        fan_out: None,
        resume_plan,
        placement_request,
        id: 7,
        priority: 0,
        tenant: 0,
        owner: Arc::default(),
        queue_share: QueueShare { tenant: 0, weight: 1.0, bytes: 100 },
        queue_slot: None,
        client_id: None,
        head: RequestHead { method: "POST".into(), path: path.into(), body_bytes: body.len() as u64, ..RequestHead::default() },
        body,
        dialect: Route::of(path).dialect(),
        work: Work { prompts: 1, answers: 1, turns: 1 },
        log_entry: AccessEntry::none(),
        referenced_response: ResponseReference::None,
        stored_response: None,
        received_at: Instant::now(),
    })
}

/// Stands in for the agent and its engines.
async fn serve(lane: Arc<Lane>, script: Arc<Mutex<VecDeque<(usize, Death)>>>, seen: Arc<Mutex<Vec<(RequestHead, Bytes)>>>) {
    let tell = |head: &RequestHead, body: &[u8], attempt: usize| {
        let name = if attempt == 0 { "cmpl-r1" } else { "cmpl-other" };
        answer(FrontEnd::Python, &head.path, body, name, &TEXTS)
    };
    serve_with(lane, script, seen, tell).await;
}

/// Stands in for the agent, with engines that answer as `tell` does.
async fn serve_with(
    lane: Arc<Lane>,
    script: Arc<Mutex<VecDeque<(usize, Death)>>>,
    seen: Arc<Mutex<Vec<(RequestHead, Bytes)>>>,
    tell: impl Fn(&RequestHead, &[u8], usize) -> Vec<String>,
) {
    let mut open: HashMap<u64, (RequestHead, Vec<u8>)> = HashMap::new();
    loop {
        while let Some(batch) = lane.outbox().take_batch() {
            for Frame { id, kind } in batch.frames {
                match kind {
                    Some(Kind::Request(head)) => drop(open.insert(id, (head.into(), Vec::new()))),
                    Some(Kind::Body(bytes)) => open.get_mut(&id).unwrap().1.extend_from_slice(&bytes),
                    Some(Kind::End(_)) => {
                        let (head, body) = open.remove(&id).unwrap();
                        let events = tell(&head, &body, seen.lock().len());
                        seen.lock().push((head, body.into()));
                        let end = script.lock().pop_front();
                        let mut frames = frames(id, &events, end);
                        if let Some((count, Death::Stall(seconds))) = end {
                            let rest = frames.split_off(count + 1);
                            tokio::spawn(send_later(lane.clone(), rest, Duration::from_secs(seconds)));
                        }
                        frames.into_iter().for_each(|kind| lane.receive(FrameBatch { frames: vec![kind] }));
                    }
                    _ => {}
                }
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
}

async fn send_later(lane: Arc<Lane>, frames: Vec<Frame>, delay: Duration) {
    sleep(delay).await;
    frames.into_iter().for_each(|kind| lane.receive(FrameBatch { frames: vec![kind] }));
}

fn frames(id: u64, events: &[String], end: Option<(usize, Death)>) -> Vec<Frame> {
    let (count, death) = match end {
        Some((_, Death::Stall(_))) | None => (usize::MAX, None),
        Some((count, death)) => (count, Some(death)),
    };
    let kind = Header { name: "content-type".into(), value: "text/event-stream; charset=utf-8".into() };
    let mut frames = vec![Frame::new(id, Kind::Response(ResponseHead { status: 200, headers: vec![kind] }.into()))];
    let body = |text: &str| Frame::new(id, Kind::Body(text.to_owned().into()));
    let half = |event: &String| event.char_indices().find(|(_, char)| char.len_utf8() > 1).map_or(event.len() / 2, |(at, _)| at + 1);
    frames.extend(events.iter().take(count).map(|event| body(event)));
    let error = "data: {\"error\": {\"message\": \"EngineCore encountered an issue. See stack trace\", \"code\": 500}}\n\n";
    let aborted = events.last().map(|_| crate::resumption::samples::finish("cut", "[99]", "abort")).unwrap_or_default();
    match death {
        Some(Death::Fault(fault)) => frames.push(Frame::end(id, Some(&StreamFault { fault, message: "gone".into() }))),
        Some(Death::EngineError) => frames.extend([body(error), body("data: [DONE]\n\n"), Frame::end(id, None)]),
        Some(Death::EngineRefusal) => {
            let refusal = error.replace("EngineCore encountered an issue. See stack trace", "no room for so many tokens");
            frames.extend([body(&refusal), body("data: [DONE]\n\n"), Frame::end(id, None)]);
        }
        Some(Death::Abort) => frames.extend([body(&aborted), body("data: [DONE]\n\n"), Frame::end(id, None)]),
        Some(Death::WithinEvent) => {
            frames.extend(events.get(count).map(|event| Frame::new(id, Kind::Body(event.as_bytes()[..half(event)].to_vec().into()))));
            frames.push(Frame::end(id, Some(&StreamFault { fault: Fault::EngineLost, message: "gone".into() })));
        }
        Some(Death::Silence) => {}
        Some(Death::Incomplete | Death::Stall(_)) | None => frames.push(Frame::end(id, None)),
    }
    frames
}

const SEAM_TEXT: &str = ": resumed\n\n";

/// The text without the router's own parts, and without what it cannot know of an engine that did
/// not end its answer.
fn bare(output: &str) -> String {
    assert_eq!(SEAM, SEAM_TEXT);
    output.replace(SEAM_TEXT, "").replace(": keep-alive\n\n", "").replace(",\"system_fingerprint\":\"vllm-0.32.0-0ffacd72\"", "")
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_engine_is_lost_anywhere_arrives_whole() {
    let faults = [Fault::EngineLost, Fault::EngineStopped, Fault::LaneLost].map(Death::Fault);
    let deaths = [&faults[..], &[Death::EngineError, Death::WithinEvent, Death::Abort, Death::Incomplete, Death::Silence]].concat();
    let requests = [
        (CHAT, r#"{"model":"m","messages":[],"stream":true,"temperature":0}"#),
        (CHAT, r#"{"model":"m","messages":[],"stream":true,"max_tokens":5,"stream_options":{"include_usage":true}}"#),
        (COMPLETIONS, r#"{"model":"m","prompt":[1,2],"stream":true,"max_tokens":50}"#),
    ];
    for (front_end, (path, body)) in FrontEnd::ALL.into_iter().flat_map(|front_end| requests.map(|request| (front_end, request))) {
        let uncut = answer(front_end, path, body.as_bytes(), "cmpl-r1", &TEXTS);
        let events = answer(front_end, path, &ask_for_tokens(body.as_bytes()), "", &TEXTS).len();
        // The form does not matter to how the engine dies.
        let deaths = if front_end == FrontEnd::Python { &deaths[..] } else { &deaths[2..6] };
        for death in deaths {
            for cut in 1..events {
                let fixture = Fixture::start_with(&[front_end; 2], &[(cut, *death)]).await;
                let (output, ended) = fixture.stream(path, body).await;
                assert_eq!((bare(&output), ended), (bare(&uncut.concat()), Ok(())), "{body} {death:?} behind {cut}");
                let seen = fixture.seen.lock().clone();
                let replicas: Vec<u32> = seen.iter().map(|(head, _)| head.replica).collect();
                assert_eq!(output.contains(SEAM_TEXT), seen.len() == 2, "{body} {death:?} behind {cut}");
                assert!(seen.len() == 1 || replicas[0] != replicas[1] && seen[1].0.path == COMPLETIONS, "{replicas:?}");
                assert!(seen.iter().all(|(head, body)| head.body_bytes == body.len() as u64));
                sleep(Duration::from_millis(100)).await;
                fixture.assert_idle();
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_resumed_by_another_front_end_keeps_its_form() {
    let body = r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#;
    for cut in 1..=TEXTS.len() {
        let fixture = Fixture::start_with(&FrontEnd::ALL, &[(cut, Death::Fault(Fault::EngineLost))]).await;
        let (output, ended) = fixture.stream(CHAT, body).await;
        let seen: Vec<FrontEnd> = fixture.seen.lock().iter().map(|(head, _)| FrontEnd::ALL[head.replica as usize]).collect();
        assert_eq!((seen.len(), &ended), (2, &Ok(())), "{output}");
        let events: Vec<serde_json::Value> =
            bare(&output).split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect();
        let text: String = events.iter().filter_map(|event| event.pointer("/choices/0/delta/content")?.as_str()).collect();
        assert_eq!(text, "Hey\u{1f980} \"quoend", "{output}");
        assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], TEXTS.len(), "{output}");
        let writes_null = |event: &serde_json::Value| event["choices"][0].as_object().map(|choice| choice.contains_key("logprobs"));
        assert!(events.iter().filter_map(writes_null).all(|writes| writes == (seen[0] == FrontEnd::Python)), "{seen:?} {output}");
        fixture.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_loses_several_engines_resumes_each_time() {
    let stopped = Death::Fault(Fault::EngineStopped);
    let fixture = Fixture::start(4, &[(2, stopped), (1, stopped), (2, stopped)]).await;
    let body = r#"{"model":"m","messages":[],"stream":true,"max_tokens":100,"min_tokens":4}"#;
    let (output, ended) = fixture.stream(CHAT, body).await;
    assert_eq!((bare(&output), ended), (bare(&answer(FrontEnd::Python, CHAT, body.as_bytes(), "", &TEXTS).concat()), Ok(())));
    assert_eq!(output.matches(SEAM_TEXT).count(), 3);
    let continuations: Vec<(String, u64)> = fixture.seen.lock()[1..]
        .iter()
        .map(|(_, body)| serde_json::from_slice::<serde_json::Value>(body).unwrap())
        .map(|body| (body["prompt"].to_string(), body["max_tokens"].as_u64().unwrap()))
        .collect();
    // The second engine gives a token without visible text, which the third gives again.
    let prompts = [("[1,2,10]", 99), ("[1,2,10]", 99), ("[1,2,10,11,12]", 97)];
    assert_eq!(continuations, prompts.map(|(prompt, most)| (prompt.to_owned(), most)));
}

#[tokio::test(start_paused = true)]
async fn a_stream_resumes_only_where_its_model_has_room() {
    let flags = |flags: &[&str]| EngineLaunch { flags: flags.iter().map(|flag| (*flag).to_owned()).collect(), ..EngineLaunch::default() };
    let files = |number: u8| Some([number; 32]);
    let context = |tokens| started(EngineLaunch { max_context_tokens: Some(tokens), ..EngineLaunch::default() });
    for (first, second, goes_on) in [
        (ReplicaStatus { files: files(1), ..started(flags(&[])) }, ReplicaStatus { files: files(1), ..started(flags(&[])) }, true),
        (ReplicaStatus { files: files(1), ..started(flags(&[])) }, started(flags(&[])), true),
        (ReplicaStatus { files: files(1), ..started(flags(&[])) }, ReplicaStatus { files: files(2), ..started(flags(&[])) }, false),
        (started(flags(&[])), started(flags(&["--max-num-seqs", "9"])), true),
        (started(flags(&[])), started(flags(&["--override-generation-config={}"])), false),
        (context(100), context(6), true),
        (context(100), context(2), false),
    ] {
        let states = [first, second];
        // The first attempt may go to either replica.
        for states in [states.clone().to_vec(), states.into_iter().rev().collect()] {
            let is_room_at_stake =
                states.iter().any(|state| state.launch.as_ref().is_some_and(|launch| launch.max_context_tokens == Some(2)));
            let fixture = Fixture::start_states(states, &[(2, Death::Fault(Fault::EngineStopped))], |head, body, _| {
                answer(FrontEnd::Python, &head.path, body, "cmpl-r1", &TEXTS)
            });
            let fixture = fixture.await;
            let (output, ended) = fixture.stream(CHAT, r#"{"model":"m","messages":[],"stream":true}"#).await;
            let began_at = fixture.seen.lock()[0].0.replica;
            // A larger engine has room for a stream that began at the small one.
            let expected =
                goes_on || (is_room_at_stake && fixture.dispatch.fleet.view().replicas[began_at as usize].max_context_tokens() == 2);
            assert_eq!(ended.is_ok(), expected, "{output}");
            fixture.assert_idle();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn three_unexplained_losses_end_a_stream() {
    for death in [Death::Fault(Fault::LaneLost), Death::Incomplete] {
        let fixture = Fixture::start(6, &[(2, death); 6]).await;
        let (output, ended) = fixture.stream(CHAT, r#"{"model":"m","messages":[],"stream":true}"#).await;
        assert!(ended.is_err() && output.contains("data: {\"error\":"), "{output}");
        assert_eq!(fixture.seen.lock().len(), 3, "{death:?}");
        fixture.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn only_a_replay_acquits_a_request() {
    let chat = r#"{"model":"m","messages":[],"stream":true}"#;
    let replayed = r#"{"model":"m","messages":[],"stream":true,"temperature":0,"stop":["x"]}"#;
    for (body, is_acquitted) in [(chat, false), (replayed, true)] {
        let fixture = Fixture::start(2, &[(2, Death::Fault(Fault::EngineLost))]).await;
        let (output, ended) = fixture.stream(CHAT, body).await;
        assert_eq!(ended, Ok(()), "{output}");
        let fingerprint = fixture.seen.lock()[0].0.fingerprint;
        assert!(fingerprint.is_some());
        let clearance = fixture.dispatch.crash_suspects.watch(fingerprint).clearance();
        assert_eq!(matches!(clearance, Ok(Clearance::Free)), is_acquitted, "{body}");
        fixture.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_killer_requests_stream_stops_after_two_engines() {
    let fixture = Fixture::start(6, &[(1, Death::Fault(Fault::EngineLost)); 6]).await;
    let (output, ended) = fixture.stream(CHAT, r#"{"model":"m","messages":[],"stream":true}"#).await;
    assert!(ended.is_err() && output.contains("data: {\"error\":"), "{output}");
    assert_eq!(fixture.seen.lock().len(), 2);
    let fingerprints: Vec<_> = fixture.seen.lock().iter().map(|(head, _)| head.fingerprint).collect();
    assert!(fingerprints[0].is_some() && fingerprints[0] == fingerprints[1]);
    fixture.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_cannot_resume_ends_with_an_error() {
    let lost = [(3, Death::Fault(Fault::EngineStopped))];
    let alone = Fixture::start(1, &lost).await;
    let (output, ended) = alone.stream(CHAT, r#"{"model":"m","messages":[],"stream":true}"#).await;
    assert!(output.contains("gone; it could not be resumed: ") && ended.is_err(), "{output}");
    alone.assert_idle();
    let odd = Fixture::start(2, &lost).await;
    let (output, ended) = odd.stream(CHAT, r#"{"model":"m","messages":[],"stream":true,"invented":7}"#).await;
    assert!(!output.contains(SEAM_TEXT) && output.contains("data: {\"error\":") && ended.is_err(), "{output}");
    assert_eq!(odd.seen.lock().len(), 1);
    assert!(!String::from_utf8_lossy(&odd.seen.lock()[0].1).contains("token_ids"));
    odd.assert_idle();
}
