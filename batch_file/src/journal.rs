//! Answers so far, in an append-only file beside the output.
//!
//! An incomplete line does not count, so a killed process loses no more than the answer that it was
//! writing. The writer holds the file's lock.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::FileError;
use crate::input::Input;

const FORMAT: &str = "hostler-batch";
const VERSION: u32 = 1;

/// How often writes are forced to the disk.
///
/// Answers that a host loses in a crash are computed again.
const SYNC_INTERVAL: Duration = Duration::from_secs(10);

/// Longest line.
///
/// An answer has 64 MiB, which may take six times as much if it is text instead of JSON.
const MAX_LINE_BYTES: u64 = 512 << 20;

/// Hexadecimal digits of a line's checksum, before a space.
const CHECKSUM_DIGITS: usize = 16;

/// First line of the journal.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct JournalHeader {
    format: String,
    version: u32,
    /// Digest of the input.
    input: String,
    requests: usize,
}

/// Place of an answer in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct JournaledAnswer {
    offset: u64,
    length: u32,
    is_failed: bool,
}

#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Answers by the number of the request.
    answers: Vec<Option<JournaledAnswer>>,
    answered: usize,
    failed: usize,
    end: u64,
    synced: Instant,
    has_lock: bool,
}

impl Journal {
    /// Path of this output's journal.
    #[must_use]
    pub fn path_for(output: &Path) -> PathBuf {
        beside(output, ".partial")
    }

    /// Opens or creates the journal of an output, and takes its lock.
    ///
    /// # Errors
    /// When another process has the journal, or it belongs to another input.
    pub fn open(path: &Path, input: &Input) -> Result<Self, FileError> {
        let unusable = |source| FileError::File { verb: "write", path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path).map_err(unusable)?;
        let has_lock = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => return Err(FileError::InUse(path.to_owned())),
            // Lustre without the mount option `flock` has no locks.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => false,
            Err(TryLockError::Error(source)) => return Err(FileError::File { verb: "lock", path: path.to_owned(), source }),
        };
        // The process that had the lock before may have finished and removed the file meanwhile.
        let opened = file.metadata().map_err(unusable)?;
        if !fs::metadata(path).is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino())) {
            return Err(FileError::InUse(path.to_owned()));
        }
        let answers = vec![None; input.requests()];
        let path = path.to_owned();
        let mut journal = Self { path, file, answers, answered: 0, failed: 0, end: 0, synced: Instant::now(), has_lock };
        journal.read(input)?;
        Ok(journal)
    }

    /// Reads the complete lines and cuts off the rest.
    fn read(&mut self, input: &Input) -> Result<(), FileError> {
        let expected = JournalHeader {
            format: FORMAT.to_owned(),
            version: VERSION,
            input: format!("{:032x}", input.digest()),
            requests: input.requests(),
        };
        let mut reader = BufReader::with_capacity(1 << 20, self.file.try_clone().map_err(|source| self.unreadable(source))?);
        let mut line = Vec::new();
        let mut end = (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).map_err(|source| self.unreadable(source))? as u64;
        if !line.ends_with(b"\n") {
            // Either the journal's first process was killed at once, or the file belongs to
            // somebody else.
            let header = to_line(&expected);
            if !header.starts_with(&line) {
                return Err(FileError::NoJournal(self.path.clone()));
            }
            self.file.set_len(0).and_then(|()| self.file.write_all(&header)).map_err(|source| self.unwritable(source))?;
            self.end = header.len() as u64;
            return Ok(());
        }
        match serde_json::from_slice::<JournalHeader>(&line) {
            Ok(header) if header == expected => {}
            Ok(header) if header.format == FORMAT => return Err(FileError::OtherInput(self.path.clone())),
            _ => return Err(FileError::NoJournal(self.path.clone())),
        }
        loop {
            line.clear();
            let read = (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).map_err(|source| self.unreadable(source))?;
            let Some(entry) = parse_entry(&line).filter(|entry| entry.number < self.answers.len()) else { break };
            self.count(&entry, end);
            end += read as u64;
        }
        self.end = end;
        self.file.set_len(end).map_err(|source| self.unwritable(source))
    }

    /// Keeps the answer to a request.
    ///
    /// # Errors
    /// When the answer cannot be written.
    pub fn append(&mut self, number: usize, answer: &[u8], is_failed: bool) -> Result<(), FileError> {
        let line = write_entry(&Entry { number, is_failed, answer });
        if let Err(source) = self.file.write_all(&line) {
            // Part of the line may be there, and lines after it would not be read.
            let _ = self.file.set_len(self.end);
            return Err(self.unwritable(source));
        }
        self.count(&Entry { number, is_failed, answer }, self.end);
        self.end += line.len() as u64;
        if self.synced.elapsed() >= SYNC_INTERVAL {
            self.sync()?;
        }
        Ok(())
    }

    /// Forces the written lines to the disk.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.synced = Instant::now();
        self.file.sync_data().map_err(|source| self.unwritable(source))
    }

    /// Counts an answer whose line begins at `offset`. The first one holds.
    fn count(&mut self, entry: &Entry<'_>, offset: u64) {
        let answer = &mut self.answers[entry.number];
        if answer.is_some() {
            return;
        }
        let length = u32::try_from(entry.answer.len()).expect("answers have 64 MiB at most");
        let offset = offset + prefix(entry).len() as u64;
        *answer = Some(JournaledAnswer { offset, length, is_failed: entry.is_failed });
        self.answered += 1;
        self.failed += usize::from(entry.is_failed);
    }

    #[must_use]
    pub fn has(&self, number: usize) -> bool {
        self.answers[number].is_some()
    }

    /// Whether a request was answered with a status of 2xx.
    #[must_use]
    pub fn has_succeeded(&self, number: usize) -> bool {
        self.answers[number].is_some_and(|answer| !answer.is_failed)
    }

    #[must_use]
    pub fn answered(&self) -> usize {
        self.answered
    }

    #[must_use]
    pub fn failed(&self) -> usize {
        self.failed
    }

    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.answered == self.answers.len()
    }

    /// Whether another process is kept out.
    #[must_use]
    pub fn has_lock(&self) -> bool {
        self.has_lock
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the lines of some answers, in the order of the input. `is_wanted` gets whether the
    /// request failed.
    ///
    /// # Errors
    /// When a line cannot be read, and those of `write`.
    pub fn write_answers<E: From<FileError>>(
        &self,
        is_wanted: impl Fn(bool) -> bool,
        mut write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut line = Vec::new();
        for answer in self.answers.iter().flatten().filter(|answer| is_wanted(answer.is_failed)) {
            line.resize(answer.length as usize, 0);
            self.file.read_exact_at(&mut line, answer.offset).map_err(|source| self.unreadable(source))?;
            line.push(b'\n');
            write(&line)?;
        }
        Ok(())
    }

    /// Writes all answers in the order of the input.
    ///
    /// The output appears whole or not at all; then the journal is removed.
    ///
    /// # Errors
    /// When the output cannot be written; the journal is kept.
    pub fn finish(self, output: &Path) -> Result<(), FileError> {
        let unwritable = |source| FileError::File { verb: "write", path: output.to_owned(), source };
        let whole = beside(output, ".whole");
        let mut writer = BufWriter::with_capacity(1 << 20, File::create(&whole).map_err(unwritable)?);
        self.write_answers(|_| true, |line| writer.write_all(line).map_err(unwritable))?;
        let file = writer.into_inner().map_err(|error| unwritable(error.into_error()))?;
        file.sync_all().and_then(|()| fs::rename(&whole, output)).map_err(unwritable)?;
        let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(unwritable)?;
        self.remove()
    }

    /// Removes the file, and with it the lock.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub fn remove(self) -> Result<(), FileError> {
        fs::remove_file(&self.path).map_err(|source| FileError::File { verb: "remove", path: self.path.clone(), source })
    }

    fn unreadable(&self, source: io::Error) -> FileError {
        FileError::File { verb: "read", path: self.path.clone(), source }
    }

    fn unwritable(&self, source: io::Error) -> FileError {
        FileError::File { verb: "write", path: self.path.clone(), source }
    }
}

/// Content of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry<'a> {
    number: usize,
    is_failed: bool,
    /// Line of the output, without its end.
    answer: &'a [u8],
}

/// Writes `CHECKSUM NUMBER +|- ANSWER`.
///
/// The checksum covers the rest of the line: after a host's crash a file may have zeros in place of
/// written bytes.
fn write_entry(entry: &Entry<'_>) -> Vec<u8> {
    let mut line = prefix(entry).into_bytes();
    line.extend_from_slice(entry.answer);
    let checksum = format!("{:0CHECKSUM_DIGITS$x}", xxh3_64(&line[CHECKSUM_DIGITS..]));
    line[..CHECKSUM_DIGITS].copy_from_slice(checksum.as_bytes());
    line.push(b'\n');
    line
}

/// Part before the answer, with room for the checksum.
fn prefix(entry: &Entry<'_>) -> String {
    format!("{:CHECKSUM_DIGITS$} {} {} ", "", entry.number, if entry.is_failed { '-' } else { '+' })
}

/// Parses a line; `None` if it was damaged.
fn parse_entry(line: &[u8]) -> Option<Entry<'_>> {
    let (checksum, rest) = line.strip_suffix(b"\n")?.split_at_checked(CHECKSUM_DIGITS)?;
    if u64::from_str_radix(str::from_utf8(checksum).ok()?, 16).ok()? != xxh3_64(rest) {
        return None;
    }
    let mut parts = rest.splitn(4, |byte| *byte == b' ').skip(1);
    let number = str::from_utf8(parts.next()?).ok()?.parse().ok()?;
    let is_failed = parts.next()? == b"-";
    Some(Entry { number, is_failed, answer: parts.next()? })
}

fn to_line(header: &JournalHeader) -> Vec<u8> {
    let mut line = serde_json::to_vec(header).expect("texts and numbers are JSON");
    line.push(b'\n');
    line
}

fn beside(output: &Path, ending: &str) -> PathBuf {
    let mut path = output.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

#[cfg(test)]
mod tests;
