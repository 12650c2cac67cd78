//! Whether the streams of an engine can be continued, by how it was started.

use super::sampling::StreamApi;
use crate::fleet::EngineLaunch;

/// A chat of an engine with one of these is not the text of its tokens, or nobody can tell. Without them, both front-ends of `vllm serve` parse
/// nothing of most models (0.32; `vllm-rs serve`, which guesses a parser by the model's name, is not how agents start engines).
const FLAGS_OF_CHATS: [&str; 4] = ["--reasoning-parser", "--reasoning-parser-plugin", "--reasoning-config", "--response-role"];

/// The same within the value of a flag, or behind its dot: `--structured-outputs-config '{"reasoning_parser": …}'`.
const WORD_OF_CHATS: &str = "reasoning_parser";

/// Models of this family have a parser without being asked, by what their configuration says of them; their names say it too.
const PARSED_FAMILY: &str = "gpt-oss";

/// With these nobody can tell what a stream of the engine looks like.
const FLAGS_OF_ALL: [&str; 4] = ["--config", "--skip-tokenizer-init", "--enable-force-include-usage", "--return-tokens-as-token-ids"];

/// Whether the streams of an engine that was started like this can be continued.
///
/// # Errors
/// With the reason why not.
pub(crate) fn check_engine(launch: Option<&EngineLaunch>, api: StreamApi) -> Result<(), &'static str> {
    let launch = launch.ok_or("engine")?;
    let has = |names: &[&str]| launch.flags.iter().any(|flag| names.iter().any(|name| is_flag(flag, name)));
    if has(&FLAGS_OF_ALL) {
        return Err("engine");
    }
    let parses_chats =
        || has(&FLAGS_OF_CHATS) || launch.flags.iter().any(|flag| flag.contains(WORD_OF_CHATS) || flag.contains(PARSED_FAMILY));
    if api == StreamApi::Chat && parses_chats() { Err("parser") } else { Ok(()) }
}

/// Whether an argument is the flag of this name, in either spelling, with or without its value or a part of it (`--flag.part`).
pub(super) fn is_flag(argument: &str, name: &str) -> bool {
    let flag = argument.split_once(['=', '.']).map_or(argument, |(flag, _)| flag).as_bytes();
    flag.len() == name.len() && flag.iter().map(|byte| if *byte == b'_' { b'-' } else { *byte }).eq(name.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(api: StreamApi, flags: &[&str]) -> Result<(), &'static str> {
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        check_engine(Some(&EngineLaunch { flags, ..EngineLaunch::default() }), api)
    }

    #[test]
    fn an_engine_that_parses_chats_has_only_its_completions_resumed() {
        use StreamApi::{Chat, Completions};
        assert_eq!(check_engine(None, Chat), Err("engine"));
        assert_eq!(check(Chat, &["--max-model-len", "10"]), Ok(()));
        for flags in [
            &["--reasoning-parser", "qwen3"][..],
            &["--reasoning-parser=qwen3"],
            &["--reasoning_parser=qwen3"],
            &["--structured-outputs-config.reasoning_parser", "qwen3"],
            &["--structured-outputs-config", "{\"reasoning_parser\": \"qwen3\"}"],
            &["--served-model-name", "openai/gpt-oss-20b"],
        ] {
            assert_eq!(check(Chat, flags), Err("parser"), "{flags:?}");
            assert_eq!(check(Completions, flags), Ok(()), "{flags:?}");
        }
        // It parses what a request without tools never gives.
        assert_eq!(check(Chat, &["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]), Ok(()));
        assert_eq!(check(Completions, &["--config", "x.yaml"]), Err("engine"));
    }
}
