//! Prompt of a request, parsed from its body by its route.
//!
//! Only values that determine tokens are kept. Whether messages and tools are well formed is found
//! when they are encoded, because that costs time and the engine words most refusals.

use std::borrow::Cow;
use std::fmt;

use hostler_api::Route;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::tree_size::check_tree_size;

/// Longest prompt of token ids that is read. No model's context has half as many.
const MAX_TOKENS: usize = 4 * 1024 * 1024;

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
    /// Text of the prompt, and the bytes of a batch's further texts.
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
    /// Values of `chat_template_kwargs`, and the request fields that engines merge into them.
    pub(crate) variables: Map<String, Value>,
    pub(crate) special_tokens: bool,
    /// Whether the request came by the chat route, which renames messages' `reasoning_content` to
    /// `reasoning` and refuses an empty list of tools; `/tokenize` does neither.
    pub(crate) is_completion: bool,
    /// Whether no tool may be called: the Rust front-end then leaves tools out.
    pub(crate) forbids_tools: bool,
}

/// Number of tokens of a prompt that an engine keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Truncation {
    pub(crate) tokens: usize,
    pub(crate) side: TruncationSide,
}

/// Tokens of too long a prompt that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TruncationSide {
    /// Last tokens, and the special tokens around them: the engines' default.
    Inner,
    /// Last tokens.
    Last,
    /// First tokens.
    First,
}

impl PromptRequest {
    /// Parses a request.
    ///
    /// `None` for routes and bodies whose prompts are not read here, and for bodies that no engine
    /// accepts, or whose values would take too much memory.
    #[must_use]
    pub fn parse(path: &str, body: &[u8]) -> Option<Self> {
        let route = Route::of(path);
        let fields: RequestFields<'_> = match route {
            Route::ChatCompletions | Route::Completions | Route::Tokenize => serde_json::from_slice(body).ok()?,
            _ => return None,
        };
        let is_chat = route == Route::ChatCompletions || route == Route::Tokenize && fields.messages.is_some();
        match route {
            _ if is_chat && check_tree_size(body).is_err() => None,
            _ if is_chat => fields.into_chat(route != Route::Tokenize),
            Route::Tokenize => fields.into_tokenize(),
            _ => fields.into_completion(),
        }
    }
}

/// Fields of all routes; each route reads only its fields.
///
/// Large fields are parsed only by their route.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RequestFields<'a> {
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_embeds: Option<&'a RawValue>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_choice: Option<&'a RawValue>,
    #[serde(borrow)]
    documents: Option<&'a RawValue>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    #[serde(borrow)]
    chat_template: Option<&'a RawValue>,
    #[serde(borrow)]
    chat_template_kwargs: Option<&'a RawValue>,
    reasoning_effort: Option<String>,
    truncate_prompt_tokens: Option<i64>,
    truncation_side: Option<String>,
    #[serde(borrow)]
    suffix: Option<&'a RawValue>,
    #[serde(borrow)]
    kv_transfer_params: Option<&'a RawValue>,
}

/// Value of a field, if it is present and acceptable to engines.
fn read<'a, T: Deserialize<'a>>(field: Option<&'a RawValue>) -> Option<Option<T>> {
    field.map(|value| serde_json::from_str(value.get())).transpose().ok()
}

impl RequestFields<'_> {
    fn into_chat(mut self, completes: bool) -> Option<PromptRequest> {
        let messages: Vec<Value> = read(self.messages)??;
        let mut tools: Option<Vec<Value>> = read(self.tools)?;
        let mut variables: Map<String, Value> = read(self.chat_template_kwargs)?.unwrap_or_default();
        let unsupported = if self.chat_template.is_some() || variables.contains_key("chat_template") {
            Some("a chat template of its own")
        } else if variables.contains_key("tokenize") {
            Some("`tokenize` in chat_template_kwargs")
        } else {
            None
        };
        let mut documents = None;
        if completes {
            documents = read(self.documents)?;
            if let Some(effort) = self.reasoning_effort.take() {
                // A reasoning effort switches reasoning on in templates where it is off by default.
                variables.entry("enable_thinking").or_insert_with(|| Value::from(effort != "none"));
                variables.insert("reasoning_effort".to_owned(), Value::from(effort));
            }
        }
        // Engines leave out values that are null or "auto".
        variables.retain(|_, value| !value.is_null() && value.as_str() != Some("auto"));
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
            forbids_tools: completes && self.tool_choice.is_some_and(|choice| choice.get() == r#""none""#),
        };
        let truncation = if completes { self.truncation() } else { Ok(None) };
        Some(self.request(Prompt::Chat(Box::new(chat)), truncation, unsupported))
    }

    fn into_tokenize(self) -> Option<PromptRequest> {
        let text = read(self.prompt)??;
        let special_tokens = self.add_special_tokens.unwrap_or(true);
        Some(self.request(Prompt::Text { text, special_tokens, more_bytes: 0 }, Ok(None), None))
    }

    fn into_completion(self) -> Option<PromptRequest> {
        if self.prompt_embeds.is_some() {
            return None;
        }
        let prompt = match read(self.prompt)?? {
            PromptField::Text(text) if text.is_empty() => return None,
            PromptField::Text(text) => self.text_prompt(text, 0),
            PromptField::Texts { first, more_bytes } => self.text_prompt(first, more_bytes),
            PromptField::Tokens { tokens, more } => Prompt::Tokens { tokens, more },
        };
        let unsupported = self.suffix.map(|_| "a suffix to be filled in before");
        let truncation = self.truncation();
        Some(self.request(prompt, truncation, unsupported))
    }

    fn text_prompt(&self, text: String, more_bytes: usize) -> Prompt {
        Prompt::Text { text, special_tokens: self.add_special_tokens.unwrap_or(true), more_bytes }
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
        let forwarded = read::<TransferParams<'_>>(self.kv_transfer_params).flatten().and_then(|params| params.prompt_token_ids);
        let unsupported = unsupported.or(forwarded.map(|_| "token ids in kv_transfer_params"));
        PromptRequest { prompt, truncation: truncation.unwrap_or_default(), unsupported: unsupported.or(truncation.err()) }
    }
}

#[derive(Deserialize)]
struct TransferParams<'a> {
    #[serde(borrow)]
    prompt_token_ids: Option<&'a RawValue>,
}

/// Prompt of a completion. Placement goes by the first of several; the others only add to the work.
enum PromptField {
    Text(String),
    /// A batch of texts, and the bytes of those after the first.
    Texts {
        first: String,
        more_bytes: usize,
    },
    /// Token ids, and the number of those in a batch's further prompts.
    Tokens {
        tokens: Vec<u32>,
        more: usize,
    },
}

impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptFieldVisitor)
    }
}

struct PromptFieldVisitor;

impl<'de> Visitor<'de> for PromptFieldVisitor {
    type Value = PromptField;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a text, token ids, or a list of either")
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptField, E> {
        Ok(PromptField::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptField, A::Error> {
        match list.next_element()? {
            None => Err(serde::de::Error::invalid_length(0, &self)),
            Some(FirstItem::Id(first)) => {
                let tokens = collect_ids(Some(first), list)?;
                Ok(PromptField::Tokens { tokens, more: 0 })
            }
            Some(FirstItem::Text(first)) => {
                let mut more_bytes = 0;
                while let Some(text) = list.next_element::<Cow<'de, str>>()? {
                    more_bytes += text.len();
                }
                Ok(PromptField::Texts { first, more_bytes })
            }
            Some(FirstItem::Ids(tokens)) => {
                let mut more = 0;
                // Ignored values have no size, so the list takes no memory.
                while let Some(ids) = list.next_element::<Vec<IgnoredAny>>()? {
                    more += ids.len();
                }
                Ok(PromptField::Tokens { tokens, more })
            }
        }
    }
}

/// First item of a prompt that is a list, which determines the kind of list.
enum FirstItem {
    Id(u32),
    Text(String),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for FirstItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FirstItemVisitor)
    }
}

struct FirstItemVisitor;

impl<'de> Visitor<'de> for FirstItemVisitor {
    type Value = FirstItem;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a token id, a text or token ids")
    }

    fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<FirstItem, E> {
        u32::try_from(id).map(FirstItem::Id).map_err(E::custom)
    }

    fn visit_str<E>(self, text: &str) -> Result<FirstItem, E> {
        Ok(FirstItem::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<FirstItem, A::Error> {
        collect_ids(None, list).map(FirstItem::Ids)
    }
}

/// Reads the remaining ids of a list.
fn collect_ids<'de, A: SeqAccess<'de>>(first: Option<u32>, mut list: A) -> Result<Vec<u32>, A::Error> {
    let mut ids: Vec<u32> = first.into_iter().collect();
    while let Some(id) = list.next_element()? {
        if ids.len() == MAX_TOKENS {
            return Err(serde::de::Error::invalid_length(MAX_TOKENS, &"a prompt that is shorter"));
        }
        ids.push(id);
    }
    Ok(ids)
}

#[cfg(test)]
mod tests;
