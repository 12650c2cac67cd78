use std::time::Duration;

use hostler_cluster::FleetSize;

use super::*;

fn entry(name: &str, model: &str) -> FleetEntry {
    FleetEntry {
        name: name.into(),
        model: model.into(),
        size: FleetSize::Fixed(1),
        walltime: Duration::from_secs(3600),
        nodes_per_replica: 1,
        queue: String::new(),
        account: String::new(),
        resources: String::new(),
        budget: hostler_cluster::Budget::default(),
        asked: 0,
        engine_args: Vec::new(),
    }
}

fn refusal(entries: &[FleetEntry], name: Option<&str>) -> String {
    find_entry(entries, name).unwrap_err().to_string()
}

#[test]
fn an_unnamed_entry_is_named_after_its_model() {
    for (model, name) in [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("/lus/models/llama 3/", "llama-3"),
        ("tiny", "tiny"),
        ("org/_hidden.v2", "hidden.v2"),
        ("/", "model"),
        ("org/ä", "model"),
    ] {
        assert_eq!(name_of_model(model), name, "{model}");
        assert_eq!(entry(&name_of_model(model), model).check(), Ok(()), "{model}");
    }
    assert_eq!(entry(&name_of_model(&"x".repeat(200)), "x").check(), Ok(()));
}

#[test]
fn an_entry_needs_naming_only_among_several() {
    let [a, b] = [entry("a", "org/a"), entry("b", "org/b")];
    assert_eq!(find_entry(std::slice::from_ref(&a), None).unwrap(), a);
    let both = [a, b.clone()];
    assert_eq!(find_entry(&both, Some("b")).unwrap(), b);
    assert_eq!(refusal(&both, None), "2 models are up, so name one of them: a, b");
    assert_eq!(refusal(&both, Some("c")), "nothing that is up is called `c`: there is a, b");
    assert_eq!(refusal(&[], Some("c")), "nothing is up: start with `hostler up MODEL --nodes N --walltime TIME`");
}

#[test]
fn an_entry_replaces_only_an_older_one_of_its_model() {
    let mut entries = vec![entry("a", "org/a")];
    put_entry(&mut entries, FleetEntry { size: FleetSize::Fixed(3), ..entry("a", "org/a") }).unwrap();
    put_entry(&mut entries, entry("b", "org/b")).unwrap();
    assert_eq!(entries.iter().map(|entry| entry.size).collect::<Vec<_>>(), [FleetSize::Fixed(3), FleetSize::Fixed(1)]);
    let error = put_entry(&mut entries, entry("a", "org/other")).unwrap_err().to_string();
    assert_eq!(error, "`a` is up already, with the model org/a: choose another name with --name");
}

#[test]
fn a_size_of_no_nodes_is_refused_naming_down() {
    assert_eq!(parse_nodes("3"), Ok(3));
    assert!(parse_nodes("0").unwrap_err().contains("`hostler down`"));
    assert!(parse_nodes("-1").is_err());
}
