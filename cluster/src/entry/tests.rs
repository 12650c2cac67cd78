use super::*;

fn read(rest: &str) -> Result<FleetEntry, String> {
    toml::from_str(&format!("name = \"chat\"\nmodel = \"org/model\"\nwalltime = \"12h\"\n{rest}")).map_err(|error| error.to_string())
}

/// Error for an entry with these lines.
fn refusal(rest: &str) -> String {
    read(rest).expect_err("it is refused")
}

#[test]
fn an_entry_is_read_and_written_in_either_form() {
    let fixed = read("nodes = 2\nengine_args = [\"--max-model-len\", \"16384\"]").unwrap();
    assert_eq!((fixed.size, fixed.walltime), (FleetSize::Fixed(2), Duration::from_secs(12 * 3600)));
    assert_eq!(fixed.engine_args, ["--max-model-len", "16384"]);
    let elastic = read("min = 0\nmax = 4\nidle_after = \"10m\"").unwrap();
    assert_eq!(elastic.size, FleetSize::Elastic { min: 0, max: 4, idle_after: Duration::from_secs(600) });
    let spread = read("nodes = 4\nnodes_per_replica = 2").unwrap();
    assert_eq!((spread.size, spread.nodes_per_replica), (FleetSize::Fixed(2), 2), "two jobs of two nodes");
    let placed = read("nodes = 1\nqueue = \"preemptable\"\naccount = \"climate\"\nresources = \"1:ngpus=8\"").unwrap();
    assert_eq!((placed.queue.as_str(), placed.account.as_str(), placed.resources.as_str()), ("preemptable", "climate", "1:ngpus=8"));
    for entry in [fixed, elastic, spread, placed] {
        assert_eq!(toml::from_str::<FleetEntry>(&toml::to_string(&entry).unwrap()).unwrap(), entry);
    }
}

#[test]
fn an_entry_idles_after_half_an_hour_by_default() {
    assert_eq!(read("min = 1\nmax = 4").unwrap().size, FleetSize::Elastic { min: 1, max: 4, idle_after: IDLE_AFTER });
}

#[test]
fn a_wrong_entry_is_refused_with_a_correction() {
    for (lines, advice) in [
        ("", "give `nodes`, or `min` and `max`"),
        ("min = 1", "give `nodes`, or `min` and `max`"),
        ("nodes = 2\nmax = 3", "give `nodes` for a fixed size"),
        ("nodes = 2\nidle_after = \"10m\"", "give `nodes` for a fixed size"),
        ("min = 3\nmax = 2", "`min` is not more than it"),
        ("min = 0\nmax = 0", "`max` is at least 1"),
        ("nodes = 1001", "use several entries"),
        ("nodes = 3\nnodes_per_replica = 2", "give a multiple of 2"),
        ("min = 0\nmax = 1200\nnodes_per_replica = 2", "wants 1200 nodes"),
        ("min = 0\nmax = 1\nidle_after = \"5s\"", "some times what a cold start takes"),
        ("nodes = 1\nnode = 2", "unknown field `node`"),
        ("nodes = -1", "u32"),
    ] {
        let message = refusal(lines);
        assert!(message.contains(advice), "{lines:?}: {message}");
    }
}

#[test]
fn entry_names_models_and_walltimes_are_validated() {
    let right = read("nodes = 1").unwrap();
    for name in ["", "-x", "a b", "a/b", "ä", &"x".repeat(MAX_NAME_BYTES + 1)] {
        let entry = FleetEntry { name: name.to_owned(), ..right.clone() };
        assert_eq!(entry.check(), Err(EntryError::Name(name.to_owned())));
    }
    assert_eq!(FleetEntry { model: " ".to_owned(), ..right.clone() }.check(), Err(EntryError::NoModel("chat".to_owned())));
    assert_eq!(FleetEntry { walltime: Duration::from_secs(59), ..right }.check(), Err(EntryError::Walltime("chat".to_owned())));
}
