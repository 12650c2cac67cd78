use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use super::*;

pub(crate) fn folder() -> (tempfile::TempDir, FleetFolder) {
    let place = tempfile::tempdir().unwrap();
    let folder = FleetFolder::at(&place.path().join("fleet")).unwrap();
    (place, folder)
}

#[test]
fn what_is_wanted_is_read_as_it_was_written() {
    let (_place, folder) = folder();
    assert_eq!(folder.entries().unwrap(), []);
    let text = "[[model]]\nname = \"chat\"\nmodel = \"Qwen/Qwen3-8B\"\nmin = 0\nmax = 3\nwalltime = \"2h\"\n";
    fs::write(folder.path().join("fleet.toml"), text).unwrap();
    let before = folder.entries().unwrap();
    folder.change_entries(|entries| entries.push(FleetEntry { name: "second".into(), ..before[0].clone() })).unwrap();
    let names: Vec<String> = folder.entries().unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["chat", "second"]);
}

#[test]
fn a_folder_that_others_can_read_is_refused_and_files_are_the_users_alone() {
    let (place, folder) = folder();
    let endpoint = Endpoint {
        host: "login1".into(),
        pid: 1,
        edge: "http://localhost:1".into(),
        operators_socket: "/tmp/s".into(),
        agents: "login1:2".into(),
        admin: "127.0.0.1:3".into(),
        key_file: "/home/me/key".into(),
    };
    folder.write_endpoint(&endpoint).unwrap();
    assert_eq!(fs::metadata(folder.path().join("endpoint.json")).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(folder.endpoint().unwrap(), Some(endpoint));
    folder.remove_endpoint().unwrap();
    folder.remove_endpoint().unwrap();
    assert_eq!(folder.endpoint().unwrap(), None);
    fs::set_permissions(place.path().join("fleet"), fs::Permissions::from_mode(0o750)).unwrap();
    assert!(matches!(FleetFolder::at(&place.path().join("fleet")), Err(FolderError::Open { mode: 0o750, .. })));
}

#[test]
fn a_fleet_has_one_controller() {
    let (_place, folder) = folder();
    let held = folder.lock_controller(Duration::ZERO).unwrap();
    assert!(matches!(folder.lock_controller(Duration::from_millis(60)), Err(FolderError::Busy { .. })));
    let mut submission = Command::new("/bin/cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    drop(held);
    // It is held as long as a command of that controller runs.
    assert!(matches!(folder.lock_controller(Duration::ZERO), Err(FolderError::Busy { .. })));
    drop(submission.stdin.take());
    submission.wait().unwrap();
    folder.lock_controller(Duration::ZERO).unwrap();
}

#[test]
fn a_folder_in_which_something_is_wanted_stays_open() {
    let (_place, folder) = folder();
    let text = "[[model]]\nname = \"chat\"\nmodel = \"m\"\nnodes = 0\nwalltime = \"2h\"\n";
    fs::write(folder.path().join("fleet.toml"), text).unwrap();
    assert!(!folder.close_if_empty().unwrap());
    folder.change_entries(Vec::clear).unwrap();
    assert!(folder.close_if_empty().unwrap());
}

#[test]
fn what_is_remembered_is_found_by_name_until_it_is_forgotten() {
    let (_place, folder) = folder();
    for name in ["b.1", "a"] {
        folder.write_memory(name, &Memory::default()).unwrap();
    }
    assert_eq!(folder.remembered().unwrap(), ["a", "b.1"]);
    folder.forget("a").unwrap();
    assert_eq!((folder.remembered().unwrap(), folder.memory("a").unwrap()), (vec!["b.1".to_owned()], None));
}

#[test]
fn a_folder_without_a_controllers_status_is_not_found_and_not_made() {
    let place = tempfile::tempdir().unwrap();
    let config = ClusterConfig { state_dir: place.path().join("fleet"), ..ClusterConfig::default() };
    assert!(FleetFolder::find(&config).unwrap().is_none() && !config.state_dir.exists());
}
