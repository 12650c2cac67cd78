//! The way of every request into the fleet, whatever API it came by: peeked at, admitted, dispatched.

use bytes::Bytes;
use hostler_proto::agent::v1::RequestHead;
use http::Method;
use http::header::{self, HeaderMap};
use http::uri::PathAndQuery;
use tokio::time::Instant;

use super::headers;
use super::peek::{Peek, peek};
use super::routes::Edge;
use crate::admission::{Estimate, Limited};
use crate::dispatch::{Answer, Dialect, Outgoing, Refusal};
use crate::keys::Caller;
use crate::metrics::Refused;
use crate::placement::Asked;

/// Bytes of text that make a token, about.
const BYTES_PER_TOKEN: usize = 4;

/// A request for an engine, in the engine's own API, and who sends it.
#[derive(Debug)]
pub(crate) struct Inquiry {
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    /// As the client sent them; those of one connection are left out on the way.
    pub(crate) headers: HeaderMap,
    /// Complete.
    pub(crate) body: Bytes,
    pub(crate) caller: Caller,
    /// When it came.
    pub(crate) begun: Instant,
}

/// Why a request got no engine's answer. Each API tells it in its own form.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Declined {
    /// It cannot be understood.
    #[error("{0}")]
    Malformed(String),
    /// Its caller may not send it.
    #[error("{0}")]
    Forbidden(String),
    /// Its caller, or the router, has too much in flight.
    #[error(transparent)]
    Limited(#[from] Limited),
    /// The fleet cannot answer it.
    #[error(transparent)]
    Fleet(#[from] Refusal),
}

impl Declined {
    /// How it is counted.
    fn reason(&self) -> Refused {
        match self {
            Self::Malformed(_) | Self::Forbidden(_) | Self::Fleet(Refusal::UnknownModel { .. }) => Refused::Request,
            Self::Limited(_) | Self::Fleet(Refusal::Overloaded { .. }) => Refused::Full,
            Self::Fleet(Refusal::Poisonous(_)) => Refused::Poison,
            Self::Fleet(_) => Refused::Fleet,
        }
    }
}

impl Edge {
    /// Has an engine answer a request.
    ///
    /// # Errors
    /// When no engine does; an engine's own refusal is an answer.
    pub(crate) async fn submit(&self, inquiry: Inquiry) -> Result<Answer, Declined> {
        let submitted = self.submit_uncounted(inquiry).await;
        submitted.inspect_err(|declined| self.dispatch.metrics.refused(declined.reason()))
    }

    async fn submit_uncounted(&self, inquiry: Inquiry) -> Result<Answer, Declined> {
        let Inquiry { method, path, headers, body, caller, begun } = inquiry;
        let peek = peeked(&headers, &body).map_err(Declined::Malformed)?;
        if let Some(model) = peek.model.as_deref().filter(|model| !caller.may_use(model)) {
            return Err(Declined::Forbidden(format!("the key `{}` may not use the model `{model}`", caller.key)));
        }
        let text: usize = peek.text.iter().map(|text| text.len()).sum();
        let estimate = Estimate { input: (text / BYTES_PER_TOKEN) as u64, output: peek.most_output.unwrap_or(0), bytes: body.len() as u64 };
        let permit = self.admission.admit(&caller, estimate)?;
        let route = path.path();
        let outgoing = Outgoing {
            id: fastrand::u64(1..),
            priority: headers::priority(&headers).or(peek.priority).unwrap_or(0),
            tenant: headers::tenant(&headers, peek.user.as_deref()),
            client_id: headers::client_id(&headers),
            asked: Asked {
                model: peek.model.filter(|model| !model.is_empty()),
                path: route.to_owned(),
                text: if computes_nothing(route) {
                    Vec::new()
                } else {
                    peek.text.into_iter().map(|text| body.slice_ref(text.as_bytes())).collect()
                },
                salt: peek.salt.unwrap_or_default(),
                most_output: if generates(route) { peek.most_output } else { Some(0) },
                streams: peek.stream,
                body: body.clone(),
            },
            dialect: Dialect::of(route),
            head: RequestHead {
                method: method.as_str().to_owned(),
                path: path.as_str().to_owned(),
                headers: headers::outgoing(&headers),
                body_bytes: body.len() as u64,
                guided: peek.guided,
                ..RequestHead::default()
            },
            body,
            begun,
        };
        Ok(self.dispatch.send(outgoing, permit).await?)
    }
}

/// Routes that ask the engine for nothing that its accelerator computes.
fn computes_nothing(path: &str) -> bool {
    matches!(path, "/tokenize" | "/detokenize" | "/version")
}

/// Routes whose answers are generated, a token a step.
fn generates(path: &str) -> bool {
    matches!(path, "/v1/chat/completions" | "/v1/completions" | "/v1/responses" | "/v1/messages")
}

/// What a JSON body says of the request. Bodies of other types are for the engine alone to understand.
fn peeked<'a>(headers: &HeaderMap, body: &'a Bytes) -> Result<Peek<'a>, String> {
    let content_type = headers.get(header::CONTENT_TYPE).map_or("", |value| value.to_str().unwrap_or_default());
    if body.is_empty() || !content_type.trim_start().to_ascii_lowercase().starts_with("application/json") {
        return Ok(Peek::default());
    }
    peek(body).map_err(|error| error.to_string())
}
