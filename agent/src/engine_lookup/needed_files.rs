//! What of the host's files an engine in a container needs, beside the agent's own folders: the
//! model, caches, and each file that the engine's arguments name.
//!
//! Home, `/tmp` and the working folder are there by most sites' rules, and not by all.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::config::AgentConfig;
use crate::prompt_files::hub_cache;
use crate::vllm::arguments::expand_config_file;

/// Processes of an engine share memory here, and the keeper removes what a killed one leaves.
const SHARED_MEMORY: &str = "/dev/shm";

/// Variables that name folders of caches: of Hugging Face, vLLM, Triton and PyTorch. The first one,
/// or `.cache` at home, has the agent's own for compiled Python, too.
const CACHE_VARIABLES: [&str; 6] =
    ["XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"];

/// Most entries of a model's folder whose targets are followed. The largest models have some 300.
const MAX_LINKS: usize = 4096;

/// Existing paths that the engine of these settings needs, each absolute.
///
/// Makes the folders of caches, which the engine could not make outside of what is bound. Blocks on
/// the disk.
pub(super) fn find(config: &AgentConfig, variable: impl Fn(&str) -> Option<OsString>) -> BTreeSet<PathBuf> {
    let mut paths: BTreeSet<_> = CACHE_VARIABLES.iter().filter_map(|name| Some(PathBuf::from(variable(name)?))).collect();
    paths.extend(variable("HOME").map(|home| Path::new(&home).join(".cache")));
    paths.insert(hub_cache(&variable));
    // One that cannot be made cannot be used without a container either.
    paths.iter().filter(|path| path.is_absolute()).for_each(|path| drop(fs::create_dir_all(path)));
    paths.insert(SHARED_MEMORY.into());
    let arguments = expand_config_file(&config.engine_args);
    paths.extend(arguments.iter().flat_map(|argument| named_paths(argument)));
    let model = Path::new(&config.model);
    if model.exists() {
        paths.extend(std::path::absolute(model));
        paths.extend(link_targets(model));
    }
    paths.retain(|path| path.is_absolute() && path.exists());
    without_nested(&paths)
}

/// Absolute paths in an argument: as a whole, after `=` as in `--lora-modules name=/path`, and in
/// strings of JSON.
fn named_paths(argument: &str) -> Vec<PathBuf> {
    let is_end = |letter: char| letter.is_whitespace() || "=\"',{}[]".contains(letter);
    argument.split(is_end).filter(|word| word.starts_with('/') && word.len() > 1).map(PathBuf::from).collect()
}

/// Folders into which the links of a model lead: a model may be a link itself, or its files may.
fn link_targets(model: &Path) -> BTreeSet<PathBuf> {
    let Ok(own) = fs::canonicalize(model) else { return BTreeSet::new() };
    let entries = fs::read_dir(&own).into_iter().flatten().take(MAX_LINKS).filter_map(Result::ok);
    let links = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
    let targets = links.filter_map(|entry| Some(fs::canonicalize(entry.path()).ok()?.parent()?.to_owned()));
    std::iter::once(own).chain(targets).collect()
}

/// Leaves out what lies in another of these folders.
fn without_nested(paths: &BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let is_nested = |path: &Path| path.ancestors().skip(1).any(|above| paths.contains(above));
    // A link in a bound folder may lead out of it.
    let is_own = |path: &Path| !is_nested(path) || fs::canonicalize(path).is_ok_and(|target| target != path);
    paths.iter().filter(|path| is_own(path)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_model_and_what_its_links_lead_to_are_bound() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        let (blobs, snapshot, link) = (root.join("store/blobs"), root.join("models/m"), root.join("m"));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(blobs.join("weights"), "").unwrap();
        symlink(blobs.join("weights"), snapshot.join("model.safetensors")).unwrap();
        symlink(&snapshot, &link).unwrap();
        let config = AgentConfig { model: link.display().to_string(), ..AgentConfig::default() };
        let bound = find(&config, |_| None);
        for path in [&blobs, &snapshot, &link] {
            assert!(bound.contains(path), "{} is missing in {bound:?}", path.display());
        }
    }

    #[test]
    fn each_existing_path_that_an_argument_names_is_bound() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        let (template, adapter, draft) = (root.join("chat.jinja"), root.join("adapter"), root.join("draft"));
        fs::write(&template, "").unwrap();
        fs::create_dir(&adapter).unwrap();
        fs::create_dir(&draft).unwrap();
        let engine_args = vec![
            format!("--chat-template={}", template.display()),
            "--lora-modules".into(),
            format!("a={}", adapter.display()),
            format!("--speculative-config={{\"model\": \"{}\"}}", draft.display()),
            "--download-dir".into(),
            root.join("nowhere").display().to_string(),
        ];
        let bound = find(&AgentConfig { engine_args, ..AgentConfig::default() }, |_| None);
        assert_eq!(bound, BTreeSet::from([PathBuf::from(SHARED_MEMORY), template, adapter, draft]));
    }

    #[test]
    fn caches_are_bound_once_where_one_lies_in_another() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        let (cache, vllm) = (root.join(".cache"), root.join(".cache/vllm"));
        fs::create_dir_all(&vllm).unwrap();
        let variable = |name: &str| match name {
            "HOME" => Some(root.clone().into()),
            "VLLM_CACHE_ROOT" => Some(vllm.clone().into()),
            "HF_HOME" => Some("relative".into()),
            _ => None,
        };
        assert_eq!(find(&AgentConfig::default(), variable), BTreeSet::from([PathBuf::from(SHARED_MEMORY), cache]));
    }
}
