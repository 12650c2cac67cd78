//! The page's chat: a request goes through the edge as any client's does, over a connection in
//! memory. So keys, tenants, limits and the access log are those of clients.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::StatusCode;
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use hostler_boot::Shutdown;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, RETRY_AFTER};
use http::{Method, Request, Uri};
use http_body::Frame;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::io::duplex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::assets::add_headers;
use super::routes::refuse;
use crate::edge::serve_in_memory;
use crate::inbound::Edge;
use crate::inbound::headers::ID_HEADER;
use crate::keys::{PageSessions, Secret, X_API_KEY, page_session};
use hostler_boot::reachable_here;

/// Most answers at one time. People read them; programs have the edge.
const MAX_CHATS: usize = 16;

/// Time for a page to send a conversation. It holds a place meanwhile.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Largest request. A conversation of 100 pages has some 300 kB.
const MAX_BODY_BYTES: usize = 1 << 20;

/// Bytes of an answer that wait for the page to read them.
const BUFFER_BYTES: usize = 64 * 1024;

/// Where clients reach the edge.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EdgePlace {
    pub(crate) scheme: &'static str,
    pub(crate) address: SocketAddr,
}

/// The way from the page into the edge.
#[derive(Debug)]
pub(crate) struct PageChat {
    edge: Arc<Edge>,
    sessions: PageSessions,
    place: EdgePlace,
    serving: Shutdown,
    places: Arc<Semaphore>,
}

impl PageChat {
    pub(crate) fn new(edge: &Arc<Edge>, sessions: PageSessions, place: EdgePlace) -> Arc<Self> {
        let place = EdgePlace { address: reachable_here(place.address), ..place };
        let (edge, serving) = (edge.clone(), edge.shutdown.clone());
        Arc::new(Self { edge, sessions, place, serving, places: Arc::new(Semaphore::new(MAX_CHATS)) })
    }

    /// Sends the page's request through the edge.
    async fn ask(&self, headers: &HeaderMap, body: Bytes, place: OwnedSemaphorePermit) -> Result<Response, hyper::Error> {
        let (here, there) = duplex(BUFFER_BYTES);
        let (edge, serving) = (self.edge.clone(), self.serving.clone());
        self.serving.tasks().spawn(async move { serve_in_memory(there, edge, &serving).await });
        let (mut sender, connection) = http1::handshake(TokioIo::new(here)).await?;
        let connection = AbortOnDropHandle::new(tokio::spawn(async { drop(connection.await) }));
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static("/v1/chat/completions");
        request.headers_mut().insert(HOST, HeaderValue::from_static("page"));
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = self.credential(headers) {
            request.headers_mut().insert(AUTHORIZATION, key);
        }
        let answer = sender.send_request(request).await?;
        let (head, answer) = answer.into_parts();
        let mut response = Response::new(Body::new(ChatAnswer { answer, _connection: connection, _place: place }));
        *response.status_mut() = head.status;
        for name in [CONTENT_TYPE, ID_HEADER, RETRY_AFTER] {
            if let Some(value) = head.headers.get(&name) {
                response.headers_mut().insert(name, value.clone());
            }
        }
        Ok(response)
    }

    /// The key that the user has typed, else that of the session. The session itself is no key.
    fn credential(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        if !self.edge.keys.are_required() {
            return None;
        }
        let typed = headers.get(X_API_KEY).filter(|key| !key.is_empty());
        let own = || self.sessions.key(page_session(headers)?);
        let key = typed.map(|key| key.as_bytes().to_vec()).or_else(|| Some(own()?.reveal().into()))?;
        let mut value = HeaderValue::from_bytes(&[b"Bearer ", &key[..]].concat()).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

/// An answer on its way to the page. Dropping it closes the connection, so that the engine stops.
struct ChatAnswer {
    answer: Incoming,
    _connection: AbortOnDropHandle<()>,
    _place: OwnedSemaphorePermit,
}

impl http_body::Body for ChatAnswer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.get_mut().answer).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.answer.is_end_stream()
    }
}

/// How clients reach the edge, for the lines beside the chat. It never has a key.
#[derive(Serialize)]
struct EdgeAnswer<'a> {
    base_url: String,
    needs_key: bool,
    /// The router's file of keys; empty without keys.
    keys_file: String,
    /// The file with the user's own key, which `hostler init` makes.
    key_file: Option<String>,
    /// The public id of the key with which this session began.
    session_key: Option<&'a str>,
    /// What clients verify the edge by, if the fleet's authority has certified it.
    authority_file: Option<String>,
}

pub(crate) fn chat_routes(chat: Arc<PageChat>) -> Router {
    let routes = Router::new().route("/page/chat", post(answer)).route("/page/edge", get(describe));
    let with_headers = |mut response: Response| async {
        add_headers(response.headers_mut());
        response
    };
    routes.layer(map_response(with_headers)).with_state(chat)
}

async fn answer(State(chat): State<Arc<PageChat>>, headers: HeaderMap, body: Body) -> Response {
    let Ok(place) = chat.places.clone().try_acquire_owned() else {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, &format!("{MAX_CHATS} answers are on their way to pages already: wait for one"));
    };
    let Ok(body) = timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_BYTES)).await else {
        return refuse(StatusCode::REQUEST_TIMEOUT, "the conversation did not come in time: send it again");
    };
    let Ok(body) = body else {
        return refuse(StatusCode::PAYLOAD_TOO_LARGE, "a conversation has at most 1 MiB here: begin a new one");
    };
    match chat.ask(&headers, body, place).await {
        Ok(response) => response,
        Err(_) => refuse(StatusCode::BAD_GATEWAY, "the edge has ended the connection"),
    }
}

async fn describe(State(chat): State<Arc<PageChat>>, headers: HeaderMap) -> Response {
    let config = &chat.edge.config;
    let needs_key = chat.edge.keys.are_required();
    let key = page_session(&headers).and_then(|session| chat.sessions.key(session)).filter(|_| needs_key);
    // The line for a terminal holds wherever it is pasted.
    let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path).display().to_string();
    let user_key = Some(config.keys_file.with_file_name("user.key")).filter(|file| needs_key && file.is_file());
    let is_certified_by_fleet = chat.place.scheme == "https" && config.tls_cert.as_os_str().is_empty();
    Json(EdgeAnswer {
        base_url: format!("{}://{}/v1", chat.place.scheme, chat.place.address),
        needs_key,
        keys_file: config.keys_file.display().to_string(),
        key_file: user_key.map(absolute),
        session_key: key.as_ref().map(Secret::id),
        authority_file: is_certified_by_fleet.then(|| absolute(config.tls_dir.join("ca.crt"))),
    })
    .into_response()
}
