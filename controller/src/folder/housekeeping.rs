//! Removes files that jobs leave in the folder, and cuts the controller's log, so a fleet of years
//! takes no more space than one of days.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::{FleetFolder, FolderError};

/// Size at which the controller's log is cut; one former log is kept.
const MAX_LOG_BYTES: u64 = 16 * 1024 * 1024;

/// How long a job's files are kept after the last change, for anyone who looks for the cause of its
/// end.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);

/// Number of job logs that are kept however old they are.
const KEPT_LOGS: usize = 100;

/// How long the identity of an unlisted job is kept: the list may not have the job yet.
pub(crate) const IDENTITY_KEPT_FOR: Duration = Duration::from_secs(3600);

impl FleetFolder {
    /// Removes unlisted jobs' identities and old logs, and cuts the controller's log.
    ///
    /// Identities go after `kept_for` without a change. Returns the names of their nodes.
    ///
    /// # Errors
    /// When a file cannot be read, removed or written.
    pub(crate) fn clean_up<'a>(
        &self,
        jobs: impl Iterator<Item = &'a str>,
        kept_for: Duration,
        now: SystemTime,
    ) -> Result<Vec<String>, FolderError> {
        let (numbers, mut gone): (Vec<String>, Vec<String>) = (jobs.map(number).collect(), Vec::new());
        for identity in aged(&self.identities(), now)? {
            // `x3001.12`, or `x3001.19-3` for an array's third part.
            let of_job = identity.name.rsplit_once('.').map(|(_, job)| number(job));
            if identity.age >= kept_for && of_job.is_some_and(|job| !numbers.contains(&job)) {
                super::remove_folder(&self.identities().join(&identity.name))?;
                gone.push(identity.name);
            }
        }
        let mut logs = aged(&self.job_logs(), now)?;
        logs.sort_by_key(|log| log.age);
        for log in logs.iter().skip(KEPT_LOGS).filter(|log| log.age >= KEPT_FOR) {
            super::remove(&self.job_logs().join(&log.name))?;
        }
        self.cut_log()?;
        Ok(gone)
    }

    /// Cuts the log in place. Writers append, so they continue at the beginning of the file.
    fn cut_log(&self) -> Result<(), FolderError> {
        let path = self.controller_log();
        if fs::metadata(&path).is_ok_and(|found| found.len() > MAX_LOG_BYTES) {
            let failed = |source| FolderError::File { what: "cut", path: path.clone(), source };
            fs::copy(&path, path.with_extension("log.1")).map_err(failed)?;
            fs::File::options().write(true).open(&path).and_then(|file| file.set_len(0)).map_err(failed)?;
        }
        Ok(())
    }
}

/// A file of a folder, and how long ago it changed.
struct AgedFile {
    name: String,
    age: Duration,
}

fn aged(folder: &Path, now: SystemTime) -> Result<Vec<AgedFile>, FolderError> {
    let failed = |source| FolderError::File { what: "read", path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let found = entries.flatten().filter_map(|entry| {
        let changed = entry.metadata().ok()?.modified().ok()?;
        Some(AgedFile { name: entry.file_name().into_string().ok()?, age: now.duration_since(changed).unwrap_or_default() })
    });
    Ok(found.collect())
}

/// Job number: `12` of `12.head` and `12[3].head`, `4711` of `4711_3`, `19` of `19-3`.
fn number(job: &str) -> String {
    job.chars().take_while(char::is_ascii_alphanumeric).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::folder;
    use super::*;

    #[test]
    fn what_gone_jobs_left_is_removed() {
        let (_place, folder) = folder();
        for node in ["x3001.12", "x3001.19-3", "x3002.77", "login"] {
            fs::create_dir_all(folder.identities().join(node)).unwrap();
        }
        for log in 0..KEPT_LOGS + 3 {
            fs::write(folder.job_logs().join(format!("{log}.OU")), "words").unwrap();
        }
        let kept = |folder: &Path| fs::read_dir(folder).unwrap().count();
        let listed = || ["12.head", "19[3].head"].into_iter();
        let clean_up = |now| folder.clean_up(listed(), IDENTITY_KEPT_FOR, now).unwrap();
        assert_eq!(clean_up(SystemTime::now()), Vec::<String>::new());
        assert_eq!((kept(&folder.identities()), kept(&folder.job_logs())), (4, KEPT_LOGS + 3), "they have just changed");
        assert_eq!(clean_up(SystemTime::now() + KEPT_FOR), ["x3002.77"]);
        assert!(!folder.identities().join("x3002.77").exists() && folder.identities().join("login").exists());
        assert_eq!((kept(&folder.identities()), kept(&folder.job_logs())), (3, KEPT_LOGS));
    }

    #[test]
    fn a_long_log_is_cut_while_its_writer_goes_on() {
        use std::io::Write;
        let (_place, folder) = folder();
        let mut writer = fs::File::options().create(true).append(true).open(folder.controller_log()).unwrap();
        let long = vec![b'x'; usize::try_from(MAX_LOG_BYTES).unwrap() + 1];
        writer.write_all(&long).unwrap();
        folder.clean_up(std::iter::empty(), IDENTITY_KEPT_FOR, SystemTime::now()).unwrap();
        writer.write_all(b"next line").unwrap();
        assert_eq!(fs::read(folder.controller_log()).unwrap(), b"next line");
        assert_eq!(fs::read(folder.path().join("controller.log.1")).unwrap(), long);
    }
}
