//! The words of engines' answers that are not passed on as they came.

use serde::Deserialize;
use serde_json::Value;

/// The client's message for a whole answer that is no JSON.
pub(in crate::edge) fn unreadable_answer(error: serde_json::Error) -> String {
    format!("the engine's answer cannot be read: {error}")
}

/// The message of an error in OpenAI's form or Ollama's; a body in neither is its own message.
pub(in crate::edge) fn error_message(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Failed {
        error: Option<Value>,
        detail: Option<Value>,
    }
    let told = serde_json::from_slice::<Failed>(body).ok().and_then(|failed| {
        let error = failed.error.or(failed.detail)?;
        let message = error.get("message").unwrap_or(&error);
        Some(message.as_str().map_or_else(|| message.to_string(), str::to_owned))
    });
    told.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned())
}
