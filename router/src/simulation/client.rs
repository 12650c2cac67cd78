//! A client sends one request, reads the answer at its own pace or leaves, and reports the bytes it
//! got and how they ended.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::model::{ModelRequest, prompt_text, prompt_tokens};
use super::world::World;

/// Longest wait for an answer. Three attempts of a minute each, and nine of a continuation's, would
/// take longer.
const PATIENCE: Duration = Duration::from_secs(300);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Chat,
    /// A completion of a text.
    Text,
    Tokens,
}

/// The choice of sampling, which decides whether a stream may be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Draw {
    Greedy,
    Random,
    Seeded,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    Eager,
    /// A pause before each piece.
    Pauses(Duration),
    Leaves(Duration),
    /// The client reads this much, and then nothing any more.
    Stalls(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) number: u64,
    pub(super) at: Duration,
    pub(super) form: Form,
    pub(super) draw: Draw,
    pub(super) is_stream: bool,
    pub(super) wants_usage: bool,
    pub(super) max_tokens: Option<u64>,
    pub(super) pace: Pace,
}

impl Question {
    pub(super) fn path(&self) -> &'static str {
        if self.form == Form::Chat { "/v1/chat/completions" } else { "/v1/completions" }
    }

    fn body(&self) -> String {
        let mut body = json!({"model": "tiny"});
        match self.form {
            Form::Chat => body["messages"] = json!([{"role": "user", "content": prompt_text(self.number)}]),
            Form::Text => body["prompt"] = prompt_text(self.number).into(),
            Form::Tokens => body["prompt"] = prompt_tokens(self.number).into(),
        }
        match self.draw {
            Draw::Greedy => body["temperature"] = 0.into(),
            Draw::Random => body["temperature"] = 0.7.into(),
            Draw::Seeded => body["seed"] = 4.into(),
        }
        if let Some(most) = self.max_tokens {
            body["max_tokens"] = most.into();
        }
        if self.is_stream {
            body["stream"] = true.into();
        }
        if self.wants_usage {
            body["stream_options"] = json!({"include_usage": true});
        }
        body.to_string()
    }

    /// Whether the answer does not depend on the engine that it began at. A slow client learns of a
    /// loss from bytes that it reads later.
    pub(super) fn outlives_engine(&self) -> bool {
        !self.is_stream || (self.draw != Draw::Seeded && self.pace == Pace::Eager)
    }

    /// The request as an engine understands it.
    pub(super) fn model_request(&self) -> ModelRequest {
        ModelRequest::parse(self.path(), self.body().as_bytes()).expect("the model knows its questions")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AnswerEnd {
    /// Complete by HTTP's rules.
    Clean,
    Broken(String),
    /// The client left, or stopped reading.
    Left,
    /// The router was killed.
    RouterGone,
    /// The answer did not end within the client's patience.
    Never,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SeenAnswer {
    /// `None` if no answer has begun.
    pub(super) status: Option<u16>,
    pub(super) body: Vec<u8>,
    pub(super) end: AnswerEnd,
}

impl Question {
    pub(super) async fn ask(&self, world: &Arc<World>) -> SeenAnswer {
        let mut seen = SeenAnswer { status: None, body: Vec::new(), end: AnswerEnd::RouterGone };
        let Some(router) = world.router() else { return seen };
        let Some(wire) = router.accept_client() else { return seen };
        world.trace.note(format_args!("q{} is asked", self.number));
        let patience = if let Pace::Leaves(after) = self.pace { after } else { PATIENCE };
        let exchanged = timeout(patience, self.exchange(TokioIo::new(wire), &mut seen)).await;
        seen.end = match exchanged {
            _ if router.has_ended() => AnswerEnd::RouterGone,
            Ok(Ok(true)) => AnswerEnd::Clean,
            Ok(Ok(false)) => AnswerEnd::Left,
            Ok(Err(error)) => AnswerEnd::Broken(error.to_string()),
            Err(_) if matches!(self.pace, Pace::Leaves(_)) => AnswerEnd::Left,
            Err(_) => AnswerEnd::Never,
        };
        seen
    }

    /// Sends the request and reads the answer. Returns `true` if it was read to its end.
    async fn exchange(&self, wire: TokioIo<super::link::LinkEnd>, seen: &mut SeenAnswer) -> Result<bool, hyper::Error> {
        let (mut sender, connection) = http1::handshake(wire).await?;
        let _connection = AbortOnDropHandle::new(tokio::spawn(async { drop(connection.await) }));
        let request = Request::post(self.path()).header(header::HOST, "router").header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Full::new(Bytes::from(self.body()))).expect("paths are written in code");
        let answer = sender.send_request(request).await?;
        seen.status = Some(answer.status().as_u16());
        let mut body = answer.into_body();
        loop {
            match self.pace {
                Pace::Pauses(pause) => sleep(pause).await,
                // The router closes the connection unobserved.
                Pace::Stalls(after) if seen.body.len() >= after => {
                    sleep(Duration::from_secs(60)).await;
                    return Ok(false);
                }
                _ => {}
            }
            match body.frame().await {
                Some(frame) => seen.body.extend_from_slice(frame?.data_ref().map_or(&[], |bytes| bytes)),
                None => return Ok(true),
            }
        }
    }
}
