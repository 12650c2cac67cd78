//! Health of one life of an engine: whether it is ready, stays healthy, and which models it serves.
//!
//! The answers of its socket go to the supervisor as events.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hostler_api::Route;
use http::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::control::{self, DesiredAdapters};
use super::diagnosis::EndCause;
use super::model_card::ModelCard;
use super::monitored_engine::MonitoredEngine;
use super::{canary, watchdog};
use crate::engine_client::{ApiClient, ApiReply, FetchError};
use crate::process::activity::ProcessSnapshot;
use crate::vllm::FrontEndInUse;

/// How often a starting engine is polled. A refused connection costs microseconds.
const STARTING_INTERVAL: Duration = Duration::from_millis(100);

/// How often a ready engine's health is polled.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// The reason why a router is not taken for an engine.
const ROUTER_ANSWERS: &str = "a router answers there, whose engines would get their own requests back: attach engines";

/// How long no router may have answered before the server counts as an engine: behind one address
/// there may be both.
const ROUTER_GONE_AFTER: Duration = Duration::from_secs(60);

/// Shortest time between two reasons why a healthy engine is not ready.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// Time limit for a health answer. vLLM's front-end tokenizes where it answers: 1.1 s were seen for
/// a prompt of 20 MB.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);

/// Consecutive bad answers that end an engine's life.
const MAX_BAD_ANSWERS: u32 = 3;

/// How often the models are read again, because adapters come and go at run time.
const MODELS_INTERVAL: Duration = Duration::from_secs(10);

const MODELS_TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit for the engine to answer whether it has a route.
///
/// The engine is ready, so an answer takes a moment. A slower engine counts as having the route.
const ROUTE_TIMEOUT: Duration = Duration::from_secs(1);

/// Route that shows which tokens the engine makes of a prompt.
const TOKENIZE: &str = Route::Tokenize.path();

/// Routes that a front-end must have, and their purpose.
const REQUIRED_ROUTES: [(&str, &str); 2] =
    [("/metrics", "which tells its load"), (TOKENIZE, "by which routers learn how it encodes prompts")];

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HealthEvent {
    Loading,
    /// The engine is healthy but names no model, or somebody else's engine does not serve, for this
    /// reason.
    NotReady(String),
    /// The engine has given its memory back, but still answers. Sent before it is ready.
    Asleep,
    Ready(Vec<ModelCard>),
    Models(Vec<ModelCard>),
    /// The engine no longer serves.
    Unhealthy(EndCause),
    /// The engine's front-end lacks these client routes. Sent before it is ready.
    MissingRoutes(Vec<&'static str>),
    /// The engine's front-end lacks a required route, so another front-end is needed, if there is
    /// one.
    LacksRoute(String),
}

/// Watches one life until it turns unhealthy or nobody receives the events.
///
/// The supervisor, not this task, has the deadline for the start.
pub(crate) async fn watch(subject: MonitoredEngine, events: mpsc::Sender<HealthEvent>) {
    let mut client = ApiClient::new(&subject.socket);
    let mut desired = subject.desired_adapters.clone();
    let Some(models) = await_ready(&mut client, &subject, &events, &mut desired).await else {
        return;
    };
    let front_end = subject.status.borrow().front_end;
    if let Some(reason) = missing_route(&mut client, front_end).await
        && events.send(HealthEvent::LacksRoute(reason)).await.is_err()
    {
        return;
    }
    if front_end == FrontEndInUse::Rust {
        let missing = missing_client_routes(&mut client).await;
        if events.send(HealthEvent::MissingRoutes(missing)).await.is_err() {
            return;
        }
    }
    // Another agent may have put the engine to sleep. Requests that reach it now would wait until
    // it is woken.
    let asleep = subject.may_sleep && control::is_asleep(&mut client).await.is_ok_and(|asleep| asleep);
    if (asleep && events.send(HealthEvent::Asleep).await.is_err()) || events.send(HealthEvent::Ready(models)).await.is_err() {
        return;
    }
    let cause = tokio::select! {
        cause = await_unhealthy(&mut client, &subject, &events, &mut desired) => cause,
        cause = watchdog::watch(&subject) => Some(cause),
        cause = canary::watch(&subject) => Some(cause),
    };
    if let Some(cause) = cause {
        // The supervisor may have seen the exit first.
        let _ = events.send(HealthEvent::Unhealthy(cause)).await;
    }
}

/// Polls until the engine is healthy and names its models; `None` once nobody listens any more.
async fn await_ready(
    client: &mut ApiClient,
    subject: &MonitoredEngine,
    events: &mpsc::Sender<HealthEvent>,
    desired: &mut watch::Receiver<DesiredAdapters>,
) -> Option<Vec<ModelCard>> {
    let (socket, attached_to) = (&subject.socket, subject.attached_to.as_ref());
    let mut bound = false;
    let mut complained: Option<(String, Instant)> = None;
    let mut router_at: Option<Instant> = None;
    loop {
        // vLLM binds its socket after its imports and listens once everything is loaded.
        if !bound && socket.exists() {
            bound = true;
            // What was wrong before is over.
            complained = None;
            events.send(HealthEvent::Loading).await.ok()?;
        }
        if events.is_closed() {
            return None;
        }
        let found = match client.get("/health", HEALTH_TIMEOUT).await {
            // A router without engines is not healthy, and would never name its models.
            Ok(reply) if reply.is_from_router => Some(Err(ROUTER_ANSWERS.to_owned())),
            Ok(reply) if is_healthy(&reply) => Some(read_all_models(client, socket, desired).await),
            // An engine that the agent starts needs its time, and prints what it does. Of another
            // one only this is known.
            Ok(reply) => attached_to.map(|_| Err(format!("/health has status {}", reply.status.as_u16()))),
            Err(_) if !bound => match attached_to {
                Some(target) => target.connect().await.err().map(|error| Err(format!("cannot connect: {error}"))),
                None => None,
            },
            Err(error) => attached_to.map(|_| Err(format!("/health: {error}"))),
        };
        if matches!(&found, Some(Err(reason)) if reason == ROUTER_ANSWERS) {
            router_at = Some(Instant::now());
        }
        let is_router = router_at.is_some_and(|at| at.elapsed() < ROUTER_GONE_AFTER);
        let obstacle = match found {
            Some(Ok(models)) if !is_router => return Some(models),
            Some(Ok(_)) => Some(ROUTER_ANSWERS.to_owned()),
            Some(Err(reason)) => Some(reason),
            None => None,
        };
        // Log the reason once. A server of garbage has another one each time.
        if let Some(reason) = obstacle
            && complained.as_ref().is_none_or(|(last, at)| *last != reason && at.elapsed() >= COMPLAINT_INTERVAL)
        {
            tracing::warn!(socket = %socket.display(), %reason, "engine is not ready");
            events.send(HealthEvent::NotReady(reason.clone())).await.ok()?;
            complained = Some((reason, Instant::now()));
        }
        // A router is asked seldom: each question is a line in its access log.
        tokio::time::sleep(if is_router { COMPLAINT_INTERVAL } else { STARTING_INTERVAL }).await;
    }
}

/// First required route that the front-end lacks, besides those that showed the engine to be ready.
async fn missing_route(client: &mut ApiClient, front_end: FrontEndInUse) -> Option<String> {
    for (route, purpose) in REQUIRED_ROUTES {
        // The Python front-end has always had it. Other engines are spared the check for a route
        // that only exact placement needs.
        if route == TOKENIZE && front_end == FrontEndInUse::Python {
            continue;
        }
        if is_missing(client, route).await {
            return Some(format!("the engine's front-end has no {route}, {purpose}"));
        }
    }
    None
}

async fn missing_client_routes(client: &mut ApiClient) -> Vec<&'static str> {
    let mut missing = Vec::new();
    for route in Route::all().filter(|route| route.may_be_missing()).map(Route::path) {
        if is_missing(client, route).await {
            missing.push(route);
        }
    }
    missing
}

/// Whether the engine's front-end lacks a route.
///
/// Both front-ends of vLLM answer a GET with 404 if they lack the route, and with 405 if the route
/// wants POST.
async fn is_missing(client: &mut ApiClient, route: &str) -> bool {
    // The health check decides whether the engine answers at all.
    client.get(route, ROUTE_TIMEOUT).await.is_ok_and(|reply| reply.status == StatusCode::NOT_FOUND)
}

/// Models of an engine that has become healthy, with the adapters that it had in its last life.
async fn read_all_models(
    client: &mut ApiClient,
    socket: &Path,
    desired: &mut watch::Receiver<DesiredAdapters>,
) -> Result<Vec<ModelCard>, String> {
    let models = read_models(client).await?;
    let now = desired.borrow_and_update().clone();
    if now.adapters.is_empty() {
        return Ok(models);
    }
    now.restore(socket, &models).await;
    read_models(client).await.map(|models| now.visible_models(models))
}

/// Polls health and models of a ready engine.
///
/// Returns why to give the engine up, or `None` once nobody listens any more.
async fn await_unhealthy(
    client: &mut ApiClient,
    subject: &MonitoredEngine,
    events: &mpsc::Sender<HealthEvent>,
    desired: &mut watch::Receiver<DesiredAdapters>,
) -> Option<EndCause> {
    let mut tally = HealthFailures::default();
    let when_ready = ProcessSnapshot::take(subject.process_group()).await;
    let mut health_at = Instant::now() + HEALTH_INTERVAL;
    let mut models_at = Instant::now() + MODELS_INTERVAL;
    while !events.is_closed() {
        tokio::select! {
            () = sleep_until(health_at) => {
                let answer = client.get("/health", HEALTH_TIMEOUT).await;
                if let Some(cause) = tally.record(&answer) {
                    return Some(cause);
                }
                // An engine whose core has ended will not recover, so patience is pointless.
                if let Some(health) = health_error(&answer)
                    && let Some(process) = ProcessSnapshot::take(subject.process_group()).await.process_lost_since(&when_ready)
                {
                    return Some(EndCause::ProcessLost { process, health });
                }
                health_at = Instant::now() + HEALTH_INTERVAL;
            }
            Ok(()) = desired.changed() => models_at = Instant::now(),
        }
        if tally.is_clean() && Instant::now() >= models_at {
            models_at = Instant::now() + MODELS_INTERVAL;
            let now = desired.borrow_and_update().clone();
            if let Ok(models) = read_models(client).await {
                // A closed channel ends the loop.
                let _ = events.send(HealthEvent::Models(now.visible_models(models))).await;
            }
        }
    }
    None
}

#[derive(Debug, Default)]
struct HealthFailures(u32);

impl HealthFailures {
    /// Records an answer, and returns why to give the engine up after too many bad ones.
    fn record(&mut self, answer: &Result<ApiReply, FetchError>) -> Option<EndCause> {
        let Some(reason) = health_error(answer) else {
            self.0 = 0;
            return None;
        };
        self.0 += 1;
        (self.0 >= MAX_BAD_ANSWERS).then_some(EndCause::Unhealthy { checks: self.0, reason })
    }

    fn is_clean(&self) -> bool {
        self.0 == 0
    }
}

fn health_error(answer: &Result<ApiReply, FetchError>) -> Option<String> {
    match answer {
        Ok(reply) if is_healthy(reply) => None,
        Ok(reply) => Some(format!("status {}", reply.status.as_u16())),
        Err(error) => Some(error.to_string()),
    }
}

/// Whether an engine says that it serves. vLLM has the route; for others, which may lack it, their
/// list of models says so.
fn is_healthy(reply: &ApiReply) -> bool {
    matches!(reply.status, StatusCode::OK | StatusCode::NOT_FOUND)
}

async fn read_models(client: &mut ApiClient) -> Result<Vec<ModelCard>, String> {
    let reply = client.get(Route::Models.path(), MODELS_TIMEOUT).await.map_err(|error| format!("cannot read /v1/models: {error}"))?;
    match reply.status {
        StatusCode::OK => {}
        StatusCode::UNAUTHORIZED => {
            return Err("/v1/models wants a key: name its file with --attach-key-file (agent.attach_key_file)".to_owned());
        }
        other => return Err(format!("/v1/models has status {}", other.as_u16())),
    }
    if reply.is_from_router {
        return Err(ROUTER_ANSWERS.to_owned());
    }
    match parse_models(&reply.body) {
        Ok(models) if models.is_empty() => Err("/v1/models names no model".to_owned()),
        Ok(models) => Ok(models),
        Err(error) => Err(format!("/v1/models is not as expected: {error}")),
    }
}

fn parse_models(body: &[u8]) -> serde_json::Result<Vec<ModelCard>> {
    #[derive(Deserialize)]
    struct List<'a> {
        #[serde(borrow)]
        data: Vec<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Card {
        id: String,
    }
    let list: List<'_> = serde_json::from_slice(body)?;
    list.data
        .into_iter()
        .map(|raw| {
            let card: Card = serde_json::from_str(raw.get())?;
            Ok(ModelCard { id: card.id, raw: Bytes::copy_from_slice(raw.get().as_bytes()) })
        })
        .collect()
}

#[cfg(test)]
pub(super) mod tests;
