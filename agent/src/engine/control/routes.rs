//! The engine's own routes for sleep and adapters, and the meaning of its answers.

use std::time::Duration;

use hostler_api::Route;
use http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::{ControlError, LoraAdapter};
use crate::engine::model_card::ModelCard;
use crate::engine_client::{ApiClient, ApiReply, FetchError};

/// Time limit for moving the engine's memory out or in.
///
/// Weights of 140 GB through pinned memory at 10 GB/s take 14 s.
pub(super) const SLEEP_TIMEOUT: Duration = Duration::from_secs(180);

/// Time limit for loading an adapter: the engine reads hundreds of megabytes, perhaps from a shared
/// filesystem.
const ADAPTER_TIMEOUT: Duration = Duration::from_secs(120);

/// Time limit for a question that the engine answers from memory.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) const NO_SLEEP_ROUTE: &str =
    "this engine cannot sleep: start it with --enable-sleep-mode among agent.engine_args, which vLLM has on CUDA and ROCm";

pub(super) const NO_ADAPTER_ROUTE: &str =
    "this engine takes no adapters at run time: start it with --enable-lora (and --max-loras, --max-lora-rank) among agent.engine_args";

pub(super) async fn sleep(client: &ApiClient, level: u8) -> Result<(), ControlError> {
    check_result(client.post(&format!("/sleep?level={level}"), "", SLEEP_TIMEOUT).await, NO_SLEEP_ROUTE)
}

/// Wakes the engine, and returns once it has accepted each step, before it is awake.
///
/// After level 1 its weights are in host memory. After level 2 they are read within `reading`,
/// before the cache is allocated, which would take the memory that reading needs.
pub(super) async fn wake(client: &ApiClient, level: u8, reading: Duration) -> Result<(), ControlError> {
    if level == 1 {
        return check_result(client.post("/wake_up", "", SLEEP_TIMEOUT).await, NO_SLEEP_ROUTE);
    }
    check_result(client.post("/wake_up?tags=weights", "", SLEEP_TIMEOUT).await, NO_SLEEP_ROUTE)?;
    let reload = json!({"method": "reload_weights"}).to_string();
    check_result(client.post("/collective_rpc", reload, reading).await, NO_SLEEP_ROUTE)?;
    check_result(client.post("/wake_up?tags=kv_cache", "", SLEEP_TIMEOUT).await, NO_SLEEP_ROUTE)
}

/// Whether the engine sleeps. Its health and its list of models do not tell.
pub(in crate::engine) async fn is_asleep(client: &mut ApiClient) -> Result<bool, ControlError> {
    #[derive(Deserialize)]
    struct Answer {
        is_sleeping: bool,
    }
    let reply = client.get("/is_sleeping", QUERY_TIMEOUT).await.map_err(ControlError::Unreachable)?;
    check_reply(&reply, NO_SLEEP_ROUTE)?;
    let answer: Answer = serde_json::from_slice(&reply.body).map_err(|error| ControlError::Refused(error.to_string()))?;
    Ok(answer.is_sleeping)
}

pub(super) async fn load(client: &ApiClient, adapter: &LoraAdapter) -> Result<(), ControlError> {
    let body = json!({"lora_name": adapter.name, "lora_path": adapter.path}).to_string();
    check_result(client.post(Route::LoadAdapter.path(), body, ADAPTER_TIMEOUT).await, NO_ADAPTER_ROUTE)
}

pub(super) async fn unload(client: &ApiClient, name: &str) -> Result<(), ControlError> {
    let body = json!({"lora_name": name}).to_string();
    check_result(client.post(Route::UnloadAdapter.path(), body, ADAPTER_TIMEOUT).await, NO_ADAPTER_ROUTE)
}

/// Adapter that a model card describes; `None` if the card is the model itself.
pub(super) fn parse_adapter(card: &ModelCard) -> Option<LoraAdapter> {
    #[derive(Deserialize)]
    struct Card {
        parent: Option<String>,
        root: Option<String>,
    }
    let Card { parent, root } = serde_json::from_slice(&card.raw).ok()?;
    parent?;
    Some(LoraAdapter { name: card.id.clone(), path: root.unwrap_or_default() })
}

fn check_result(reply: Result<ApiReply, FetchError>, no_route: &'static str) -> Result<(), ControlError> {
    check_reply(&reply.map_err(ControlError::Unreachable)?, no_route)
}

/// Turns an engine's answer into a result.
///
/// A missing route gives FastAPI's own 404; a refusal has the engine's words.
pub(super) fn check_reply(reply: &ApiReply, no_route: &'static str) -> Result<(), ControlError> {
    #[derive(Deserialize)]
    struct Refusal {
        error: Message,
    }
    #[derive(Deserialize)]
    struct Message {
        message: String,
    }
    if reply.status.is_success() {
        return Ok(());
    }
    match serde_json::from_slice::<Refusal>(&reply.body) {
        Ok(refusal) => Err(ControlError::Refused(refusal.error.message)),
        Err(_) if reply.status == StatusCode::NOT_FOUND || reply.status == StatusCode::METHOD_NOT_ALLOWED => {
            Err(ControlError::NoRoute(no_route))
        }
        Err(_) => {
            let body: String = String::from_utf8_lossy(&reply.body).chars().take(200).collect();
            Err(ControlError::Refused(format!("status {}: {body}", reply.status.as_u16())))
        }
    }
}
