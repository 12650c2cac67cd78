//! What a request asks an engine to read, parsed from its body by its route. Only what decides about tokens is kept; whether messages and
//! tools are well formed is found when they are encoded, because that costs time and most refusals are the engine's to word.

use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Debug, Clone)]
pub struct PromptRequest {
    pub(crate) prompt: Prompt,
    pub(crate) truncation: Option<Truncation>,
    /// A feature that only the engine itself can encode.
    pub(crate) unsupported: Option<&'static str>,
}

#[derive(Debug, Clone)]
pub(crate) enum Prompt {
    Chat(Box<Chat>),
    /// One text, and the bytes of a batch's further texts.
    Text {
        text: String,
        special_tokens: bool,
        more_bytes: usize,
    },
    /// Token ids, and the number of those in a batch's further prompts.
    Tokens {
        tokens: Vec<u32>,
        more: usize,
    },
}

/// A conversation and everything else that a chat template may read.
#[derive(Debug, Clone)]
pub(crate) struct Chat {
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) documents: Option<Value>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) continue_final_message: bool,
    /// `chat_template_kwargs`, and the request fields that engines merge into them.
    pub(crate) variables: Map<String, Value>,
    pub(crate) special_tokens: bool,
    /// Whether it came by the chat route, which renames messages' `reasoning_content` to
    /// `reasoning` and refuses an empty list of tools; `/tokenize` does neither.
    pub(crate) is_completion: bool,
    /// Whether no tool may be called: the Rust front-end then leaves tools out.
    pub(crate) forbids_tools: bool,
}

/// How many tokens of a prompt an engine keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Truncation {
    pub(crate) tokens: usize,
    pub(crate) side: TruncationSide,
}

/// Which tokens of too long a prompt are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TruncationSide {
    /// The last ones, and the special tokens around them: the engines' default.
    Inner,
    /// The last ones.
    Last,
    /// The first ones.
    First,
}

impl PromptRequest {
    /// `None` for routes and bodies whose prompts are not read here, and for bodies that no engine
    /// accepts.
    #[must_use]
    pub fn parse(path: &str, body: &[u8]) -> Option<Self> {
        let body: RequestBody = match path {
            "/v1/chat/completions" | "/v1/completions" | "/tokenize" => serde_json::from_slice(body).ok()?,
            _ => return None,
        };
        match path {
            "/v1/chat/completions" => body.into_chat(true),
            "/tokenize" if body.messages.is_some() => body.into_chat(false),
            "/tokenize" => body.into_tokenize(),
            _ => body.into_completion(),
        }
    }
}

/// The fields of all routes; each route reads its own.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RequestBody {
    messages: Option<Vec<Value>>,
    prompt: Option<Value>,
    prompt_embeds: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    documents: Option<Value>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    chat_template: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    truncate_prompt_tokens: Option<i64>,
    truncation_side: Option<String>,
    suffix: Option<Value>,
    kv_transfer_params: Option<Value>,
}

impl RequestBody {
    fn into_chat(mut self, completes: bool) -> Option<PromptRequest> {
        let messages = self.messages.take()?;
        let mut variables = self.chat_template_kwargs.take().unwrap_or_default();
        let unsupported = if self.chat_template.is_some() || variables.contains_key("chat_template") {
            Some("a chat template of its own")
        } else if variables.contains_key("tokenize") {
            Some("`tokenize` in chat_template_kwargs")
        } else {
            None
        };
        let mut documents = None;
        if completes {
            documents = self.documents.take().filter(|documents| !documents.is_null());
            if let Some(effort) = self.reasoning_effort.take() {
                // A reasoning effort switches reasoning on in templates where it is off by default.
                variables.entry("enable_thinking").or_insert_with(|| Value::from(effort != "none"));
                variables.insert("reasoning_effort".to_owned(), Value::from(effort));
            }
        }
        // Engines leave out what is null or "auto".
        variables.retain(|_, value| !value.is_null() && value.as_str() != Some("auto"));
        let mut tools = self.tools.take();
        if let Some(Value::Array(given)) = variables.remove("tools") {
            tools = Some(given);
        }
        let documents = documents.or_else(|| variables.remove("documents"));
        variables.retain(|name, _| !matches!(name.as_str(), "add_generation_prompt" | "continue_final_message" | "documents"));
        let chat = Chat {
            messages,
            tools,
            documents,
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            continue_final_message: self.continue_final_message.unwrap_or(false),
            variables,
            special_tokens: self.add_special_tokens.unwrap_or(false),
            is_completion: completes,
            forbids_tools: completes && self.tool_choice.as_ref().and_then(Value::as_str) == Some("none"),
        };
        let truncation = if completes { self.truncation() } else { Ok(None) };
        Some(self.request(Prompt::Chat(Box::new(chat)), truncation, unsupported))
    }

    fn into_tokenize(mut self) -> Option<PromptRequest> {
        let Some(Value::String(text)) = self.prompt.take() else { return None };
        let special_tokens = self.add_special_tokens.unwrap_or(true);
        Some(self.request(Prompt::Text { text, special_tokens, more_bytes: 0 }, Ok(None), None))
    }

    fn into_completion(mut self) -> Option<PromptRequest> {
        if self.prompt_embeds.as_ref().is_some_and(|embeds| !embeds.is_null()) {
            return None;
        }
        let special_tokens = self.add_special_tokens.unwrap_or(true);
        let prompt = match self.prompt.take()? {
            Value::String(text) if !text.is_empty() => Prompt::Text { text, special_tokens, more_bytes: 0 },
            Value::Array(list) if list.first().is_some_and(Value::is_number) => Prompt::Tokens { tokens: token_ids(&list)?, more: 0 },
            Value::Array(list) => batch(list, special_tokens)?,
            _ => return None,
        };
        let unsupported = self.suffix.as_ref().filter(|suffix| !suffix.is_null()).map(|_| "a suffix to be filled in before");
        let truncation = self.truncation();
        Some(self.request(prompt, truncation, unsupported))
    }

    fn truncation(&self) -> Result<Option<Truncation>, &'static str> {
        let Some(tokens) = self.truncate_prompt_tokens else { return Ok(None) };
        // -1 means the model's longest prompt, which the files do not tell.
        let tokens = usize::try_from(tokens).ok().filter(|tokens| *tokens > 0).ok_or("a truncation to the length of the model")?;
        let side = match self.truncation_side.as_deref() {
            None => TruncationSide::Inner,
            Some("left") => TruncationSide::Last,
            Some("right") => TruncationSide::First,
            Some(_) => return Err("an unknown truncation_side"),
        };
        Ok(Some(Truncation { tokens, side }))
    }

    fn request(
        self,
        prompt: Prompt,
        truncation: Result<Option<Truncation>, &'static str>,
        unsupported: Option<&'static str>,
    ) -> PromptRequest {
        let forwarded = self.kv_transfer_params.as_ref().and_then(|params| params.get("prompt_token_ids")).filter(|ids| !ids.is_null());
        let unsupported = unsupported.or(forwarded.map(|_| "token ids in kv_transfer_params"));
        PromptRequest { prompt, truncation: truncation.unwrap_or_default(), unsupported: unsupported.or(truncation.err()) }
    }
}

fn token_ids(list: &[Value]) -> Option<Vec<u32>> {
    list.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// A list of texts or of lists of token ids. Placement goes by the first; the others only add to
/// the work.
fn batch(list: Vec<Value>, special_tokens: bool) -> Option<Prompt> {
    let mut prompts = list.into_iter();
    match prompts.next()? {
        Value::String(text) => {
            let more_bytes = prompts.map(|prompt| prompt.as_str().map(str::len)).sum::<Option<usize>>()?;
            Some(Prompt::Text { text, special_tokens, more_bytes })
        }
        Value::Array(first) => {
            let more = prompts.map(|prompt| prompt.as_array().map(Vec::len)).sum::<Option<usize>>()?;
            Some(Prompt::Tokens { tokens: token_ids(&first)?, more })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
