//! Where staged models go on a node. The choice is pure; `agent.stage` names a folder or leaves it
//! to `auto`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::entry::{MAX_DEPTH, StageFolder, bound_within, size_of};
use super::error::StageError;
use crate::mounts::{FileSystem, FileSystemKind};
use crate::sizes::format_gib;

/// Places that sites give to jobs on a node's own disk, those that outlive a job first: a copy
/// there serves the next job, and its name stays, on which vLLM's cache of compiled models depends.
const PLACES: [&str; 8] =
    ["/local/scratch", "/mnt/bb/$USER", "/tmp", "$PBS_JOBFS", "$SLURM_TMPDIR", "$LOCAL_SCRATCH", "$TMPDIR", "/dev/shm"];

/// Memory counts as plenty where so many copies of the model would fit: the engine and its caches
/// need it, too.
const COPIES_IN_MEMORY: u64 = 4;

/// A place as it was found.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    pub(crate) file_system: FileSystem,
    pub(crate) total: u64,
    /// Room for staged models, with what those there take, within their bound.
    pub(crate) free: u64,
    pub(crate) is_writable: bool,
}

/// The chosen place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    /// Why this one, in words.
    pub(crate) because: String,
}

impl Candidate {
    /// Looks at a place; `None` if it does not exist. Blocks on the disk.
    ///
    /// `bound` is `agent.stage_bytes`.
    fn look(path: &Path, bound: u64) -> Option<Self> {
        let path = std::fs::canonicalize(path).ok().filter(|path| path.is_dir())?;
        let room = rustix::fs::statvfs(&path).ok()?;
        let is_writable = rustix::fs::access(&path, rustix::fs::Access::WRITE_OK).is_ok();
        let total = room.f_blocks.saturating_mul(room.f_frsize);
        let staged = size_of(&StageFolder::path_in(&path), MAX_DEPTH);
        Some(Self {
            file_system: FileSystem::of(&path)?,
            total,
            free: room.f_bavail.saturating_mul(room.f_frsize).saturating_add(staged).min(bound_within(bound, total)),
            path,
            is_writable,
        })
    }

    /// All places of this node that `auto` considers, in its order.
    pub(crate) fn of_this_node(bound: u64, variable: impl Fn(&str) -> Option<String>) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for place in PLACES.iter().filter_map(|place| expand(place, &variable).ok()).filter_map(|place| Self::look(&place, bound)) {
            if !found.iter().any(|other| other.path == place.path) {
                found.push(place);
            }
        }
        found
    }

    /// Why nothing is staged here, unless something may be.
    fn obstacle(&self, bytes: u64, available_memory: u64) -> Option<String> {
        match self.file_system.kind {
            FileSystemKind::Shared => Some(format!("is on {}, which other hosts share", self.file_system.source)),
            _ if !self.is_writable => Some("may not be written".to_owned()),
            _ if self.free < bytes => Some(format!("has room for {}", format_gib(self.free))),
            FileSystemKind::Memory if available_memory / COPIES_IN_MEMORY < bytes => Some("is memory, which is not plenty".to_owned()),
            FileSystemKind::Memory | FileSystemKind::Local => None,
        }
    }

    /// What the place is, for `hostler doctor`.
    pub(crate) fn describe(&self) -> String {
        let kind = match self.file_system.kind {
            FileSystemKind::Shared => "shared with other hosts",
            FileSystemKind::Local => "a disk of this host",
            FileSystemKind::Memory => "memory",
        };
        format!("{} ({kind}, room for {} of {})", self.path.display(), format_gib(self.free), format_gib(self.total))
    }
}

/// Chooses a place for so many bytes: a disk of the node, else memory that is plenty.
pub(crate) fn choose(candidates: &[Candidate], bytes: u64, available_memory: u64) -> Result<Place, StageError> {
    let mut refused = String::new();
    let disks = candidates.iter().filter(|place| place.file_system.kind != FileSystemKind::Memory);
    let memory = candidates.iter().filter(|place| place.file_system.kind == FileSystemKind::Memory);
    for place in disks.chain(memory) {
        match place.obstacle(bytes, available_memory) {
            None => {
                let chosen = place.describe();
                let because = if refused.is_empty() { chosen } else { format!("{chosen}; {refused}") };
                return Ok(Place { path: place.path.clone(), because });
            }
            Some(why) => {
                let gap = if refused.is_empty() { "" } else { ", " };
                let _ = write!(refused, "{gap}{} {why}", place.path.display());
            }
        }
    }
    Err(StageError::NoPlace(if refused.is_empty() { "none was found".to_owned() } else { refused }))
}

/// A folder with the job's variables put in, `$NAME` or `${NAME}`.
pub(crate) fn expand(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<PathBuf, StageError> {
    let mut path = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        path.push_str(before);
        let braced = after.strip_prefix('{').and_then(|after| after.split_once('}'));
        let (name, tail) = braced.unwrap_or_else(|| {
            let end = after.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').unwrap_or(after.len());
            after.split_at(end)
        });
        let value = variable(name).filter(|value| !value.is_empty());
        path.push_str(&value.ok_or_else(|| StageError::NoVariable(text.to_owned(), name.to_owned()))?);
        rest = tail;
    }
    path.push_str(rest);
    Ok(path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn candidate(path: &str, kind: FileSystemKind, free: u64) -> Candidate {
        let file_system = FileSystem { source: "files:/x".into(), kind, mount_point: path.into() };
        Candidate { path: path.into(), file_system, total: 1000 * GIB, free, is_writable: true }
    }

    #[test]
    fn the_first_disk_of_the_node_with_room_is_chosen() {
        let scratch = candidate("/local/scratch", FileSystemKind::Local, GIB);
        let shared = candidate("/mnt/bb/me", FileSystemKind::Shared, 900 * GIB);
        let disk = candidate("/tmp", FileSystemKind::Local, 100 * GIB);
        let place = choose(&[scratch, shared, disk], 16 * GIB, 0).unwrap();
        assert_eq!(place.path, Path::new("/tmp"));
        assert!(place.because.contains("/local/scratch has room for 1.0 GiB, /mnt/bb/me is on files:/x"), "{}", place.because);
    }

    #[test]
    fn memory_is_chosen_only_where_it_is_plenty_and_no_disk_is_there() {
        let memory = candidate("/dev/shm", FileSystemKind::Memory, 500 * GIB);
        let chosen = |candidates: &[Candidate], available| choose(candidates, 16 * GIB, available).map(|place| place.path);
        assert_eq!(chosen(std::slice::from_ref(&memory), 512 * GIB).unwrap(), Path::new("/dev/shm"));
        assert!(matches!(chosen(std::slice::from_ref(&memory), 60 * GIB), Err(StageError::NoPlace(_))));
        let disk = candidate("/scratch", FileSystemKind::Local, 100 * GIB);
        assert_eq!(chosen(&[memory, disk], 512 * GIB).unwrap(), Path::new("/scratch"));
    }

    #[test]
    fn variables_of_the_job_are_put_in() {
        let variable = |name: &str| (name == "TMPDIR").then(|| "/tmp/12".to_owned());
        assert_eq!(expand("$TMPDIR/a", variable).unwrap(), Path::new("/tmp/12/a"));
        assert_eq!(expand("/x${TMPDIR}y", variable).unwrap(), Path::new("/x/tmp/12y"));
        assert!(matches!(expand("$NOTHING/a", variable), Err(StageError::NoVariable(..))));
    }
}
