//! The call of a tool that `tool_choice` demands: `required` or a named function, or one that the
//! model makes by itself. Its arguments are a JSON object with the function's first parameter, some words long.

use std::io::Write;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::errors::{ApiError, json_string};
use super::fields::typed;
use super::random_id;
use crate::mailbox::Finish;
use crate::scheduler::Limit;
use crate::tokens::decode;

/// Tokens of a complete call: one for the name, one to open the arguments, words, and
/// one to close them.
const CALL_TOKENS: usize = 8;

/// The call that an answer makes.
#[derive(Debug)]
pub(crate) struct ToolCall {
    id: String,
    name: String,
    parameter: String,
}

#[derive(Deserialize)]
struct Tool {
    function: FunctionDefinition,
}

#[derive(Deserialize)]
struct FunctionDefinition {
    name: String,
    #[serde(default)]
    parameters: Parameters,
}

#[derive(Default, Deserialize)]
struct Parameters {
    #[serde(default)]
    properties: serde_json::Map<String, serde_json::Value>,
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

impl ToolCall {
    /// The call that a request demands, or that a model makes which `chooses` to where it may; if there is one.
    pub(crate) fn parse(tools: Option<&RawValue>, choice: Option<&RawValue>, chooses: bool) -> Result<Option<Self>, ApiError> {
        let tools: Option<Vec<Tool>> = typed("tools", tools, "list_type", "Input should be a valid list")?;
        let choice: Option<Choice> = typed("tool_choice", choice, "value_error", "Invalid value for `tool_choice`")?;
        let Some(tools) = tools.filter(|tools| !chooses || !tools.is_empty()) else { return Ok(None) };
        let Some(choice) = choice.or_else(|| chooses.then(|| Choice::Mode("auto".to_owned()))) else { return Ok(None) };
        let tool = match &choice {
            Choice::Mode(mode) if mode == "required" || mode == "auto" && chooses => tools.into_iter().next(),
            Choice::Mode(_) => return Ok(None),
            Choice::Named { function } => tools.into_iter().find(|tool| tool.function.name == function.name),
        };
        let Some(Tool { function }) = tool else {
            let message = "The tool specified in `tool_choice` does not match any of the specified `tools`.";
            return Err(ApiError::bad_value("tool_choice", "", message));
        };
        let parameter = function.parameters.properties.into_iter().next();
        Ok(Some(Self {
            id: format!("chatcmpl-tool-{}", random_id(16)),
            name: function.name,
            parameter: parameter.map_or_else(|| "query".to_owned(), |(name, _)| name),
        }))
    }

    /// The limit of an answer that is a call.
    pub(crate) fn limit(limit: Limit) -> Limit {
        if limit.tokens < CALL_TOKENS { limit } else { Limit { tokens: CALL_TOKENS, finish: Finish::Stop } }
    }

    /// The insides of the `delta`s for the tokens from `position` on; the last one goes
    /// with the finish reason, if there is one.
    pub(crate) fn stream_contents(&self, position: usize, tokens: &[u32], finish: Option<Finish>) -> Vec<Vec<u8>> {
        let mut contents = Vec::with_capacity(3);
        let mut arguments = tokens;
        if position == 0 && !tokens.is_empty() {
            contents.push(self.name_content());
            arguments = &tokens[1..];
        }
        if !arguments.is_empty() {
            let text = self.arguments(position.max(1), arguments);
            let text = json_string(&text);
            let mut content = Vec::with_capacity(64);
            let _ = write!(content, r#""content":null,"tool_calls":[{{"index":0,"function":{{"arguments":{text}}}}}]"#);
            contents.push(content);
        }
        if finish.is_some() || contents.is_empty() {
            contents.push(Vec::new());
        }
        contents
    }

    fn name_content(&self) -> Vec<u8> {
        let (id, name) = (&self.id, json_string(&self.name));
        format!(r#""content":null,"tool_calls":[{{"id":"{id}","type":"function","index":0,"function":{{"name":{name}}}}}]"#).into_bytes()
    }

    /// Appends the whole call.
    pub(crate) fn push_whole(&self, tokens: &[u32], json: &mut Vec<u8>) {
        let arguments = tokens.get(1..).map_or(String::new(), |tokens| self.arguments(1, tokens));
        let (id, name, arguments) = (&self.id, json_string(&self.name), json_string(&arguments));
        let _ = write!(json, r#"{{"id":"{id}","type":"function","function":{{"name":{name},"arguments":{arguments}}}}}"#);
    }

    /// The part of the arguments' text that some tokens stand for.
    fn arguments(&self, position: usize, tokens: &[u32]) -> String {
        let mut text = String::new();
        for (position, token) in (position..).zip(tokens) {
            match position {
                1 => text.push_str(&format!("{{{}: \"", json_string(&self.parameter))),
                _ if position + 1 == CALL_TOKENS => text.push_str("\"}"),
                _ => {
                    let word = json_string(&decode(&[*token]));
                    text.push_str(&word[1..word.len() - 1]);
                }
            }
        }
        text
    }
}
