use super::*;

#[test]
fn what_the_agent_inherits_comes_after_the_folder() {
    let path = |inherited: &str| environment(Path::new("/run/e0"), OsStr::new(inherited), Duration::from_micros(500))[0].1.clone();
    assert_eq!(path(""), "/run/e0/python");
    assert_eq!(path("/a:/b"), "/run/e0/python:/a:/b");
}

#[test]
fn the_metadata_name_what_the_module_has() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path()).unwrap();
    let read = |name: &str| fs::read_to_string(folder_in(directory.path()).join(name)).unwrap();
    let entry_points = read("hostler_engine-1.dist-info/entry_points.txt");
    let (module, function) = entry_points.trim().rsplit_once("= ").unwrap().1.split_once(':').unwrap();
    let module = read(&format!("{module}.py"));
    assert!(module.contains(&format!("def {function}():")) && module.contains(SWITCH_INTERVAL));
}
