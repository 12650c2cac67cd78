//! Decides from an engine's launch whether its streams can be continued.

use super::sampling::StreamApi;
use crate::fleet::EngineLaunch;
use crate::resume_tier::NotResumed;

/// Flags with which a chat is not, or may not be, the text of its tokens.
///
/// Without them, both front-ends of `vllm serve` parse nothing of most models (0.32). `vllm-rs
/// serve` guesses a parser from the model's name, but agents do not start engines with it.
const FLAGS_OF_CHATS: [&str; 4] = ["--reasoning-parser", "--reasoning-parser-plugin", "--reasoning-config", "--response-role"];

/// A reasoning parser within the value of a flag, or behind its dot: `--structured-outputs-config
/// '{"reasoning_parser": …}'`.
const WORD_OF_CHATS: &str = "reasoning_parser";

/// Models of this family get a parser unasked, because of their configuration. Their names reveal
/// the family too.
const PARSED_FAMILY: &str = "gpt-oss";

/// Flags with which nobody can tell the form of the engine's streams.
const FLAGS_OF_ALL: [&str; 4] = ["--config", "--skip-tokenizer-init", "--enable-force-include-usage", "--return-tokens-as-token-ids"];

/// Whether the streams of an engine that was started like this can be continued.
///
/// # Errors
/// The reason why not.
pub(crate) fn check_engine(launch: Option<&EngineLaunch>, api: StreamApi) -> Result<(), NotResumed> {
    let launch = launch.ok_or(NotResumed::Engine)?;
    let known = match api {
        StreamApi::Chat => &launch.resume_checks.chats,
        StreamApi::Completions => &launch.resume_checks.completions,
    };
    *known.get_or_init(|| check_flags(launch, api))
}

fn check_flags(launch: &EngineLaunch, api: StreamApi) -> Result<(), NotResumed> {
    let has = |names: &[&str]| names.iter().any(|name| launch.has_flag(name));
    if launch.is_attached || has(&FLAGS_OF_ALL) {
        return Err(NotResumed::Engine);
    }
    let parses_chats =
        || has(&FLAGS_OF_CHATS) || launch.flags.iter().any(|flag| flag.contains(WORD_OF_CHATS) || flag.contains(PARSED_FAMILY));
    if api == StreamApi::Chat && parses_chats() { Err(NotResumed::Parser) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(api: StreamApi, flags: &[&str]) -> Result<(), NotResumed> {
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        check_engine(Some(&EngineLaunch { flags, ..EngineLaunch::default() }), api)
    }

    #[test]
    fn an_engine_that_parses_chats_has_only_its_completions_resumed() {
        use StreamApi::{Chat, Completions};
        assert_eq!(check_engine(None, Chat), Err(NotResumed::Engine));
        assert_eq!(check(Chat, &["--max-model-len", "10"]), Ok(()));
        for flags in [
            &["--reasoning-parser", "qwen3"][..],
            &["--reasoning-parser=qwen3"],
            &["--reasoning_parser=qwen3"],
            &["--structured-outputs-config.reasoning_parser", "qwen3"],
            &["--structured-outputs-config", "{\"reasoning_parser\": \"qwen3\"}"],
            &["--served-model-name", "openai/gpt-oss-20b"],
        ] {
            assert_eq!(check(Chat, flags), Err(NotResumed::Parser), "{flags:?}");
            assert_eq!(check(Completions, flags), Ok(()), "{flags:?}");
        }
        // The tool parser finds nothing in answers to requests without tools.
        assert_eq!(check(Chat, &["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]), Ok(()));
        assert_eq!(check(Completions, &["--config", "x.yaml"]), Err(NotResumed::Engine));
    }
}
