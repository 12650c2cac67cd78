//! What all parts of an engine must have in common, and the first difference in words.
//!
//! vLLM compares nothing of it for tensor and pipeline parallelism (0.33): parts that differ hang,
//! or fail far from the cause.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Inherited variables with these prefixes must be the same on all nodes.
const COMPARED_PREFIXES: [&str; 3] = ["VLLM_", "NCCL_", "FI_"];

/// Variables that differ between nodes, or are secrets.
const NOT_COMPARED: [&str; 6] =
    ["VLLM_HOST_IP", "VLLM_PORT", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID"];

/// Longest value of a variable in a message, in characters.
const MAX_SHOWN: usize = 80;

/// Setup of one part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartSetup {
    /// Release of the engine.
    pub(crate) engine: String,
    /// SHA-256 over the names, sizes and small files of the model's folder; empty if that is not
    /// known.
    pub(crate) model: String,
    /// Arguments of the engine, but for those that differ between nodes.
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: BTreeMap<String, String>,
    /// Number of GPUs.
    pub(crate) gpus: usize,
    /// Nodes of the replica.
    pub(crate) nodes: u32,
}

impl PartSetup {
    /// Difference between this setup, the head's, and a member's on `host`; `None` if they agree.
    pub(crate) fn difference(&self, member: &Self, host: &str) -> Option<String> {
        if self.engine != member.engine {
            return Some(format!("{host} has {}, and the head has {}", member.engine, self.engine));
        }
        if self.nodes != member.nodes {
            return Some(format!("{host} has --nodes-per-replica {}, and the head {}", member.nodes, self.nodes));
        }
        if self.gpus != member.gpus {
            return Some(format!("{host} gives the replica {} GPUs, and the head {}", member.gpus, self.gpus));
        }
        if let Some((ours, theirs)) = first_difference(&self.arguments, &member.arguments) {
            return Some(format!("the engine's arguments differ: {theirs} on {host}, and {ours} on the head"));
        }
        if self.model != member.model && !self.model.is_empty() && !member.model.is_empty() {
            return Some(format!("the model's files on {host} are not those of the head"));
        }
        let names = self.environment.keys().chain(member.environment.keys());
        let differs = |name: &&String| self.environment.get(*name) != member.environment.get(*name);
        let name = names.into_iter().find(differs)?;
        let shown = |of: &Self| of.environment.get(name).map_or("not set".to_owned(), |value| shorten(value));
        Some(format!("the variable {name} differs: {} on {host}, and {} on the head", shown(member), shown(self)))
    }
}

/// Variables of this process that must be the same on all nodes.
pub(crate) fn compared_environment() -> BTreeMap<String, String> {
    let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())));
    variables.filter(|(name, _)| is_compared(name)).collect()
}

fn is_compared(name: &str) -> bool {
    COMPARED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && !NOT_COMPARED.contains(&name)
}

/// Digest of a model's folder: the names and sizes of its files, and what its `config.json` says.
/// Empty if there is no such folder.
///
/// Reading the weights would take as long as loading them.
pub(crate) fn digest_model(folder: &Path) -> String {
    let Ok(entries) = std::fs::read_dir(folder) else { return String::new() };
    let mut files: Vec<(String, u64)> = entries
        .filter_map(Result::ok)
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, std::fs::metadata(entry.path()).ok()?)))
        .filter(|(name, found)| found.is_file() && !name.starts_with('.'))
        .map(|(name, found)| (name, found.len()))
        .collect();
    files.sort();
    let mut hash = Sha256::new();
    for (name, bytes) in &files {
        hash.update(format!("{name}\0{bytes}\0"));
    }
    hash.update(std::fs::read(folder.join("config.json")).unwrap_or_default());
    hostler_tls::hex(&hash.finalize())
}

/// First words in which two command lines differ.
fn first_difference<'a>(ours: &'a [String], theirs: &'a [String]) -> Option<(&'a str, &'a str)> {
    let longest = ours.len().max(theirs.len());
    let word = |of: &'a [String], at: usize| of.get(at).map_or("nothing", String::as_str);
    let at = (0..longest).find(|at| ours.get(*at) != theirs.get(*at))?;
    Some((word(ours, at), word(theirs, at)))
}

fn shorten(value: &str) -> String {
    match value.char_indices().nth(MAX_SHOWN) {
        None => value.to_owned(),
        Some((end, _)) => format!("{} …", &value[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup() -> PartSetup {
        PartSetup {
            engine: "vLLM 0.33.0".into(),
            model: "aa".into(),
            arguments: ["serve", "m", "--max-model-len", "8192"].map(str::to_owned).to_vec(),
            environment: BTreeMap::from([("NCCL_NET".to_owned(), "Socket".to_owned())]),
            gpus: 4,
            nodes: 2,
        }
    }

    #[test]
    fn equal_setups_have_no_difference() {
        assert_eq!(setup().difference(&setup(), "n2"), None);
        let unknown = PartSetup { model: String::new(), ..setup() };
        assert_eq!(setup().difference(&unknown, "n2"), None, "a hub's name has no folder to compare");
    }

    #[test]
    fn the_first_difference_is_named_with_both_values() {
        let ours = setup();
        let says = |member: PartSetup, words: &[&str]| {
            let said = ours.difference(&member, "n2").unwrap();
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        };
        says(PartSetup { engine: "vLLM 0.32.0".into(), ..setup() }, &["n2 has vLLM 0.32.0", "the head has vLLM 0.33.0"]);
        says(PartSetup { nodes: 3, ..setup() }, &["n2 has --nodes-per-replica 3, and the head 2"]);
        says(PartSetup { gpus: 2, ..setup() }, &["n2 gives the replica 2 GPUs, and the head 4"]);
        let mut other = setup();
        other.arguments[3] = "4096".into();
        says(other, &["4096 on n2", "8192 on the head"]);
        let mut longer = setup();
        longer.arguments.push("--enforce-eager".into());
        says(longer, &["--enforce-eager on n2", "nothing on the head"]);
        says(PartSetup { model: "bb".into(), ..setup() }, &["files on n2"]);
        says(PartSetup { environment: BTreeMap::new(), ..setup() }, &["NCCL_NET differs: not set on n2, and Socket on the head"]);
    }

    #[test]
    fn what_belongs_to_one_node_is_not_compared() {
        for name in NOT_COMPARED {
            assert!(!is_compared(name), "{name}");
        }
        assert!(is_compared("VLLM_ATTENTION_BACKEND") && is_compared("FI_PROVIDER") && !is_compared("HOME"));
    }
}
