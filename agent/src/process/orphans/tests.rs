//! Real processes, found and ended by an engine's directory and their environment.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use super::*;
use crate::process::table;
use crate::vllm::directory::prepare;

fn spawn(script: &str, directory: &Path, environment: &[(&str, &Path)]) -> Child {
    prepare(directory).unwrap();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).process_group(0).envs(environment.iter().copied());
    let child = command.spawn().unwrap();
    ProcessRecord::of(child.id().cast_signed()).unwrap().write(directory).unwrap();
    child
}

#[test]
fn recorded_orphans_are_found_without_their_first_process() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let mut child = spawn("sleep 600 & sleep 600 & exit 0", &directory, &[]);
    child.wait().unwrap();
    assert_eq!(orphans(&directory).len(), 2);
    assert_eq!(end_orphans(&directory), Ok(2));
    assert_eq!(orphans(&directory), Vec::<i32>::new());
}

#[test]
fn unrecorded_orphans_are_found_by_their_environment() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let mut child = spawn("exec sleep 600", &directory, &[("VLLM_RPC_BASE_PATH", &directory)]);
    fs::remove_file(directory.join("engine.pid")).unwrap();
    // The shell becomes another program, and has no environment in between.
    while orphans(&directory).is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(end_orphans(&directory), Ok(1));
    child.wait().unwrap();
}

#[test]
fn an_orphaned_keeper_is_ended_with_its_engine_and_uncounted() {
    let parent = tempfile::tempdir().unwrap();
    let (directory, other) = (parent.path().join("e0"), parent.path().join("e1"));
    let mut child = spawn("exec sleep 600", &directory, &[]);
    let mut keepers = [&directory, &other].map(|of| Command::new("/bin/sleep").arg("600").env(KEEPER_OF, of).spawn().unwrap());
    // A child has the environment of its program only once it runs that program.
    while keepers_of(&directory).is_empty() || keepers_of(&other).is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(end_orphans(&directory), Ok(1));
    assert!(!child.wait().unwrap().success());
    assert!(!keepers[0].wait().unwrap().success());
    assert!(keepers[1].try_wait().unwrap().is_none(), "another engine's keeper is nobody's orphan");
    keepers[1].kill().unwrap();
    keepers[1].wait().unwrap();
}

#[test]
fn a_process_that_reuses_a_recorded_id_is_no_orphan() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let mut child = spawn("exec sleep 600", &directory, &[]);
    let record = ProcessRecord::read(&directory).unwrap();
    assert!(record.is_of(record.leader()));
    let other_records = [
        ProcessRecord { started: record.started - 1, ..record.clone() },
        ProcessRecord { boot_and_namespace: "another-boot/pid:[1]".to_owned(), ..record.clone() },
    ];
    for other in other_records {
        other.write(&directory).unwrap();
        assert_eq!(orphans(&directory), Vec::<i32>::new());
        assert!(!other.is_of(record.leader()) && !other.is_of(other.leader()));
    }
    assert_eq!(record.members().len(), 1);
    record.write(&directory).unwrap();
    assert_eq!(end_orphans(&directory), Ok(1));
    child.wait().unwrap();
    assert!(!record.is_of(record.leader()), "a process that has ended is no engine");
}

#[test]
fn whatever_is_in_the_session_of_a_dead_keeper_is_an_orphan() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    prepare(&directory).unwrap();
    let mut keeper = Command::new("setsid").args(["sh", "-c", "sleep 600 & sleep 600 & wait"]).spawn().unwrap();
    let session = keeper.id().cast_signed();
    let sleepers = || {
        let mut found = table::session(session);
        found.retain(|process| process.pid != session);
        found
    };
    while sleepers().len() < 2 {
        std::thread::yield_now();
    }
    // No process is in the group of this one.
    let record = ProcessRecord::of(sleepers()[0].pid).unwrap();
    record.write(&directory).unwrap();
    assert_eq!(end_orphans(&directory), Ok(2), "and not the keeper, which is found by itself");
    assert_eq!(sleepers(), Vec::new());
    keeper.wait().unwrap();
}
