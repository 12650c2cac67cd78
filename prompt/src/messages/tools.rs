//! Tools of a request and calls of tools in its messages, with the fields and the order that
//! engines give them.
//!
//! Templates write them out as JSON, so both become tokens.

use serde_json::{Map, Value, json};

use super::invalid;
use crate::{Dialect, EncodeError};

/// Tools of a request. A missing known field is `null`.
pub(crate) fn prepare_tools(tools: &[Value]) -> Result<Vec<Value>, EncodeError> {
    tools.iter().map(prepare_tool).collect()
}

fn prepare_tool(tool: &Value) -> Result<Value, EncodeError> {
    let function = tool.get("function").and_then(Value::as_object).ok_or_else(|| invalid("a tool has a function"))?;
    if tool.get("type").is_some_and(|kind| kind != "function") {
        return Err(invalid("a tool is of type \"function\""));
    }
    let name = function.get("name").filter(|name| name.is_string()).ok_or_else(|| invalid("the function of a tool has a name"))?;
    let deferred = tool.get("defer_loading").filter(|deferred| !deferred.is_null());
    let mut described = Map::new();
    described.insert("name".to_owned(), name.clone());
    for field in ["description", "parameters"] {
        described.insert(field.to_owned(), function.get(field).cloned().unwrap_or_default());
    }
    if let Some(strict) = function.get("strict").filter(|strict| !strict.is_null()) {
        described.insert("strict".to_owned(), strict.clone());
    }
    if let Some(deferred) = function.get("defer_loading").filter(|deferred| !deferred.is_null()).or(deferred) {
        described.insert("defer_loading".to_owned(), deferred.clone());
    }
    let mut whole = Map::new();
    whole.insert("type".to_owned(), Value::from("function"));
    whole.insert("function".to_owned(), Value::Object(described));
    if let Some(deferred) = deferred {
        whole.insert("defer_loading".to_owned(), deferred.clone());
    }
    Ok(Value::Object(whole))
}

/// Tool calls of an assistant's message; `None` if there are none.
pub(super) fn prepare_calls(calls: Option<&Value>, dialect: Dialect) -> Result<Option<Value>, EncodeError> {
    match calls {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(calls)) if calls.is_empty() => Ok(None),
        Some(Value::Array(calls)) => {
            Ok(Some(Value::Array(calls.iter().map(|given| prepare_call(given, dialect)).collect::<Result<_, _>>()?)))
        }
        Some(_) => Err(invalid("tool_calls is a list")),
    }
}

fn prepare_call(call: &Value, dialect: Dialect) -> Result<Value, EncodeError> {
    let fields = call.as_object().ok_or_else(|| invalid("a tool call is an object"))?;
    let function = fields.get("function").and_then(Value::as_object).ok_or_else(|| invalid("a tool call has a function"))?;
    if fields.get("type").is_none_or(|kind| kind != "function") {
        return Err(invalid("a tool call is of type \"function\""));
    }
    let text = |fields: &Map<String, Value>, name: &str| fields.get(name).and_then(Value::as_str).map(str::to_owned);
    let (Some(id), Some(name), Some(arguments)) = (text(fields, "id"), text(function, "name"), text(function, "arguments")) else {
        return Err(invalid("a tool call has an id, the name of a function and its arguments, each as text"));
    };
    if dialect == Dialect::Rust {
        let arguments: Value = serde_json::from_str(&arguments).map_err(|_| invalid("the arguments of a tool call are JSON"))?;
        return Ok(json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }));
    }
    let mut function = order_fields(function, &["arguments", "name"]);
    function.insert("arguments".to_owned(), object(&arguments));
    let mut whole = order_fields(fields, &["id", "function", "type"]);
    whole.insert("function".to_owned(), Value::Object(function));
    Ok(Value::Object(whole))
}

/// Moves the known fields to the front, as engines' validation does.
fn order_fields(fields: &Map<String, Value>, first: &[&str]) -> Map<String, Value> {
    let known = first.iter().filter_map(|name| Some(((*name).to_owned(), fields.get(*name)?.clone())));
    let others = fields.iter().filter(|(name, _)| !first.contains(&name.as_str())).map(|(name, value)| (name.clone(), value.clone()));
    known.chain(others).collect()
}

/// Parses arguments into an object.
///
/// Templates expect one, but clients send the model's text, which need not be JSON.
fn object(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(object @ Value::Object(_)) => object,
        _ => Value::Object(Map::new()),
    }
}
