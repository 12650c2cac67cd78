use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

fn file(age: u64, bytes: u64) -> PooledFile {
    PooledFile { used: SystemTime::UNIX_EPOCH + Duration::from_secs(1000 - age), bytes, path: format!("/{age}").into() }
}

fn open(folder: &Path, bytes: u64) -> io::Result<FilePool> {
    FilePool::take(folder, bytes, false)
}

#[test]
fn the_oldest_files_are_removed_until_a_tenth_of_the_bound_is_free() {
    let files = || vec![file(1, 30), file(9, 30), file(5, 30), file(7, 30)];
    assert_eq!(excess(files(), 120), []);
    assert_eq!(excess(files(), 110), [file(9, 30)]);
    assert_eq!(excess(files(), 99), [file(9, 30), file(7, 30)], "90 bytes would be more than nine tenths");
    assert_eq!(excess(files(), 0).len(), 4);
}

#[test]
fn files_in_all_folders_count_and_links_are_not_followed() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    let pool = open(&folder, 100 << 10).unwrap();
    let deep = folder.join("0.33.0/model_r0/abc/de_g0");
    fs::create_dir_all(&deep).unwrap();
    let outside = parent.path().join("outside");
    fs::write(&outside, vec![0; 1 << 20]).unwrap();
    symlink(parent.path(), deep.join("link")).unwrap();
    for index in 0..4 {
        fs::write(deep.join(format!("{index}.bin")), vec![0; 40 << 10]).unwrap();
        let written = SystemTime::now() - Duration::from_secs(100 - index);
        let times = fs::FileTimes::new().set_modified(written).set_accessed(written);
        File::options().write(true).open(deep.join(format!("{index}.bin"))).unwrap().set_times(times).unwrap();
    }
    assert_eq!(pool.trim().unwrap(), 2, "of 160 KiB, 80 may stay");
    let mut left: Vec<_> = fs::read_dir(&deep).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["2.bin", "3.bin", "link"]);
    assert_eq!(pool.trim().unwrap(), 0);
    pool.leave();
    assert!(outside.exists());
}

#[test]
fn the_last_agent_to_leave_removes_the_folder() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    let (first, second) = (open(&folder, GIB).unwrap(), open(&folder, GIB).unwrap());
    fs::write(folder.join("block.bin"), "kv").unwrap();
    drop(first);
    remove_unused(&folder);
    assert!(folder.join("block.bin").exists(), "the second agent has it");
    drop(second);
    remove_unused(&folder);
    assert!(!folder.exists());
}

#[test]
fn an_agent_removes_what_a_killed_one_has_left_unless_engines_live_on() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    drop(open(&folder, GIB).unwrap());
    fs::write(folder.join("block.bin"), "kv").unwrap();
    drop(FilePool::take(&folder, GIB, true).unwrap());
    assert!(folder.join("block.bin").exists());
    drop(open(&folder, GIB).unwrap());
    assert!(!folder.join("block.bin").exists());
}

#[test]
fn a_folder_that_others_may_open_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    let held = open(&folder, GIB).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(open(&folder, GIB).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    fs::remove_dir(&folder).unwrap();
    symlink(parent.path(), &folder).unwrap();
    assert_eq!(open(&folder, GIB).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    drop(held);
}
