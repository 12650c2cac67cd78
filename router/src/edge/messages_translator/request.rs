//! Translates a request of the Messages API to a chat.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::edge::translation::{USE_PYTHON, is_wanted};

/// Beginning of a system text with a hash of the request, as Claude Code writes it. No prompt with
/// such a hash would ever be found cached.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Fields that a chat has too, with its name for each. The engine judges their values.
const SAME_FIELDS: [(&str, &str); 9] = [
    ("model", "model"),
    ("stop_sequences", "stop"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("cache_salt", "cache_salt"),
    ("chat_template_kwargs", "chat_template_kwargs"),
    ("vllm_xargs", "vllm_xargs"),
    ("watermarking", "watermarking"),
];

/// Fields that ask for something only some engines' message answers have, or none.
///
/// Anthropic's other fields concern its own service (where and how fast it computes, what it stores
/// and bills), and engines drop them too.
const LOST_FIELDS: [(&str, &str); 5] = [
    ("kv_transfer_params", USE_PYTHON),
    ("ec_transfer_params", USE_PYTHON),
    ("mcp_servers", "no engine calls MCP servers: call them and give their tools"),
    ("logprobs", "messages have no log probabilities: ask for a chat completion"),
    ("top_logprobs", "messages have no log probabilities: ask for a chat completion"),
];

/// The fields of a request. `SAME_FIELDS` are in `rest`.
#[derive(Debug, Deserialize)]
struct MessagesRequest {
    messages: Vec<Message>,
    max_tokens: Option<u64>,
    system: Option<Value>,
    stream: Option<bool>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    tools: Option<Vec<ClientTool>>,
    tool_choice: Option<ToolChoice>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: MessageRole,
    content: Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum MessageRole {
    User,
    Assistant,
    System,
}

impl MessageRole {
    fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::System => "system",
        }
    }
}

/// A part of a message.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text {
        text: String,
    },
    Image {
        source: ImageSource,
    },
    Thinking {
        thinking: String,
    },
    /// Only Anthropic can read redacted thinking.
    RedactedThinking {},
    ToolUse {
        id: String,
        name: String,
        #[serde(default)]
        input: Map<String, Value>,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<Value>,
    },
    Document {
        source: DocumentSource,
        title: Option<String>,
    },
    /// A tool that a search among tools has found.
    ToolReference {
        tool_name: String,
    },
    /// Calls that Anthropic's servers have run, and their results, which only these can read.
    #[serde(
        alias = "web_search_tool_result",
        alias = "web_fetch_tool_result",
        alias = "code_execution_tool_result",
        alias = "bash_code_execution_tool_result",
        alias = "text_editor_code_execution_tool_result",
        alias = "tool_search_tool_result",
        alias = "mcp_tool_use",
        alias = "mcp_tool_result"
    )]
    ServerToolUse {},
}

/// A document that is text. Others are refused: no chat has a place for them.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum DocumentSource {
    Text { data: String },
    Content { content: Value },
}

/// The text of a document, below its title.
fn document_text(title: Option<String>, source: DocumentSource) -> Result<String, String> {
    let text = match source {
        DocumentSource::Text { data } => data,
        DocumentSource::Content { content } => {
            let text = |block| match block {
                Block::Text { text } => Ok(text),
                _ => Err("a document's content has texts only".to_owned()),
            };
            blocks(content)?.into_iter().map(text).collect::<Result<Vec<_>, String>>()?.join("\n")
        }
    };
    Ok(title.map_or_else(|| text.clone(), |title| format!("{title}\n\n{text}")))
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ImageSource {
    Base64 { media_type: String, data: String },
    Url { url: String },
}

impl ImageSource {
    fn into_part(self) -> Value {
        let url = match self {
            Self::Base64 { media_type, data } => format!("data:{media_type};base64,{data}"),
            Self::Url { url } => url,
        };
        json!({"type": "image_url", "image_url": {"url": url}})
    }
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Thinking {
    Enabled { budget_tokens: u64 },
    Disabled {},
    Adaptive {},
}

#[derive(Debug, Deserialize)]
struct OutputConfig {
    effort: Option<Value>,
    format: Option<OutputFormat>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum OutputFormat {
    JsonSchema { schema: Value },
}

/// A tool that the client runs itself. Tools that Anthropic runs have no schema.
#[derive(Debug, Deserialize)]
struct ClientTool {
    name: String,
    description: Option<String>,
    input_schema: Map<String, Value>,
    strict: Option<bool>,
    defer_loading: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ToolChoice {
    #[serde(flatten)]
    which: WhichTool,
    #[serde(default)]
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum WhichTool {
    Auto,
    Any,
    None,
    Tool { name: String },
}

/// The body of a chat for a body of `/v1/messages`, and whether its answer streams.
///
/// # Errors
/// If the body is no such request, or asks for something that no engine does; in words for the
/// client.
pub(in crate::edge) fn chat_request(body: &[u8]) -> Result<(Value, bool), String> {
    let request = parse(body)?;
    let most = request.max_tokens.filter(|most| *most > 0).ok_or("max_tokens is needed, and at least 1")?;
    if let Some(Thinking::Enabled { budget_tokens }) = &request.thinking
        && *budget_tokens >= most
    {
        return Err("thinking.budget_tokens must be less than max_tokens".to_owned());
    }
    let streams = request.stream == Some(true);
    let mut chat = request.into_chat()?;
    chat.insert("max_tokens".to_owned(), most.into());
    if streams {
        chat.insert("stream".to_owned(), true.into());
        // The first event says how long the prompt was.
        chat.insert("stream_options".to_owned(), json!({"include_usage": true, "continuous_usage_stats": true}));
    }
    Ok((chat.into(), streams))
}

/// The body of a request to `/tokenize` for one of `/v1/messages/count_tokens`.
///
/// # Errors
/// As for [`chat_request`].
pub(in crate::edge) fn count_request(body: &[u8]) -> Result<Value, String> {
    let mut chat = parse(body)?.into_chat()?;
    chat.retain(|name, _| matches!(name.as_str(), "model" | "messages" | "tools" | "chat_template_kwargs"));
    Ok(chat.into())
}

fn parse(body: &[u8]) -> Result<MessagesRequest, String> {
    let request: MessagesRequest =
        serde_json::from_slice(body).map_err(|error| format!("the body is no request of the Messages API: {error}"))?;
    match LOST_FIELDS.iter().find(|(field, _)| request.rest.get(*field).is_some_and(is_wanted)) {
        Some((field, why)) => Err(format!("`{field}` cannot be done: {why}")),
        None => Ok(request),
    }
}

impl MessagesRequest {
    /// The chat fields that counting and generating share.
    fn into_chat(mut self) -> Result<Map<String, Value>, String> {
        let mut chat = Map::new();
        for (name, chats) in SAME_FIELDS {
            if let Some(value) = self.rest.remove(name).filter(|value| !value.is_null()) {
                chat.insert(chats.to_owned(), value);
            }
        }
        let mut messages = Vec::new();
        // Many templates accept a system prompt only at the beginning, so later ones go there too.
        let mut system = self.system.as_ref().map(system_text).transpose()?.unwrap_or_default();
        for message in self.messages {
            match message.role {
                MessageRole::System => system.push_str(&system_text(&message.content)?),
                role => convert_message(role, message.content, &mut messages)?,
            }
        }
        if !system.is_empty() {
            messages.insert(0, json!({"role": "system", "content": system}));
        }
        chat.insert("messages".to_owned(), messages.into());
        match self.thinking {
            Some(Thinking::Enabled { budget_tokens }) => {
                chat.insert("thinking_token_budget".to_owned(), budget_tokens.into());
            }
            // Templates call the option by one name or the other, and drop unknown names.
            Some(Thinking::Disabled {}) => {
                let options = chat.entry("chat_template_kwargs").or_insert_with(|| json!({}));
                if let Value::Object(options) = options {
                    for name in ["enable_thinking", "thinking"] {
                        options.entry(name).or_insert_with(|| false.into());
                    }
                }
            }
            Some(Thinking::Adaptive {}) | None => {}
        }
        if let Some(OutputConfig { effort, format }) = self.output_config {
            if let Some(OutputFormat::JsonSchema { schema }) = format {
                let format = json!({"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}});
                chat.insert("response_format".to_owned(), format);
            }
            if let Some(effort) = effort.filter(|effort| !effort.is_null()) {
                chat.insert("reasoning_effort".to_owned(), effort);
            }
        }
        // Engines refuse an empty list.
        if let Some(tools) = self.tools.filter(|tools| !tools.is_empty()) {
            let choice = self.tool_choice.as_ref().map_or_else(|| "auto".into(), |choice| choice.which.to_chat());
            chat.insert("tools".to_owned(), tools.into_iter().map(ClientTool::into_chat).collect());
            chat.insert("tool_choice".to_owned(), choice);
            if let Some(disabled) = self.tool_choice.and_then(|choice| choice.disable_parallel_tool_use) {
                chat.insert("parallel_tool_calls".to_owned(), (!disabled).into());
            }
        }
        Ok(chat)
    }
}

impl ClientTool {
    fn into_chat(mut self) -> Value {
        self.input_schema.entry("type").or_insert_with(|| "object".into());
        let mut function = json!({"name": self.name, "parameters": self.input_schema});
        if let Some(description) = self.description {
            function["description"] = description.into();
        }
        for (name, flag) in [("strict", self.strict), ("defer_loading", self.defer_loading)] {
            if let Some(flag) = flag {
                function[name] = flag.into();
            }
        }
        json!({"type": "function", "function": function})
    }
}

impl WhichTool {
    fn to_chat(&self) -> Value {
        match self {
            Self::Auto => "auto".into(),
            Self::Any => "required".into(),
            Self::None => "none".into(),
            Self::Tool { name } => json!({"type": "function", "function": {"name": name}}),
        }
    }
}

/// The parts of a content. A plain text is one part.
fn blocks(content: Value) -> Result<Vec<Block>, String> {
    match content {
        Value::String(text) => Ok(vec![Block::Text { text }]),
        Value::Array(blocks) => {
            let block = |block| Block::deserialize(block).map_err(|error| format!("a block of a content cannot be understood: {error}"));
            blocks.into_iter().map(block).collect()
        }
        _ => Err("a content is a text or a list of blocks".to_owned()),
    }
}

/// The texts of a system prompt, joined.
fn system_text(content: &Value) -> Result<String, String> {
    let text = |block| match block {
        Block::Text { text } => Ok(if text.starts_with(BILLING_HEADER) { String::new() } else { text }),
        _ => Err("a system prompt has texts only".to_owned()),
    };
    blocks(content.clone())?.into_iter().map(text).collect()
}

/// Adds the chat messages for a message: one for each tool's result, and one for the rest.
fn convert_message(role: MessageRole, content: Value, messages: &mut Vec<Value>) -> Result<(), String> {
    if let Value::String(text) = content {
        messages.push(json!({"role": role.as_str(), "content": text}));
        return Ok(());
    }
    let (mut parts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), String::new());
    for block in blocks(content)? {
        match block {
            Block::Text { text } if text.is_empty() => {}
            Block::Text { text } => parts.push(json!({"type": "text", "text": text})),
            Block::Image { source } => parts.push(source.into_part()),
            Block::Thinking { thinking } => reasoning.push_str(&thinking),
            Block::RedactedThinking {} | Block::ServerToolUse {} => {}
            Block::Document { source, title } => parts.push(json!({"type": "text", "text": document_text(title, source)?})),
            Block::ToolReference { tool_name } => parts.push(json!({"type": "text", "text": tool_name})),
            Block::ToolUse { id, name, input } => {
                let arguments = Value::Object(input).to_string();
                calls.push(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}));
            }
            Block::ToolResult { tool_use_id, content } => {
                let (text, images) = result_content(content)?;
                messages.push(json!({"role": "tool", "tool_call_id": tool_use_id, "content": text}));
                if !images.is_empty() {
                    messages.push(json!({"role": "user", "content": images}));
                }
            }
        }
    }
    if role == MessageRole::User {
        if !parts.is_empty() {
            messages.push(json!({"role": "user", "content": join_parts(parts)}));
        }
        return Ok(());
    }
    let mut message = json!({"role": "assistant"});
    // Engines refuse a message with neither content nor calls.
    if !parts.is_empty() || calls.is_empty() {
        message["content"] = join_parts(parts);
    }
    if !reasoning.is_empty() {
        message["reasoning"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

/// Parts as a content. A single text is not wrapped in a list.
fn join_parts(mut parts: Vec<Value>) -> Value {
    match &mut parts[..] {
        [] => "".into(),
        [part] if part["type"] == "text" => part["text"].take(),
        _ => parts.into(),
    }
}

/// The texts and images of a tool's result.
fn result_content(content: Option<Value>) -> Result<(String, Vec<Value>), String> {
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    for block in content.filter(|content| !content.is_null()).map_or_else(|| Ok(Vec::new()), blocks)? {
        match block {
            Block::Text { text } => texts.push(text),
            Block::Image { source } => images.push(source.into_part()),
            Block::Document { source, title } => texts.push(document_text(title, source)?),
            Block::ToolReference { tool_name } => texts.push(tool_name),
            _ => return Err("a tool's result has texts, images, documents and names of tools only".to_owned()),
        }
    }
    Ok((texts.join("\n"), images))
}
