//! Rules of ARCHITECTURE.md that a program can check, against the source of every crate: no circle
//! of modules, each type name once in a crate, and the places where things may be mentioned.
//!
//! Nothing is compiled or run here; the source is parsed.

mod circles;
mod events;
mod source;

use std::collections::{BTreeMap, BTreeSet};

use source::{Crate, Module, production_crates};

/// A rule in a sentence, and a finder of its violations.
type Rule = (&'static str, fn(&[Crate]) -> Vec<String>);

const RULES: [Rule; 7] = [
    ("modules form no circle: move what both sides need below them", circles),
    ("a type name occurs once in a crate", repeated_types),
    ("messages between agents and routers are named only where they are read and written", wire_beyond_borders),
    ("what decides never mentions tokio, so that it can be replayed in any interleaving", tokio_in_decisions),
    ("nobody starts a task without waiting for it: keep its handle, or use a `TaskTracker`", dropped_tasks),
    ("nothing on the request path is an `Arc<dyn …>`", trait_objects),
    ("the names of events are those in docs/logs.md", events::differences),
];

/// A single test checks all rules, because parsing the source takes longer than all of them.
#[test]
fn the_source_keeps_the_rules() {
    let crates = production_crates();
    let broken: Vec<String> = RULES
        .iter()
        .map(|(rule, check)| (rule, check(&crates)))
        .filter(|(_, found)| !found.is_empty())
        .map(|(rule, found)| format!("{rule}:\n{}", found.join("\n")))
        .collect();
    assert!(broken.is_empty(), "{}", broken.join("\n\n"));
}

fn modules(crates: &[Crate]) -> impl Iterator<Item = (&str, &Module)> {
    crates.iter().flat_map(|krate| krate.modules.values().map(|module| (krate.name.as_str(), module)))
}

fn file_of((_, module): (&str, &Module)) -> String {
    module.file.display().to_string()
}

fn circles(crates: &[Crate]) -> Vec<String> {
    crates.iter().flat_map(circles::find).collect()
}

fn repeated_types(crates: &[Crate]) -> Vec<String> {
    let mut places: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for (krate, module) in modules(crates) {
        for name in &module.types {
            places.entry((krate, name)).or_default().push(file_of((krate, module)));
        }
    }
    let repeated = places.iter().filter(|(_, files)| files.len() > 1);
    repeated.map(|((krate, name), files)| format!("{krate} {name}: {}", files.join(", "))).collect()
}

/// Modules that may name messages of the contract between agents and routers.
///
/// Everywhere else they have been read into the crate's own types.
///
/// - `fleet::directives` writes the orders.
/// - `fleet::agent_report` keeps an agent's reports of a replica unchanged: `operators` answers
///   with those messages whole.
/// - `prompt::bundle` and `prompt_files` read and write a bundle of files, which is stored and
///   hashed as one encoded message.
const WIRE: [(&str, &[&str]); 2] = [
    ("router", &["agent_endpoint", "fleet::agent_report", "fleet::directives", "fleet::session", "lanes", "prompt::bundle"]),
    ("agent", &["lane", "prompt_files", "uplink"]),
];

fn wire_beyond_borders(crates: &[Crate]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, border) in WIRE {
        let naming = modules(crates).filter(|(krate, module)| *krate == name && module.mentions(&["hostler_proto", "agent"]));
        let found: BTreeSet<String> = naming
            .map(|(_, module)| module.path.join("::"))
            .map(|path| border.iter().find(|at| format!("{path}::").starts_with(&format!("{at}::"))).map_or(path, |at| (*at).to_owned()))
            .collect();
        if !found.iter().eq(border) {
            wrong.push(format!("hostler_proto::agent is named in {found:?} of {name}, and should be in {border:?}"));
        }
    }
    wrong
}

fn tokio_in_decisions(crates: &[Crate]) -> Vec<String> {
    let is_pure = |krate: &str, module: &Module| {
        ["api", "cluster", "placement", "prompt"].contains(&krate)
            || (krate == "proto" && module.path.first().is_some_and(|name| name == "lane"))
    };
    modules(crates).filter(|(krate, module)| is_pure(krate, module) && module.mentions(&["tokio"])).map(file_of).collect()
}

fn dropped_tasks(crates: &[Crate]) -> Vec<String> {
    modules(crates).flat_map(|(_, module)| module.dropped_tasks.clone()).collect()
}

/// Files of the only trait object on the request path: the receiver to which a lane's task hands a
/// piece of an answer while the relay waits (decision 10).
///
/// As a type parameter it would travel through `Lane`, `Lanes`, `Replica` and `FleetView`.
const INLINE_CONSUMER: [&str; 2] = ["proto/src/lane/inbox.rs", "router/src/lanes/mod.rs"];

fn trait_objects(crates: &[Crate]) -> Vec<String> {
    let request_path = ["router", "agent", "placement", "prompt", "http1", "proto"];
    let found = modules(crates).filter(|(krate, module)| request_path.contains(krate) && module.has_arc_dyn).map(file_of);
    found.filter(|file| !INLINE_CONSUMER.contains(&file.as_str())).collect()
}
