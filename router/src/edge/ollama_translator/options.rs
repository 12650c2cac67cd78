//! Translates Ollama's `options`, `format` and `think` to fields of an engine's request.

use serde_json::{Map, Value, json};

/// Options with the same meaning in both APIs, and the engine's name for each. Ollama's others
/// (`num_ctx`, `num_gpu`, `mirostat`, …) concern how a model is loaded or its own sampler, and are
/// ignored.
const SAMPLING_OPTIONS: [(&str, &str); 9] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("seed", "seed"),
    ("stop", "stop"),
    ("repeat_penalty", "repetition_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
];

/// Adds the sampling options to `request`. The engine judges their values.
///
/// # Errors
/// If `num_predict` is no number: an answer's limit must not be lost silently.
pub(super) fn add_sampling(options: &Map<String, Value>, request: &mut Map<String, Value>) -> Result<(), String> {
    for (name, engines) in SAMPLING_OPTIONS {
        match options.get(name) {
            None | Some(Value::Null) => {}
            Some(Value::Array(stop)) if stop.is_empty() => {}
            Some(value) => {
                request.insert(engines.to_owned(), to_integer(value).map_or_else(|| value.clone(), Value::from));
            }
        }
    }
    // -2 means as many as fit, -1 as the model likes, and so does 0.
    match options.get("num_predict") {
        None | Some(Value::Null) => {}
        Some(value) => match to_integer(value) {
            Some(most) if most > 0 => {
                request.insert("max_tokens".to_owned(), most.into());
            }
            Some(_) => {}
            None => return Err(format!("options.num_predict must be a whole number, not {value}")),
        },
    }
    Ok(())
}

/// Reads an integer. Clients in languages with one kind of number write `40.0`, which not every
/// front-end accepts.
fn to_integer(value: &Value) -> Option<i64> {
    // Below 2^53 a float names every whole number exactly.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    #[expect(clippy::cast_possible_truncation, reason = "it is whole, and small enough")]
    let from_float = || value.as_f64().filter(|float| float.fract() == 0.0 && float.abs() < EXACT).map(|float| float as i64);
    value.as_i64().or_else(from_float)
}

/// Adds the form of the answer: any JSON, or JSON of a schema.
///
/// # Errors
/// If `format` is neither.
pub(super) fn add_format(format: Option<&Value>, request: &mut Map<String, Value>) -> Result<(), String> {
    let format = match format {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::String(word)) if word.is_empty() => return Ok(()),
        Some(Value::String(word)) if word == "json" => json!({"type": "json_object"}),
        Some(schema @ Value::Object(_)) => json!({"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}),
        Some(other) => return Err(format!("format must be \"json\" or a JSON schema, not {other}")),
    };
    request.insert("response_format".to_owned(), format);
    Ok(())
}

/// Adds whether, or how much, the model thinks before it answers.
///
/// # Errors
/// If `think` is neither a boolean nor one of the levels.
pub(super) fn add_thinking(think: Option<&Value>, request: &mut Map<String, Value>) -> Result<(), String> {
    match think {
        None | Some(Value::Null) => {}
        // Templates use one name or the other; an engine ignores names that its template does not
        // know.
        Some(Value::Bool(thinks)) => {
            request.insert("chat_template_kwargs".to_owned(), json!({"enable_thinking": thinks, "thinking": thinks}));
        }
        Some(Value::String(level)) if matches!(level.as_str(), "low" | "medium" | "high" | "max") => {
            request.insert("reasoning_effort".to_owned(), level.as_str().into());
        }
        Some(other) => return Err(format!("think must be true, false, \"low\", \"medium\", \"high\" or \"max\", not {other}")),
    }
    Ok(())
}

pub(super) fn add_logprobs(wanted: Option<bool>, alternatives: Option<u32>, request: &mut Map<String, Value>) {
    if wanted == Some(true) {
        request.insert("logprobs".to_owned(), true.into());
        request.insert("top_logprobs".to_owned(), alternatives.unwrap_or(0).into());
    }
}
