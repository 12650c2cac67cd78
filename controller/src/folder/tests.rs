use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use hostler_scheduler::Scheduler;

use super::*;

pub(crate) fn folder() -> (tempfile::TempDir, FleetFolder) {
    let place = tempfile::tempdir().unwrap();
    let folder = FleetFolder::at(&place.path().join("fleet")).unwrap();
    (place, folder)
}

#[test]
fn fleet_entries_are_read_as_written() {
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
fn a_script_is_private_and_removed_with_its_entry() {
    let (_place, folder) = folder();
    let script = folder.scripts("chat").join("1.sh");
    folder.write_script(&script, "export HF_TOKEN=hf_secret\n").unwrap();
    let found = fs::metadata(&script).unwrap();
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(folder.scripts("chat")).unwrap().permissions().mode() & 0o777, 0o700);
    folder.write_script(&script, "export HF_TOKEN=hf_secret\n").unwrap();
    assert_eq!(fs::metadata(&script).unwrap().ino(), found.ino(), "it was replaced");
    fs::write(&script, "exp").unwrap();
    folder.write_script(&script, "export HF_TOKEN=hf_secret\n").unwrap();
    assert_eq!(fs::read_to_string(&script).unwrap(), "export HF_TOKEN=hf_secret\n", "it was not whole");
    folder.forget("other").unwrap();
    assert!(script.exists());
    folder.forget("chat").unwrap();
    assert!(!folder.scripts("chat").exists());
}

pub(crate) fn endpoint(host: &str) -> Endpoint {
    Endpoint {
        host: host.into(),
        pid: 1,
        instance: Endpoint::draw_instance(),
        job: None,
        edge: "http://localhost:1".into(),
        edge_socket: Some("/tmp/e".into()),
        operators_socket: "/tmp/s".into(),
        agents: "login1:2".into(),
        admin: "127.0.0.1:3".into(),
        key_file: "/home/me/key".into(),
        authority: None,
        program: None,
    }
}

#[test]
fn a_folder_readable_by_others_is_refused() {
    let (place, folder) = folder();
    let endpoint = endpoint("login1");
    folder.write_endpoint(&endpoint).unwrap();
    for file in ["endpoint.json", "tag"] {
        assert_eq!(fs::metadata(folder.path().join(file)).unwrap().permissions().mode() & 0o777, 0o600, "{file}");
    }
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
    // The lock is held as long as a command of that controller runs.
    assert!(matches!(folder.lock_controller(Duration::ZERO), Err(FolderError::Busy { .. })));
    drop(submission.stdin.take());
    submission.wait().unwrap();
    folder.lock_controller(Duration::ZERO).unwrap();
}

#[test]
fn a_folder_with_entries_stays_open() {
    let (_place, folder) = folder();
    let text = "[[model]]\nname = \"chat\"\nmodel = \"m\"\nnodes = 0\nwalltime = \"2h\"\n";
    fs::write(folder.path().join("fleet.toml"), text).unwrap();
    assert!(!folder.close_if_empty().unwrap());
    folder.change_entries(Vec::clear).unwrap();
    assert!(folder.close_if_empty().unwrap());
}

#[test]
fn a_memory_is_found_by_name_until_forgotten() {
    let (_place, folder) = folder();
    for name in ["b.1", "a"] {
        folder.write_memory(name, &Memory::default()).unwrap();
    }
    assert_eq!(folder.remembered().unwrap(), ["a", "b.1"]);
    folder.forget("a").unwrap();
    assert_eq!((folder.remembered().unwrap(), folder.memory("a").unwrap()), (vec!["b.1".to_owned()], None));
}

#[test]
fn a_missing_folder_is_not_created_by_a_lookup() {
    let place = tempfile::tempdir().unwrap();
    let config = ClusterConfig { state_dir: place.path().join("fleet"), ..ClusterConfig::default() };
    assert!(FleetFolder::find(&config).unwrap().is_none() && !config.state_dir.exists());
}

#[test]
fn a_folder_is_found_before_its_controller_has_written_a_status() {
    let place = tempfile::tempdir().unwrap();
    let config = ClusterConfig { state_dir: place.path().join("fleet"), ..ClusterConfig::default() };
    let made = FleetFolder::open(&config).unwrap();
    assert_eq!((made.status().unwrap().is_none(), FleetFolder::find(&config).unwrap()), (true, Some(made)));
}

#[test]
fn job_names_are_unique_to_their_fleet_and_permanent() {
    let (place, folder) = folder();
    let name = folder.job_name("chat");
    assert!(name.starts_with("hostler-chat-") && name.len() == "hostler-chat-ab12".len(), "{name}");
    assert_eq!(FleetFolder::at(&place.path().join("fleet")).unwrap().job_name("chat"), name);
    let others: std::collections::BTreeSet<String> =
        (0..4).map(|number| FleetFolder::at(&place.path().join(number.to_string())).unwrap().job_name("chat")).chain([name]).collect();
    assert!(others.len() >= 4, "{others:?}");
    fs::write(folder.path().join("tag"), "a b;c\n").unwrap();
    assert!(matches!(FleetFolder::at(folder.path()), Err(FolderError::Unreadable { .. })));
}

#[test]
fn concurrent_commands_in_a_new_folder_share_one_tag() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("fleet");
    let open = || FleetFolder::at(&path).unwrap().job_name("chat");
    let names: Vec<String> = std::thread::scope(|scope| {
        let opening: Vec<_> = (0..16).map(|_| scope.spawn(open)).collect();
        opening.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(names.iter().all(|name| *name == names[0]), "{names:?}");
    assert_eq!(open(), names[0]);
}

#[test]
fn peeking_creates_no_folder_and_shows_a_placeholder_tag() {
    let (place, folder) = folder();
    let at = |path: &str| ClusterConfig { state_dir: place.path().join(path), ..ClusterConfig::default() };
    let shown = FleetFolder::peek(&at("fleet")).unwrap();
    assert!(shown.has_tag() && shown.job_name("chat") == folder.job_name("chat"));
    let none = FleetFolder::peek(&at("none")).unwrap();
    assert_eq!((none.has_tag(), none.job_name("chat").as_str(), none.path().exists()), (false, "hostler-chat-TAG", false));
}

#[test]
fn a_folder_with_jobs_at_another_scheduler_is_refused() {
    let (_place, folder) = folder();
    let identity = |kind, name: Option<&str>| SchedulerIdentity { kind, name: name.map(str::to_owned) };
    let (nameless, head) = (identity(Scheduler::Pbs, None), identity(Scheduler::Pbs, Some("head")));
    folder.check_scheduler(&head).unwrap();
    assert_eq!(folder.scheduler().unwrap(), None, "a command that only asks claims nothing");
    folder.claim_scheduler(&nameless).unwrap();
    folder.claim_scheduler(&head).unwrap();
    folder.claim_scheduler(&nameless).unwrap();
    assert_eq!(folder.scheduler().unwrap(), Some(head), "a name that was learned later stays");
    for other in [identity(Scheduler::Pbs, Some("other")), identity(Scheduler::Slurm, None)] {
        let refused = folder.claim_scheduler(&other).unwrap_err();
        assert!(matches!(refused, FolderError::OtherScheduler { .. }) && refused.to_string().contains("cluster.state_dir"), "{refused}");
        assert!(folder.check_scheduler(&other).is_err());
    }
}

fn set_heartbeat(folder: &FleetFolder, time: SystemTime) {
    File::open(folder.path().join("endpoint.json")).unwrap().set_modified(time).unwrap();
}

#[test]
fn a_controller_is_gone_when_retired_or_without_heartbeat() {
    let (_place, folder) = folder();
    assert!(folder.is_controller_gone().unwrap());
    let own = endpoint("login1");
    folder.write_endpoint(&own).unwrap();
    assert!(!folder.is_controller_gone().unwrap(), "it has not written a status yet");
    set_heartbeat(&folder, SystemTime::now() - HEARTBEAT_LIFETIME - HEARTBEAT_INTERVAL);
    assert!(folder.is_controller_gone().unwrap());
    folder.renew_endpoint(&own).unwrap();
    assert!(!folder.is_controller_gone().unwrap());
    folder.retire_endpoint(&own).unwrap();
    assert!(folder.is_controller_gone().unwrap() && folder.endpoint().unwrap() == Some(own.clone()), "its ports are for the next one");
    folder.remove_endpoint().unwrap();
    folder.renew_endpoint(&own).unwrap();
    assert_eq!(folder.endpoint().unwrap(), None);
}

#[test]
fn a_controller_never_renews_another_controllers_endpoint() {
    let (_place, folder) = folder();
    let own = endpoint("login1");
    let others = [endpoint("login1"), Endpoint { host: "login2".into(), ..own.clone() }, Endpoint { pid: 2, ..own.clone() }];
    for other in others {
        folder.write_endpoint(&other).unwrap();
        set_heartbeat(&folder, SystemTime::UNIX_EPOCH);
        folder.renew_endpoint(&own).unwrap();
        assert_eq!(folder.last_heartbeat().unwrap(), Some(SystemTime::UNIX_EPOCH));
    }
}
