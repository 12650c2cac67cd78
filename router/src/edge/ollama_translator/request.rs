//! Translates a request of Ollama's API for an engine.

use hostler_api::Route;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::messages::{self, ChatMessage};
use super::options::{add_format, add_logprobs, add_sampling, add_thinking};

/// The route, which decides the form of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::edge) enum OllamaRoute {
    /// `/api/chat`, answered with a message.
    Chat,
    /// `/api/generate`, answered with text.
    Generate,
    /// `/api/embed`, answered with vectors.
    Embed,
    /// `/api/embeddings`, answered with one vector.
    Embedding,
}

#[derive(Debug, PartialEq)]
pub(in crate::edge) struct OllamaRequest {
    pub(in crate::edge) model: String,
    pub(in crate::edge) route: OllamaRoute,
    /// Whether the answer must come line by line.
    pub(in crate::edge) is_stream: bool,
    /// The request for the engine; `None` if the client only wants its model loaded.
    pub(in crate::edge) engine_request: Option<OpenAiRequest>,
}

/// A request for an engine, without its model.
#[derive(Debug, PartialEq)]
pub(in crate::edge) struct OpenAiRequest {
    pub(in crate::edge) engine_route: Route,
    pub(in crate::edge) fields: Map<String, Value>,
    /// The engine's default on this route is a few tokens, but the client wants as many as
    /// possible.
    pub(in crate::edge) needs_token_limit: bool,
}

impl OllamaRequest {
    pub(in crate::edge) fn parse(form: OllamaRoute, body: &[u8]) -> Result<Self, String> {
        let words = |error: serde_json::Error| format!("the body cannot be understood: {error}");
        let wanted = match form {
            OllamaRoute::Chat => serde_json::from_slice::<OllamaChat>(body).map_err(words)?.into_request()?,
            OllamaRoute::Generate => serde_json::from_slice::<OllamaGenerate>(body).map_err(words)?.into_request()?,
            OllamaRoute::Embed => serde_json::from_slice::<OllamaEmbed>(body).map_err(words)?.into_request()?,
            OllamaRoute::Embedding => serde_json::from_slice::<OllamaEmbeddings>(body).map_err(words)?.into_request(),
        };
        if wanted.model.is_empty() { Err("the body names no model".to_owned()) } else { Ok(wanted) }
    }
}

#[derive(Debug, Deserialize)]
struct GenerationFields {
    #[serde(default)]
    model: String,
    stream: Option<bool>,
    format: Option<Value>,
    options: Option<Map<String, Value>>,
    think: Option<Value>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
}

impl GenerationFields {
    /// Whether the answer must come line by line, which is the default.
    fn is_stream(&self) -> bool {
        self.stream.unwrap_or(true)
    }

    fn add_to(&self, fields: &mut Map<String, Value>) -> Result<(), String> {
        if self.is_stream() {
            fields.insert("stream".to_owned(), true.into());
            fields.insert("stream_options".to_owned(), json!({"include_usage": true}));
        }
        add_sampling(self.options.as_ref().unwrap_or(&Map::new()), fields)?;
        add_format(self.format.as_ref(), fields)
    }

    /// Adds the fields that only a chat has.
    fn add_to_chat(&self, fields: &mut Map<String, Value>) -> Result<(), String> {
        self.add_to(fields)?;
        add_logprobs(self.logprobs, self.top_logprobs, fields);
        add_thinking(self.think.as_ref(), fields)
    }

    fn into_request(self, form: OllamaRoute, asked: Option<OpenAiRequest>) -> OllamaRequest {
        OllamaRequest { is_stream: self.is_stream(), model: self.model, route: form, engine_request: asked }
    }
}

/// `/api/chat`.
#[derive(Debug, Deserialize)]
struct OllamaChat {
    #[serde(flatten)]
    common: GenerationFields,
    messages: Option<Vec<ChatMessage>>,
    tools: Option<Vec<Value>>,
}

impl OllamaChat {
    fn into_request(self) -> Result<OllamaRequest, String> {
        let Self { common, messages, tools } = self;
        let Some(messages) = messages.filter(|messages| !messages.is_empty()) else {
            return Ok(common.into_request(OllamaRoute::Chat, None));
        };
        let mut fields = Map::new();
        fields.insert("messages".to_owned(), messages::to_openai_messages(messages)?.into());
        if let Some(tools) = tools.filter(|tools| !tools.is_empty()) {
            fields.insert("tools".to_owned(), tools.into());
        }
        common.add_to_chat(&mut fields)?;
        Ok(common.into_request(
            OllamaRoute::Chat,
            Some(OpenAiRequest { engine_route: Route::ChatCompletions, fields, needs_token_limit: false }),
        ))
    }
}

#[derive(Debug, Deserialize)]
struct OllamaGenerate {
    #[serde(flatten)]
    common: GenerationFields,
    prompt: Option<String>,
    suffix: Option<String>,
    system: Option<String>,
    template: Option<String>,
    context: Option<Vec<Value>>,
    raw: Option<bool>,
    images: Option<Vec<String>>,
}

impl OllamaGenerate {
    fn into_request(self) -> Result<OllamaRequest, String> {
        let Self { common, prompt, suffix, system, template, context, raw, images } = self;
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let (prompt, suffix, system, images) = (given(prompt), given(suffix), given(system), images.unwrap_or_default());
        if given(template).is_some() {
            return Err("`template` cannot be set here, the engine applies its model's own: send the finished prompt with `raw`".to_owned());
        }
        if context.is_some_and(|context| !context.is_empty()) {
            return Err("`context` is neither given nor taken here: send the conversation to /api/chat".to_owned());
        }
        let Some(prompt) = prompt else { return Ok(common.into_request(OllamaRoute::Generate, None)) };
        let mut fields = Map::new();
        if raw != Some(true) && suffix.is_none() {
            let mut messages: Vec<Value> = system.into_iter().map(|system| json!({"role": "system", "content": system})).collect();
            messages.push(json!({"role": "user", "content": messages::content_with_images(prompt, images)?}));
            fields.insert("messages".to_owned(), messages.into());
            common.add_to_chat(&mut fields)?;
            return Ok(common.into_request(
                OllamaRoute::Generate,
                Some(OpenAiRequest { engine_route: Route::ChatCompletions, fields, needs_token_limit: false }),
            ));
        }
        if system.is_some() || !images.is_empty() || common.logprobs == Some(true) {
            return Err("a prompt with `raw` or `suffix` goes to the model as it is: it has no `system`, `images` or `logprobs`".to_owned());
        }
        fields.insert("prompt".to_owned(), prompt.into());
        if let Some(suffix) = suffix {
            fields.insert("suffix".to_owned(), suffix.into());
        }
        common.add_to(&mut fields)?;
        let unlimited = !fields.contains_key("max_tokens");
        Ok(common.into_request(
            OllamaRoute::Generate,
            Some(OpenAiRequest { engine_route: Route::Completions, fields, needs_token_limit: unlimited }),
        ))
    }
}

#[derive(Debug, Deserialize)]
struct OllamaEmbed {
    #[serde(default)]
    model: String,
    input: Option<EmbedInput>,
    truncate: Option<bool>,
    dimensions: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum EmbedInput {
    One(String),
    Many(Vec<String>),
}

impl OllamaEmbed {
    fn into_request(self) -> Result<OllamaRequest, String> {
        let Self { model, input, truncate, dimensions } = self;
        let texts = match input {
            None => Vec::new(),
            Some(EmbedInput::One(text)) if text.is_empty() => Vec::new(),
            Some(EmbedInput::One(text)) => vec![text],
            Some(EmbedInput::Many(texts)) => texts,
        };
        if texts.iter().any(String::is_empty) {
            return Err("an empty text has no embedding".to_owned());
        }
        let mut asked = embeddings_request(texts, truncate);
        if let (Some(asked), Some(dimensions)) = (&mut asked, dimensions.filter(|dimensions| !dimensions.is_null())) {
            asked.fields.insert("dimensions".to_owned(), dimensions);
        }
        Ok(OllamaRequest { model, route: OllamaRoute::Embed, is_stream: false, engine_request: asked })
    }
}

/// `/api/embeddings`, the older one.
#[derive(Debug, Deserialize)]
struct OllamaEmbeddings {
    #[serde(default)]
    model: String,
    prompt: Option<String>,
}

impl OllamaEmbeddings {
    fn into_request(self) -> OllamaRequest {
        let texts = self.prompt.into_iter().filter(|text| !text.is_empty()).collect();
        OllamaRequest {
            model: self.model,
            route: OllamaRoute::Embedding,
            is_stream: false,
            engine_request: embeddings_request(texts, None),
        }
    }
}

/// Builds a request for embeddings. A text that is too long is cut to the model's limit, unless the
/// client forbids it.
fn embeddings_request(texts: Vec<String>, truncate: Option<bool>) -> Option<OpenAiRequest> {
    if texts.is_empty() {
        return None;
    }
    let mut fields = Map::new();
    fields.insert("input".to_owned(), texts.into());
    fields.insert("encoding_format".to_owned(), "float".into());
    if truncate != Some(false) {
        fields.insert("truncate_prompt_tokens".to_owned(), (-1).into());
    }
    Some(OpenAiRequest { engine_route: Route::Embeddings, fields, needs_token_limit: false })
}
