//! Choice of vLLM's HTTP front-end for the engines of a node.
//!
//! If the front-end is the limit, the Rust one gives 1.6 times the tokens a second of the Python
//! one (a model of 1.7 billion parameters, 512 streams, one H200). It lacks some of the Python
//! one's flags and routes.

use std::path::{Path, PathBuf};

use super::error::PlanError;
#[cfg(test)]
use super::model::ModelFacts;
use super::model::ModelInfo;
use super::setup::EnginePlanSetup;
use crate::config::{FrontEnd, Profile};
use crate::vllm::FrontEndInUse;
use crate::vllm::arguments::EngineArguments;
use crate::vllm::front_end::{RUST_FLAGS_SINCE, RUST_UNSUPPORTED_FLAGS};
use crate::vllm::releases::RUST_TOKENIZE_SINCE;

/// Front-end of all engines of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontEndChoice {
    pub in_use: FrontEndInUse,
    /// Reason, which ends a sentence.
    pub because: String,
    /// Whether an engine gets the Python front-end if the Rust one does not start.
    pub may_fall_back: bool,
}

/// Chooses the front-end. `binary` is the Rust front-end of the installed vLLM, if it has one.
///
/// # Errors
/// When the Rust front-end was requested but is not installed.
pub(super) fn choose(
    setting: FrontEnd,
    binary: Option<&Path>,
    setup: &EnginePlanSetup,
    model: &ModelInfo,
) -> Result<FrontEndChoice, PlanError> {
    let python = |because: &str| FrontEndChoice { in_use: FrontEndInUse::Python, because: because.to_owned(), may_fall_back: false };
    let rust = |because: &str, may_fall_back| FrontEndChoice { in_use: FrontEndInUse::Rust, because: because.to_owned(), may_fall_back };
    if setup.simulated {
        return Ok(match setting {
            FrontEnd::Rust => rust("agent.front_end says so; the simulated engine lacks what it lacks", false),
            FrontEnd::Python | FrontEnd::Auto => python("the simulated engine has its own"),
        });
    }
    if setup.attached {
        return Ok(python("the engine runs already"));
    }
    let absent = || match setup.version {
        Some(version) => format!("the installed vLLM {version} comes without it"),
        None => "the version of vLLM is unknown".to_owned(),
    };
    match (setting, binary) {
        (FrontEnd::Python, _) => Ok(python("agent.front_end says so")),
        (FrontEnd::Rust, None) => Err(PlanError::NoRustFrontEnd { because: absent() }),
        (FrontEnd::Rust, Some(_)) => Ok(rust("agent.front_end says so", false)),
        (FrontEnd::Auto, None) => Ok(python(&format!("{}: the Rust one ships with vLLM for GPUs since 0.22", absent()))),
        (FrontEnd::Auto, Some(_)) => match rust_obstacle(setup, model) {
            Some(because) => Ok(python(&because)),
            None => Ok(rust(
                "it serves more tokens a second; it keeps no responses and has no pooling routes, for which use --front-end python",
                true,
            )),
        },
    }
}

/// Why the Rust front-end is not the better one here.
fn rust_obstacle(setup: &EnginePlanSetup, model: &ModelInfo) -> Option<String> {
    if !setup.is_at_least(RUST_TOKENIZE_SINCE) {
        return Some(format!("the Rust one has what routers need since vLLM {}.{}", RUST_TOKENIZE_SINCE.major, RUST_TOKENIZE_SINCE.minor));
    }
    if setup.nodes > 1 {
        return Some("the Rust one was not tried with an engine over several nodes".to_owned());
    }
    if setup.profile == Profile::Conservative {
        return Some("the profile is conservative".to_owned());
    }
    let given = EngineArguments(&setup.arguments);
    let not_yet = RUST_FLAGS_SINCE.iter().filter(|(_, since)| !setup.is_at_least(*since)).map(|(flag, _)| flag);
    if let Some(flag) = RUST_UNSUPPORTED_FLAGS.iter().chain(not_yet).find(|flag| given.has(flag)) {
        return Some(format!("the Rust one does not do {flag}"));
    }
    let other = model.facts().filter(|facts| !facts.is_generative())?;
    Some(format!("the Rust one serves text generation only, and {} is something else", other.architecture))
}

/// Rust front-end that this process's environment names in place of the installed one.
#[must_use]
pub(super) fn binary_from_environment(variable: Option<std::ffi::OsString>) -> Option<PathBuf> {
    let path = PathBuf::from(variable?);
    path.is_file().then_some(path)
}

#[cfg(test)]
mod tests;
