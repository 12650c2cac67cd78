//! Circles of modules.
//!
//! The modules of one folder, each with everything below it, must have an order in which they can
//! be read one at a time. A module may use definitions of the modules above it, because it is a
//! part of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::Crate;

/// Uses among the modules of one folder, each with an example.
type Uses = BTreeMap<String, BTreeMap<String, String>>;

/// A sentence for each circle of `krate`.
pub(crate) fn find(krate: &Crate) -> Vec<String> {
    let mut folders: BTreeMap<Vec<String>, Uses> = BTreeMap::new();
    for (from, module) in &krate.modules {
        for written in module.paths.iter().chain(module.bindings.values()) {
            let Some(to) = resolve(krate, from, written, 0) else { continue };
            let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            // A use between a module and one above or below is between a part and its whole.
            if shared == from.len() || shared == to.len() {
                continue;
            }
            let example = format!("{} uses {}", module.file.display(), written.join("::"));
            let uses = folders.entry(from[..shared].to_vec()).or_default();
            uses.entry(from[shared].clone()).or_default().entry(to[shared].clone()).or_insert(example);
        }
    }
    folders.into_iter().flat_map(|(folder, uses)| circles_of(&krate.name, &folder, &uses)).collect()
}

/// Module whose file defines the meaning of a path, or `None` if it is not in this crate.
fn resolve(krate: &Crate, from: &[String], path: &[String], depth: usize) -> Option<Vec<String>> {
    // Two modules may bind names to each other. rustc follows such chains further than this does.
    if depth > 8 {
        return None;
    }
    let (mut at, mut rest) = match path.first()?.as_str() {
        "crate" => (Vec::new(), &path[1..]),
        "self" => (from.to_vec(), &path[1..]),
        "super" => (from.split_last()?.1.to_vec(), &path[1..]),
        _ => (from.to_vec(), path),
    };
    let is_relative = rest.len() == path.len();
    let mut steps = 0;
    while let Some((name, after)) = rest.split_first() {
        if name == "super" {
            at.pop()?;
        } else {
            let child = [at.clone(), vec![name.clone()]].concat();
            if krate.modules.contains_key(&child) {
                at = child;
            } else if let Some(bound) = krate.modules.get(&at)?.bindings.get(name).filter(|bound| *bound != path) {
                return resolve(krate, &at, &[bound.as_slice(), after].concat(), depth + 1);
            } else {
                break;
            }
        }
        steps += 1;
        rest = after;
    }
    (!is_relative || steps > 0).then_some(at)
}

/// Modules that reach each other.
fn circles_of(krate: &str, folder: &[String], uses: &Uses) -> Vec<String> {
    let reached = |from: &String| {
        let mut seen = BTreeSet::new();
        let mut next: Vec<&String> = uses.get(from).into_iter().flat_map(BTreeMap::keys).collect();
        while let Some(name) = next.pop() {
            if seen.insert(name) {
                next.extend(uses.get(name).into_iter().flat_map(BTreeMap::keys));
            }
        }
        seen
    };
    let reach: BTreeMap<&String, BTreeSet<&String>> = uses.keys().map(|name| (name, reached(name))).collect();
    let mut reported = BTreeSet::new();
    let mut circles = Vec::new();
    for (name, names) in &reach {
        if !names.contains(*name) || reported.contains(*name) {
            continue;
        }
        let members: BTreeSet<&String> =
            names.iter().copied().filter(|other| reach.get(other).is_some_and(|back| back.contains(*name))).collect();
        reported.extend(members.iter().copied());
        let mut circle = format!("{krate}/{}:", folder.join("/"));
        for member in &members {
            for (_, example) in uses[*member].iter().filter(|(to, _)| members.contains(to)) {
                circle.push_str(&format!("\n  {member}: {example}"));
            }
        }
        circles.push(circle);
    }
    circles
}
