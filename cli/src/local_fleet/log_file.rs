//! Log of a `hostler up` whose terminal shows something else: a file beside its record.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use tokio::time::sleep;

use crate::host_names::this_host;
use crate::up_record::make_folder;

/// How many logs of processes that have ended are kept.
const KEPT: usize = 5;

/// Size at which a log begins anew. With the part before it, a process has twice as much.
const MAX_BYTES: u64 = 16 * 1024 * 1024;

/// How often the size is looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct UpLog {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl UpLog {
    /// Makes that of this process, and removes old ones of this host.
    ///
    /// # Errors
    /// When there is no folder of the user's own, or it takes no file.
    pub(crate) fn of_this_process() -> anyhow::Result<Self> {
        let folder = make_folder()?;
        let prefix = format!("{}-", this_host());
        remove_old(&folder, &prefix, |pid| Path::new(&format!("/proc/{pid}")).exists());
        let path = folder.join(file_name(std::process::id()));
        Ok(Self { file: open(&path).with_context(|| format!("cannot write {}", path.display()))?, path })
    }

    /// Names it after another process, which writes it. Returns its path.
    ///
    /// # Errors
    /// When the file cannot be renamed.
    pub(crate) fn give_to(self, pid: u32) -> anyhow::Result<PathBuf> {
        let named = self.path.with_file_name(file_name(pid));
        fs::rename(&self.path, &named).with_context(|| format!("cannot rename {}", self.path.display()))?;
        Ok(named)
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Has `write_to` take another file whenever the log at `path` is large; the part before it is kept
/// beside it. The access log follows by itself when its file is moved.
pub(crate) async fn keep_bounded(path: impl Fn() -> Option<PathBuf>, write_to: impl Fn(File)) {
    loop {
        sleep(CHECK_INTERVAL).await;
        let Some(path) = path() else { continue };
        match begin_anew_above(&path, MAX_BYTES) {
            Ok(next) => next.into_iter().for_each(&write_to),
            Err(error) => tracing::warn!(log = %path.display(), %error, "the log grows: it cannot begin anew"),
        }
    }
}

/// A new file in the place of one that is larger than this.
fn begin_anew_above(path: &Path, most: u64) -> io::Result<Option<File>> {
    if fs::metadata(path)?.len() <= most {
        return Ok(None);
    }
    fs::rename(path, part_before(path))?;
    open(path).map(Some)
}

/// Name of the older part of a log.
fn part_before(path: &Path) -> PathBuf {
    path.with_added_extension("1")
}

fn file_name(pid: u32) -> String {
    format!("{}-{pid}.log", this_host())
}

/// Removes logs with this prefix whose process has ended, but for the newest.
fn remove_old(folder: &Path, prefix: &str, runs: impl Fn(u32) -> bool) {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut ended: Vec<(SystemTime, PathBuf)> = entries
        .filter_map(|path| {
            let pid = path.file_name()?.to_str()?.strip_prefix(prefix)?.strip_suffix(".log")?.parse().ok()?;
            let written = path.metadata().ok()?.modified().ok()?;
            (!runs(pid)).then_some((written, path))
        })
        .collect();
    ended.sort();
    for (_, path) in ended.iter().rev().skip(KEPT) {
        // Another process may have removed it.
        let _ = fs::remove_file(path).and_then(|()| fs::remove_file(part_before(path)));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_large_log_begins_anew_and_its_last_part_is_kept() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("host-7.log");
        let mut file = open(&path).unwrap();
        for text in ["first", "second", "third"] {
            file.write_all(text.as_bytes()).unwrap();
            if let Some(next) = begin_anew_above(&path, 4).unwrap() {
                file = next;
            }
            assert!(begin_anew_above(&path, 4).unwrap().is_none());
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        assert_eq!(fs::read_to_string(part_before(&path)).unwrap(), "third");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2);
    }

    #[test]
    fn logs_of_ended_processes_are_kept_as_far_as_they_are_new() {
        let place = tempfile::tempdir().unwrap();
        for pid in 1..=8 {
            let file = File::create(place.path().join(format!("host-{pid}.log"))).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(pid)).unwrap();
        }
        for other in ["host-1.json", "other-1.log", "host-2.log.1", "host-8.log.1"] {
            File::create(place.path().join(other)).unwrap();
        }
        remove_old(place.path(), "host-", |pid| pid == 1);
        let mut left: Vec<String> =
            fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        let expected = [
            "host-1.json",
            "host-1.log",
            "host-4.log",
            "host-5.log",
            "host-6.log",
            "host-7.log",
            "host-8.log",
            "host-8.log.1",
            "other-1.log",
        ];
        assert_eq!(left, expected, "the first one runs still");
    }
}
