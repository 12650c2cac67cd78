//! Translates an engine's answer for a client of Ollama's API: one JSON object for a whole answer,
//! or one per line of a stream.

use std::time::{Duration, SystemTime};

use hostler_api::{ChunkChoice, ChunkFunction, ChunkMessage, ChunkUsage, CompletionChunk};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::request::OllamaRoute;
use crate::edge::translation::unreadable_answer;

/// A tool call as Ollama's clients read it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(in crate::edge) struct OllamaToolCall {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    function: OllamaFunction,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct OllamaFunction {
    index: usize,
    name: String,
    arguments: Map<String, Value>,
}

impl OllamaToolCall {
    /// A complete call.
    ///
    /// # Errors
    /// If its arguments are no JSON object, which clients expect: the model was cut short, or wrote
    /// nonsense.
    pub(in crate::edge) fn new(index: usize, id: Option<String>, name: String, arguments: &str) -> Result<Self, String> {
        let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
        match serde_json::from_str(arguments) {
            Ok(arguments) => Ok(Self { id, function: OllamaFunction { index, name, arguments } }),
            Err(_) => Err(format!("the model called `{name}` with arguments that are no JSON object, or was cut short while it did")),
        }
    }
}

/// A line of a stream, or a whole answer.
#[derive(Debug, Default)]
pub(in crate::edge) struct AnswerPart<'a> {
    pub(in crate::edge) text: &'a str,
    pub(in crate::edge) thinking: Option<&'a str>,
    pub(in crate::edge) tool_calls: &'a [OllamaToolCall],
    pub(in crate::edge) logprobs: Option<&'a RawValue>,
    /// Set on the last part.
    pub(in crate::edge) end: Option<AnswerEnd<'a>>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::edge) struct AnswerEnd<'a> {
    /// The engine's own word.
    pub(in crate::edge) finish_reason: &'a str,
    pub(in crate::edge) usage: ChunkUsage,
    pub(in crate::edge) timings: AnswerTimings,
}

/// Times measured in the router: they include the engine's queue and the network.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::edge) struct AnswerTimings {
    /// From the request to the end of its answer.
    pub(in crate::edge) total: Duration,
    /// From the request to the first token; unknown if the answer came as one piece.
    pub(in crate::edge) prompt: Option<Duration>,
    /// From the first token to the end; the whole time if the answer came as one piece.
    pub(in crate::edge) answer: Duration,
}

#[derive(Serialize)]
struct OllamaLine<'a> {
    model: &'a str,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<OllamaMessage<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a RawValue>,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_duration: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    load_duration: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_eval_count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_eval_duration: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_duration: Option<u64>,
}

#[derive(Serialize)]
struct OllamaMessage<'a> {
    role: &'static str,
    content: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tool_calls: &'a [OllamaToolCall],
}

/// Writes a whole answer, or one line of a stream.
pub(in crate::edge) fn encode_line(form: OllamaRoute, model: &str, told: &AnswerPart<'_>, now: SystemTime) -> Vec<u8> {
    let chats = form == OllamaRoute::Chat;
    let end = told.end;
    let line = OllamaLine {
        model,
        created_at: format_time(now),
        message: chats.then_some(OllamaMessage {
            role: "assistant",
            content: told.text,
            thinking: told.thinking,
            tool_calls: told.tool_calls,
        }),
        response: (!chats).then_some(told.text),
        thinking: told.thinking.filter(|_| !chats),
        logprobs: told.logprobs,
        done: end.is_some(),
        done_reason: end.map(|end| done_reason(end.finish_reason)),
        total_duration: end.map(|end| nanoseconds(end.timings.total)),
        // Models are loaded before anybody asks.
        load_duration: end.map(|_| 0),
        prompt_eval_count: end.map(|end| end.usage.prompt_tokens),
        prompt_eval_duration: end.and_then(|end| end.timings.prompt).map(nanoseconds),
        eval_count: end.map(|end| end.usage.completion_tokens),
        eval_duration: end.map(|end| nanoseconds(end.timings.answer)),
    };
    serde_json::to_vec(&line).expect("a line has only names for keys")
}

/// Answers a request that only wants its model loaded.
pub(in crate::edge) fn model_loaded_answer(form: OllamaRoute, model: &str, now: SystemTime) -> Value {
    let mut told = serde_json::json!({"model": model, "created_at": format_time(now)});
    let more = match form {
        OllamaRoute::Chat => serde_json::json!({"message": {"role": "assistant", "content": ""}, "done": true, "done_reason": "load"}),
        OllamaRoute::Generate => serde_json::json!({"response": "", "done": true, "done_reason": "load"}),
        OllamaRoute::Embed => return serde_json::json!({"model": model, "embeddings": []}),
        OllamaRoute::Embedding => return serde_json::json!({"embedding": []}),
    };
    if let (Value::Object(told), Value::Object(more)) = (&mut told, more) {
        told.extend(more);
    }
    told
}

pub(in crate::edge) fn translate_answer(
    form: OllamaRoute,
    model: &str,
    body: &[u8],
    took: Duration,
    now: SystemTime,
) -> Result<Vec<u8>, String> {
    if let OllamaRoute::Embed | OllamaRoute::Embedding = form {
        return translate_embeddings(form, model, body, took);
    }
    let CompletionChunk { choices, usage, .. } = serde_json::from_slice(body).map_err(unreadable_answer)?;
    let ChunkChoice { message, text, logprobs, finish_reason, .. } = choices.into_iter().next().ok_or("the engine's answer is empty")?;
    let ChunkMessage { content, reasoning, tool_calls, .. } = message.unwrap_or_default();
    let calls = tool_calls.unwrap_or_default().into_iter().enumerate().map(|(index, call)| {
        let ChunkFunction { name, arguments } = call.function;
        OllamaToolCall::new(index, call.id, name.unwrap_or_default(), arguments.as_deref().unwrap_or_default())
    });
    let calls = calls.collect::<Result<Vec<_>, String>>()?;
    let finish = finish_reason.unwrap_or_default();
    let took = AnswerTimings { total: took, prompt: None, answer: took };
    let told = AnswerPart {
        text: content.as_deref().or(text.as_deref()).unwrap_or_default(),
        thinking: reasoning.as_deref().filter(|thinking| !thinking.is_empty()),
        tool_calls: &calls,
        logprobs: logprobs.as_ref().and_then(|logprobs| logprobs.content.as_deref()),
        end: Some(AnswerEnd { finish_reason: &finish, usage: usage.unwrap_or_default(), timings: took }),
    };
    Ok(encode_line(form, model, &told, now))
}

/// Embeddings, with every number as the engine wrote it.
fn translate_embeddings(form: OllamaRoute, model: &str, body: &[u8], took: Duration) -> Result<Vec<u8>, String> {
    #[derive(Deserialize)]
    struct Vectors<'a> {
        #[serde(borrow)]
        data: Vec<Vector<'a>>,
        usage: Option<ChunkUsage>,
    }
    #[derive(Deserialize)]
    struct Vector<'a> {
        index: usize,
        #[serde(borrow)]
        embedding: &'a RawValue,
    }
    #[derive(Serialize)]
    struct Embedded<'a> {
        model: &'a str,
        embeddings: Vec<&'a RawValue>,
        total_duration: u64,
        load_duration: u64,
        prompt_eval_count: u64,
    }
    #[derive(Serialize)]
    struct One<'a> {
        embedding: &'a RawValue,
    }
    let Vectors { mut data, usage } = serde_json::from_slice(body).map_err(unreadable_answer)?;
    data.sort_by_key(|vector| vector.index);
    let told = if form == OllamaRoute::Embedding {
        let embedding = data.first().ok_or("the engine's answer is empty")?.embedding;
        serde_json::to_vec(&One { embedding })
    } else {
        serde_json::to_vec(&Embedded {
            model,
            embeddings: data.iter().map(|vector| vector.embedding).collect(),
            total_duration: nanoseconds(took),
            load_duration: 0,
            prompt_eval_count: usage.unwrap_or_default().prompt_tokens,
        })
    };
    Ok(told.expect("an answer has only names for keys"))
}

pub(in crate::edge) fn error_body(message: &str) -> Value {
    serde_json::json!({"error": message})
}

fn done_reason(finish: &str) -> &'static str {
    if finish == "length" { "length" } else { "stop" }
}

pub(in crate::edge) fn format_time(time: SystemTime) -> String {
    humantime::format_rfc3339_nanos(time).to_string()
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
