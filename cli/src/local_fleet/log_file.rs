//! Log of a `hostler up` whose terminal shows something else: a file beside its record.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;

use super::record::make_folder;
use crate::host_names::this_host;

/// How many logs of processes that have ended are kept.
const KEPT: usize = 5;

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
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
        Ok(Self { file: file.with_context(|| format!("cannot write {}", path.display()))?, path })
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
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn logs_of_ended_processes_are_kept_as_far_as_they_are_new() {
        let place = tempfile::tempdir().unwrap();
        for pid in 1..=8 {
            let file = File::create(place.path().join(format!("host-{pid}.log"))).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(pid)).unwrap();
        }
        for other in ["host-1.json", "other-1.log"] {
            File::create(place.path().join(other)).unwrap();
        }
        remove_old(place.path(), "host-", |pid| pid == 1);
        let mut left: Vec<String> =
            fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        let expected = ["host-1.json", "host-1.log", "host-4.log", "host-5.log", "host-6.log", "host-7.log", "host-8.log", "other-1.log"];
        assert_eq!(left, expected, "the first one runs still");
    }
}
