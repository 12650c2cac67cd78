//! The route `/invocations`, SageMaker's single route for every request.
//!
//! The body determines which other route it is for, and a header the model. The body's own model is
//! ignored, as in vLLM 0.32.

use bytes::Bytes;
use hostler_api::Route;
use http::StatusCode;
use serde_json::{Map, Value};

use super::errors::ApiError;

pub(crate) const ADAPTER: &str = "x-amzn-sagemaker-adapter-identifier";

/// Route that a body is for, and the body as that route gets it.
pub(crate) fn parse_invocation(body: &[u8], adapter: Option<&str>) -> Result<(&'static str, Bytes), ApiError> {
    let mut fields: Map<String, Value> = serde_json::from_slice(body).map_err(|error| ApiError::bad_json(body, &error))?;
    fields.insert("model".into(), adapter.into());
    let path = match (fields.contains_key("messages"), fields.contains_key("prompt")) {
        (true, _) => Route::ChatCompletions.path(),
        (false, true) => Route::Completions.path(),
        (false, false) => {
            return Err(ApiError { status: StatusCode::BAD_REQUEST, ..ApiError::internal("Cannot find suitable handler for request.") });
        }
    };
    Ok((path, Value::Object(fields).to_string().into()))
}
