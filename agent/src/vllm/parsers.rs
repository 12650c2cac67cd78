//! Parsers of tool calls and of reasoning: those of the installed release, and those that a model
//! needs.
//!
//! Without them vLLM refuses requests with tools, and leaves reasoning in the text (0.32, both
//! front-ends as `vllm serve` starts them). A family is recognized by what its chat template writes
//! around a call, or by its architecture where templates of several families look alike. The names
//! are those of vLLM's manual, examined in 0.32.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use hostler_boot::program::run_to_end;

use crate::container::{self, Container};

/// Time limit for the Rust front-end to name its parsers, which takes it 10 ms.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// Parsers of a front-end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum InstalledParsers {
    /// Names that the installed front-end has registered; empty if it could not be queried.
    Listed { tools: BTreeSet<String>, reasoning: BTreeSet<String> },
    /// The release is not installed, and assumed to have what is needed.
    Assumed,
}

impl Default for InstalledParsers {
    fn default() -> Self {
        Self::Listed { tools: BTreeSet::new(), reasoning: BTreeSet::new() }
    }
}

/// Lines of Python that print the registered names of a vLLM in `folder`, without importing it.
///
/// Releases have registered them in three ways: a table in the package, a call for each, and a
/// decorator.
pub(super) const LISTING_SCRIPT: &str = r#"
import glob, re
def parsers(folder, kind, places):
    for place in places:
        for path in sorted(glob.glob(folder + '/' + place + '/*.py')):
            text = open(path, encoding='utf-8').read()
            table = re.findall(r'^ {4}"([\w.-]+)": \(', text, re.M) if path.endswith('__init__.py') else []
            calls = re.findall(r'register_(?:lazy_)?module\(\s*(?:name\s*=\s*)?\[?((?:\s*["\'][\w.-]+["\']\s*,?)+)', text)
            for name in table + [name for call in calls for name in re.findall(r'["\']([\w.-]+)["\']', call)]:
                print(kind + ' ' + name)
for folder in folders:
    parsers(folder, 'tool-parser', ('tool_parsers', 'entrypoints/openai/tool_parsers'))
    parsers(folder, 'reasoning-parser', ('reasoning',))
"#;

impl InstalledParsers {
    /// Reads what `LISTING_SCRIPT` printed.
    pub(super) fn from_output(output: &str) -> Self {
        let named = |prefix| output.lines().filter_map(|line| line.strip_prefix(prefix)).map(str::to_owned).collect();
        Self::Listed { tools: named("tool-parser "), reasoning: named("reasoning-parser ") }
    }

    /// Asks the Rust front-end, which names its parsers when it is given one that it does not have.
    pub(crate) async fn of_rust_front_end(binary: &Path, container: Option<&Container>) -> Self {
        let ask = async |flag: &str| {
            let mut command = container::command(container, binary.as_os_str());
            command.args(["render", "nowhere", flag, "?"]);
            let ended = run_to_end(command, b"", ASK_TIMEOUT).await.ok().flatten();
            ended.map_or_else(BTreeSet::new, |ended| named_in_refusal(&String::from_utf8_lossy(&[ended.stderr, ended.stdout].concat())))
        };
        Self::Listed { tools: ask(TOOL_PARSER_FLAG).await, reasoning: ask(REASONING_PARSER_FLAG).await }
    }

    fn first_tool_parser(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| match self {
            Self::Listed { tools, .. } => tools.contains(*name),
            Self::Assumed => true,
        })
    }

    pub(crate) fn has_reasoning_parser(&self, name: &str) -> bool {
        match self {
            Self::Listed { reasoning, .. } => reasoning.contains(name),
            Self::Assumed => true,
        }
    }

    /// Chooses a model's parsers.
    pub(crate) fn choose(&self, architecture: &str, template: Option<&str>) -> ModelParsers {
        let text = template.unwrap_or_default();
        let Some(family) = FAMILIES.iter().find(|family| family.includes(architecture, text)) else {
            let why = if template.is_none() { "it has no chat template" } else { "its chat template is of no known family" };
            return ModelParsers::without(if template.is_some() && !text.contains("tools") { NO_TOOLS } else { why });
        };
        let tools = match self.first_tool_parser(family.tools) {
            _ if template.is_some() && !text.contains("tools") => Err(NO_TOOLS.to_owned()),
            _ if family.tools.is_empty() => Err("vLLM has no parser for its calls".to_owned()),
            Some(name) => Ok(name),
            None => Err(format!("the installed front-end has no {}", family.tools.join(", "))),
        };
        let thinks = family.thinks_by.is_empty() || family.thinks_by.iter().any(|mark| text.contains(mark));
        let reasoning = match family.reasoning {
            Some(name) if thinks && self.has_reasoning_parser(name) => Ok(name),
            Some(name) if thinks => Err(format!("the installed front-end has no {name}")),
            _ => Err("its chat template has no reasoning".to_owned()),
        };
        ModelParsers { tools, reasoning }
    }
}

/// Names in `… is not registered (choose from: a, b)`.
fn named_in_refusal(output: &str) -> BTreeSet<String> {
    let list = output.split_once("(choose from: ").and_then(|(_, rest)| rest.split_once(')'));
    list.map_or_else(BTreeSet::new, |(names, _)| names.split(", ").map(str::to_owned).collect())
}

pub(crate) const TOOL_PARSER_FLAG: &str = "--tool-call-parser";

pub(crate) const REASONING_PARSER_FLAG: &str = "--reasoning-parser";

const NO_TOOLS: &str = "its chat template has no tools";

/// Parsers for a model, or why there is none. Reasons continue "the model has none: …".
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelParsers {
    pub(crate) tools: Result<&'static str, String>,
    pub(crate) reasoning: Result<&'static str, String>,
}

impl ModelParsers {
    pub(crate) fn without(because: &str) -> Self {
        Self { tools: Err(because.to_owned()), reasoning: Err(because.to_owned()) }
    }
}

/// Models whose calls and reasoning look alike.
struct Family {
    /// Beginnings of architectures; empty for all.
    architectures: &'static [&'static str],
    /// Texts that the template has, all of them.
    marks: &'static [&'static str],
    /// Names of the parser of calls, the best first.
    tools: &'static [&'static str],
    reasoning: Option<&'static str>,
    /// Texts of which a template with reasoning has one; empty if the whole family reasons.
    thinks_by: &'static [&'static str],
}

impl Family {
    fn includes(&self, architecture: &str, template: &str) -> bool {
        let is_architecture = self.architectures.is_empty() || self.architectures.iter().any(|begin| architecture.starts_with(begin));
        is_architecture && self.marks.iter().all(|mark| template.contains(mark))
    }
}

const THINK: &[&str] = &["<think>"];

const fn family(
    architectures: &'static [&'static str],
    marks: &'static [&'static str],
    tools: &'static [&'static str],
    reasoning: Option<&'static str>,
    thinks_by: &'static [&'static str],
) -> Family {
    Family { architectures, marks, tools, reasoning, thinks_by }
}

/// The first that includes a model is its family.
const FAMILIES: &[Family] = &[
    family(&["GptOss"], &[], &["openai"], Some("openai_gptoss"), &[]),
    family(&["DeepseekV4"], &[], &["deepseek_v4"], Some("deepseek_v4"), &[]),
    family(&["DeepseekV32"], &[], &["deepseek_v32"], Some("deepseek_v3"), &[]),
    // Since V3.1 the arguments stand without the fence of a code block.
    family(&[], &["<｜tool▁calls▁begin｜>", "```json"], &["deepseek_v3"], Some("deepseek_r1"), THINK),
    family(&[], &["<｜tool▁calls▁begin｜>"], &["deepseek_v31"], Some("deepseek_v3"), THINK),
    family(&[], &["<|tool_calls_section_begin|>"], &["kimi_k2"], Some("kimi_k2"), THINK),
    family(&[], &["[TOOL_CALLS]"], &["mistral"], Some("mistral"), &["[THINK]"]),
    family(&[], &["<minimax:tool_call>"], &["minimax_m2"], Some("minimax_m2"), THINK),
    family(&[], &["<seed:tool_call>"], &["seed_oss"], Some("seed_oss"), &["<seed:think>"]),
    family(&[], &["<longcat_tool_call>"], &["longcat"], None, &[]),
    family(&[], &["<|tool_call_start|>"], &["lfm2"], None, &[]),
    family(&[], &["<start_function_call>"], &["functiongemma"], None, &[]),
    family(&["Gemma4"], &[], &["gemma4"], Some("gemma4"), &[]),
    family(&["Llama4"], &["[func_name1"], &["llama4_pythonic"], None, &[]),
    family(&["Llama4"], &[], &["llama4_json"], None, &[]),
    family(&[], &["<|start_header_id|>", "ipython"], &["llama3_json"], None, &[]),
    family(&[], &["{function-name}<arg_key>"], &["glm47", "glm45"], Some("glm45"), THINK),
    family(&[], &["<arg_key>"], &["glm45"], Some("glm45"), THINK),
    family(&["Step3p5"], &[], &["step3p5"], Some("step3p5"), THINK),
    family(&["Step3"], &[], &["step3"], Some("step3"), THINK),
    family(&["Nemotron"], &["<function="], &["qwen3_coder", "qwen3_xml"], Some("nemotron_v3"), THINK),
    family(&["MiMo"], &["<function="], &["mimo", "qwen3_xml"], Some("mimo"), THINK),
    family(&[], &["<function=", "<parameter="], &["qwen3_coder", "qwen3_xml"], Some("qwen3"), THINK),
    family(&["Granite"], &["<tool_call>"], &["granite4", "hermes"], Some("granite"), &["Here is my thought process"]),
    family(&["Granite"], &["<|tool_call|>"], &["granite"], Some("granite"), &["Here is my thought process"]),
    family(&["HunYuan"], &["<tool_calls>"], &["hunyuan_a13b"], Some("hunyuan_a13b"), THINK),
    family(&["Ernie4_5"], &[], &["ernie45"], Some("ernie45"), THINK),
    family(&["Olmo3"], &["<function_calls>"], &["olmo3"], Some("olmo3"), THINK),
    family(&["Cohere2"], &["<|START_ACTION|>"], &["cohere_command3"], Some("cohere_command3"), &["<|START_THINKING|>"]),
    family(&["Jamba"], &["<tool_calls>"], &["jamba"], None, &[]),
    family(&["InternLM"], &["<|plugin|>"], &["internlm"], None, &[]),
    family(&["Phi3"], &["<|tool|>"], &["phi4_mini_json"], None, &[]),
    family(&["Apertus"], &["<|tools_prefix|>"], &["apertus"], None, &[]),
    family(&["Qwen3"], &["<tool_call>"], &["hermes"], Some("qwen3"), THINK),
    // QwQ, which reasons always.
    family(&["Qwen2"], &["<tool_call>"], &["hermes"], Some("deepseek_r1"), THINK),
    family(&[], &["<tool_call>", "</tool_call>"], &["hermes"], None, &[]),
];

#[cfg(test)]
mod tests;
