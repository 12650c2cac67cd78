//! Ollama's API: translates clients' requests for an engine, dispatches them like all others, and
//! translates the answers back.

mod catalog;

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::ollama_translator::{
    OllamaRequest, OllamaRoute, OllamaTranslator, OpenAiRequest, error_body, model_loaded_answer, translate_answer,
};
use super::reply::{self, EdgeBody};
use super::translation::{StreamTranslation, TranslatedBody, error_message, translate_whole, translated_headers};
use crate::access_log::AccessEntry;
use crate::dispatch;
use crate::inbound::{Edge, Explanation, InboundRequest, Prepared, Rejection, headers, owner_share};
use crate::keys::Caller;
use crate::outcome::RefusalReason;

/// The page at `/`. Some clients look for it before they go on.
const ROOT_PAGE: &str = "Hostler is running. To clients of its API, Ollama is running.\n";

pub(super) fn is_ollama_path(path: &str) -> bool {
    path == "/" || path == "/api" || path.starts_with("/api/")
}

/// Turns an error of the edge in OpenAI's form into Ollama's; leaves any other answer as it is.
pub(super) fn translate_error(response: Response<EdgeBody>) -> Response<EdgeBody> {
    if response.status().is_success() {
        return response;
    }
    response.map(|body| match body {
        EdgeBody::Local(Some(bytes)) => EdgeBody::Local(Some(error_body(&error_message(&bytes)).to_string().into())),
        other => other,
    })
}

/// Whether a route at this path would change a replica behind the back of all routers.
fn is_operators_path(path: &str) -> bool {
    matches!(path, "/api/push" | "/api/create" | "/api/copy" | "/api/delete") || path.starts_with("/api/blobs/")
}

/// Refuses a request that Hostler does not support, or not with this method.
fn refuse_path(path: &str) -> Response<EdgeBody> {
    match path {
        "/" | "/api/version" | "/api/tags" | "/api/ps" => method_not_allowed("GET, HEAD"),
        "/api/show" | "/api/pull" | "/api/chat" | "/api/generate" | "/api/embed" | "/api/embeddings" => method_not_allowed("POST"),
        path => error_response(StatusCode::NOT_FOUND, &format!("there is no {path} here")),
    }
}

/// A request as it was read.
struct OllamaReading {
    model: String,
    route: OllamaRoute,
    is_stream: bool,
    /// `None` if the client only wants its model loaded.
    prepared: Option<Prepared>,
}

impl Edge {
    pub(super) async fn answer_ollama(
        self: &Arc<Self>,
        request: Box<Request<Incoming>>,
        caller: &Caller,
        entry: &AccessEntry,
    ) -> Response<EdgeBody> {
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        let posts = request.method() == Method::POST;
        match request.uri().path() {
            "/" if reads => text_response(ROOT_PAGE),
            "/api/version" if reads => json_response(&catalog::version()),
            "/api/tags" if reads => json_response(&self.list_tags(caller)),
            "/api/ps" if reads => json_response(&self.list_running(caller)),
            "/api/show" if posts => self.show_ollama_model(request, caller, entry).await,
            "/api/pull" if posts => self.pull_ollama_model(request, caller, entry).await,
            "/api/chat" if posts => self.proxy_translated(OllamaRoute::Chat, request, caller, entry).await,
            "/api/generate" if posts => self.proxy_translated(OllamaRoute::Generate, request, caller, entry).await,
            "/api/embed" if posts => self.proxy_translated(OllamaRoute::Embed, request, caller, entry).await,
            "/api/embeddings" if posts => self.proxy_translated(OllamaRoute::Embedding, request, caller, entry).await,
            path if is_operators_path(path) => reply::refuse_unread(request, operators_only()).await,
            path => {
                self.dispatch.metrics.count_refusal(RefusalReason::NoRoute);
                let refused = refuse_path(path);
                reply::refuse_unread(request, refused).await
            }
        }
    }

    /// Has an engine answer, and translates the answer to Ollama's form.
    async fn proxy_translated(
        self: &Arc<Self>,
        form: OllamaRoute,
        request: Box<Request<Incoming>>,
        caller: &Caller,
        entry: &AccessEntry,
    ) -> Response<EdgeBody> {
        let inbound = match self.read_request(request, caller, entry).await {
            Ok(read) => read,
            Err(unread) => return reply::unread_body(&unread),
        };
        let (received_at, explanation) = (inbound.received_at, self.explanation(&inbound.headers, caller));
        let read = self.read_on_pool((inbound.body.len(), caller), move |edge| edge.read_for_ollama(form, inbound)).await;
        let OllamaReading { model, route, is_stream, prepared } = match read {
            Ok(read) => read,
            Err(rejection) => {
                self.count_rejection(&rejection, entry);
                return reply::rejection(&rejection);
            }
        };
        let Some(prepared) = prepared else {
            return match self.find_model(&model, caller) {
                Ok(_) => json_response(&model_loaded_answer(route, &model, SystemTime::now())),
                Err(refusal) => self.refuse(refusal, entry),
            };
        };
        match self.send(Ok(prepared), caller, entry).await {
            Ok(answer) => {
                let options = TranslationOptions { route, model, is_stream, received_at, explanation };
                self.translate_for_ollama(options, answer, caller).await
            }
            Err(rejection) => reply::rejection(&rejection),
        }
    }

    fn read_for_ollama(&self, form: OllamaRoute, mut inbound: InboundRequest) -> Result<OllamaReading, Rejection> {
        inbound.count_translation()?;
        let OllamaRequest { model, route, is_stream, engine_request } =
            OllamaRequest::parse(form, &inbound.body).map_err(Rejection::Malformed)?;
        let prepared = engine_request.map(|asked| {
            inbound.replace_body(asked.engine_route, self.engine_body(&model, asked));
            self.prepare(inbound)
        });
        Ok(OllamaReading { prepared: prepared.transpose()?, model, route, is_stream })
    }

    /// The body of a request as an engine reads it.
    fn engine_body(&self, model: &str, asked: OpenAiRequest) -> String {
        let OpenAiRequest { mut fields, needs_token_limit: unlimited, .. } = asked;
        let model = self.resolve_model(model);
        if let Some(longest) = self.longest_context(&model).filter(|_| unlimited) {
            fields.insert("max_tokens".to_owned(), longest.into());
        }
        fields.insert("model".to_owned(), model.into());
        Value::Object(fields).to_string()
    }

    async fn translate_for_ollama(&self, options: TranslationOptions, answer: dispatch::Answer, caller: &Caller) -> Response<EdgeBody> {
        let TranslationOptions { route, model, is_stream: streams, received_at, explanation } = options;
        let status = StatusCode::from_u16(answer.head.status).unwrap_or(StatusCode::BAD_GATEWAY);
        let (mut heads, is_stream) = translated_headers(answer.head.headers, &answer.decision, explanation);
        let mut response = if status.is_success() && streams && is_stream {
            heads.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
            headers::disable_buffering(&mut heads);
            let translation = StreamTranslation::new(OllamaTranslator::new(route, model, received_at));
            Response::new(EdgeBody::Translated(Box::new(TranslatedBody::new(answer.body, translation))))
        } else {
            let translate = move |body: Bytes| match status.is_success() {
                true => translate_answer(route, &model, &body, received_at.elapsed(), SystemTime::now()).map(Bytes::from),
                false => Ok(error_body(&error_message(&body)).to_string().into()),
            };
            match translate_whole((&self.body_memory, &self.readers), owner_share(caller), answer.body, translate).await {
                Ok(body) => reply::json(status, body),
                Err(error) => error_response(error.status(), &error.to_string()),
            }
        };
        response.headers_mut().extend(heads);
        reply::add_retry_if_full(response)
    }

    fn malformed(&self, entry: &AccessEntry, message: &str) -> Response<EdgeBody> {
        self.dispatch.metrics.count_refusal(RefusalReason::Request);
        entry.record_refusal("malformed");
        error_response(StatusCode::BAD_REQUEST, message)
    }
}

struct TranslationOptions {
    route: OllamaRoute,
    model: String,
    is_stream: bool,
    received_at: Instant,
    explanation: Explanation,
}

fn json_response(body: &Value) -> Response<EdgeBody> {
    reply::json(StatusCode::OK, body.to_string())
}

/// The end of an order that had nothing to do, as the one line of a stream or whole.
fn success_response(is_stream: bool) -> Response<EdgeBody> {
    let done = json!({"status": "success"});
    let mut response = if is_stream { reply::json(StatusCode::OK, format!("{done}\n")) } else { json_response(&done) };
    if is_stream {
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    }
    response
}

fn error_response(status: StatusCode, message: &str) -> Response<EdgeBody> {
    reply::json(status, error_body(message).to_string())
}

fn text_response(body: &'static str) -> Response<EdgeBody> {
    let mut response = Response::new(EdgeBody::Local(Some(Bytes::from_static(body.as_bytes()))));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

fn method_not_allowed(allowed: &'static str) -> Response<EdgeBody> {
    let mut response = error_response(StatusCode::METHOD_NOT_ALLOWED, &format!("this path takes {allowed}"));
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

fn operators_only() -> Response<EdgeBody> {
    error_response(
        StatusCode::FORBIDDEN,
        "models are served by the fleet's operator: clients neither pull nor push, create, copy or delete them",
    )
}

#[cfg(test)]
mod tests;
