//! Which engines' streams can be replayed, and by which other engines.

use super::super::engine_check::is_flag;
use crate::fleet::EngineLaunch;

/// With these nobody can tell how an engine was started, or what a stream of it looks like.
const OBSCURE: [&str; 3] = ["--config", "--skip-tokenizer-init", "--return-tokens-as-token-ids"];

/// Flags that decide what an engine makes of a request's answer. Others, as those of its GPUs, may differ.
const SHAPING: [&str; 22] = [
    "--reasoning-parser",
    "--reasoning-parser-plugin",
    "--reasoning-config",
    "--response-role",
    "--tool-call-parser",
    "--tool-parser-plugin",
    "--enable-auto-tool-choice",
    "--exclude-tools-when-tool-choice-none",
    "--chat-template",
    "--chat-template-content-format",
    "--default-chat-template-kwargs",
    "--trust-request-chat-template",
    "--structured-outputs-config",
    "--generation-config",
    "--override-generation-config",
    "--tokenizer",
    "--tokenizer-mode",
    "--tokenizer-revision",
    "--revision",
    "--enable-prompt-tokens-details",
    "--enable-force-include-usage",
    "--logprobs-mode",
];

/// Whether the streams of an engine that was started like this can be replayed.
///
/// # Errors
/// With the reason why not.
pub(crate) fn check_replaying_engine(launch: Option<&EngineLaunch>) -> Result<(), &'static str> {
    let launch = launch.ok_or("engine")?;
    let is_obscure = |flag: &String| OBSCURE.iter().any(|name| is_flag(flag, name));
    if launch.flags.iter().any(is_obscure) { Err("engine") } else { Ok(()) }
}

/// Whether two engines, by their front-ends and flags, make the same stream of the same tokens.
pub(crate) fn are_alike(one: &EngineLaunch, other: &EngineLaunch) -> bool {
    one.dialect == other.dialect && shaping_flags(&one.flags) == shaping_flags(&other.flags)
}

/// The flags that shape answers, with their values, in the order of their names.
fn shaping_flags(flags: &[String]) -> Vec<(&'static str, Vec<&str>)> {
    let mut shaping = Vec::new();
    for (at, flag) in flags.iter().enumerate() {
        let Some(name) = SHAPING.iter().find(|name| is_flag(flag, name)) else { continue };
        let within = flag.split_once('=').map(|(_, value)| value);
        let behind = flags[at + 1..].iter().map(String::as_str).take_while(|value| within.is_none() && !value.starts_with("--"));
        shaping.push((*name, within.into_iter().chain(behind).collect()));
    }
    shaping.sort_unstable();
    shaping
}

#[cfg(test)]
mod tests {
    use hostler_prompt::Dialect;

    use super::*;

    fn launch(dialect: Dialect, flags: &str) -> EngineLaunch {
        EngineLaunch { dialect, flags: flags.split_whitespace().map(str::to_owned).collect(), ..EngineLaunch::default() }
    }

    #[test]
    fn engines_are_alike_that_differ_in_nothing_that_shapes_answers() {
        let alike = |one: &str, other: &str| are_alike(&launch(Dialect::Python, one), &launch(Dialect::Python, other));
        assert!(alike("--tensor-parallel-size 2 --port 1", "--tensor-parallel-size 4"));
        assert!(alike("--tool-call-parser hermes --enable-auto-tool-choice", "--enable_auto_tool_choice --tool-call-parser=hermes"));
        assert!(!alike("--tool-call-parser hermes", "--tool-call-parser mistral"));
        assert!(!alike("--reasoning-parser qwen3", ""));
        assert!(!alike("--chat-template a --port 1", "--chat-template b --port 1"));
        assert!(!are_alike(&launch(Dialect::Python, ""), &launch(Dialect::Rust, "")));
    }

    #[test]
    fn an_engine_that_is_not_known_replays_nothing() {
        let check = |dialect, flags| check_replaying_engine(Some(&launch(dialect, flags)));
        assert_eq!(check_replaying_engine(None), Err("engine"));
        assert_eq!(check(Dialect::Python, "--reasoning-parser qwen3 --tool-call-parser hermes"), Ok(()));
        assert_eq!(check(Dialect::Python, "--config x.yaml"), Err("engine"));
        assert_eq!(check(Dialect::Rust, ""), Ok(()));
    }
}
