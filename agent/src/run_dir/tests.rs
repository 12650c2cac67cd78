//! Directories of living and dead agents, side by side in a temporary base.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::*;

/// A base directory short enough for sockets.
pub(super) fn temporary() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("h").tempdir_in("/tmp").unwrap()
}

#[test]
fn an_agents_private_directory_is_removed_with_it() {
    let parent = temporary();
    let base = parent.path().join("run");
    let one = RunDir::open(&base, "n0").unwrap();
    let two = RunDir::open(&base, "n0").unwrap();
    assert_ne!(one.path, two.path);
    assert!(one.path.is_dir(), "a living agent's directory stays");
    assert_eq!(two.cleared(), []);
    let mode = fs::metadata(&one.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let path = one.path.clone();
    drop(one);
    assert!(!path.exists());
    assert!(two.path.exists());
}

#[test]
fn a_directory_that_others_can_enter_is_refused() {
    let parent = temporary();
    fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let error = RunDir::open(parent.path(), "n0").unwrap_err().to_string();
    assert!(error.contains("mode 755"), "{error}");
    assert!(error.contains("--run-dir"), "{error}");

    let link = parent.path().join("link");
    std::os::unix::fs::symlink(parent.path(), &link).unwrap();
    assert!(RunDir::open(&link, "n0").is_err());
}

#[test]
fn directories_of_others_are_never_touched() {
    let base = temporary();
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o700)).unwrap();
    for name in ["Downloads", "project", "a-long-one", "a_b", "abcdef"] {
        fs::create_dir(base.path().join(name)).unwrap();
    }
    fs::write(base.path().join("project").join(LOCK), "").unwrap();
    fs::write(base.path().join("project/work.txt"), "mine").unwrap();
    let agent = RunDir::open(base.path(), "n0").unwrap();
    assert_eq!(agent.cleared(), []);
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 5 + 2, "the five, the lock and the agent's own");
    assert!(base.path().join("project/work.txt").exists());
}

#[test]
fn a_path_too_long_for_sockets_is_refused_early() {
    let parent = temporary();
    let longest = MAX_PATH_BYTES - MAX_PATH_BELOW - 7;
    let used = parent.path().as_os_str().len() + 1;
    let fits = parent.path().join("x".repeat(longest - used));
    let agent = RunDir::open(&fits, "n0").unwrap();
    let socket = agent.engine(999).join("x".repeat(36));
    assert_eq!(socket.as_os_str().len(), MAX_PATH_BYTES);

    let too_long = parent.path().join("y".repeat(longest - used + 3));
    let error = RunDir::open(&too_long, "n0").unwrap_err().to_string();
    assert!(error.contains("by 3 bytes"), "{error}");
    assert!(!too_long.exists());
}

#[test]
fn a_dead_agents_engines_are_killed_and_its_directory_removed() {
    let parent = temporary();
    let base = parent.path().join("run");
    make_private(&base).unwrap();
    let dead = make_unique(&base).unwrap();
    drop(lock_file(&dead.join(LOCK)).unwrap());
    let engine = dead.join("e0");
    fs::create_dir(&engine).unwrap();
    let mut orphan = Command::new("/bin/sh")
        .args(["-c", "trap '' TERM; sleep 600 & wait"])
        .env("VLLM_RPC_BASE_PATH", &engine)
        .process_group(0)
        .spawn()
        .unwrap();
    let empty = make_unique(&base).unwrap();

    let agent = RunDir::open(&base, "n0").unwrap();
    assert!(!dead.exists() && !empty.exists());
    assert!(!orphan.wait().unwrap().success());
    let found = agent.cleared().iter().find(|cleared| cleared.path == dead);
    let found = found.unwrap();
    assert!((1..=2).contains(&found.killed), "{found:?}");
    assert_eq!(found.unkillable, Vec::<i32>::new());
}

#[test]
fn files_of_others_stay_in_the_run_directory() {
    let parent = temporary();
    let base = parent.path().join("run");
    make_private(&base).unwrap();
    fs::create_dir(base.join("logs")).unwrap();
    fs::write(base.join("logs/e0.log"), "x").unwrap();
    let agent = RunDir::open(&base, "n0").unwrap();
    assert!(base.join("logs/e0.log").exists());
    assert_eq!(agent.cleared(), []);
}

#[test]
fn a_configured_log_directory_is_made() {
    let parent = temporary();
    let requested = parent.path().join("a/b");
    assert_eq!(log_dir(&requested).unwrap(), requested);
    let refused = log_dir(Path::new("/dev/null/logs")).unwrap_err().to_string();
    assert!(refused.contains("name another with --log-dir"), "{refused}");
    assert!(requested.is_dir());
}

#[test]
fn a_log_is_named_by_host_and_node() {
    assert_eq!(log_name("gpu1", "gpu1", 0), "gpu1-e0.log");
    assert_eq!(log_name("gpu1", "gpu1-12.head", 3), "gpu1-12.head-e3.log");
    assert_eq!(log_name("gpu1", "mine", 0), "gpu1-mine-e0.log");
    assert_ne!(log_name("gpu1", "mine", 0), log_name("gpu2", "mine", 0));
}
