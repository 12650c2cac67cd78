use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);

/// A process that has a file of this directory mapped: its own program.
struct Mapping {
    child: Child,
    path: PathBuf,
}

impl Mapping {
    fn of(directory: &Path, name: &str) -> Self {
        let path = directory.join(name);
        fs::copy("/bin/cat", &path).unwrap();
        let mut child = Command::new(&path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // `spawn` returns before the kernel has mapped the program.
        child.stdin.as_mut().unwrap().write_all(b"a").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        Self { child, path }
    }

    fn look(&self, leftovers: &SharedMemoryLeftovers) {
        leftovers.record_mappings(vec![self.child.id().cast_signed()], PATIENCE);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn directory() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().canonicalize().unwrap();
    (directory, path)
}

#[test]
fn shared_memory_of_a_killed_process_is_removed() {
    let (_directory, path) = directory();
    let leftovers = SharedMemoryLeftovers::in_directory(&path);
    for name in ["psm_1a2b3c4d", "vllm_offload_2f6c1d58-6f1a-4d5b-9a43-0d3c2b1a4e5f.mmap"] {
        let mapping = Mapping::of(&path, name);
        mapping.look(&leftovers);
        let segment = mapping.path.clone();
        drop(mapping);
        assert_eq!((segment.exists(), leftovers.remove(), segment.exists()), (true, 1, false), "{name}");
        assert_eq!(leftovers.remove(), 0);
    }
}

#[test]
fn a_file_named_by_a_person_stays() {
    let (_directory, path) = directory();
    let leftovers = SharedMemoryLeftovers::in_directory(&path);
    let mapping = Mapping::of(&path, "model.safetensors");
    mapping.look(&leftovers);
    assert_eq!(leftovers.remove(), 0);
    assert!(mapping.path.exists());
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the age of a file counts in ticks of the kernel's clock, which no test can set")]
fn a_file_of_other_processes_stays() {
    let (_directory, path) = directory();
    let mapping = Mapping::of(&path, "psm_old");
    std::thread::sleep(3 * CLOCK_TICK);
    let later = SharedMemoryLeftovers::in_directory(&path);
    mapping.look(&later);
    assert_eq!((later.remove(), mapping.path.exists()), (0, true));

    let leftovers = SharedMemoryLeftovers::in_directory(&path);
    let mapping = Mapping::of(&path, "psm_new");
    mapping.look(&leftovers);
    // The engine removed the file itself, and another file has the name now. The old one is still
    // mapped, so its inode is not reused.
    fs::remove_file(&mapping.path).unwrap();
    fs::write(&mapping.path, "another").unwrap();
    assert_eq!((leftovers.remove(), mapping.path.exists()), (0, true));
}

#[test]
fn a_semaphore_is_recognized_by_its_inode() {
    let (_directory, path) = directory();
    let leftovers = SharedMemoryLeftovers::in_directory(&path);
    let mapping = Mapping::of(&path, "sem.Bh4yjd");
    // Create it as the C library does.
    let kept = path.join("sem.mp-4v8eqlko");
    fs::hard_link(&mapping.path, &kept).unwrap();
    fs::remove_file(&mapping.path).unwrap();
    mapping.look(&leftovers);
    assert_eq!((leftovers.remove(), kept.exists()), (1, false));
}

#[test]
fn memory_map_lines_are_parsed_by_their_fields() {
    let read = |line| parse_inode(line, Path::new("/dev/shm"));
    assert_eq!(read("7f2a1c000000-7f2a1d000000 rw-s 00000000 00:1b 4711                       /dev/shm/psm_3ee6b273"), Some(4711));
    assert_eq!(read("7f2a1c000000-7f2a1d000000 rw-s 00000000 00:1b 4711 /dev/shm/sem.Bh4yjd (deleted)"), Some(4711));
    assert_eq!(read("7f2a1c000000-7f2a1d000000 rw-s 00000000 00:1b 4711 /dev/shm/models/psm_1"), None);
    assert_eq!(read("7f2a1c000000-7f2a1d000000 rw-p 00000000 00:00 0 [heap]"), None);
    assert_eq!(read("7f2a1c000000-7f2a1d000000 rw-p 00000000 00:00 0"), None);
}

#[test]
fn a_process_that_is_gone_has_no_leftovers() {
    let leftovers = SharedMemoryLeftovers::new();
    leftovers.record_mappings(vec![i32::MAX], PATIENCE);
    assert_eq!(leftovers.remove(), 0);
}
