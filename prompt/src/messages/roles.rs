//! Handling of the role `developer` for templates that do not know it.
//!
//! Its messages become the system's, and all of the system's are joined into the first message.

use serde_json::{Map, Value};

/// Converts messages for a template that does not know `developer`.
pub(crate) fn without_developers(mut messages: Vec<Value>) -> Vec<Value> {
    let has_role = |message: &Value, role: &str| message.get("role").is_some_and(|own| own == role);
    if !messages.iter().any(|message| has_role(message, "developer")) {
        return messages;
    }
    for message in &mut messages {
        if has_role(message, "developer")
            && let Some(fields) = message.as_object_mut()
        {
            fields.insert("role".to_owned(), Value::from("system"));
            fields.shift_remove("tools");
        }
    }
    if !messages.iter().skip(1).any(|message| has_role(message, "system")) {
        return messages;
    }
    let (system, others): (Vec<Value>, Vec<Value>) = messages.into_iter().partition(|message| has_role(message, "system"));
    let texts: Vec<String> = system.iter().map(text).filter(|text| !text.is_empty()).collect();
    let mut first = Map::new();
    first.insert("role".to_owned(), Value::from("system"));
    first.insert("content".to_owned(), Value::from(texts.join("\n\n")));
    std::iter::once(Value::Object(first)).chain(others).collect()
}

fn text(message: &Value) -> String {
    match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part.get("text").unwrap_or(part).as_str()).collect();
            texts.join("\n")
        }
        _ => String::new(),
    }
}
