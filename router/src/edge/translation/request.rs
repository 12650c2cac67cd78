//! The common parts of translating requests of other APIs to chats.

use serde_json::Value;

/// Advice for a request that only the routes themselves can answer.
pub(in crate::edge) const USE_PYTHON: &str = "whoever runs the engines starts their agents with --front-end python";

/// Whether a field asks for something.
pub(in crate::edge) fn is_wanted(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(values) => !values.is_empty(),
        _ => true,
    }
}
