//! Tools of a response as functions of a chat, and the chat's calls as calls of those tools.
//!
//! A chat has functions alone. A function of a namespace gets the namespace into its name, as
//! vLLM's Python front-end names it. A free-form (`custom`) tool becomes a function with one text.
//! Tools that OpenAI's servers run are left out: nobody here could run them.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

/// Types of tools that OpenAI's servers run, and of their calls in a conversation.
const HOSTED_TOOLS: [&str; 11] = [
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "image_generation",
    "file_search",
    "code_interpreter",
    "computer_use_preview",
    "computer",
    "mcp",
    "tool_search",
];

/// Most tools of namespaces or in free form. A stream keeps their names.
const MAX_RENAMED_TOOLS: usize = 1024;

/// The field of a free-form tool's function that holds its input.
const INPUT: &str = "input";

/// A tool that the client runs itself, or that nobody runs.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Tool {
    Function(FunctionTool),
    Custom(CustomTool),
    Namespace { name: String, tools: Vec<NamespaceTool> },
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum NamespaceTool {
    Function(FunctionTool),
    Custom(CustomTool),
}

#[derive(Debug, Deserialize)]
struct FunctionTool {
    name: String,
    description: Option<Value>,
    parameters: Option<Value>,
    strict: Option<bool>,
    defer_loading: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct CustomTool {
    name: String,
    description: Option<String>,
    format: Option<Value>,
}

/// A tool as the client names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedTool {
    pub(super) name: String,
    pub(super) namespace: Option<String>,
    pub(super) is_custom: bool,
}

impl NamedTool {
    /// The beginning of its calls' ids.
    pub(super) fn id_prefix(&self) -> &'static str {
        if self.is_custom { "ctc" } else { "fc" }
    }
}

/// The client's tools by their names in the chat. Plain functions have the same name there and are
/// left out.
#[derive(Debug, Clone, Default)]
pub(super) struct RenamedTools(HashMap<String, NamedTool>);

/// Names of a request's tools in the chat, each of one kind of tool.
#[derive(Debug, Default)]
struct ToolNames {
    renamed: RenamedTools,
    taken: HashSet<String>,
}

impl RenamedTools {
    /// The client's tool for a name in the chat. A name that nobody has given is the client's own.
    pub(super) fn client_tool(&self, name: &str) -> NamedTool {
        let same = || NamedTool { name: name.to_owned(), namespace: None, is_custom: false };
        self.0.get(name).cloned().unwrap_or_else(same)
    }
}

impl ToolNames {
    fn add(&mut self, name: String, namespace: Option<&str>, is_custom: bool) -> Result<String, String> {
        if name.is_empty() {
            return Err("a tool needs a name".to_owned());
        }
        let chat_name = chat_name(namespace, &name);
        let is_renamed = namespace.is_some() || is_custom;
        // Engines take two functions of one name.
        if !self.taken.insert(chat_name.clone()) && (is_renamed || self.renamed.0.contains_key(&chat_name)) {
            return Err(format!("two tools have the name {chat_name:?} here, so a call could be of either: rename one"));
        }
        if is_renamed {
            if self.renamed.0.len() >= MAX_RENAMED_TOOLS {
                return Err(format!("a request may have {MAX_RENAMED_TOOLS} tools in namespaces or in free form: send fewer"));
            }
            self.renamed.0.insert(chat_name.clone(), NamedTool { name, namespace: namespace.map(str::to_owned), is_custom });
        }
        Ok(chat_name)
    }
}

/// The name of a tool in the chat.
pub(super) fn chat_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}__{name}"))
}

/// The arguments of a free-form call's function.
pub(super) fn custom_arguments(input: &str) -> String {
    json!({ INPUT: input }).to_string()
}

/// Whether the limit of the answer's length has cut a call with these arguments. A client must not
/// run it.
pub(super) fn is_cut(arguments: &str, finish_reason: Option<&str>) -> bool {
    finish_reason == Some("length") && serde_json::from_str::<IgnoredAny>(arguments).is_err()
}

/// The input of a free-form call. What is no such object is the input itself, unless it was cut.
pub(super) fn custom_input(arguments: &str, finish_reason: Option<&str>) -> String {
    let read = serde_json::from_str::<Map<String, Value>>(arguments).ok();
    match read.and_then(|mut fields| fields.remove(INPUT)) {
        Some(Value::String(input)) => input,
        _ if is_cut(arguments, finish_reason) => String::new(),
        _ => arguments.to_owned(),
    }
}

pub(super) fn is_hosted(kind: &str) -> bool {
    HOSTED_TOOLS.contains(&kind)
}

fn is_hosted_tool(tool: &Value) -> bool {
    tool["type"].as_str().is_some_and(is_hosted)
}

/// Adds a request's tools to the chat.
///
/// # Errors
/// If a tool, or the choice among them, cannot be understood.
pub(super) fn add_tools(fields: &Map<String, Value>, chat: &mut Map<String, Value>) -> Result<RenamedTools, String> {
    let mut names = ToolNames::default();
    let choice = fields.get("tool_choice").filter(|choice| !choice.is_null());
    let Some(tools) = fields.get("tools").and_then(Value::as_array).filter(|tools| !tools.is_empty()) else {
        return match choice.and_then(Value::as_str) {
            Some("required") => Err("tool_choice demands a call, but the request has no tools".to_owned()),
            _ => Ok(RenamedTools::default()),
        };
    };
    let mut functions = Vec::new();
    for tool in tools.iter().filter(|tool| !is_hosted_tool(tool)) {
        match Tool::deserialize(tool).map_err(|error| format!("a tool cannot be understood: {error}"))? {
            Tool::Function(tool) => functions.push(function(tool, None, &mut names)?),
            Tool::Custom(tool) => functions.push(custom_function(tool, None, &mut names)?),
            Tool::Namespace { name: namespace, tools } => {
                for tool in tools {
                    functions.push(match tool {
                        NamespaceTool::Function(tool) => function(tool, Some(&namespace), &mut names)?,
                        NamespaceTool::Custom(tool) => custom_function(tool, Some(&namespace), &mut names)?,
                    });
                }
            }
        }
    }
    let choice = choice.map_or_else(|| Ok("auto".into()), |choice| tool_choice(choice, &mut functions))?;
    if functions.is_empty() {
        let is_free = matches!(choice.as_str(), Some("auto" | "none"));
        return if is_free {
            Ok(names.renamed)
        } else {
            Err("tool_choice demands a call, but nobody here can run the request's tools".to_owned())
        };
    }
    chat.insert("tools".to_owned(), functions.into());
    chat.insert("tool_choice".to_owned(), choice);
    if let Some(parallel) = fields.get("parallel_tool_calls").filter(|parallel| !parallel.is_null()) {
        chat.insert("parallel_tool_calls".to_owned(), parallel.clone());
    }
    Ok(names.renamed)
}

fn function(tool: FunctionTool, namespace: Option<&str>, names: &mut ToolNames) -> Result<Value, String> {
    let FunctionTool { name, description, parameters, strict, defer_loading } = tool;
    // The Rust front-end requires parameters for every function.
    let parameters = parameters.filter(|parameters| !parameters.is_null()).unwrap_or_else(|| json!({"type": "object", "properties": {}}));
    let mut function = json!({"name": names.add(name, namespace, false)?, "parameters": parameters});
    let flags = [("strict", strict.map(Value::from)), ("defer_loading", defer_loading.map(Value::from))];
    for (field, value) in [("description", description)].into_iter().chain(flags) {
        if let Some(value) = value {
            function[field] = value;
        }
    }
    Ok(json!({"type": "function", "function": function}))
}

/// A free-form tool as a function. A grammar of its input is told to the model, but not enforced:
/// an engine's grammar would be that of the whole answer.
fn custom_function(tool: CustomTool, namespace: Option<&str>, names: &mut ToolNames) -> Result<Value, String> {
    let CustomTool { name, description, format } = tool;
    let mut described = description.unwrap_or_default();
    if let Some(format) = format.filter(|format| format["type"] == "grammar") {
        let (syntax, definition) = (format["syntax"].as_str().unwrap_or_default(), format["definition"].as_str().unwrap_or_default());
        described.push_str(&format!("\n\nThe input follows this {syntax} grammar:\n{definition}"));
    }
    let input = json!({"type": "string", "description": "The whole input of the tool, as plain text"});
    let parameters = json!({"type": "object", "properties": {INPUT: input}, "required": [INPUT], "additionalProperties": false});
    let function = json!({"name": names.add(name, namespace, true)?, "description": described.trim(), "parameters": parameters});
    Ok(json!({"type": "function", "function": function}))
}

/// A chat's choice among its `functions`, of which only the allowed ones stay.
fn tool_choice(choice: &Value, functions: &mut Vec<Value>) -> Result<Value, String> {
    let named = |tool: &Value| {
        let is_function = matches!(tool["type"].as_str(), Some("function" | "custom"));
        tool["name"].as_str().filter(|_| is_function).map(|name| chat_name(tool["namespace"].as_str(), name))
    };
    if choice.is_string() {
        return Ok(choice.clone());
    }
    if let Some(name) = named(choice) {
        return Ok(json!({"type": "function", "function": {"name": name}}));
    }
    match (choice["type"].as_str(), choice["tools"].as_array(), choice["mode"].as_str()) {
        (Some("allowed_tools"), Some(allowed), Some(mode @ ("auto" | "required"))) => {
            let ours = allowed.iter().filter(|tool| !is_hosted_tool(tool));
            let allowed: Option<HashSet<String>> = ours.map(named).collect();
            let Some(allowed) = allowed else {
                return Err("tool_choice: a tool of `allowed_tools` is a function or custom tool with its name".to_owned());
            };
            let name_of = |function: &Value| function["function"]["name"].as_str().map(str::to_owned);
            let known: HashSet<String> = functions.iter().filter_map(name_of).collect();
            if let Some(unknown) = allowed.iter().find(|name| !known.contains(*name)) {
                return Err(format!("tool_choice: `allowed_tools` has {unknown:?}, which is none of the request's tools"));
            }
            functions.retain(|function| name_of(function).is_some_and(|name| allowed.contains(&name)));
            Ok(mode.into())
        }
        _ => Err("tool_choice is a word, a function or custom tool with its name, or `allowed_tools` with a mode and tools".to_owned()),
    }
}
