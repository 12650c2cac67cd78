use super::*;

#[test]
fn the_inherited_python_path_follows_the_plugins_folder() {
    let path = |directory: &str, inherited: &str| {
        let [(_, path), _] = environment(Path::new(directory), OsStr::new(inherited))?;
        path.into_string().ok()
    };
    assert_eq!(path("/run/e0", "").as_deref(), Some("/run/e0/python"));
    assert_eq!(path("/run/e0", "/a:/b").as_deref(), Some("/run/e0/python:/a:/b"));
    assert_eq!(path("/run:1/e0", "/a"), None, "it would be two entries");
}

#[test]
fn a_plugin_list_excludes_hostlers_plugin_unless_it_names_it() {
    for (allowed, is_left_out) in [("hostler", false), ("a,hostler", false), ("", true), ("a,hostler2", true)] {
        assert_eq!(is_excluded_by(OsStr::new(allowed)), is_left_out, "{allowed}");
    }
}

#[test]
fn the_plugins_metadata_names_its_module_and_function() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path()).unwrap();
    let read = |name: &str| fs::read_to_string(folder_path(directory.path()).join(name)).unwrap();
    let entry_points = read("hostler_engine-1.dist-info/entry_points.txt");
    assert!(entry_points.contains(&format!("\n{NAME} = ")));
    let (module, function) = entry_points.trim().rsplit_once("= ").unwrap().1.split_once(':').unwrap();
    let module = read(&format!("{module}.py"));
    assert!(module.contains(&format!("def {function}():")) && module.contains(SWITCH_INTERVAL_VARIABLE));
}
