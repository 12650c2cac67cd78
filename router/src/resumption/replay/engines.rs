//! Decides which engines' streams can be replayed, and by which other engines.

use std::collections::BTreeMap;

use crate::fleet::{EngineLaunch, is_flag};
use crate::resume_tier::NotResumed;

/// Flags with which nobody can tell how an engine was started, or the form of its streams.
const OBSCURE: [&str; 3] = ["--config", "--skip-tokenizer-init", "--return-tokens-as-token-ids"];

/// Flags that shape an engine's answer to a request. Others, such as those of GPUs, may differ.
const SHAPING: [&str; 31] = [
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
    "--max-logprobs",
    "--logits-processors",
    "--max-model-len",
    "--dtype",
    "--quantization",
    "--kv-cache-dtype",
    "--load-format",
    "--hf-overrides",
    "--speculative-config",
];

/// The subset of `SHAPING` that decides which tokens follow others where the request leaves it to
/// the engine, and what a token is.
const TOKEN_SHAPING: [&str; 9] = [
    "--generation-config",
    "--override-generation-config",
    "--tokenizer",
    "--tokenizer-mode",
    "--tokenizer-revision",
    "--revision",
    "--quantization",
    "--hf-overrides",
    "--logits-processors",
];

/// Whether the streams of an engine that was started like this can be replayed.
///
/// # Errors
/// The reason why not.
pub(crate) fn check_replaying_engine(launch: Option<&EngineLaunch>) -> Result<(), NotResumed> {
    let launch = launch.ok_or(NotResumed::Engine)?;
    *launch.resume_checks.replays.get_or_init(|| {
        let is_obscure = |flag: &String| OBSCURE.iter().any(|name| is_flag(flag, name));
        if launch.flags.iter().any(is_obscure) { Err(NotResumed::Engine) } else { Ok(()) }
    })
}

/// Whether two engines, by front-end and flags, make the same stream of the same tokens.
pub(crate) fn are_alike(one: &EngineLaunch, other: &EngineLaunch) -> bool {
    one.dialect == other.dialect && select_flags(&one.flags, &SHAPING) == select_flags(&other.flags, &SHAPING)
}

/// Whether two engines, by their flags, go on alike from the same tokens. Their front-ends may
/// differ.
pub(crate) fn have_alike_tokens(one: &EngineLaunch, other: &EngineLaunch) -> bool {
    select_flags(&one.flags, &TOKEN_SHAPING) == select_flags(&other.flags, &TOKEN_SHAPING)
}

/// The flags with one of these names, each with the part that it sets and its last value.
fn select_flags<'a>(flags: &'a [String], names: &[&'static str]) -> BTreeMap<(&'static str, Option<&'a str>), Vec<&'a str>> {
    let mut selected = BTreeMap::new();
    for (at, flag) in flags.iter().enumerate() {
        // `-q` is the short form of `--quantization`.
        let Some(name) = names.iter().find(|name| is_flag(flag, name) || (**name == "--quantization" && flag == "-q")) else { continue };
        let (flag, within) = flag.split_once('=').map_or((flag.as_str(), None), |(flag, value)| (flag, Some(value)));
        let part = flag.split_once('.').map(|(_, part)| part);
        let behind = flags[at + 1..].iter().map(String::as_str).take_while(|value| within.is_none() && !value.starts_with("--"));
        selected.insert((*name, part), within.into_iter().chain(behind).collect());
    }
    selected
}

#[cfg(test)]
mod tests {
    use hostler_prompt::Dialect;

    use super::*;

    fn launch(dialect: Dialect, flags: &str) -> EngineLaunch {
        EngineLaunch { dialect, flags: flags.split_whitespace().map(str::to_owned).collect(), ..EngineLaunch::default() }
    }

    #[test]
    fn engines_are_alike_when_their_answer_settings_match() {
        let alike = |one: &str, other: &str| are_alike(&launch(Dialect::Python, one), &launch(Dialect::Python, other));
        assert!(alike("--tensor-parallel-size 2 --port 1", "--tensor-parallel-size 4"));
        assert!(alike("--tool-call-parser hermes --enable-auto-tool-choice", "--enable_auto_tool_choice --tool-call-parser=hermes"));
        assert!(!alike("--tool-call-parser hermes", "--tool-call-parser mistral"));
        assert!(!alike("--reasoning-parser qwen3", ""));
        assert!(!alike("--chat-template a --port 1", "--chat-template b --port 1"));
        assert!(!alike("--default-chat-template-kwargs.enable_thinking false", ""));
        assert!(!alike("-q fp8", "") && alike("-q fp8", "--quantization=fp8"));
        // The last flag counts.
        assert!(alike("--dtype half --dtype auto", "--dtype auto") && !alike("--dtype half --dtype auto", "--dtype auto --dtype half"));
        assert!(!are_alike(&launch(Dialect::Python, ""), &launch(Dialect::Rust, "")));
        assert!(have_alike_tokens(&launch(Dialect::Python, "--reasoning-parser qwen3"), &launch(Dialect::Rust, "--max-model-len 9")));
        assert!(!have_alike_tokens(&launch(Dialect::Python, "--generation-config vllm"), &launch(Dialect::Python, "")));
    }

    #[test]
    fn an_unknown_engine_replays_nothing() {
        let check = |dialect, flags| check_replaying_engine(Some(&launch(dialect, flags)));
        assert_eq!(check_replaying_engine(None), Err(NotResumed::Engine));
        assert_eq!(check(Dialect::Python, "--reasoning-parser qwen3 --tool-call-parser hermes"), Ok(()));
        assert_eq!(check(Dialect::Python, "--config x.yaml"), Err(NotResumed::Engine));
        assert_eq!(check(Dialect::Rust, ""), Ok(()));
    }
}
