//! Directories that are removed while their agent lives.

use super::super::tests::temporary;
use super::super::{LOCK, RunDir};
use super::*;

#[test]
fn a_removed_run_directory_is_restored_and_still_owned() {
    let parent = temporary();
    let base = parent.path().join("run");
    let agent = RunDir::open(&base, "n0").unwrap();
    let own = agent.engine(0).parent().unwrap().to_owned();
    let removals: [&dyn Fn(); 3] = [
        &|| fs::remove_dir_all(&base).unwrap(),
        &|| fs::remove_dir_all(&own).unwrap(),
        // Remove only files, as some cleaners do.
        &|| fs::remove_file(own.join(LOCK)).unwrap(),
    ];
    for remove in removals {
        remove();
        agent.held().restore().unwrap();
        assert!(own.is_dir());
        check_private(&own).unwrap();
        // Another agent that starts takes nothing away.
        let other = RunDir::open(&base, "n0").unwrap();
        assert_eq!(other.cleared(), []);
        assert!(own.is_dir());
    }
    drop(agent);
    assert!(!own.exists());
}

#[test]
fn an_intact_run_directory_is_left_alone() {
    let parent = temporary();
    let base = parent.path().join("run");
    let agent = RunDir::open(&base, "n0").unwrap();
    let lock = agent.engine(0).with_file_name(LOCK);
    let before = fs::metadata(&lock).unwrap().ino();
    agent.held().restore().unwrap();
    assert_eq!(fs::metadata(&lock).unwrap().ino(), before);
}

#[test]
fn an_ended_run_directory_is_not_restored() {
    let parent = temporary();
    let base = parent.path().join("run");
    let agent = RunDir::open(&base, "n0").unwrap();
    let (own, held) = (agent.engine(0).parent().unwrap().to_owned(), agent.held().clone());
    drop(agent);
    held.restore().unwrap();
    assert!(!own.exists());
}
