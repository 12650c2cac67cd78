//! Reads what somebody has said to the engine in its arguments, by the engine's own rules: `--flag value` or `--flag=value`, dashes or underscores, and the last one counts.

/// The value that the last `flag` (with dashes, as `--max-model-len`) was given.
pub(crate) fn value_of<'a>(arguments: &'a [String], flag: &str) -> Option<&'a str> {
    let at = arguments.iter().rposition(|argument| is(argument, flag))?;
    match arguments[at].split_once('=') {
        Some((_, value)) => Some(value),
        None => arguments.get(at + 1).map(String::as_str),
    }
}

/// Whether a `flag` without a value was given.
pub(crate) fn is_given(arguments: &[String], flag: &str) -> bool {
    arguments.iter().any(|argument| is(argument, flag))
}

fn is(argument: &str, flag: &str) -> bool {
    let name = argument.split('=').next().unwrap_or_default();
    name.starts_with("--") && name.replace('_', "-") == flag
}

#[cfg(test)]
mod tests;
