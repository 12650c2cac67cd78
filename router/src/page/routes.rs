//! The page's routes: its files, the trade of a token for a session, the stream of changes, one
//! request explained, and orders.

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Json, Router};
use http::header::CONTENT_TYPE;
use serde::{Deserialize, Serialize};
use tonic::{Code, Status};

use super::usage::{EntryPicture, Usage};
use super::{Page, assets};
use crate::fleet::ReplicaOrder;
use crate::keys::{NoSession, PageRights, page_session};
use crate::operators::{Operators, decision_message};
use crate::placement::MAX_RECORDED_DECISIONS;

/// Largest body. A token, a key or an order needs less, with room to spare.
const MAX_BODY_BYTES: usize = 4096;

/// Lines of an engine's log: all that an agent keeps.
const LOG_LINES: u32 = 200;

pub(crate) fn page_routes(page: Arc<Page>) -> Router {
    let routes = Router::new()
        .route("/", get(assets::document))
        .route("/page/{file}", get(assets::file))
        .route("/page/session", post(begin_session))
        .route("/page/events", get(watch))
        .route("/page/requests/{id}", get(explain))
        .route("/page/steps/replica/{*id}", get(replica_steps))
        .route("/page/steps/tenant/{name}", get(tenant_steps))
        .route("/page/logs/{*replica}", get(log))
        .route("/page/usage", get(usage))
        .route("/page/orders", post(order))
        .route("/page/{part}/{*rest}", any(unknown));
    let with_headers = |mut response: Response| async {
        assets::add_headers(response.headers_mut());
        response
    };
    routes.layer(DefaultBodyLimit::max(MAX_BODY_BYTES)).layer(map_response(with_headers)).with_state(page)
}

async fn unknown() -> Response {
    refuse(StatusCode::NOT_FOUND, "the page has nothing there")
}

/// Credentials that are traded for a session.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Admittance {
    Token(String),
    Key(String),
}

#[derive(Serialize)]
struct SessionAnswer<'a> {
    session: &'a str,
    may_operate: bool,
}

async fn begin_session(State(page): State<Arc<Page>>, Json(shown): Json<Admittance>) -> Response {
    let begun = match &shown {
        Admittance::Token(token) => page.sessions.redeem_token(token),
        Admittance::Key(key) => page.sessions.redeem_key(key.trim()),
    };
    match begun {
        Ok((session, rights)) => {
            Json(SessionAnswer { session: session.reveal(), may_operate: rights == PageRights::Operate }).into_response()
        }
        Err(error @ NoSession::Random(_)) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        Err(error) => refuse(StatusCode::FORBIDDEN, &error.to_string()),
    }
}

async fn watch(State(page): State<Arc<Page>>, headers: HeaderMap) -> Response {
    let session = page_session(&headers).unwrap_or_default().to_owned();
    match page.live.watch(page.sessions.clone(), session, page.end.clone()) {
        Some(events) => ([(CONTENT_TYPE, "text/event-stream")], axum::body::Body::from_stream(events)).into_response(),
        None => refuse(StatusCode::SERVICE_UNAVAILABLE, "too many look at this page already: close one elsewhere"),
    }
}

/// All attempts of a request, the latest first.
async fn explain(State(page): State<Arc<Page>>, Path(id): Path<String>) -> Response {
    let found = page.calls.placer.decisions.find(&id);
    if found.is_empty() {
        let forgotten = format!("this request is no longer remembered: each router keeps its last {MAX_RECORDED_DECISIONS} decisions");
        return refuse(StatusCode::NOT_FOUND, &forgotten);
    }
    Json(found.iter().map(|record| decision_message(record)).collect::<Vec<_>>()).into_response()
}

/// The last hour of a replica: moments in milliseconds, each with the ten seconds before it, or
/// `null` where the replica was not there.
async fn replica_steps(State(page): State<Arc<Page>>, Path(id): Path<String>) -> Response {
    Json(page.calls.history.of_replica(&id)).into_response()
}

async fn tenant_steps(State(page): State<Arc<Page>>, Path(name): Path<String>) -> Response {
    Json(page.calls.history.of_tenant(&name)).into_response()
}

/// The last lines of an engine's log, for who may operate.
async fn log(State(page): State<Arc<Page>>, Path(replica): Path<String>) -> Response {
    match page.calls.engine_log(&replica, LOG_LINES, None).await {
        Ok(answered) => Json(serde_json::json!({ "lines": answered.lines })).into_response(),
        Err(status) => refuse(status_code(&status), status.message()),
    }
}

#[derive(Serialize)]
struct UsageAnswer<'a> {
    #[serde(flatten)]
    usage: Usage,
    entries: Vec<EntryPicture<'a>>,
}

async fn usage(State(page): State<Arc<Page>>) -> Response {
    let usage = match page.usage.read().await {
        Ok(usage) => usage,
        Err(error) => return refuse(StatusCode::INTERNAL_SERVER_ERROR, &format!("the usage cannot be read: {error}")),
    };
    let view = page.calls.fleet.view();
    Json(UsageAnswer { usage, entries: view.entries().iter().map(EntryPicture::from).collect() }).into_response()
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OrderWord {
    Drain,
    Restart,
    Release,
    Sleep,
    Wake,
}

#[derive(Deserialize)]
struct PageOrder {
    order: OrderWord,
    /// A node or a replica.
    target: String,
}

async fn order(State(page): State<Arc<Page>>, Json(PageOrder { order, target }): Json<PageOrder>) -> Response {
    let order = match order {
        OrderWord::Drain => ReplicaOrder::Drain,
        OrderWord::Restart => ReplicaOrder::Restart,
        OrderWord::Release => ReplicaOrder::Release,
        OrderWord::Sleep => ReplicaOrder::Sleep { level: 1 },
        OrderWord::Wake => ReplicaOrder::Wake,
    };
    match send(&page.calls, &target, order).await {
        Ok(replicas) => Json(serde_json::json!({ "replicas": replicas })).into_response(),
        Err(status) => refuse(status_code(&status), status.message()),
    }
}

fn status_code(status: &Status) -> StatusCode {
    match status.code() {
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::InvalidArgument | Code::FailedPrecondition => StatusCode::CONFLICT,
        _ => StatusCode::BAD_GATEWAY,
    }
}

async fn send(calls: &Operators, target: &str, order: ReplicaOrder) -> Result<Vec<String>, Status> {
    // Without a name the operators' call means the whole fleet, which the page has no button for.
    if target.is_empty() {
        return Err(Status::invalid_argument("name a node or a replica"));
    }
    Ok(calls.send_order(target, order).await?.into_inner().replicas)
}

pub(super) fn refuse(status: StatusCode, words: &str) -> Response {
    (status, format!("{words}\n")).into_response()
}
