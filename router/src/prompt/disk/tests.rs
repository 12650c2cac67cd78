use std::os::unix::fs::PermissionsExt;

use super::*;

fn bundle(number: usize) -> (FilesHash, Vec<u8>) {
    let content = format!("bundle {number}").into_bytes();
    (bundle::bundle_hash(&content), content)
}

fn names(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_written_bundle_reads_back_and_is_private() {
    let cache = tempfile::tempdir().unwrap();
    let (hash, content) = bundle(0);
    let disk = DiskCache::open(&cache.path().join("new"));
    assert!(!disk.may_have(&hash) && disk.read(&hash).is_none());
    disk.write(&hash, &content);
    assert!(disk.may_have(&hash));
    let again = DiskCache::open(&cache.path().join("new"));
    assert!(again.may_have(&hash));
    assert_eq!(again.read(&hash), Some(content));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&disk.folder), mode(&disk.path(&hash))), (0o700, 0o600));
    assert_eq!(names(&disk.folder), 1, "nothing unfinished is left");
}

#[test]
fn a_damaged_bundle_is_rejected_and_forgotten() {
    let cache = tempfile::tempdir().unwrap();
    let disk = DiskCache::open(cache.path());
    let (hash, content) = bundle(0);
    disk.write(&hash, &content);
    fs::write(disk.path(&hash), b"bundle 9").unwrap();
    assert_eq!(disk.read(&hash), None);
    assert!(!disk.may_have(&hash));
    disk.write(&hash, &content);
    assert_eq!(disk.read(&hash), Some(content));
}

#[test]
fn only_plain_files_are_opened() {
    let cache = tempfile::tempdir().unwrap();
    let (hash, _) = bundle(0);
    fs::create_dir_all(cache.path().join("prompt").join(hex(&hash))).unwrap();
    let disk = DiskCache::open(cache.path());
    assert!(disk.may_have(&hash));
    assert_eq!(disk.read(&hash), None);
}

#[test]
fn the_disk_cache_works_without_a_writable_folder() {
    let cache = tempfile::tempdir().unwrap();
    let taken = cache.path().join("file");
    fs::write(&taken, b"").unwrap();
    let disk = DiskCache::open(&taken);
    let (hash, content) = bundle(0);
    disk.write(&hash, &content);
    assert!(disk.has_warned.load(Ordering::Relaxed));
    assert!(!disk.may_have(&hash) && disk.read(&hash).is_none());
}

#[test]
fn the_least_recently_used_bundles_are_evicted_first() {
    let cache = tempfile::tempdir().unwrap();
    let disk = DiskCache::open(cache.path());
    let long_ago = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    for number in 0..MAX_MODELS {
        let (hash, content) = bundle(number);
        disk.write(&hash, &content);
        File::open(disk.path(&hash)).unwrap().set_modified(long_ago(number as u64)).unwrap();
    }
    let (oldest, next) = (bundle(0).0, bundle(1).0);
    disk.read(&oldest).unwrap();
    let (hash, content) = bundle(MAX_MODELS);
    disk.write(&hash, &content);
    assert_eq!(names(&disk.folder), MAX_MODELS);
    assert!(disk.read(&oldest).is_some() && disk.read(&hash).is_some() && disk.read(&next).is_none());
}

#[test]
fn unfinished_bundles_of_dead_routers_are_removed() {
    let cache = tempfile::tempdir().unwrap();
    let disk = DiskCache::open(cache.path());
    let (hash, content) = bundle(0);
    disk.write(&hash, &content);
    let (abandoned, fresh, foreign) = (".tmpa", ".tmpb", "c.txt");
    for name in [abandoned, fresh, foreign] {
        fs::write(disk.folder.join(name), b"half").unwrap();
    }
    File::open(disk.folder.join(abandoned)).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    disk.write(&hash, &content);
    assert!(!disk.folder.join(abandoned).exists());
    assert!(disk.folder.join(fresh).exists() && disk.folder.join(foreign).exists());
}

#[test]
fn only_names_of_64_lowercase_digits_are_bundles() {
    let (hash, _) = bundle(0);
    assert_eq!(parse_name(Path::new("/x").join(hex(&hash)).as_path()), Some(hash));
    for name in [hex(&hash).to_uppercase(), format!("{}0", hex(&hash)), hex(&hash)[1..].to_owned(), "ä".repeat(32), String::new()] {
        assert_eq!(parse_name(Path::new(&name)), None, "{name}");
    }
}
