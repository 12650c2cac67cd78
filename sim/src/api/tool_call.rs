//! Tool call of an answer, which `tool_choice` demands (`required` or a named function), or which
//! the model makes by itself.
//!
//! Its tokens are the function's name and the arguments, as the chat template writes them when the
//! call comes back in the next request.

use http::StatusCode;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::errors::{ApiError, ToolFault, json_string};
use super::fields::{Fields, typed};
use super::random_id;
use crate::args::EngineArgs;
use crate::mailbox::Finish;
use crate::structured::{StructuredOutput, call_head};
use crate::tokens::{Detokenizer, decode, push_escaped};

/// Call that an answer makes.
#[derive(Clone, Debug)]
pub(crate) struct ToolCall {
    pub(crate) id: String,
    pub(crate) name: String,
    parameters: Value,
    /// Whether the request names the function.
    pub(crate) is_named: bool,
    /// Tokens before the arguments.
    head: usize,
}

/// Progress of a streamed call.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallProgress {
    tokens: usize,
    arguments: Detokenizer,
}

/// Part of a call that some tokens add.
#[derive(Debug, Default)]
pub(crate) struct CallDelta {
    /// Whether these tokens complete the name.
    pub(crate) opens: bool,
    /// Next part of the arguments, escaped for a JSON string.
    pub(crate) arguments: String,
}

#[derive(Deserialize)]
struct Tool {
    function: FunctionDefinition,
}

#[derive(Deserialize)]
struct FunctionDefinition {
    name: String,
    #[serde(default)]
    parameters: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Choice {
    Mode(String),
    Named { function: NamedChoice },
}

#[derive(Deserialize)]
struct NamedChoice {
    name: String,
}

/// Refuses tools of a chat that are no functions, in the words of the front-end.
pub(super) fn check_tools(fields: &Fields<'_>, args: &EngineArgs) -> Result<(), ApiError> {
    #[derive(Deserialize)]
    struct Strict {
        #[serde(rename = "type")]
        _kind: Option<IgnoredAny>,
        #[serde(rename = "function")]
        _function: IgnoredAny,
    }
    let tools: Vec<&RawValue> = fields.tools.and_then(|tools| serde_json::from_str(tools.get()).ok()).unwrap_or_default();
    if args.sim_rust_front_end {
        return tools.iter().enumerate().try_for_each(|(at, tool)| fields.strictly(&format!("tools[{at}]"), tool).map(|_: Strict| ()));
    }
    let mut faults = Vec::new();
    for (at, tool) in tools.iter().enumerate() {
        let Ok(Value::Object(tool)) = serde_json::from_str(tool.get()) else { continue };
        if let Some(kind) = tool.get("type").and_then(Value::as_str).filter(|kind| *kind != "function") {
            faults.push(ToolFault::Kind { at, kind: kind.to_owned() });
        }
        if !tool.contains_key("function") {
            faults.push(ToolFault::NoFunction { at, fields: tool.len() });
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(ApiError::no_functions(&faults)) }
}

/// Refuses a choice of tools for which the engine has no parser, as vLLM does.
fn check_parser(choice: &Choice, args: &EngineArgs) -> Result<(), ApiError> {
    let has_parser = args.tool_call_parser.is_some();
    let refused = |message: &str| Err(ApiError::refused(None, message));
    match choice {
        Choice::Mode(mode) if mode == "none" => Ok(()),
        _ if args.sim_rust_front_end && !has_parser => Err(ApiError {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "server_error",
            code: Some("server_error"),
            param: None,
            message: "failed to submit chat request: tool parsing is disabled by frontend configuration".to_owned(),
        }),
        Choice::Mode(mode) if mode == "auto" && !args.sim_rust_front_end && !(has_parser && args.enable_auto_tool_choice) => {
            refused("\"auto\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set")
        }
        _ if has_parser => Ok(()),
        Choice::Mode(mode) => refused(&format!("tool_choice=\"{mode}\" requires --tool-call-parser to be set")),
        Choice::Named { function } => refused(&format!("tool_choice=function \"{}\" requires --tool-call-parser to be set", function.name)),
    }
}

impl ToolCall {
    /// Call that a request demands, or that a model with `chooses` makes if it may.
    ///
    /// `None` without a call.
    pub(crate) fn parse(
        tools: Option<&RawValue>,
        choice: Option<&RawValue>,
        (args, chooses): (&EngineArgs, bool),
    ) -> Result<Option<Self>, ApiError> {
        let tools: Option<Vec<Tool>> = typed("tools", tools, "list_type", "Input should be a valid list")?;
        let choice: Option<Choice> = typed("tool_choice", choice, "value_error", "Invalid value for `tool_choice`")?;
        let tools = tools.filter(|tools| !tools.is_empty());
        let choice = choice.unwrap_or_else(|| Choice::Mode("auto".to_owned()));
        let is_named = matches!(choice, Choice::Named { .. });
        if tools.is_some() {
            check_parser(&choice, args)?;
        }
        if matches!(&choice, Choice::Mode(mode) if mode == "none" || mode == "auto" && (!chooses || tools.is_none())) {
            return Ok(None);
        }
        let Some(tools) = tools else {
            return Err(ApiError::refused(Some("tool_choice"), "When using `tool_choice`, `tools` must be set."));
        };
        let tool = match choice {
            Choice::Mode(mode) if mode == "required" || mode == "auto" => tools.into_iter().next(),
            Choice::Mode(mode) => {
                let message =
                    format!("Invalid value for `tool_choice`: {mode}! Only named tools, \"none\", \"auto\" or \"required\" are supported.");
                return Err(ApiError::refused(Some("tool_choice"), &message));
            }
            Choice::Named { function } => tools.into_iter().find(|tool| tool.function.name == function.name),
        };
        let Some(Tool { function: FunctionDefinition { name, parameters } }) = tool else {
            let message = "The tool specified in `tool_choice` does not match any of the specified `tools`";
            return Err(ApiError::refused(Some("tool_choice"), message));
        };
        let parameters = if parameters.is_null() { json!({ "type": "object" }) } else { parameters };
        let (id, head) = (format!("chatcmpl-tool-{}", random_id(16)), call_head(&name).len());
        Ok(Some(Self { id, name, parameters, is_named, head }))
    }

    /// Form of an answer that is this call.
    pub(crate) fn output(&self) -> StructuredOutput {
        StructuredOutput::Call { name: self.name.clone(), parameters: self.parameters.clone() }
    }

    /// Part of the call that the next tokens of an answer add.
    pub(crate) fn advance(&self, progress: &mut CallProgress, tokens: &[u32]) -> CallDelta {
        let before = progress.tokens;
        progress.tokens += tokens.len();
        let head = self.head.saturating_sub(before).min(tokens.len());
        let mut arguments = Vec::new();
        progress.arguments.push_escaped(&tokens[head..], &mut arguments);
        CallDelta { opens: before < self.head && progress.tokens >= self.head, arguments: utf8(arguments) }
    }

    /// Arguments of a whole answer; `None` if it was cut before them.
    pub(crate) fn arguments(&self, tokens: &[u32]) -> Option<String> {
        let mut arguments = Vec::new();
        push_escaped(tokens.get(self.head..)?, &mut arguments);
        let arguments = utf8(arguments);
        (!arguments.is_empty()).then_some(arguments)
    }

    /// Arguments of a whole answer as JSON, if they are complete.
    pub(crate) fn input(&self, tokens: &[u32]) -> Option<Value> {
        serde_json::from_str(&decode(tokens.get(self.head..)?)).ok()
    }

    /// Call of a whole chat, if there is one.
    ///
    /// Without a name in the request vLLM reads the call as JSON, which an incomplete call is not.
    pub(crate) fn whole(&self, tokens: &[u32], is_complete: bool) -> Option<String> {
        let arguments = self.arguments(tokens).filter(|_| is_complete || self.is_named)?;
        let (id, name) = (&self.id, json_string(&self.name));
        Some(format!(r#"{{"id":"{id}","type":"function","function":{{"name":{name},"arguments":"{arguments}"}}}}"#))
    }
}

/// Why an answer ended. As in vLLM, a call that the request names ends like a text.
pub(super) fn reason(tool_call: Option<&ToolCall>, finish: Finish) -> &'static str {
    let called = finish == Finish::Stop && tool_call.is_some_and(|call| !call.is_named);
    if called { "tool_calls" } else { finish.as_str() }
}

fn utf8(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("the detokenizer writes whole characters")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_need_a_parser_as_in_vllm() {
        let refusal = |flags: &[&str], choice: &str| {
            let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
            let choice: Choice = serde_json::from_str(choice).unwrap();
            check_parser(&choice, &EngineArgs::from_flags(&flags)).err().map(|error| (error.status.as_u16(), error.message))
        };
        let refused = |message: &str| Some((400, message.to_owned()));
        let (auto, required, named) = (r#""auto""#, r#""required""#, r#"{"type":"function","function":{"name":"f"}}"#);
        let auto_refused = refused(r#""auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set"#);
        assert_eq!(refusal(&[], auto), auto_refused);
        assert_eq!(refusal(&["--tool-call-parser", "hermes"], auto), auto_refused);
        assert_eq!(refusal(&["--tool-call-parser", "hermes", "--enable-auto-tool-choice"], auto), None);
        assert_eq!(refusal(&[], required), refused(r#"tool_choice="required" requires --tool-call-parser to be set"#));
        assert_eq!(refusal(&[], named), refused(r#"tool_choice=function "f" requires --tool-call-parser to be set"#));
        assert_eq!(refusal(&["--tool-call-parser", "hermes"], named), None);
        assert_eq!(refusal(&[], r#""none""#), None);
        assert_eq!(refusal(&["--sim-rust-front-end"], auto).unwrap().0, 500);
        assert_eq!(refusal(&["--sim-rust-front-end", "--tool-call-parser", "hermes"], auto), None);
    }
}
