use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::cache::Cursor;

fn file(age: u64, bytes: u64) -> PooledFile {
    let used = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 - age);
    PooledFile { last_block: Some(age), used, bytes, path: format!("/{age}").into() }
}

fn open(folder: &Path, bytes: u64) -> io::Result<FilePool> {
    FilePool::take(folder, folder.join("0.33.0/m"), bytes, Arc::default())
}

/// Leaves like an agent that is killed.
fn kill(pool: FilePool) {
    drop(pool);
}

#[test]
fn near_the_bound_the_oldest_files_are_removed_until_a_fifth_is_free() {
    let excess = |most| {
        let mut files = vec![file(1, 30), file(9, 30), file(5, 30), file(7, 30)];
        let excess = split_off_excess(&mut files, most, FxHashMap::default);
        assert_eq!(files.len() + excess.len(), 4);
        excess
    };
    assert_eq!(excess(140), []);
    assert_eq!(excess(130), [file(9, 30)], "120 bytes are more than nine tenths");
    assert_eq!(excess(110), [file(7, 30), file(9, 30)], "90 bytes would be more than eight tenths");
    assert_eq!(excess(0).len(), 4);
}

#[test]
fn a_conversation_that_goes_on_keeps_its_beginning_and_loses_its_end_first() {
    // 9 ← 7 ← 1, and 8 ← 5.
    let parents = FxHashMap::from_iter([(7, 9), (1, 7), (5, 8)]);
    let excess = |most| {
        let mut files = [9, 8, 7, 5, 1].map(|age| file(age, 30)).to_vec();
        let excess = split_off_excess(&mut files, most, || parents.clone());
        excess.iter().map(|file| file.last_block.unwrap()).rev().collect::<Vec<u64>>()
    };
    assert_eq!(excess(150), [5], "the end of the conversation that was used longest ago");
    assert_eq!(excess(120), [5, 8]);
    assert_eq!(excess(100), [5, 8, 1], "then the end of the other");
    // Written in another order: 5 ← 9.
    let mut files = vec![file(9, 30), file(5, 30)];
    let excess = split_off_excess(&mut files, 50, || FxHashMap::from_iter([(9, 5)]));
    assert_eq!(excess, [file(9, 30)]);
    // Another model's file of the same tokens.
    let mut files = vec![file(1, 30), file(9, 30), PooledFile { last_block: None, path: "/other".into(), ..file(9, 30) }];
    let excess = split_off_excess(&mut files, 90, || FxHashMap::from_iter([(1, 9)]));
    assert_eq!(excess.iter().map(|file| file.path.clone()).collect::<Vec<_>>(), [PathBuf::from("/other")]);
    let circle = FxHashMap::from_iter([(1, 2), (2, 1)]);
    let mut files = vec![file(1, 30), file(2, 30)];
    assert_eq!(split_off_excess(&mut files, 10, || circle).len(), 2);
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
    assert_eq!(pool.trim().unwrap().most, 100 << 10);
    let mut left: Vec<_> = fs::read_dir(&deep).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["2.bin", "3.bin", "link"], "of 160 KiB, 80 may stay");
    pool.hold.remove_if_last();
    assert!(outside.exists() && !folder.exists());
}

#[test]
fn blocks_of_files_that_are_gone_are_no_longer_reported() {
    let parent = tempfile::tempdir().unwrap();
    // One is removed by somebody else, and the last one was never written.
    let log = FileLog::with_files(&[(0xf00d, 10, None), (0xbeef, 20, None), (0xcafe, 30, None), (7, 40, None)]);
    let folder = parent.path().join("pool");
    let pool = FilePool::take(&folder, folder.join("0.33.0/m"), 100 << 10, log.into()).unwrap();
    let deep = pool.root.join("model_r0/abc/de_g0");
    fs::create_dir_all(&deep).unwrap();
    let path = |name: u64| deep.join(format!("{}{name:016x}.bin", "0123456789abcdef".repeat(3)));
    for (name, bytes) in [(0xf00d, 40 << 10), (0xbeef, 40 << 10), (0xcafe, 1)] {
        fs::write(path(name), vec![0; bytes]).unwrap();
    }
    fs::remove_file(path(0xbeef)).unwrap();
    pool.trim().unwrap();
    let mut left = pool.log.read(&mut Cursor::default(), 100).unwrap().stored;
    left.sort_unstable();
    assert_eq!(left, [10, 30]);
    fs::write(path(1), vec![0; 80 << 10]).unwrap();
    pool.trim().unwrap();
    let left = pool.log.read(&mut Cursor::default(), 100).unwrap().stored.len();
    assert!(left < 2 && fs::read_dir(&deep).unwrap().count() <= 2, "what is over the bound goes, {left}");
}

#[test]
fn folders_that_have_been_empty_for_a_while_are_removed_and_the_rest_is_listed() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    let pool = open(&folder, GIB).unwrap();
    for (name, age) in [("old", 100), ("new", 0)] {
        fs::create_dir(folder.join(name)).unwrap();
        let times = fs::FileTimes::new().set_modified(SystemTime::now() - Duration::from_secs(age));
        File::open(folder.join(name)).unwrap().set_times(times).unwrap();
    }
    fs::write(folder.join("new/block.bin"), "kv").unwrap();
    pool.trim().unwrap();
    assert!(!folder.join("old").exists() && folder.join("new/block.bin").exists());
}

#[test]
fn the_last_to_let_go_removes_the_folder() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    let (agent, keeper) = (open(&folder, GIB).unwrap(), FolderHold::take(&folder).unwrap());
    fs::write(folder.join("block.bin"), "kv").unwrap();
    agent.hold.remove_if_last();
    assert!(folder.join("block.bin").exists(), "an engine lives on");
    keeper.remove_if_last();
    assert!(!folder.exists());
}

#[test]
fn an_agent_removes_what_a_killed_one_has_left_unless_engines_live_on() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    let keeper = FolderHold::take(&folder).unwrap();
    kill(open(&folder, GIB).unwrap());
    fs::write(folder.join("block.bin"), "kv").unwrap();
    kill(open(&folder, GIB).unwrap());
    assert!(folder.join("block.bin").exists());
    drop(keeper);
    kill(open(&folder, GIB).unwrap());
    assert!(!folder.join("block.bin").exists());
}

#[test]
fn a_folder_that_others_may_open_is_closed_to_them_and_a_link_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    let held = open(&folder, GIB).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    kill(open(&folder, GIB).unwrap());
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700, "an engine has made it anew");
    fs::remove_dir(&folder).unwrap();
    symlink(parent.path(), &folder).unwrap();
    assert_eq!(open(&folder, GIB).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    drop(held);
}

#[test]
fn a_pipe_in_place_of_the_lock_is_not_waited_for() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pool");
    rustix::fs::mknodat(rustix::fs::CWD, lock_path(&folder), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    open(&folder, GIB).unwrap_err();
}
