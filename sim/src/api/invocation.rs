//! `/invocations`, SageMaker's one route for every request: the body says which other route it is for, and a header which model. What the
//! body says of its model is forgotten, as vLLM 0.32 does.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Map, Value};

use super::errors::ApiError;

pub(crate) const ADAPTER: &str = "x-amzn-sagemaker-adapter-identifier";

/// The route that a body is for, and the body as that route gets it.
pub(crate) fn parse_invocation(body: &[u8], adapter: Option<&str>) -> Result<(&'static str, Bytes), ApiError> {
    let mut fields: Map<String, Value> = serde_json::from_slice(body).map_err(|error| ApiError::bad_json(body, &error))?;
    fields.insert("model".into(), adapter.into());
    let path = match (fields.contains_key("messages"), fields.contains_key("prompt")) {
        (true, _) => "/v1/chat/completions",
        (false, true) => "/v1/completions",
        (false, false) => {
            return Err(ApiError { status: StatusCode::BAD_REQUEST, ..ApiError::internal("Cannot find suitable handler for request.") });
        }
    };
    Ok((path, Value::Object(fields).to_string().into()))
}
