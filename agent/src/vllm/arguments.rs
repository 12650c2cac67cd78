//! Parser for engine arguments, by the engine's own rules: `--flag value` or `--flag=value`, dashes
//! or underscores, and the last one counts.

use std::fs;

use hostler_api::given_model_names;

/// Flags with a value that only an engine with an HTTP server takes.
const SERVER_FLAGS: [&str; 1] = ["--api-server-count"];

/// Value of the last `flag` (with dashes, such as `--max-model-len`).
pub(crate) fn value_of<'a>(arguments: &'a [String], flag: &str) -> Option<&'a str> {
    let at = arguments.iter().rposition(|argument| is_flag(argument, flag))?;
    match arguments[at].split_once('=') {
        Some((_, value)) => Some(value),
        None => arguments.get(at + 1).map(String::as_str),
    }
}

/// Whether a `flag` without a value was given.
pub(crate) fn is_given(arguments: &[String], flag: &str) -> bool {
    arguments.iter().any(|argument| is_flag(argument, flag))
}

/// Names by which an engine with these arguments serves `model`. None if that cannot be told, or if
/// it serves adapters beside the model.
pub fn model_names(model: &str, arguments: &[String]) -> Vec<String> {
    let arguments = expand_config_file(arguments);
    if is_given(&arguments, "--lora-modules") {
        return Vec::new();
    }
    let names = given_model_names(&arguments).unwrap_or_else(|| vec![model]);
    // A list in the file is not read.
    let is_known = names.iter().all(|name| !name.is_empty() && !name.starts_with('['));
    if is_known { names.into_iter().map(str::to_owned).collect() } else { Vec::new() }
}

fn is_flag(argument: &str, flag: &str) -> bool {
    let name = argument.split('=').next().unwrap_or_default();
    name.starts_with('-') && name.replace('_', "-") == flag
}

/// Arguments together with those of the file that `--config` names.
///
/// The engine puts the file's arguments before the others. Only the names of nested entries are
/// used. An unreadable file adds nothing: the engine will report it.
pub(crate) fn expand_config_file(arguments: &[String]) -> Vec<String> {
    let text = value_of(arguments, "--config").and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
    let argument = |line: &str| {
        let (name, value) = line.split_once(':').filter(|(name, _)| name.starts_with(|first: char| first.is_ascii_alphanumeric()))?;
        let value = value.split(" #").next().unwrap_or_default().trim().trim_matches(['"', '\'']);
        Some(match value {
            "true" | "True" => format!("--{name}"),
            "false" | "False" => format!("--no-{name}"),
            value => format!("--{name}={value}"),
        })
    };
    text.lines().filter_map(argument).chain(arguments.iter().cloned()).collect()
}

/// A user's arguments without those that a part without a server does not take.
pub(crate) fn without_server_flags(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let name = word.split('=').next().unwrap_or_default().replace('_', "-");
        if !SERVER_FLAGS.contains(&name.as_str()) {
            kept.push(word.clone());
        } else if !word.contains('=') {
            words.next();
        }
    }
    kept
}

pub(crate) struct EngineArguments<'a>(pub(crate) &'a [String]);

impl EngineArguments<'_> {
    /// Whether a flag was given, as `--flag`, `--flag=value` or with underscores, or negated as
    /// `--no-flag`.
    pub(crate) fn has(&self, flag: &str) -> bool {
        let bare = flag.trim_start_matches('-');
        self.0.iter().any(|argument| {
            let name = argument.split('=').next().unwrap_or_default().replace('_', "-");
            let name = name.strip_prefix("--").or_else(|| name.strip_prefix('-')).unwrap_or_default();
            name == bare || name.strip_prefix("no-") == Some(bare)
        })
    }

    /// Whether a flag was given as `--no-flag`.
    pub(crate) fn negates(&self, flag: &str) -> bool {
        let negated = format!("--no-{}", flag.trim_start_matches('-'));
        self.0.iter().any(|argument| argument.replace('_', "-") == negated)
    }

    /// Value of a flag: empty if the flag takes none, `off` if it was negated, `None` if it was not
    /// given.
    pub(crate) fn display_value(&self, flag: &str) -> Option<String> {
        if self.negates(flag) {
            return Some("off".to_owned());
        }
        let value = || value_of(self.0, flag).filter(|value| !value.starts_with("--")).unwrap_or_default().to_owned();
        self.has(flag).then(value)
    }
}

#[cfg(test)]
mod tests;
