use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;

use super::*;
use crate::keys::tests::headers;
use crate::keys::{Secret, change, read_private};

fn add(path: &Path) -> Secret {
    let secret = Secret::random().unwrap();
    let entry = KeyEntry::new(&secret, "t", SystemTime::now());
    change(path, true, |entries| {
        entries.push(entry);
        Ok(())
    })
    .unwrap();
    secret
}

fn knows(keys: &Keys, secret: &Secret) -> bool {
    keys.authenticate(&headers(&[("x-api-key", secret.reveal())])).is_ok()
}

/// A router's look at its key file, again and again.
struct Look {
    kept: Arc<KeyStore>,
    seen: Option<FileVersion>,
    metrics: RouterMetrics,
}

impl Look {
    fn new(keys: &Keys) -> Self {
        let kept = keys.0.clone().unwrap();
        Self { seen: kept.initial_version, kept, metrics: RouterMetrics::default() }
    }

    /// Looks once. Returns how often the file was read so far, with success and without.
    fn again(&mut self) -> (u64, u64) {
        self.seen = reload_if_changed(&self.kept, self.seen, &self.metrics);
        self.metrics.key_file_reads()
    }
}

#[test]
fn a_broken_key_file_keeps_the_keys_in_use() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    let first = add(&path);
    let keys = Keys::open(&path).unwrap();
    let mut look = Look::new(&keys);
    let mut turn = || look.again();
    assert_eq!(turn(), (0, 0));

    let second = add(&path);
    assert!(!knows(&keys, &second));
    assert_eq!((turn(), turn()), ((1, 0), (1, 0)));
    assert!(knows(&keys, &first) && knows(&keys, &second));

    // The file is written in place, and broken.
    std::fs::write(&path, "[[key]]\nid = 5").unwrap();
    assert_eq!((turn(), turn()), ((1, 1), (1, 1)));
    assert!(knows(&keys, &first) && knows(&keys, &second));
    assert_eq!(keys.is_file_usable(), Some(false));

    std::fs::remove_file(&path).unwrap();
    assert_eq!((turn(), turn()), ((1, 2), (1, 2)));
    assert!(knows(&keys, &first));

    let third = add(&path);
    assert_eq!(turn(), (2, 2));
    assert_eq!(keys.is_file_usable(), Some(true));
    assert!(knows(&keys, &third) && !knows(&keys, &first));

    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(turn(), (2, 3));
    assert!(knows(&keys, &third));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(turn(), (3, 3));
}

#[test]
fn an_emptied_key_file_locks_nobody_out() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let keys = Keys::open(&path).unwrap();
    let mut look = Look::new(&keys);
    let kept = look.kept.clone();
    let mut turn = || (look.again(), keys.is_file_usable());
    std::fs::write(&path, "# no key yet\n").unwrap();
    assert_eq!(turn(), ((1, 0), Some(true)), "there was none before");
    let secret = add(&path);
    assert_eq!(turn(), ((2, 0), Some(true)));

    for (failures, text) in [(1, ""), (2, "# a comment\n"), (3, "key = []\n")] {
        std::fs::write(&path, text).unwrap();
        assert_eq!(turn(), ((2, failures), Some(false)), "{text:?}");
        assert!(knows(&keys, &secret), "{text:?}");
    }
    let error = read_replacement(&kept).unwrap_err().to_string();
    assert!(error.contains("hostler keys revoke ID"), "{error}");

    // What revokes really leaves the entry in the file.
    let last = add(&path);
    assert_eq!(turn(), ((3, 3), Some(true)));
    change(&path, false, |entries| {
        entries.iter_mut().for_each(|entry| entry.revoked = Some(entry.created));
        Ok(())
    })
    .unwrap();
    assert_eq!(turn(), ((4, 3), Some(true)));
    assert!(!knows(&keys, &last));
}

#[test]
fn a_pipe_or_device_for_keys_never_stops_the_reading() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    let secret = add(&path);
    let keys = Keys::open(&path).unwrap();
    let mut look = Look::new(&keys);
    std::fs::remove_file(&path).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let read = look.again();
        let refused = [read_private(&look.kept.path).map(drop), change(&look.kept.path, true, |_| Ok(()))];
        done.send((look.seen.is_some(), read, refused.map(|refused| refused.unwrap_err().to_string()))).unwrap();
    });
    let (is_seen, read, refused) = finished.recv_timeout(Duration::from_secs(20)).expect("a pipe that nobody writes is waited for");
    assert_eq!((is_seen, read), (true, (0, 1)));
    assert!(refused.iter().all(|refused| refused.contains("not a regular file")), "{refused:?}");
    assert!(read_private(Path::new("/dev/null")).is_err() && knows(&keys, &secret));
}

#[tokio::test(start_paused = true)]
async fn a_changed_key_file_is_noticed_within_two_seconds() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    add(&path);
    let keys = Keys::open(&path).unwrap();
    let end = CancellationToken::new();
    let task = tokio::spawn(watch_file(keys.clone(), Arc::new(RouterMetrics::default()), end.clone()));
    let second = add(&path);
    let begun = tokio::time::Instant::now();
    while !knows(&keys, &second) {
        assert!(begun.elapsed() < Duration::from_secs(2), "the change is not noticed");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    end.cancel();
    task.await.unwrap();
    // Without keys there is nothing to follow.
    watch_file(Keys::default(), Arc::default(), CancellationToken::new()).await;
}
