//! Encoder of one model: passes a request's messages through the chat template, and its text
//! through the tokenizer.

use std::fmt;

use serde_json::{Map, Value};

use crate::error::EncodeError;
use crate::files::{TemplateSources, TokenizerConfig};
use crate::messages::{self, Conversation, MEDIA_MARKER, MediaMode, MessageRules, invalid};
use crate::request::{Chat, Prompt, Truncation, TruncationSide};
use crate::template::{ContentShape, Template};
use crate::tokens::{ContinueReading, EncoderStats, Progress, SegmentTokenizer};
use crate::{Dialect, FilesError, ModelFiles, PromptRequest};

/// Most bytes of text encoded for one request: about two million tokens, a few seconds of one core.
pub const MAX_TEXT_BYTES: usize = 8 << 20;

/// Bytes of prose or code per token, used for estimates.
const BYTES_PER_TOKEN: usize = 4;

/// Converter of requests for one model into tokens.
///
/// Shared by `Arc`; every method can be called from any thread.
pub struct Encoder {
    tokens: SegmentTokenizer,
    template: Option<Template>,
    /// Template used instead if a request has tools.
    tool_template: Option<Template>,
    special_tokens: Map<String, Value>,
    /// The model uses the harmony format: engines write its chats without a template.
    harmony: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// Tokens of the prompt, or of the requested beginning.
    ///
    /// For a batch, these are the tokens of the first prompt.
    pub tokens: Vec<u32>,
    /// Estimated tokens in the text that was not read because nobody needed it.
    pub unread_tokens: u32,
    /// Whether the tokens are complete; false if they stop before the first image, sound or video.
    ///
    /// The engine's last token may then differ, because the following text can merge with it.
    pub is_whole: bool,
    /// Estimated tokens of the further prompts of a batch.
    pub batch_tokens: u32,
}

impl Encoder {
    /// Creates an encoder. `cache_bytes` bounds the cache of segments.
    pub fn new(files: &ModelFiles, cache_bytes: usize) -> Result<Self, FilesError> {
        let config = TokenizerConfig::read(files)?;
        let tokens = SegmentTokenizer::new(&files.tokenizer, &config, cache_bytes)?;
        let sources = match &files.template {
            Some(template) => TemplateSources { default: Some(template.clone()), tool_use: None },
            None => config.templates(),
        };
        let compiled = |source: Option<String>| source.map(|source| Template::new(&source)).transpose();
        let harmony = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"].iter().all(|token| tokens.has_added_token(token));
        Ok(Self {
            tokens,
            template: compiled(sources.default)?,
            tool_template: compiled(sources.tool_use)?,
            special_tokens: config.special_tokens,
            harmony,
        })
    }

    /// Tokens that an engine with the Python front-end sees for this request.
    pub fn encode(&self, request: &PromptRequest) -> Result<EncodedPrompt, EncodeError> {
        self.encode_in(Dialect::Python, request)
    }

    /// Tokens that an engine with this dialect sees for this request.
    pub fn encode_in(&self, dialect: Dialect, request: &PromptRequest) -> Result<EncodedPrompt, EncodeError> {
        self.encode_prefix(dialect, request, &mut |_| true)
    }

    /// Like [`encode_in`](Self::encode_in), but may stop after the first tokens.
    ///
    /// At places where reading can stop, `goes_on` says whether to continue. A request that is
    /// truncated is read whole.
    pub fn encode_prefix(
        &self,
        dialect: Dialect,
        request: &PromptRequest,
        goes_on: &mut ContinueReading<'_>,
    ) -> Result<EncodedPrompt, EncodeError> {
        if let Some(reason) = request.unsupported {
            return Err(EncodeError::Unsupported(reason));
        }
        let mut goes_on = |progress: Progress<'_>| request.truncation.is_some() || goes_on(progress);
        let ((tokens, unread), whole, special_tokens, more) = match &request.prompt {
            Prompt::Chat(chat) => {
                let (text, whole) = self.render(dialect, chat)?;
                (self.text(&text, chat.special_tokens, &mut goes_on)?, whole, chat.special_tokens, 0)
            }
            Prompt::Text { text, special_tokens, more_bytes } => {
                (self.text(text, *special_tokens, &mut goes_on)?, true, *special_tokens, more_bytes.div_ceil(BYTES_PER_TOKEN))
            }
            Prompt::Tokens { tokens, more } => ((tokens.clone(), 0), true, false, *more),
        };
        let tokens = match request.truncation {
            Some(_) if !whole => return Err(EncodeError::Unsupported("a truncation and media")),
            Some(truncation) => self.truncate(tokens, truncation, special_tokens)?,
            None => tokens,
        };
        let counted = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        Ok(EncodedPrompt { tokens, unread_tokens: counted(unread), is_whole: whole, batch_tokens: counted(more) })
    }

    #[must_use]
    pub fn stats(&self) -> EncoderStats {
        self.tokens.stats()
    }

    /// Tokens of a text as far as they are needed, and an estimate of the rest from the rate per
    /// byte so far.
    fn text(&self, text: &str, special_tokens: bool, goes_on: &mut ContinueReading<'_>) -> Result<(Vec<u32>, usize), EncodeError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(EncodeError::TooLong { bytes: text.len(), most: MAX_TEXT_BYTES });
        }
        let read = self.tokens.read_text(text, special_tokens, goes_on)?;
        let unread = (text.len() - read.bytes) * read.tokens.len() / read.bytes.max(1);
        Ok((read.tokens, unread))
    }

    /// Text of a conversation up to its first medium, and whether that is all of it.
    fn render(&self, dialect: Dialect, chat: &Chat) -> Result<(String, bool), EncodeError> {
        if self.harmony {
            return Err(EncodeError::Unsupported("messages in the harmony format"));
        }
        let given = chat.tools.as_deref().filter(|tools| dialect == Dialect::Python || !(chat.forbids_tools || tools.is_empty()));
        let tools = given.map(messages::prepare_tools).transpose()?;
        let template = match &tools {
            Some(_) => self.tool_template.as_ref().or(self.template.as_ref()),
            None => self.template.as_ref(),
        };
        let template = template.ok_or(EncodeError::NotChat)?;
        if dialect == Dialect::Python && chat.is_completion && chat.tools.as_ref().is_some_and(Vec::is_empty) {
            return Err(invalid("tools cannot be an empty list"));
        }
        if chat.continue_final_message && chat.add_generation_prompt {
            return Err(invalid("continue_final_message needs add_generation_prompt to be false"));
        }
        if chat.variables.contains_key("messages") {
            return Err(invalid("chat_template_kwargs cannot have messages"));
        }
        let mut variables = self.special_tokens.clone();
        variables.extend(chat.variables.clone());
        variables.insert("tools".to_owned(), tools.map_or(Value::Null, Value::Array));
        variables.insert("documents".to_owned(), chat.documents.clone().unwrap_or_default());
        variables.insert("add_generation_prompt".to_owned(), Value::Bool(chat.add_generation_prompt));

        let rules = MessageRules { shape: template.shape(), media: MediaMode::Marked, dialect, renames_reasoning: chat.is_completion };
        let conversation = messages::conversation(&chat.messages, rules)?;
        let has_media = conversation.has_media;
        let marked = render_conversation(template, (dialect, chat), conversation, &mut variables)?;
        if !has_media {
            return Ok((marked, true));
        }
        let mut certain = marked.find(MEDIA_MARKER).unwrap_or(marked.len());
        if rules.shape == ContentShape::Parts {
            // A template may write an image's placeholder long before the text beside it. Only text
            // that does not depend on the media is certain.
            let kept = messages::conversation(&chat.messages, MessageRules { media: MediaMode::Kept, ..rules })?;
            let kept = render_conversation(template, (dialect, chat), kept, &mut variables)?;
            certain = certain.min(common_prefix(&marked, &kept));
        }
        Ok((marked[..certain].to_owned(), false))
    }

    fn truncate(&self, mut tokens: Vec<u32>, truncation: Truncation, special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let surplus = tokens.len().saturating_sub(truncation.tokens);
        let (before, after) = match (truncation.side, special_tokens) {
            (TruncationSide::Inner, true) => {
                self.tokens.surrounding_counts().ok_or(EncodeError::Unsupported("a truncation of uncommon special tokens"))?
            }
            _ => (0, 0),
        };
        if surplus > 0 && before + after >= truncation.tokens {
            return Err(EncodeError::Unsupported("a truncation to special tokens alone"));
        }
        match truncation.side {
            TruncationSide::First => tokens.truncate(truncation.tokens),
            TruncationSide::Last | TruncationSide::Inner => {
                tokens.drain(before..before + surplus);
            }
        }
        Ok(tokens)
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// Tag of `transformers` for a continued message: the template gets the final message with this tag
/// at its end, and its output after the tag is cut.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

fn render_conversation(
    template: &Template,
    (dialect, chat): (Dialect, &Chat),
    conversation: Conversation,
    variables: &mut Map<String, Value>,
) -> Result<String, EncodeError> {
    let mut messages = conversation.messages;
    if dialect == Dialect::Python && !template.contains("\"developer\"") && !template.contains("'developer'") {
        messages = messages::without_developers(messages);
    }
    let mut continued = String::new();
    if chat.continue_final_message {
        if !template.contains("content") {
            return Err(invalid("the chat template has no content to continue"));
        }
        let content = messages.last_mut().and_then(|message| message.get_mut("content"));
        let text = content.and_then(last_text).ok_or_else(|| invalid("the final message has no text to continue"))?;
        continued = text.clone();
        text.push_str(CONTINUE_TAG);
    }
    variables.insert("messages".to_owned(), Value::Array(messages));
    let mut text = template.render(variables)?;
    if chat.continue_final_message {
        let end = text.rfind(CONTINUE_TAG.trim_end()).filter(|_| text.contains(continued.trim()));
        let end = end.ok_or_else(|| invalid("the chat template leaves out what is to be continued"))?;
        let keeps_spaces = text[end..].starts_with(CONTINUE_TAG);
        text.truncate(end);
        if !keeps_spaces {
            text.truncate(text.trim_end().len());
        }
    }
    Ok(text)
}

fn last_text(content: &mut Value) -> Option<&mut String> {
    match content {
        Value::String(text) => Some(text),
        Value::Array(parts) => parts.iter_mut().rev().find_map(|part| match part.get_mut("text")? {
            Value::String(text) => Some(text),
            _ => None,
        }),
        _ => None,
    }
}

/// Length in bytes of the common prefix, cut at a character boundary.
fn common_prefix(one: &str, other: &str) -> usize {
    let equal = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    (0..=equal).rev().find(|end| one.is_char_boundary(*end)).unwrap_or_default()
}

#[cfg(test)]
mod tests;
