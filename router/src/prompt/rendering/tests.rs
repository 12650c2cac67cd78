use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use hostler_proto::lane::{Fault, StreamFault};
use prometheus_client::metrics::counter::Counter;

use super::*;
use crate::lanes::{Lane, Lanes};
use crate::prompt::proof::tests::{Answers, engine};
use crate::prompt::tests::{TENANT, nothing_kept};

const RENDERED: &str = include_str!("../../../../tests/fixtures/vllm/json_chat_render.raw");
const RENDERED_LIST: &str = include_str!("../../../../tests/fixtures/vllm/json_completions_render.raw");
const DISABLED: &str = include_str!("../../../../tests/fixtures/vllm/err_403_scale_out.raw");

/// The body of a recorded answer.
fn recorded(answer: &str) -> Vec<u8> {
    answer.split_once("\r\n\r\n").unwrap().1.as_bytes().to_vec()
}

/// An engine in its first life, and what is known of it.
struct Asked {
    lanes: Arc<Lanes>,
    known: EngineRendering,
    prompts: Prompts,
    lane: Arc<Lane>,
}

impl Asked {
    fn new(answers: Answers) -> Self {
        let (lanes, lane) = engine(answers);
        Self { lanes, known: EngineRendering::default(), prompts: nothing_kept(), lane }
    }

    /// An engine that shows the route when it is probed, and answers all else like this.
    async fn offering(status: u32, answer: impl Into<Vec<u8>>) -> Self {
        let (answer, asked) = (answer.into(), AtomicUsize::new(0));
        let asked = Self::new(Box::new(move |_, _| match asked.fetch_add(1, Ordering::Relaxed) {
            0 => (200, recorded(RENDERED_LIST)),
            _ => (status, answer.clone()),
        }));
        assert!(asked.probe(1).await);
        asked
    }

    fn engine(&self, epoch: u64) -> RenderingEngine<'_> {
        RenderingEngine { engine: EngineQuestion { lanes: &self.lanes, replica: 3 }, epoch, known: &self.known }
    }

    /// Whether a probe of this life was due and has found the route.
    async fn probe(&self, epoch: u64) -> bool {
        let due = self.known.begin_probe(epoch, Instant::now());
        if due {
            self.prompts.probe_rendering(&self.engine(epoch), "small").await;
        }
        due && self.known.is_offered(epoch)
    }

    async fn render(&self, route: Route) -> Result<EncodedPrompt, NotEncoded> {
        self.prompts.render(TENANT, &self.engine(1), route, Bytes::from_static(b"{\"messages\":[]}")).await
    }

    fn counts(&self) -> (u64, u64, u64) {
        let stats = self.prompts.stats();
        (stats.rendered, stats.rendered_late, stats.not_rendered)
    }
}

#[tokio::test]
async fn an_engine_says_the_tokens_of_chats_and_completions() {
    let asked = Asked::new(Box::new(|path, body| match path {
        "/v1/chat/completions/render" => {
            assert_eq!(body, b"{\"messages\":[]}", "the client's own bytes");
            (200, recorded(RENDERED))
        }
        "/v1/completions/render" => (200, recorded(RENDERED_LIST)),
        other => panic!("{other}"),
    }));
    assert!(asked.probe(1).await);
    let chat = asked.render(Route::ChatCompletions).await.unwrap();
    assert_eq!((&chat.tokens[..], chat.batch_tokens), (&[1, 2247, 201, 2124, 2, 201, 1, 714, 744, 1144, 201][..], 0));
    let completion = asked.render(Route::Completions).await.unwrap();
    assert_eq!((&completion.tokens[..], completion.batch_tokens), (&[2124][..], 4), "the first prompt of two");
    assert_eq!(asked.counts(), (2, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn an_engine_without_the_route_is_probed_once_a_life() {
    for (status, answer) in [(403, recorded(DISABLED)), (404, b"{\"detail\":\"Not Found\"}".to_vec()), (200, b"{}".to_vec())] {
        let asked = Asked::new(Box::new(move |_, _| (status, answer.clone())));
        assert!(!asked.probe(1).await && !asked.known.begin_probe(1, Instant::now()), "{status}");
        assert_eq!(asked.render(Route::ChatCompletions).await, Err(NotEncoded::NotRendered(RenderingFailure::Busy)));
        assert!(asked.known.begin_probe(2, Instant::now()), "the next life may have it");
    }
    let broken = Asked::new(Box::new(|_, _| (500, Vec::new())));
    assert!(!broken.probe(1).await && !broken.known.begin_probe(1, Instant::now()));
    tokio::time::sleep(RETRY_AFTER_FAILURE).await;
    assert!(broken.known.begin_probe(1, Instant::now()), "nobody knows yet");
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_hangs_costs_few_requests_little_time() {
    let asked = Asked::offering(200, recorded(RENDERED)).await;
    let (hung, _lane) = (Arc::new(Lanes::default()), Lane::new(Counter::default()));
    hung.add(&_lane);
    let engine = RenderingEngine { engine: EngineQuestion { lanes: &hung, replica: 3 }, ..asked.engine(1) };
    let ask = || asked.prompts.render(TENANT, &engine, Route::ChatCompletions, Bytes::from_static(b"{}"));
    let began = Instant::now();
    let rendered = join_all((0..6).map(|_| ask())).await;
    let failed = |failure| rendered.iter().filter(|one| **one == Err(NotEncoded::NotRendered(failure))).count();
    assert_eq!((failed(RenderingFailure::Late), failed(RenderingFailure::Busy)), (4, 2));
    assert!(began.elapsed() <= BASE_WAIT + Duration::from_millis(2), "{:?}", began.elapsed());
    assert_eq!((asked.counts(), asked.known.may_be_asked(1, Instant::now())), ((0, 4, 2), false));
    tokio::time::sleep(RETRY_AFTER_FAILURE).await;
    assert!(asked.known.may_be_asked(1, Instant::now()) && asked.render(Route::ChatCompletions).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn an_unusable_rendering_gives_no_tokens() {
    let long = format!("{{\"token_ids\":[{}1]}}", "131071,".repeat(MAX_ANSWER_BYTES / 7));
    let unusable = [
        (200, long.into_bytes()),
        (200, b"not JSON".to_vec()),
        (200, Vec::new()),
        (200, b"[]".to_vec()),
        (200, b"{\"token_ids\":[]}".to_vec()),
        (200, b"{\"token_ids\":[1,-2]}".to_vec()),
        (200, b"{\"token_ids\":[4294967296]}".to_vec()),
        (200, b"{\"token_ids\":[1],\"features\":{\"mm_hashes\":{}}}".to_vec()),
        (200, [b"[".repeat(100_000), b"]".repeat(100_000)].concat()),
        (500, recorded(RENDERED)),
    ];
    for (status, answer) in unusable {
        let (asked, start) =
            (Asked::offering(status, answer.clone()).await, String::from_utf8_lossy(&answer[..answer.len().min(40)]).into_owned());
        let rendered = asked.render(Route::ChatCompletions).await;
        assert_eq!(rendered, Err(NotEncoded::NotRendered(RenderingFailure::Unusable)), "{status} {start}");
        assert!(!asked.known.may_be_asked(1, Instant::now()), "{status} {start}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_rendering_speaks_against_the_request_alone() {
    let asked = Asked::offering(400, "{\"error\":{}}").await;
    assert_eq!(asked.render(Route::ChatCompletions).await, Err(NotEncoded::NotRendered(RenderingFailure::Refused)));
    assert!(asked.known.may_be_asked(1, Instant::now()));
}

#[tokio::test(start_paused = true)]
async fn a_lost_lane_gives_no_tokens() {
    let asked = Asked::offering(200, recorded(RENDERED)).await;
    asked.lane.mark_lost(&StreamFault { fault: Fault::EngineStopped, message: "gone".into() });
    assert_eq!(asked.render(Route::ChatCompletions).await, Err(NotEncoded::NotRendered(RenderingFailure::Unusable)));
}
