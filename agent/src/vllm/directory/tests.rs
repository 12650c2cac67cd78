use super::*;

#[test]
fn a_directory_is_emptied_before_each_life() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("e0");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("engine.sock"), "stale").unwrap();
    prepare(&directory).unwrap();
    assert!(!directory.join("engine.sock").exists());
    assert!(temporary_path(&directory).is_dir());
    assert!(directory.join("python/hostler_engine.py").is_file());
}
