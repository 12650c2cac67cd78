//! What is known of a copy: the manifest of a whole one, and the journal of one that is being made.
//!
//! Blocks on the disk.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::error::StageError;

const MANIFEST: &str = "manifest.json";
const JOURNAL: &str = "journal";

/// Bytes of a journal's line: two numbers of eight digits, and a hash.
const LINE_BYTES: u64 = 8 + 1 + 8 + 1 + 64 + 1;

/// A copy that was whole when this was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// For people who look into the folder.
    pub(super) source: String,
    /// The host's boot in which it was written. Bytes that were still in memory when a host went
    /// down are lost, so another boot hashes the files again.
    pub(super) boot: String,
    pub(super) block_bytes: u64,
    /// In the order of the source's files.
    pub(super) files: Vec<FileRecord>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileRecord {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    /// SHA-256 of each block, in hexadecimal digits.
    pub(super) blocks: Vec<String>,
    pub(super) identity: FileIdentity,
}

/// What changes when somebody writes to a file or replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileIdentity {
    inode: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileIdentity {
    pub(super) fn of(about: &Metadata) -> Self {
        Self { inode: about.ino(), modified: (about.mtime(), about.mtime_nsec()), changed: (about.ctime(), about.ctime_nsec()) }
    }
}

impl Manifest {
    /// The manifest in this folder; `None` where there is none that can be read.
    pub(super) fn read(entry: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(entry.join(MANIFEST)).ok()?).ok()
    }

    /// Writes it in one step, after which the journal is not needed any longer.
    pub(super) fn write(&self, entry: &Path) -> Result<(), StageError> {
        let (path, new) = (entry.join(MANIFEST), entry.join("manifest.new"));
        let text = serde_json::to_vec(self).expect("a manifest has only text and numbers");
        let written = write_private(&new, &text).and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| StageError::target(&path, error))?;
        Journal::remove(entry)
    }
}

fn write_private(path: &Path, content: &[u8]) -> std::io::Result<()> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?.write_all(content)
}

/// Number of a file, and of a block in it.
pub(super) type BlockName = (usize, u64);

/// Blocks that were copied, with their hashes, a line each. A line is written after its block, so
/// whatever ends the copy, the next one knows what it may keep.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: Mutex<File>,
    /// Blocks of the copy before this one.
    pub(super) known: BTreeMap<BlockName, String>,
}

impl Journal {
    /// Opens the journal to go on with it.
    pub(super) fn open(entry: &Path) -> Result<Self, StageError> {
        let path = entry.join(JOURNAL);
        let text = fs::read_to_string(&path).unwrap_or_default();
        // A line that a killed process began is cut off.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let open = || {
            let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
            file.set_len(whole as u64)?;
            Ok(file)
        };
        let file = open().map_err(|error: std::io::Error| StageError::target(&path, error))?;
        Ok(Self { file: Mutex::new(file), known: text[..whole].lines().filter_map(parse_line).collect(), path })
    }

    pub(super) fn note(&self, (file, block): BlockName, hash: &str) -> Result<(), StageError> {
        let line = format!("{file:08x} {block:08x} {hash}\n");
        self.file.lock().write_all(line.as_bytes()).map_err(|error| StageError::target(&self.path, error))
    }

    pub(super) fn remove(entry: &Path) -> Result<(), StageError> {
        let path = entry.join(JOURNAL);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(StageError::target(&path, error)),
            _ => Ok(()),
        }
    }

    /// How many blocks the copy in this folder has, for those who wait for it.
    pub(super) fn count(entry: &Path) -> u64 {
        fs::metadata(entry.join(JOURNAL)).map_or(0, |about| about.len() / LINE_BYTES)
    }
}

fn parse_line(line: &str) -> Option<(BlockName, String)> {
    let mut words = line.split(' ');
    let mut number = || u64::from_str_radix(words.next()?, 16).ok();
    let (file, block) = (usize::try_from(number()?).ok()?, number()?);
    let hash = words.next().filter(|hash| hash.len() == 64)?;
    Some(((file, block), hash.to_owned()))
}

/// Name of the host's present boot; empty where the kernel does not say it.
pub(super) fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}
