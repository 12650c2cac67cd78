//! The rules of ARCHITECTURE.md that a program can check, held against the source of every crate: no circle of modules, each type name once in a crate,
//! and what may be mentioned where. Nothing is compiled or run here; the source is parsed.

mod circles;
mod events;
mod source;

use std::collections::{BTreeMap, BTreeSet};

use source::{Crate, production_crates};

#[test]
fn modules_do_not_depend_on_each_other_in_circles() {
    let found: Vec<String> = production_crates().iter().flat_map(circles::find).collect();
    assert!(found.is_empty(), "circles of modules; move what both sides need below them:\n{}", found.join("\n"));
}

#[test]
fn a_type_name_occurs_once_in_a_crate() {
    let mut twice = Vec::new();
    for krate in production_crates() {
        let mut places: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for module in krate.modules.values() {
            for name in &module.types {
                places.entry(name).or_default().push(module.file.display().to_string());
            }
        }
        let more_than_once = places.iter().filter(|(_, files)| files.len() > 1);
        twice.extend(more_than_once.map(|(name, files)| format!("{} {name}: {}", krate.name, files.join(", "))));
    }
    assert!(twice.is_empty(), "type names used more than once in a crate:\n{}", twice.join("\n"));
}

/// Where messages of the contract between agents and routers may be named; everywhere else they have been read into the crate's own types.
///
/// - `fleet::directives` writes the orders.
/// - `fleet::agent_report` keeps what an agent reports of a replica as it came: `operators` answers with those messages whole.
/// - `prompt::bundle` and `prompt_files` read and write a bundle of files, which is stored and hashed as one encoded message.
const WIRE: [(&str, &[&str]); 2] = [
    ("router", &["agent_endpoint", "fleet::agent_report", "fleet::directives", "fleet::session", "lanes", "prompt::bundle"]),
    ("agent", &["lane", "prompt_files", "uplink"]),
];

#[test]
fn messages_between_agents_and_routers_are_named_only_where_they_are_read_and_written() {
    let crates = production_crates();
    for (name, border) in WIRE {
        let krate = crates.iter().find(|krate| krate.name == name).expect("the crate is in the workspace");
        let naming = krate.modules.values().filter(|module| module.mentions(&["hostler_proto", "agent"]));
        let found: BTreeSet<String> = naming
            .map(|module| module.path.join("::"))
            .map(|path| border.iter().find(|at| format!("{path}::").starts_with(&format!("{at}::"))).map_or(path, |at| (*at).to_owned()))
            .collect();
        assert!(found.iter().eq(border), "hostler_proto::agent is named in {found:?} of {name}, and should be in {border:?}");
    }
}

#[test]
fn what_decides_never_mentions_tokio() {
    let pure = |krate: &Crate| ["cluster", "placement", "prompt"].contains(&krate.name.as_str());
    let mut found = Vec::new();
    for krate in production_crates() {
        let modules = krate
            .modules
            .values()
            .filter(|module| pure(&krate) || (krate.name == "proto" && module.path.first().is_some_and(|name| name == "lane")));
        found.extend(modules.filter(|module| module.mentions(&["tokio"])).map(|module| module.file.display().to_string()));
    }
    assert!(found.is_empty(), "tokio is named in crates that can be replayed in any interleaving:\n{}", found.join("\n"));
}

#[test]
fn no_task_is_started_without_anybody_who_waits_for_it() {
    let found: Vec<String> =
        production_crates().iter().flat_map(|krate| krate.modules.values()).flat_map(|module| module.dropped_tasks.clone()).collect();
    assert!(
        found.is_empty(),
        "a task's handle is dropped where it is started; keep it, or start the task on a `TaskTracker`:\n{}",
        found.join("\n")
    );
}

/// The one trait object on the request path: what a lane's task hands a piece of an answer to while
/// the relay waits (decision 10). As a type parameter it would travel through `Lane`, `Lanes`,
/// `Replica` and `FleetView`.
const INLINE_CONSUMER: [&str; 2] = ["proto/src/lane/inbox.rs", "router/src/lanes/mod.rs"];

#[test]
fn nothing_on_the_request_path_is_an_arc_of_a_trait_object() {
    let request_path = ["router", "agent", "placement", "prompt", "http1", "proto"];
    let crates = production_crates();
    let found: Vec<String> = crates
        .iter()
        .filter(|krate| request_path.contains(&krate.name.as_str()))
        .flat_map(|krate| krate.modules.values())
        .filter(|module| module.has_arc_dyn)
        .map(|module| module.file.display().to_string())
        .filter(|file| !INLINE_CONSUMER.contains(&file.as_str()))
        .collect();
    assert!(found.is_empty(), "`Arc<dyn …>` in:\n{}", found.join("\n"));
}
