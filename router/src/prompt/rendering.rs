//! Rendering: an engine says which tokens it makes of a request (`/render` of vLLM 0.29 and later).
//!
//! It stands in where no encoder here may read a prompt, as with models whose chat template is code
//! (decision 34). What is known of an engine outlives views, so the fleet keeps it with the
//! replica's load; `Prompts` asks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hostler_api::Route;
use hostler_prompt::EncodedPrompt;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::engine_question::EngineQuestion;
use super::{NotEncoded, Prompts};

/// How long a request waits for an engine's rendering, beside [`WAIT_PER_BYTE`].
///
/// vLLM 0.32 on a CPU took 1.5 ms for a chat of 500 bytes when idle, and 8 ms for one of 24 kB. Beside
/// eight streams on two cores the median was 8 to 35 ms.
const BASE_WAIT: Duration = Duration::from_millis(100);

/// Further wait for each byte of the request, four times what the idle engine took.
const WAIT_PER_BYTE: Duration = Duration::from_micros(1);

/// Longest request that an engine is asked to render. The wait for it is a second.
pub(crate) const MAX_RENDERED_BYTES: usize = 1024 * 1024;

/// Most bytes of an answer that are read: some 300,000 tokens.
const MAX_ANSWER_BYTES: usize = 2 * 1024 * 1024;

/// Most requests of this router that one engine renders at once. vLLM renders on one thread, so
/// more would only wait for each other.
const MAX_AT_ONCE: u32 = 4;

/// How long an engine is left alone that was late or gave no usable answer. A hung one costs
/// [`MAX_AT_ONCE`] requests their wait, each time.
const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(5);

/// How long an engine may take to show that it has the route. No request waits for that.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);

/// What is known of an engine's rendering.
#[derive(Debug, Default)]
pub(crate) struct EngineRendering {
    state: Mutex<RenderingState>,
    /// One more than the epoch of the life that renders prompts; 0 for none. Every request reads it
    /// for each replica, so without the lock.
    offered: AtomicU64,
}

#[derive(Debug, Default)]
struct RenderingState {
    /// The life of the engine that the rest is about.
    epoch: u64,
    offer: Offer,
    /// The engine is not asked before this time.
    silent_until: Option<Instant>,
    at_once: u32,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Offer {
    #[default]
    Unknown,
    Probed,
    Given,
    Absent,
}

impl RenderingState {
    fn is_silent(&self, now: Instant) -> bool {
        self.silent_until.is_some_and(|until| now < until)
    }

    fn has_turn(&self, epoch: u64, now: Instant) -> bool {
        self.epoch == epoch && self.offer == Offer::Given && !self.is_silent(now) && self.at_once < MAX_AT_ONCE
    }
}

impl EngineRendering {
    /// Whether the engine's life `epoch` was found to render prompts.
    #[must_use]
    pub(crate) fn is_offered(&self, epoch: u64) -> bool {
        self.offered.load(Ordering::Relaxed) == epoch.wrapping_add(1)
    }

    /// Whether the engine may be asked now.
    #[must_use]
    pub(crate) fn may_be_asked(&self, epoch: u64, now: Instant) -> bool {
        self.state.lock().has_turn(epoch, now)
    }

    /// Whether somebody should find out if the engine has the route. `probe_rendering` must follow.
    #[must_use]
    pub(crate) fn begin_probe(&self, epoch: u64, now: Instant) -> bool {
        let mut state = self.state.lock();
        if state.epoch != epoch {
            *state = RenderingState { epoch, at_once: state.at_once, ..RenderingState::default() };
        }
        let begins = state.offer == Offer::Unknown && !state.is_silent(now);
        if begins {
            state.offer = Offer::Probed;
        }
        begins
    }

    fn end_probe(&self, epoch: u64, offer: Offer, now: Instant) {
        let mut state = self.state.lock();
        if state.epoch == epoch && state.offer == Offer::Probed {
            state.offer = offer;
            if offer == Offer::Given {
                self.offered.store(epoch.wrapping_add(1), Ordering::Relaxed);
            }
            state.silent_until = (offer == Offer::Unknown).then(|| now + RETRY_AFTER_FAILURE);
        }
    }

    /// A turn at the engine; `None` if it may not be asked now.
    fn begin(&self, epoch: u64, now: Instant) -> Option<RenderingTurn<'_>> {
        let mut state = self.state.lock();
        let has_turn = state.has_turn(epoch, now);
        state.at_once += u32::from(has_turn);
        has_turn.then(|| RenderingTurn(self))
    }

    fn record_failure(&self, now: Instant) {
        self.state.lock().silent_until = Some(now + RETRY_AFTER_FAILURE);
    }
}

/// One request that an engine renders.
struct RenderingTurn<'a>(&'a EngineRendering);

impl Drop for RenderingTurn<'_> {
    fn drop(&mut self) {
        self.0.state.lock().at_once -= 1;
    }
}

/// Why an engine has given no tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RenderingFailure {
    #[error("the engines render as many prompts as they may")]
    Busy,
    #[error("the engine's rendering came too late")]
    Late,
    /// The engine will refuse the request itself, too.
    #[error("the engine refuses to render this prompt")]
    Refused,
    /// The answer broke, is too long or not what vLLM gives.
    #[error("the engine's rendering cannot be used")]
    Unusable,
}

impl RenderingFailure {
    /// The failure in the words of `hostler explain`.
    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Busy => "rendering busy",
            Self::Late => "rendering late",
            Self::Refused => "rendering refused",
            Self::Unusable => "rendering unusable",
        }
    }
}

/// How many requests engines have rendered or not.
#[derive(Debug, Default)]
pub(super) struct RenderingCounts {
    pub(super) rendered: AtomicU64,
    pub(super) late: AtomicU64,
    pub(super) failed: AtomicU64,
}

impl RenderingCounts {
    fn record(&self, rendered: &Result<EncodedPrompt, RenderingFailure>) {
        let counter = match rendered {
            Ok(_) => &self.rendered,
            Err(RenderingFailure::Late) => &self.late,
            Err(_) => &self.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// An engine that is asked, and what is known of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RenderingEngine<'a> {
    pub engine: EngineQuestion<'a>,
    pub epoch: u64,
    pub known: &'a EngineRendering,
}

impl Prompts {
    /// The tokens that this engine makes of `tenant`'s request on this route.
    ///
    /// # Errors
    /// If there are none, or not soon enough. The request may be placed without them.
    pub(crate) async fn render(
        &self,
        tenant: u64,
        engine: &RenderingEngine<'_>,
        route: Route,
        body: Bytes,
    ) -> Result<EncodedPrompt, NotEncoded> {
        let rendered = self.ask_for_rendering(tenant, engine, route, body).await;
        self.0.renderings.record(&rendered);
        rendered.map_err(NotEncoded::NotRendered)
    }

    async fn ask_for_rendering(
        &self,
        tenant: u64,
        asked: &RenderingEngine<'_>,
        route: Route,
        body: Bytes,
    ) -> Result<EncodedPrompt, RenderingFailure> {
        let path = rendering_path(route).ok_or(RenderingFailure::Unusable)?;
        let _turn = asked.known.begin(asked.epoch, Instant::now()).ok_or(RenderingFailure::Busy)?;
        let wait = BASE_WAIT + WAIT_PER_BYTE * u32::try_from(body.len()).unwrap_or(u32::MAX);
        let answered = async {
            let (status, answer) = asked.engine.ask(path, body, MAX_ANSWER_BYTES).await.map_err(|_| RenderingFailure::Unusable)?;
            match status {
                200 => {}
                400 | 422 => return Err(RenderingFailure::Refused),
                _ => return Err(RenderingFailure::Unusable),
            }
            let parsed = self.0.pool.run((tenant, answer.len()), move || parse_rendering(&answer)).await;
            parsed.map_err(|_| RenderingFailure::Busy)?.ok_or(RenderingFailure::Unusable)
        };
        let rendered = timeout(wait, answered).await.unwrap_or(Err(RenderingFailure::Late));
        if let Err(RenderingFailure::Late | RenderingFailure::Unusable) = rendered {
            asked.known.record_failure(Instant::now());
        }
        rendered
    }

    /// Finds out whether an engine that serves `model` has the route. Call this after
    /// [`EngineRendering::begin_probe`]; if the engine gives no answer, it is probed again later.
    pub(crate) async fn probe_rendering(&self, asked: &RenderingEngine<'_>, model: &str) {
        let probing = Probe { asked, offer: Offer::Unknown };
        let body = json!({ "model": model, "prompt": "Hello" }).to_string().into();
        let answer = asked.engine.ask(Route::CompletionRender.path(), body, MAX_ANSWER_BYTES);
        probing.end(match timeout(PROBE_DEADLINE, answer).await {
            Ok(Ok((200, answer))) if parse_rendering(&answer).is_some() => Offer::Given,
            // vLLM answers 403 without its `--enable-scale-out`; a front-end without the route 404.
            Ok(Ok((200..=499 | 501, _))) => Offer::Absent,
            _ => Offer::Unknown,
        });
    }
}

/// A running probe. When it is dropped, another may begin.
struct Probe<'a> {
    asked: &'a RenderingEngine<'a>,
    offer: Offer,
}

impl Probe<'_> {
    fn end(mut self, offer: Offer) {
        self.offer = offer;
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        self.asked.known.end_probe(self.asked.epoch, self.offer, Instant::now());
    }
}

/// The route that renders requests of this one.
fn rendering_path(route: Route) -> Option<&'static str> {
    match route {
        Route::ChatCompletions => Some(Route::ChatRender.path()),
        Route::Completions => Some(Route::CompletionRender.path()),
        _ => None,
    }
}

/// The tokens in an answer: one object for a chat, a list of them for the prompts of a completion.
/// `None` if the prompt has media, whose blocks differ by more than their tokens.
fn parse_rendering(answer: &[u8]) -> Option<EncodedPrompt> {
    #[derive(Deserialize)]
    struct Rendered {
        token_ids: Vec<u32>,
        #[serde(default)]
        features: Option<serde::de::IgnoredAny>,
    }
    let prompts: Vec<Rendered> = match answer.first()? {
        b'[' => serde_json::from_slice(answer).ok()?,
        _ => vec![serde_json::from_slice(answer).ok()?],
    };
    let mut prompts = prompts.into_iter();
    let first = prompts.next()?;
    let others: usize = prompts.map(|prompt| prompt.token_ids.len()).sum();
    if first.features.is_some() || first.token_ids.is_empty() {
        return None;
    }
    let batch_tokens = u32::try_from(others).unwrap_or(u32::MAX);
    Some(EncodedPrompt { tokens: first.token_ids, unread_tokens: 0, is_whole: true, batch_tokens })
}

#[cfg(test)]
mod tests;
