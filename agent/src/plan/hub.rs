//! Description of a model that is named as on Hugging Face and not downloaded yet: its small files,
//! without which no size, context or parser can be chosen.
//!
//! They are fetched by the engine's own Python, so that mirrors, proxies, tokens and the offline
//! variables of `huggingface_hub` count as they do for the engine.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use hostler_boot::program::run_to_end;

use crate::container::{self, Container};
use crate::prompt_files::resolve_folder;
use crate::vllm::arguments::{EngineArguments, value_of};
use crate::vllm::version::last_line;

/// Time limit. The files have some 20 MB, and without a network the library gives up after 10 s for
/// each attempt.
const FETCH_TIMEOUT: Duration = Duration::from_secs(60);

/// Variables with which nothing is fetched, or from elsewhere.
const OTHER_SOURCES: [&str; 3] = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_USE_MODELSCOPE"];

/// Fetches a repository's small files: name and revision are its arguments.
const FETCH_SCRIPT: &str = "\
import sys
from huggingface_hub import snapshot_download
snapshot_download(sys.argv[1], revision=sys.argv[2] or None, allow_patterns=['*.json', '*.jinja', '*.model', 'tokenizer*'])";

#[derive(Debug, thiserror::Error)]
pub(super) enum HubError {
    #[error("cannot start {0}: {1}")]
    Start(String, io::Error),
    #[error("it took longer than {} s", FETCH_TIMEOUT.as_secs())]
    Timeout,
    #[error("{0}")]
    Refused(String),
}

/// Names of the library's errors, and words of its requests, where no network leads to the hub.
const UNREACHED: [&str; 8] = [
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "ReadTimeout",
    "NameResolutionError",
    "ProxyError",
];

impl HubError {
    /// Why nothing is known of `model`, and what to do about it.
    pub(super) fn explain(&self, model: &str) -> String {
        let words = self.to_string();
        let has = |names: &[&str]| names.iter().any(|name| words.contains(name));
        let offline = "or name a folder";
        match self {
            Self::Refused(_) if has(&["GatedRepoError"]) => {
                format!("it is gated: ask for access on its page, then `hf auth login` and `hf download {model} config.json` ({words})")
            }
            Self::Refused(_) if has(&["RepositoryNotFoundError", "RevisionNotFoundError"]) => {
                format!("the hub has no such model, or it is private: check the name, or `hf auth login` ({words})")
            }
            Self::Timeout => {
                format!("the hub did not answer ({words}): `hf download {model} config.json` where there is a network, {offline}")
            }
            Self::Refused(_) if has(&UNREACHED) => {
                format!("the hub is not reached from here: `hf download {model} config.json` where there is a network, {offline} ({words})")
            }
            _ => format!("its description could not be fetched ({words}): `hf download {model} config.json` first, {offline}"),
        }
    }
}

/// Whether the description may be fetched: the name is one of Hugging Face's, is found nowhere here,
/// and no setting says that it comes from elsewhere.
pub(super) fn may_fetch(model: &str, arguments: &[String], downloads: &Path, variable: impl Fn(&str) -> Option<OsString>) -> bool {
    let is_name = |part: &str| {
        !part.is_empty() && !part.starts_with('.') && part.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter))
    };
    let is_set = |name: &str| variable(name).is_some_and(|value| !value.is_empty() && value != "0");
    model.split('/').count() == 2
        && model.split('/').all(is_name)
        && !OTHER_SOURCES.into_iter().any(is_set)
        && !EngineArguments(arguments).has("--download-dir")
        && !Path::new(model).exists()
        && resolve_folder(model, value_of(arguments, "--revision"), downloads).is_none()
}

/// Fetches the description into the folder of downloaded models, where the engine looks, too.
///
/// # Errors
/// In the library's own words, such as that the model is gated.
pub(super) async fn fetch(interpreter: &Path, container: Option<&Container>, model: &str, arguments: &[String]) -> Result<(), HubError> {
    let mut command = container::command(container, interpreter.as_os_str());
    command.args(["-c", FETCH_SCRIPT, model, value_of(arguments, "--revision").unwrap_or_default()]);
    match run_to_end(command, b"", FETCH_TIMEOUT).await {
        Err(error) => Err(HubError::Start(interpreter.display().to_string(), error)),
        Ok(None) => Err(HubError::Timeout),
        Ok(Some(Output { status, .. })) if status.success() => Ok(()),
        Ok(Some(Output { stderr, .. })) => match last_line(&String::from_utf8_lossy(&stderr)) {
            "" => Err(HubError::Refused("it said nothing".to_owned())),
            words => Err(HubError::Refused(words.to_owned())),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_what_is_named_as_on_hugging_face_and_is_not_here_is_fetched() {
        let cache = tempfile::tempdir().unwrap();
        let may = |model: &str, flags: &[&str], offline: bool| {
            let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
            may_fetch(model, &flags, cache.path(), |name| (offline && name == "HF_HUB_OFFLINE").then(|| "1".into()))
        };
        assert!(may("org/Model-8B.v2", &[], false));
        for other in ["/models/m", "./m", "model", "a/b/c", "../m", "org/-c;rm", "org/", ".x/y"] {
            assert!(!may(other, &[], false), "{other}");
        }
        assert!(!may("org/model", &[], true) && !may("org/model", &["--download-dir", "/d"], false));
        let snapshot = cache.path().join("models--org--here/snapshots/abc");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(cache.path().join("models--org--here/refs")).unwrap();
        fs::write(cache.path().join("models--org--here/refs/main"), "abc").unwrap();
        assert!(!may("org/here", &[], false) && may("org/here", &["--revision", "v2"], false));
    }

    #[test]
    fn a_name_that_the_hub_lacks_is_no_network_that_is_down() {
        let explained = |words: &str| HubError::Refused(words.to_owned()).explain("org/m");
        assert!(explained("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error").contains("no such model"));
        assert!(explained("huggingface_hub.errors.GatedRepoError: 401").contains("is gated"));
        assert!(explained("huggingface_hub.errors.LocalEntryNotFoundError: An error happened").contains("not reached from here"));
        assert!(HubError::Timeout.explain("org/m").contains("did not answer"));
        assert!(explained("OSError: disk full").contains("could not be fetched (OSError: disk full)"));
    }

    #[tokio::test]
    async fn the_library_is_given_name_and_revision_and_its_last_words_are_the_error() {
        let place = tempfile::tempdir().unwrap();
        let python = place.path().join("python");
        fs::write(&python, "#!/bin/sh\nshift 2\necho \"$@\" > \"$(dirname \"$0\")/asked\"\necho Traceback >&2\necho 'GatedRepoError: ask first' >&2\n[ \"$2\" = v2 ]\n").unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        let error = fetch(&python, None, "org/model", &[]).await.unwrap_err();
        assert_eq!(error.to_string(), "GatedRepoError: ask first");
        fetch(&python, None, "org/model", &["--revision=v2".to_owned()]).await.unwrap();
        assert_eq!(fs::read_to_string(place.path().join("asked")).unwrap(), "org/model v2\n");
        assert!(matches!(fetch(Path::new("/nonexistent"), None, "org/model", &[]).await, Err(HubError::Start(..))));
    }
}
