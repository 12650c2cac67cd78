//! Ollama's API: what its clients ask becomes a request for an engine, goes the way of every other, and the answer is told in their form.

mod answer;
mod catalog;
mod messages;
mod options;
mod request;
mod stream;

pub(super) use stream::Retold;

use std::time::SystemTime;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use serde_json::Value;
use tokio::time::Instant;

use super::access::Entry;
use super::headers;
use super::reply::{self, EdgeBody};
use super::routes::Edge;
use super::submit::Inquiry;
use crate::dispatch::{self, Relay};
use crate::keys::Caller;
use crate::metrics::RefusalReason;
use answer::{error, loaded, message_of, whole};
use request::{Asked, Form, Wanted};
use stream::Teller;

/// A whole answer longer than this is not retold. Embeddings are the largest: of two thousand texts they have some 100 MB in JSON.
const MOST_ANSWER_BYTES: usize = 256 * 1024 * 1024;

/// What some clients look for at `/` before they go on.
const RUNNING: &str = "Hostler is running. To clients of its API, Ollama is running.\n";

/// Whether a path is one of Ollama's.
pub(super) fn is_ours(path: &str) -> bool {
    path == "/" || path == "/api" || path.starts_with("/api/")
}

/// An error that the edge has made in OpenAI's form, in Ollama's; any other answer as it is.
pub(super) fn retold(response: Response<EdgeBody>) -> Response<EdgeBody> {
    if response.status().is_success() {
        return response;
    }
    response.map(|body| match body {
        EdgeBody::Own(Some(bytes)) => EdgeBody::Own(Some(error(&message_of(&bytes)).to_string().into())),
        other => other,
    })
}

/// The answer to a request for what is not done here, or not by this method.
fn refused(path: &str) -> Response<EdgeBody> {
    match path {
        "/" | "/api/version" | "/api/tags" | "/api/ps" => wrong_method("GET, HEAD"),
        "/api/show" | "/api/chat" | "/api/generate" | "/api/embed" | "/api/embeddings" => wrong_method("POST"),
        "/api/pull" | "/api/push" | "/api/create" | "/api/copy" | "/api/delete" => for_operators(),
        path if path.starts_with("/api/blobs/") => for_operators(),
        path => failed(StatusCode::NOT_FOUND, &format!("there is no {path} here")),
    }
}

impl Edge {
    /// Answers a request to one of Ollama's paths.
    pub(super) async fn ollama(&self, request: Request<Incoming>, caller: Caller) -> Response<EdgeBody> {
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        let posts = request.method() == Method::POST;
        match request.uri().path() {
            "/" if reads => text(RUNNING),
            "/api/version" if reads => told(&catalog::version()),
            "/api/tags" if reads => told(&self.tags(&caller)),
            "/api/ps" if reads => told(&self.running(&caller)),
            "/api/show" if posts => self.show(request, &caller).await,
            "/api/chat" if posts => self.retell(Form::Chat, request, caller).await,
            "/api/generate" if posts => self.retell(Form::Generate, request, caller).await,
            "/api/embed" if posts => self.retell(Form::Embed, request, caller).await,
            "/api/embeddings" if posts => self.retell(Form::Embedding, request, caller).await,
            path => reply::unread(request.body(), refused(path)),
        }
    }

    /// Has an engine answer, and tells its answer in Ollama's form.
    async fn retell(&self, form: Form, request: Request<Incoming>, caller: Caller) -> Response<EdgeBody> {
        let begun = Instant::now();
        let Read { mut headers, entry, body } = match self.taken_in(request, &caller).await {
            Ok(read) => read,
            Err(response) => return *response,
        };
        let Wanted { model, form, streams, asked } = match Wanted::read(form, &body) {
            Ok(wanted) => wanted,
            Err(message) => return self.malformed(&entry, &message),
        };
        let Some(asked) = asked else {
            return match self.known(&model, &caller) {
                Ok(_) => told(&loaded(form, &model, SystemTime::now())),
                Err(refusal) => reply::refusal(&refusal),
            };
        };
        let explain = headers.get(headers::EXPLAIN).is_some_and(|value| value == "1");
        // Clients send JSON under any name, and cannot know what else an engine might answer with.
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.remove(header::ACCEPT);
        headers.remove(header::ACCEPT_ENCODING);
        let path = PathAndQuery::from_static(asked.path);
        let body = self.for_engine(&model, asked);
        let inquiry = Inquiry { method: Method::POST, path, headers, body, caller, entry, begun };
        match self.submit(inquiry).await {
            Ok(answer) => retell_answer(Reader { form, model, streams, begun, explain }, answer).await,
            Err(declined) => reply::declined(&declined),
        }
    }

    /// The body of a request as an engine reads it.
    fn for_engine(&self, model: &str, asked: Asked) -> Bytes {
        let Asked { mut fields, unlimited, .. } = asked;
        let model = self.resolved(model);
        if let Some(longest) = self.longest_context(&model).filter(|_| unlimited) {
            fields.insert("max_tokens".to_owned(), longest.into());
        }
        fields.insert("model".to_owned(), model.into());
        Value::Object(fields).to_string().into()
    }

    /// Reads a request to its end; an answer where that cannot be.
    async fn taken_in(&self, request: Request<Incoming>, caller: &Caller) -> Result<Read, Box<Response<EdgeBody>>> {
        let (mut head, body) = request.into_parts();
        let entry = head.extensions.remove::<Entry>().unwrap_or_default();
        let body = self.read_body(caller, &head.headers, body).await.inspect_err(|_| {
            self.dispatch.metrics.count_refusal(RefusalReason::Request);
            entry.refused("body");
        })?;
        Ok(Read { headers: head.headers, entry, body })
    }

    /// A request that cannot be understood.
    fn malformed(&self, entry: &Entry, message: &str) -> Response<EdgeBody> {
        self.dispatch.metrics.count_refusal(RefusalReason::Request);
        entry.refused("malformed");
        failed(StatusCode::BAD_REQUEST, message)
    }
}

/// A request that was read to its end.
struct Read {
    headers: HeaderMap,
    entry: Entry,
    body: Bytes,
}

/// How an answer is to be told.
struct Reader {
    form: Form,
    model: String,
    streams: bool,
    begun: Instant,
    explain: bool,
}

async fn retell_answer(reader: Reader, answer: dispatch::Answer) -> Response<EdgeBody> {
    let Reader { form, model, streams, begun, explain } = reader;
    let status = StatusCode::from_u16(answer.head.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let mut heads = headers::incoming(answer.head.headers);
    headers::explain(&mut heads, &answer.decision, explain);
    let is_stream = heads.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    // They speak of the engine's body.
    for name in [header::CONTENT_TYPE, header::CONTENT_LENGTH, header::CONTENT_ENCODING] {
        heads.remove(name);
    }
    let mut response = if status.is_success() && streams && is_stream {
        heads.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
        Response::new(EdgeBody::Retold(Box::new(Retold::new(answer.body, Teller::new(form, model, begun)))))
    } else {
        match collected(answer.body).await {
            Ok(body) if !status.is_success() => failed(status, &message_of(&body)),
            Ok(body) => match whole(form, &model, &body, begun.elapsed(), SystemTime::now()) {
                Ok(body) => reply::json(StatusCode::OK, body),
                Err(message) => failed(StatusCode::BAD_GATEWAY, &message),
            },
            Err(message) => failed(StatusCode::BAD_GATEWAY, &message),
        }
    };
    response.headers_mut().extend(heads);
    if response.status() == StatusCode::SERVICE_UNAVAILABLE { reply::retry_after(response) } else { response }
}

/// All of an answer that is no stream. The relay sees to it that the engine does not pause for ever, and aborts when the client leaves.
async fn collected(body: Box<Relay>) -> Result<Bytes, String> {
    match Limited::new(body, MOST_ANSWER_BYTES).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err("the answer is too large: ask for less at once".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn told(body: &Value) -> Response<EdgeBody> {
    reply::json(StatusCode::OK, body.to_string())
}

fn failed(status: StatusCode, message: &str) -> Response<EdgeBody> {
    reply::json(status, error(message).to_string())
}

fn text(body: &'static str) -> Response<EdgeBody> {
    let mut response = Response::new(EdgeBody::Own(Some(Bytes::from_static(body.as_bytes()))));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

fn wrong_method(allowed: &'static str) -> Response<EdgeBody> {
    let mut response = failed(StatusCode::METHOD_NOT_ALLOWED, &format!("this path takes {allowed}"));
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

/// What would change a replica behind the back of all routers.
fn for_operators() -> Response<EdgeBody> {
    failed(StatusCode::FORBIDDEN, "models are served by the fleet's operator: clients neither pull nor push, create, copy or delete them")
}

#[cfg(test)]
mod tests;
