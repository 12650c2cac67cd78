use super::*;

#[test]
fn what_the_agent_inherits_comes_after_the_folder() {
    let path = |directory: &str, inherited: &str| {
        let [(_, path), _] = environment(Path::new(directory), OsStr::new(inherited))?;
        path.into_string().ok()
    };
    assert_eq!(path("/run/e0", "").as_deref(), Some("/run/e0/python"));
    assert_eq!(path("/run/e0", "/a:/b").as_deref(), Some("/run/e0/python:/a:/b"));
    assert_eq!(path("/run:1/e0", "/a"), None, "it would be two entries");
}

#[test]
fn a_list_of_plugins_leaves_it_out_unless_it_has_its_name() {
    for (allowed, is_left_out) in [("hostler", false), ("a,hostler", false), ("", true), ("a,hostler2", true)] {
        assert_eq!(is_excluded_by(OsStr::new(allowed)), is_left_out, "{allowed}");
    }
}

#[test]
fn the_metadata_name_what_the_module_has() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path()).unwrap();
    let read = |name: &str| fs::read_to_string(folder_path(directory.path()).join(name)).unwrap();
    let entry_points = read("hostler_engine-1.dist-info/entry_points.txt");
    assert!(entry_points.contains(&format!("\n{NAME} = ")));
    let (module, function) = entry_points.trim().rsplit_once("= ").unwrap().1.split_once(':').unwrap();
    let module = read(&format!("{module}.py"));
    assert!(module.contains(&format!("def {function}():")) && module.contains(SWITCH_INTERVAL_VARIABLE));
}
