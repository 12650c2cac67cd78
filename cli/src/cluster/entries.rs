//! Finds a fleet's entries by name, and names new ones. Pure.

use std::path::Path;
use std::time::SystemTime;

use anyhow::bail;
use hostler_cluster::FleetEntry;

/// Most bytes in a name.
const MAX_NAME_BYTES: usize = 64;

/// Parses the number of nodes of an entry.
///
/// # Errors
/// For zero, which is the job of `hostler down`.
pub(super) fn parse_nodes(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Err("a model is served by one node or more; `hostler down` ends all of them".into()),
        Ok(nodes) => Ok(nodes),
        Err(_) => Err("a number of nodes was expected".into()),
    }
}

/// Default name of an entry: the last part of its model, with `-` for characters that a name may
/// not have.
pub(crate) fn name_of_model(model: &str) -> String {
    let last = Path::new(model).file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let is_of_names = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let name: String = last.chars().map(|letter| if is_of_names(letter) { letter } else { '-' }).take(MAX_NAME_BYTES).collect();
    let name = name.trim_start_matches(|letter: char| !letter.is_ascii_alphanumeric());
    if name.is_empty() { "model".to_owned() } else { name.to_owned() }
}

/// The entry of this name; without a name, the only one.
///
/// # Errors
/// The error lists the existing entries.
pub(super) fn find_entry(entries: &[FleetEntry], name: Option<&str>) -> anyhow::Result<FleetEntry> {
    let found = match name {
        Some(name) => entries.iter().find(|entry| entry.name == name),
        None => entries.first().filter(|_| entries.len() == 1),
    };
    if let Some(found) = found {
        return Ok(found.clone());
    }
    let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    match (name, &names[..]) {
        (_, []) => bail!("nothing is up: start with `hostler up MODEL --nodes N --walltime TIME`"),
        (Some(name), known) => bail!("nothing that is up is called `{name}`: there is {}", known.join(", ")),
        (None, known) => bail!("{} models are up, so name one of them: {}", known.len(), known.join(", ")),
    }
}

/// Current time in the form of an entry's `asked`.
pub(super) fn milliseconds_since_1970() -> u64 {
    u64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or_default()
}

/// Adds an entry, or replaces the one of its name.
///
/// # Errors
/// When the existing entry has another model.
pub(super) fn put_entry(entries: &mut Vec<FleetEntry>, new: FleetEntry) -> anyhow::Result<()> {
    match entries.iter_mut().find(|entry| entry.name == new.name) {
        Some(old) if old.model != new.model => {
            bail!("`{}` is up already, with the model {}: choose another name with --name", old.name, old.model)
        }
        Some(old) => *old = new,
        None => entries.push(new),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
