//! Routes for operators of the engine: sleeping and waking, LoRA adapters, weights.
//!
//! As in vLLM, sleeping, waking and weights need the development mode, and the adapter routes need
//! the environment to allow them.

use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::errors::{ApiError, json_string};
use super::{Api, errors};
use crate::adapters::{Adapter, LoadAdapterError};
use crate::reply::{Reply, json, whole};

/// The route `/sleep`: aborts running requests, forgets the cache and stops stepping.
pub(crate) async fn sleep(api: &Api, query: &str) -> Reply {
    let level = values(query, "level").pop().unwrap_or_else(|| "1".to_owned());
    let Some(level) = level.parse::<u8>().ok().filter(|level| (1..=2).contains(level)) else {
        return json(StatusCode::BAD_REQUEST, r#"{"detail":"level"}"#);
    };
    api.core.sleep(level).await;
    json(StatusCode::OK, format!(r#"{{"status":"sleeping","level":{level}}}"#))
}

/// The route `/wake_up`: gives some or all memory back, and steps again once all is back.
pub(crate) async fn wake_up(api: &Api, query: &str) -> Reply {
    let tags = values(query, "tags");
    let status = if api.core.wake(&tags).await { "awake" } else { "sleeping" };
    let tags = if tags.is_empty() {
        "null".to_owned()
    } else {
        format!("[{}]", tags.iter().map(|tag| json_string(tag)).collect::<Vec<_>>().join(","))
    };
    json(StatusCode::OK, format!(r#"{{"status":"{status}","tags":{tags}}}"#))
}

pub(crate) fn is_sleeping(api: &Api) -> Reply {
    json(StatusCode::OK, format!(r#"{{"is_sleeping":{}}}"#, api.core.slumber.level() > 0))
}

/// The route `/collective_rpc`, which only supports the reading of weights.
pub(crate) fn collective_rpc(api: &Api, body: &Bytes) -> Reply {
    #[derive(Deserialize)]
    struct Call {
        method: String,
    }
    match serde_json::from_slice::<Call>(body) {
        Ok(call) if call.method == "reload_weights" => {
            api.core.slumber.reload();
            json(StatusCode::OK, r#"{"results":[null]}"#)
        }
        Ok(_) => json(StatusCode::INTERNAL_SERVER_ERROR, r#"{"detail":"Internal Server Error"}"#),
        Err(_) => json(StatusCode::BAD_REQUEST, r#"{"detail":"Missing 'method' in request body"}"#),
    }
}

#[derive(Deserialize)]
struct LoadRequest {
    lora_name: String,
    lora_path: String,
    #[serde(default)]
    load_inplace: bool,
}

pub(crate) fn load_adapter(api: &Api, body: &Bytes) -> Result<Reply, ApiError> {
    let LoadRequest { lora_name: name, lora_path: path, load_inplace } = read(body)?;
    if name.is_empty() || path.is_empty() {
        return Err(invalid("Both 'lora_name' and 'lora_path' must be provided.".to_owned()));
    }
    if api.args.served_names().contains(&name) {
        return Err(invalid(format!("The lora adapter '{name}' conflicts with a served base model.")));
    }
    if !api.args.enable_lora {
        return Err(ApiError::internal("Call to add_lora method failed: LoRA is not enabled."));
    }
    let loaded = api.adapters.load(Adapter { name: name.clone(), path: path.clone() }, load_inplace);
    match loaded {
        Ok(()) => Ok(text_reply(format!("Success: LoRA adapter '{name}' added successfully."))),
        Err(LoadAdapterError::Known) => Err(invalid(format!(
            "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
        ))),
        Err(LoadAdapterError::Missing) => Err(errors::not_found_error(format!("Loading lora {name} failed: No adapter found for {path}"))),
    }
}

pub(crate) fn unload_adapter(api: &Api, body: &Bytes) -> Result<Reply, ApiError> {
    #[derive(Deserialize)]
    struct Request {
        lora_name: String,
    }
    let Request { lora_name: name } = read(body)?;
    if api.adapters.unload(&name) {
        Ok(text_reply(format!("Success: LoRA adapter '{name}' removed successfully.")))
    } else {
        Err(errors::not_found_error(format!("The lora adapter '{name}' cannot be found.")))
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, ApiError> {
    // Report the error for a body that is not a JSON object.
    serde_json::from_slice::<Map<String, Value>>(body).map_err(|error| ApiError::bad_json(body, &error))?;
    serde_json::from_slice(body).map_err(|error| ApiError::missing(&error.to_string()))
}

fn invalid(message: String) -> ApiError {
    ApiError { status: StatusCode::BAD_REQUEST, kind: "InvalidUserInput", code: None, param: None, message }
}

/// A sentence without a content type, as vLLM gives.
fn text_reply(sentence: String) -> Reply {
    let mut reply = whole(StatusCode::OK, "text/plain", sentence);
    reply.headers_mut().remove(http::header::CONTENT_TYPE);
    reply
}

/// Values of `name` in a query.
fn values(query: &str, name: &str) -> Vec<String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(key, _)| *key == name).map(|(_, value)| value.to_owned()).collect()
}
