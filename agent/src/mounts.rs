//! File systems under paths, as `/proc/self/mountinfo` lists them: which one it is, and whether
//! other hosts share it.
//!
//! The names of the types decide, not `statfs`: its magic numbers are the same for all of FUSE, and
//! several parallel file systems have none that is published.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// File systems on a disk of this host. A type that is not known counts as shared: to wait for a
/// turn costs less than fifty jobs that read at once.
const LOCAL_TYPES: [&str; 18] = [
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk", "iso9660", "jfs", "ntfs3", "overlay", "reiserfs",
    "squashfs", "vfat", "xfs", "zfs",
];

const MEMORY_TYPES: [&str; 4] = ["devtmpfs", "hugetlbfs", "ramfs", "tmpfs"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileSystemKind {
    /// Other hosts have it, too, or may have.
    Shared,
    /// On a disk of this host.
    Local,
    /// In this host's memory.
    Memory,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileSystem {
    /// What is mounted, such as `server:/export`: the same on all hosts that share it.
    pub(crate) source: String,
    pub(crate) kind: FileSystemKind,
    pub(crate) mount_point: PathBuf,
}

impl FileSystem {
    /// The file system of a path without links. Blocks on `/proc` alone.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        Self::find(&std::fs::read("/proc/self/mountinfo").ok()?, path)
    }

    /// A later line for the same place hides the earlier one.
    fn find(mountinfo: &[u8], path: &Path) -> Option<Self> {
        let lines = mountinfo.split(|byte| *byte == b'\n').filter_map(parse_line);
        lines.filter(|found| path.starts_with(&found.mount_point)).max_by_key(|found| found.mount_point.as_os_str().len())
    }
}

/// `36 35 98:0 /root /mount/point options … - type source options`
fn parse_line(line: &[u8]) -> Option<FileSystem> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mount_point = PathBuf::from(OsString::from_vec(unescape(fields.nth(4)?)));
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let (kind, source) = (String::from_utf8_lossy(rest.next()?).into_owned(), unescape(rest.next()?));
    let kind = match kind.as_str() {
        name if LOCAL_TYPES.contains(&name) => FileSystemKind::Local,
        name if MEMORY_TYPES.contains(&name) => FileSystemKind::Memory,
        _ => FileSystemKind::Shared,
    };
    Some(FileSystem { source: String::from_utf8_lossy(&source).into_owned(), kind, mount_point })
}

/// The kernel writes blanks and backslashes as `\040`.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal =
            tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        plain.push(octal.unwrap_or(*first));
        rest = &tail[if octal.is_some() { 3 } else { 0 }..];
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /tmp rw - tmpfs tmpfs rw
31 22 0:41 / /models rw - autofs systemd-1 rw
32 31 0:42 / /models rw - nfs4 files:/export/models rw
33 22 0:43 / /my\\040models rw - fuse.sshfs me@files:/m rw
34 22 0:44 / /lus rw - lustre 10.0.0.1@tcp:/lus rw
35 22 0:45 / /gpfs rw - gpfs /dev/fs1 rw
";

    fn of(path: &str) -> (String, FileSystemKind) {
        let found = FileSystem::find(LINES.as_bytes(), Path::new(path)).unwrap();
        (found.source, found.kind)
    }

    #[test]
    fn the_longest_mount_point_and_its_last_line_count() {
        assert_eq!(of("/models/a/b"), ("files:/export/models".to_owned(), FileSystemKind::Shared));
        assert_eq!(of("/modelsx"), ("/dev/vda".to_owned(), FileSystemKind::Local));
        assert_eq!(of("/tmp/x"), ("tmpfs".to_owned(), FileSystemKind::Memory));
    }

    #[test]
    fn what_is_not_known_as_local_counts_as_shared() {
        assert_eq!(of("/my models/m"), ("me@files:/m".to_owned(), FileSystemKind::Shared));
        assert_eq!(of("/lus/m").1, FileSystemKind::Shared);
        assert_eq!(of("/gpfs/m").1, FileSystemKind::Shared, "although its source looks like a disk");
    }
}
