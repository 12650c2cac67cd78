//! Real processes: shells that play an engine with children that ignore SIGTERM.

use std::ffi::OsString;

use super::*;

/// A shell script as an engine.
fn shell(script: &str) -> CommandLine {
    CommandLine {
        program: "/bin/sh".into(),
        arguments: vec![OsString::from("-c"), OsString::from(script)],
        set: Vec::new(),
        unset: vec!["HOME"],
    }
}

/// Waits for a file to appear in the engine's directory.
async fn appears(path: &Path) {
    let waiting = async {
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), waiting).await.unwrap();
}

#[tokio::test]
async fn a_group_is_killed_with_grandchildren_that_ignore_sigterm() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let script = format!("trap '' TERM; (trap '' TERM; sleep 600 & sleep 600) & touch {}/up; wait", directory.display());
    let mut spawned = spawn(&shell(&script), &directory).unwrap();
    appears(&directory.join("up")).await;
    assert!(spawned.group.members().len() >= 2);
    spawned.group.terminate();
    assert!(!spawned.group.is_empty());
    spawned.group.kill();
    spawned.child.wait().await.unwrap();
    spawned.group.end().await.unwrap();
    assert!(spawned.group.is_empty());
    assert_eq!(spawned.group.members(), Vec::<i32>::new());
}

#[tokio::test]
async fn a_group_whose_first_process_is_gone_is_not_empty_until_killed() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let mut spawned = spawn(&shell("sleep 600 & exit 0"), &directory).unwrap();
    assert!(spawned.child.wait().await.unwrap().success());
    assert!(!spawned.group.is_empty());
    spawned.group.end().await.unwrap();
}

#[tokio::test]
async fn a_spawn_empties_the_directory_and_cleans_the_environment() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("engine.sock"), "stale").unwrap();
    let mut line = shell("echo \"home=$HOME name=$NAME\" >&2; echo last");
    line.set.push(("NAME", "value".into()));
    let mut spawned = spawn(&line, &directory).unwrap();
    assert!(!directory.join("engine.sock").exists());
    assert!(temporary_in(&directory).is_dir());
    let mut output = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut spawned.output, &mut output).await.unwrap();
    assert_eq!(output, "home= name=value\nlast\n");
    spawned.child.wait().await.unwrap();
}

#[tokio::test]
async fn orphans_are_found_by_the_record_even_without_their_first_process() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let mut spawned = spawn(&shell("sleep 600 & sleep 600 & exit 0"), &directory).unwrap();
    spawned.child.wait().await.unwrap();
    assert_eq!(orphans(&directory).len(), 2);
    assert_eq!(end_orphans(&directory), Ok(2));
    assert!(spawned.group.is_empty());
}

#[tokio::test]
async fn orphans_are_found_by_their_environment_even_without_a_record() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let mut line = shell("exec sleep 600");
    line.set.push(("VLLM_RPC_BASE_PATH", directory.clone().into()));
    let mut spawned = spawn(&line, &directory).unwrap();
    fs::remove_file(directory.join("engine.pid")).unwrap();
    assert_eq!(end_orphans(&directory), Ok(1));
    spawned.child.wait().await.unwrap();
}

#[tokio::test]
async fn a_process_that_reuses_the_recorded_id_is_not_an_orphan() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    let mut spawned = spawn(&shell("exec sleep 600"), &directory).unwrap();
    let record = Record::read(&directory).unwrap();
    let strangers = [
        Record { started: record.started - 1, ..record.clone() },
        Record { birthplace: "another-boot/pid:[1]".to_owned(), ..record.clone() },
    ];
    for stranger in strangers {
        stranger.write(&directory).unwrap();
        assert_eq!(orphans(&directory), Vec::<i32>::new());
    }
    assert_eq!(record.members().len(), 1);
    spawned.group.end().await.unwrap();
    spawned.child.wait().await.unwrap();
}

#[test]
fn a_program_that_does_not_exist_is_an_error() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _context = runtime.enter();
    let parent = tempfile::tempdir().unwrap();
    let mut line = shell("");
    line.program = "/nonexistent/vllm".into();
    let error = spawn(&line, &parent.path().join("e0")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}
