//! Check of the events in the log, whose names are an interface: those in the source and those in
//! docs/logs.md must agree, with role and level.

use std::collections::BTreeSet;
use std::path::Path;

use super::source::Crate;

/// Event as (name, role, level).
type NamedEvent = (String, String, String);

/// Role of the process that writes a crate's lines.
fn role_of(krate: &str) -> &str {
    match krate {
        "boot" => "each",
        "tls" => "router",
        role => role,
    }
}

/// Rows of the table in the section `The names of events`.
///
/// The columns are name, role, level, meaning and remedy; role and level may be several.
fn documented() -> BTreeSet<NamedEvent> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/logs.md");
    let page = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("cannot read {}: {error}", page.display()));
    let section = page.split("\n## ").find(|section| section.starts_with("The names of events\n")).expect("docs/logs.md has the section");
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|line| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>());
    let mut found = BTreeSet::new();
    for row in cells {
        let [name, roles, levels, meaning, remedy] = row[..] else { panic!("a row of the table of events has five cells: {row:?}") };
        assert!(!meaning.is_empty() && !remedy.is_empty(), "{name} is not explained");
        for role in roles.split(", ") {
            for level in levels.split(", ") {
                let event = (name.trim_matches('`').to_owned(), role.to_owned(), level.to_owned());
                assert!(found.insert(event), "{name} is there twice");
            }
        }
    }
    found
}

/// Events that only the manual or only the source has.
pub(crate) fn differences(crates: &[Crate]) -> Vec<String> {
    let written: BTreeSet<NamedEvent> = crates
        .iter()
        .flat_map(|krate| krate.modules.values().flat_map(|module| &module.events).map(|event| (krate.name.as_str(), event)))
        .map(|(krate, (name, level))| (name.clone(), role_of(krate).to_owned(), level.clone()))
        .collect();
    let documented = documented();
    assert!(!documented.is_empty());
    let missing = written.difference(&documented).map(|event| format!("docs/logs.md lacks {event:?}"));
    missing.chain(documented.difference(&written).map(|event| format!("no line of the log is {event:?}"))).collect()
}
