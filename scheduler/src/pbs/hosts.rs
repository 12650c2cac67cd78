//! Checks whether a PBS host has the resources of a chunk. Pure; `pbsnodes -a` prints the hosts,
//! each with the total of its vnodes.

use std::collections::{BTreeMap, BTreeSet};

use super::SEPARATOR;

/// Value that `pbsnodes` prints if a host's vnodes differ.
const VARIOUS: &str = "<various>";

const AVAILABLE: &str = "resources_available.";

/// Units of PBS sizes, and by how many bits each shifts a number to the left. A word counts as a
/// byte.
const UNITS: [(&str, u32); 5] = [("k", 10), ("m", 20), ("g", 30), ("t", 40), ("p", 50)];

/// Resources of one host, by name.
type Host<'a> = BTreeMap<&'a str, &'a str>;

/// Says why no host has the resources of a chunk such as `1:ncpus=16:ngpus=4`; `None` if one has
/// them.
///
/// Resources that no host names belong to the server, or are set by a hook, and are not compared.
pub(crate) fn find_obstacle(chunk: &str, printed: &str) -> Option<String> {
    let hosts: Vec<Host<'_>> = printed.lines().map(read_host).filter(|host| !host.is_empty()).collect();
    let named: BTreeSet<&str> = hosts.iter().flat_map(|host| host.keys().copied()).collect();
    let required: Vec<(&str, &str)> =
        chunk.split(':').filter_map(|part| part.split_once('=')).filter(|(name, _)| named.contains(name)).collect();
    if required.is_empty() || hosts.iter().any(|host| required.iter().all(|want| has(host, *want))) {
        return None;
    }
    let lacking = required.iter().find(|want| !hosts.iter().any(|host| has(host, **want)));
    Some(match lacking {
        Some((name, value)) => match most(&hosts, name) {
            Some(most) => format!("no host has {name}={value}: the most is {most}"),
            None => format!("no host has {name}={value}"),
        },
        None => {
            format!("no host has all of {}", required.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", "))
        }
    })
}

/// Parses `Name=x3001\u{1}Mom=x3001\u{1}resources_available.ncpus=64…`.
fn read_host(line: &str) -> Host<'_> {
    let attributes = line.split(SEPARATOR).filter_map(|attribute| attribute.strip_prefix(AVAILABLE)?.split_once('='));
    attributes.collect()
}

fn has(host: &Host<'_>, (name, required): (&str, &str)) -> bool {
    let Some(available) = host.get(name) else { return false };
    match (read_amount(available), read_amount(required)) {
        (Some(available), Some(required)) => available >= required,
        _ => *available == VARIOUS || available.split(',').any(|one| one.trim().eq_ignore_ascii_case(required)),
    }
}

/// The largest amount of a resource on any host, as printed.
fn most<'a>(hosts: &[Host<'a>], name: &str) -> Option<&'a str> {
    let amounts = hosts.iter().filter_map(|host| host.get(name)).filter_map(|value| Some((read_amount(value)?, *value)));
    amounts.max_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, value)| value)
}

/// Parses a number, or a size such as `64gb` in bytes.
fn read_amount(value: &str) -> Option<f64> {
    let value = value.trim().to_ascii_lowercase();
    let number = value.trim_end_matches(['b', 'w']);
    let (number, shift) = UNITS.iter().find_map(|(unit, shift)| Some((number.strip_suffix(unit)?, *shift))).unwrap_or((number, 0));
    let number: f64 = number.parse().ok()?;
    (number.is_finite() && number >= 0.0).then(|| number * 2_f64.powi(shift.cast_signed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed() -> String {
        let host = |name: &str, ncpus: &str, more: &[&str]| {
            let head = [format!("Name={name}"), "ntype=PBS".into(), format!("resources_available.ncpus={ncpus}")];
            head.into_iter()
                .chain(more.iter().map(|attribute| format!("resources_available.{attribute}")))
                .collect::<Vec<_>>()
                .join(SEPARATOR)
        };
        [
            host("x1", "64", &["ngpus=4", "mem=528278872kb", "gpu_type=a100", "host=x1"]),
            host("x2", "128", &["mem=1056557744kb", "host=x2", "gpu_type=none,a100"]),
        ]
        .join("\n")
    }

    #[test]
    fn a_chunk_that_a_host_has_meets_no_obstacle() {
        for chunk in
            ["1:ncpus=64:ngpus=4:mem=500gb", "ncpus=128", "1", "1:ngpus=4:mpiprocs=4:site_flag=yes", "1:gpu_type=A100", "1:host=x2"]
        {
            assert_eq!(find_obstacle(chunk, &printed()), None, "{chunk}");
        }
        assert_eq!(find_obstacle("1:ngpus=8", ""), None, "nothing is known of the hosts");
    }

    #[test]
    fn what_no_host_has_is_named_with_the_most_that_one_has() {
        let find = |chunk| find_obstacle(chunk, &printed()).unwrap();
        assert_eq!(find("1:ncpus=16:ngpus=8"), "no host has ngpus=8: the most is 4");
        assert_eq!(find("1:mem=2tb"), "no host has mem=2tb: the most is 1056557744kb");
        assert_eq!(find("1:gpu_type=h100"), "no host has gpu_type=h100");
        assert_eq!(find("1:ncpus=128:ngpus=4"), "no host has all of ncpus=128, ngpus=4");
    }
}
