//! Routes that vLLM's Rust front-end lacks and a chat can stand for. Where a replica that may get a request lacks its route, the request
//! becomes a chat, which every replica answers, and the answer is told in the route's form.

use http::header::{self, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, Response, StatusCode};
use serde::Deserialize;
use serde_json::Value;

use super::messages_translator::{self, MessagesTranslator};
use super::reply::{self, EdgeBody};
use super::translation::{TranslatedBody, collect_body, translated_headers};
use crate::dispatch;
use crate::inbound::{Edge, InboundRequest};
use crate::outcome::RefusalReason;

/// A route that a chat can stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChatFallback {
    Messages,
    CountTokens,
}

impl ChatFallback {
    pub(super) fn from_request(method: &Method, path: &str) -> Option<Self> {
        match path {
            "/v1/messages" if method == Method::POST => Some(Self::Messages),
            "/v1/messages/count_tokens" if method == Method::POST => Some(Self::CountTokens),
            _ => None,
        }
    }

    fn path(self) -> &'static str {
        match self {
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
        }
    }

    /// What an engine is asked instead: where, with which body, and whether for a stream.
    fn engine_request(self, body: &[u8]) -> Result<(&'static str, Value, bool), String> {
        match self {
            Self::Messages => messages_translator::chat_request(body).map(|(body, streams)| ("/v1/chat/completions", body, streams)),
            Self::CountTokens => messages_translator::count_request(body).map(|body| ("/tokenize", body, false)),
        }
    }

    /// An engine's whole answer in the route's form.
    fn translate_answer(self, body: &[u8]) -> Result<Vec<u8>, String> {
        match self {
            Self::Messages => messages_translator::translate_answer(body),
            Self::CountTokens => messages_translator::translate_count(body),
        }
    }
}

impl Edge {
    /// The route again, if a replica that may get the request lacks it.
    pub(super) async fn choose_fallback(&self, route: ChatFallback, body: &[u8]) -> Option<ChatFallback> {
        #[derive(Deserialize)]
        struct Named {
            model: Option<String>,
        }
        // Until the first agents are here nobody knows which route is where.
        self.dispatch.await_startup_grace(None).await;
        let view = self.dispatch.fleet.view();
        let lacks = |model: Option<&str>| view.may_lack_route(model, route.path());
        if !lacks(None) {
            return None;
        }
        // What cannot be read has no model, and is refused by whoever reads it.
        let model = serde_json::from_slice::<Named>(body).ok().and_then(|named| named.model);
        lacks(model.as_deref()).then_some(route)
    }

    /// Has an engine answer a chat, and tells its answer in the route's form.
    pub(super) async fn answer_with_chat(&self, route: ChatFallback, inquiry: InboundRequest, explain: bool) -> Response<EdgeBody> {
        let (path, body, streams) = match route.engine_request(&inquiry.body) {
            Ok(asked) => asked,
            Err(message) => {
                self.dispatch.metrics.count_refusal(RefusalReason::Request);
                inquiry.log_entry.record_refusal("malformed");
                return reply::error(StatusCode::BAD_REQUEST, "BadRequestError", &message);
            }
        };
        let mut headers = inquiry.headers;
        // They speak of the client's body and of what it makes of the answer's.
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.remove(header::ACCEPT);
        headers.remove(header::ACCEPT_ENCODING);
        let inquiry = InboundRequest {
            path: PathAndQuery::from_static(path),
            headers,
            body: body.to_string().into(),
            // The client's body is gone.
            reservation: None,
            ..inquiry
        };
        match self.submit(inquiry).await {
            Ok(answer) => translate_response(route, answer, streams, explain).await,
            Err(declined) => reply::rejection(&declined),
        }
    }
}

async fn translate_response(route: ChatFallback, answer: dispatch::Answer, streams: bool, explain: bool) -> Response<EdgeBody> {
    let status = StatusCode::from_u16(answer.head.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let (mut heads, is_stream) = translated_headers(answer.head.headers, &answer.decision, explain);
    let mut response = if status.is_success() && streams && is_stream {
        heads.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        Response::new(EdgeBody::Translated(Box::new(TranslatedBody::new(answer.body, MessagesTranslator::default()))))
    } else {
        let bad_gateway = |message: &str| reply::error(StatusCode::BAD_GATEWAY, "BadGatewayError", message);
        match collect_body(answer.body).await {
            // An error in OpenAI's form, which local replies are told in.
            Ok(body) if !status.is_success() => reply::json(status, body),
            Ok(body) => match route.translate_answer(&body) {
                Ok(body) => reply::json(StatusCode::OK, body),
                Err(message) => bad_gateway(&message),
            },
            Err(message) => bad_gateway(&message),
        }
    };
    response.headers_mut().extend(heads);
    if response.status() == StatusCode::SERVICE_UNAVAILABLE { reply::add_retry_after(response) } else { response }
}
