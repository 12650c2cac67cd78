//! Chat template in two forms: as text in the configuration of a Hugging Face tokenizer, and as
//! code that writes the rendered result.
//!
//! Messages come typed from `api::prompt`, after vLLM's own changes before any template.

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use serde_json::{Map, Value};

use super::{MESSAGE_END, MESSAGE_START};

/// Text of the template.
///
/// No line break follows a block, because the renderer of chat templates drops it there. Missing
/// and empty contents, parameters and calls write nothing.
pub(super) const TEMPLATE: &str = concat!(
    "{% if tools %}<|im_start|>tools\n",
    "{% for tool in tools %}{{ tool['function']['name'] }}",
    "{% if tool['function']['parameters'] %} {{ tool['function']['parameters'] | tojson }}{% endif %}{{ '\\n' }}",
    "{% endfor %}<|im_end|>\n{% endif %}",
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n",
    "{% if message['content'] %}{{ message['content'] }}{% endif %}",
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}",
    "{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}\n",
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
);

/// A function with an object: a tool with its parameters, or a call with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ToolUse {
    pub(crate) name: String,
    pub(crate) object: Map<String, Value>,
}

/// Text of a chat while it is written.
#[derive(Debug, Default)]
pub(crate) struct ChatText(String);

impl ChatText {
    /// Writes the tools that the model may call; they come before the messages.
    pub(crate) fn push_tools(&mut self, tools: &[ToolUse]) {
        if tools.is_empty() {
            return;
        }
        self.open("tools");
        for tool in tools {
            self.0.push_str(&tool.name);
            if !tool.object.is_empty() {
                self.push_object(&tool.object);
            }
            self.0.push('\n');
        }
        self.close();
    }

    /// Writes one message and the calls that it makes.
    pub(crate) fn push_message(&mut self, role: &str, content: &str, calls: &[ToolUse]) {
        self.open(role);
        self.0.push_str(content);
        for call in calls {
            self.0.push_str(&call.name);
            self.push_object(&call.object);
            self.0.push('\n');
        }
        self.close();
    }

    pub(crate) fn push_answer_start(&mut self) {
        self.open("assistant");
    }

    /// Opens the last message again, so that the answer continues it.
    ///
    /// As in transformers, this searches for the last occurrence of its content. Trailing spaces of
    /// the content stay only if it has no leading ones.
    pub(crate) fn reopen(&mut self, content: &str) {
        let bare = content.trim();
        if let Some(start) = self.0.rfind(bare) {
            let kept = if self.0[start..].starts_with(content) { content } else { bare };
            self.0.truncate(start + kept.len());
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    fn open(&mut self, role: &str) {
        self.0.push_str(MESSAGE_START);
        self.0.push_str(role);
        self.0.push('\n');
    }

    fn close(&mut self) {
        self.0.push_str(MESSAGE_END);
        self.0.push('\n');
    }

    fn push_object(&mut self, object: &Map<String, Value>) {
        self.0.push(' ');
        self.0.push_str(&spaced_json(object));
    }
}

/// Formats JSON like chat templates and most models, with a space after each comma and colon.
pub(crate) fn spaced_json(value: &impl Serialize) -> String {
    let mut json = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut json, SpacedFormatter);
    value.serialize(&mut serializer).expect("writing to memory cannot fail");
    String::from_utf8(json).expect("JSON is UTF-8")
}

struct SpacedFormatter;

impl Formatter for SpacedFormatter {
    fn begin_array_value<W: std::io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
