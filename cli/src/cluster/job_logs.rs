//! Last output of jobs, for people who wait for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::controller_process::last_lines;

/// Prefixes of lines that follow a cause: the exit code from Slurm's own programs, and the agent's
/// advice.
const AFTER_THE_CAUSE: [&str; 3] = ["srun: ", "slurmstepd: ", "what to do: "];

/// The last line that a job has printed since then.
pub(super) fn last_words(logs: &Path, since: SystemTime) -> Option<String> {
    last_words_of(fs::read_dir(logs).ok()?.filter_map(|entry| entry.ok().map(|entry| entry.path())), since)
}

/// Last line of the most recently written file, if written since then.
pub(super) fn last_words_of(files: impl IntoIterator<Item = PathBuf>, since: SystemTime) -> Option<String> {
    let dated = files.into_iter().filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)));
    let (_, newest) = dated.filter(|(changed, _)| *changed >= since).max()?;
    let lines: Vec<String> = last_lines(&newest).ok()?.into_iter().filter(|line| !line.trim().is_empty()).collect();
    let own = lines.iter().rfind(|line| !AFTER_THE_CAUSE.iter().any(|beginning| line.starts_with(beginning)));
    own.or(lines.last()).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_quoted_and_not_what_the_launcher_says_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("hostler-chat-4711.log");
        let cause = "error: there is no vLLM in PATH";
        for (text, expected) in [
            (format!("starting\n{cause}\nsrun: error: node1: task 0: Exited with exit code 1\n\n"), Some(cause)),
            (format!("{cause}\nwhat to do: install it\n"), Some(cause)),
            ("srun: error: Unable to create step\n".to_owned(), Some("srun: error: Unable to create step")),
            ("\n".to_owned(), None),
        ] {
            fs::write(&log, &text).unwrap();
            assert_eq!(last_words(folder.path(), SystemTime::UNIX_EPOCH).as_deref(), expected, "{text:?}");
        }
    }
}
