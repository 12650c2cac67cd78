//! Routes that vLLM's Rust front-end lacks and a chat can replace.
//!
//! If a replica that may get a request lacks its route, the request becomes a chat, which every
//! replica answers. The answer is translated to the route's form.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use hostler_api::Route;
use http::header::{self, HeaderValue};
use http::{Method, Response, StatusCode};
use serde::Deserialize;
use serde_json::Value;

use super::awaited_answer::{Awaited, held_reply};
use super::messages_translator::{self, MessagesTranslator};
use super::reply::{self, EdgeBody};
use super::responses_translator::{self, ResponseFields, ResponsesTranslator};
use super::translation::{StreamTranslation, TranslatedBody, translate_whole, translated_headers};
use crate::dispatch;
use crate::inbound::{Edge, Explanation, InboundRequest, Prepared, Rejection, headers, owner_share};
use crate::keys::Caller;

/// A route that a chat can replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChatFallback {
    Messages,
    CountTokens,
    Responses,
}

/// The request sent to an engine instead.
struct FallbackRequest {
    route: Route,
    body: Value,
    is_stream: bool,
    form: AnswerForm,
}

/// The form that its answer is translated to.
enum AnswerForm {
    Message,
    TokenCount,
    Response(ResponseFields),
}

impl ChatFallback {
    pub(super) fn from_request(method: &Method, path: &str) -> Option<Self> {
        let asked = Some(Route::of(path)).filter(|_| method == Method::POST)?;
        [Self::Messages, Self::CountTokens, Self::Responses].into_iter().find(|fallback| fallback.route() == asked)
    }

    pub(super) fn route(self) -> Route {
        match self {
            Self::Messages => Route::Messages,
            Self::CountTokens => Route::CountTokens,
            Self::Responses => Route::Responses,
        }
    }

    fn engine_request(self, body: &[u8]) -> Result<FallbackRequest, String> {
        match self {
            Self::Messages => messages_translator::chat_request(body).map(|(body, is_stream)| FallbackRequest {
                route: Route::ChatCompletions,
                body,
                is_stream,
                form: AnswerForm::Message,
            }),
            Self::CountTokens => messages_translator::count_request(body).map(|body| FallbackRequest {
                route: Route::Tokenize,
                body,
                is_stream: false,
                form: AnswerForm::TokenCount,
            }),
            Self::Responses => responses_translator::chat_request(body).map(|(body, fields, is_stream)| FallbackRequest {
                route: Route::ChatCompletions,
                body,
                is_stream,
                form: AnswerForm::Response(fields),
            }),
        }
    }
}

impl AnswerForm {
    /// Translates an engine's whole answer to this form.
    fn translate_answer(&self, body: &[u8]) -> Result<Vec<u8>, String> {
        match self {
            Self::Message => messages_translator::translate_answer(body),
            Self::TokenCount => messages_translator::translate_count(body),
            Self::Response(fields) => responses_translator::translate_answer(fields, body, SystemTime::now()),
        }
    }

    /// Translates an engine's event stream to this form.
    fn stream_translation(self) -> StreamTranslation {
        match self {
            Self::Message | Self::TokenCount => StreamTranslation::new(MessagesTranslator::default()),
            Self::Response(fields) => StreamTranslation::new(ResponsesTranslator::new(fields)),
        }
    }
}

/// A request that was read for a route that some replicas lack.
struct ReadRequest {
    prepared: Prepared,
    /// The translation of the answer, if a chat replaces the route, and whether the answer streams.
    translation: Option<(AnswerForm, bool)>,
}

impl Edge {
    /// Whether a chat must replace this route, because a replica that may get the request lacks it.
    fn needs_fallback(&self, route: ChatFallback, body: &[u8]) -> bool {
        #[derive(Deserialize)]
        struct Named {
            model: Option<String>,
        }
        let view = self.dispatch.fleet.view();
        // An unreadable body has no model, and is refused by whoever reads it.
        let model = serde_json::from_slice::<Named>(body).ok().and_then(|named| named.model);
        let model = model.as_deref();
        let is_there = || view.eligible(model, &[]).any(|(_, replica)| replica.has_route(route.route().path()));
        let needs_route = route == ChatFallback::Responses && responses_translator::needs_kept_responses(body) && is_there();
        !needs_route && view.may_lack_route(model, route.route())
    }

    fn read_for_route(&self, route: ChatFallback, mut inbound: InboundRequest) -> Result<ReadRequest, Rejection> {
        inbound.count_translation()?;
        if !self.needs_fallback(route, &inbound.body) {
            return Ok(ReadRequest { prepared: self.prepare(inbound)?, translation: None });
        }
        let FallbackRequest { route: engine_route, body, is_stream, mut form } =
            route.engine_request(&inbound.body).map_err(Rejection::Malformed)?;
        if let AnswerForm::Response(fields) = &mut form {
            fields.keep_in(|bytes| self.hold_memory(&inbound, bytes))?;
        }
        inbound.replace_body(engine_route, body.to_string());
        Ok(ReadRequest { prepared: self.prepare(inbound)?, translation: Some((form, is_stream)) })
    }

    /// Has an engine answer a request for a route that some replicas lack, on the route or as a
    /// chat whose answer is translated to the route's form.
    pub(super) async fn answer_on_any_route(self: &Arc<Self>, route: ChatFallback, inbound: InboundRequest) -> Response<EdgeBody> {
        let (caller, entry) = (inbound.caller.clone(), inbound.log_entry.clone());
        let explanation = self.explanation(&inbound.headers, &caller);
        let read = self.read_on_pool((inbound.body.len(), &caller), move |edge| edge.read_for_route(route, inbound)).await;
        let (prepared, translation) = match read {
            Ok(ReadRequest { prepared, translation }) => (Ok(prepared), translation),
            Err(rejection) => (Err(rejection), None),
        };
        let Some((form, is_stream)) = translation else {
            return self.answer_prepared(prepared, &caller, &entry, explanation).await;
        };
        let dialect = is_stream.then(|| route.route().dialect());
        match self.await_answer(prepared, &caller, &entry, dialect).await {
            Awaited::Answered(Ok(mut answer)) => {
                answer.body.send_keep_alives(self.config.stream_keepalive);
                self.translate_for_route(form, answer, is_stream, (&caller, explanation)).await
            }
            Awaited::Answered(Err(rejection)) => reply::rejection(&rejection),
            Awaited::Held(mut stream, id) => {
                stream.translate(form.stream_translation());
                held_reply(stream, id)
            }
        }
    }

    async fn translate_for_route(
        &self,
        form: AnswerForm,
        answer: dispatch::Answer,
        is_asked_to_stream: bool,
        (caller, explanation): (&Caller, Explanation),
    ) -> Response<EdgeBody> {
        let status = StatusCode::from_u16(answer.head.status).unwrap_or(StatusCode::BAD_GATEWAY);
        let (mut heads, is_stream) = translated_headers(answer.head.headers, &answer.decision, explanation);
        let mut response = if status.is_success() && is_asked_to_stream && is_stream {
            heads.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
            headers::disable_buffering(&mut heads);
            Response::new(EdgeBody::Translated(Box::new(TranslatedBody::new(answer.body, form.stream_translation()))))
        } else {
            // Local replies are errors in OpenAI's form, too.
            let translate = move |body: Bytes| if status.is_success() { form.translate_answer(&body).map(Bytes::from) } else { Ok(body) };
            match translate_whole((&self.body_memory, &self.readers), owner_share(caller), answer.body, translate).await {
                Ok(body) => reply::json(status, body),
                Err(error) => reply::error(error.status(), error.kind(), &error.to_string()),
            }
        };
        response.headers_mut().extend(heads);
        reply::add_retry_if_full(response)
    }
}
