//! Rotated file of one engine's output.
//!
//! Its own thread writes it, so a slow, full or missing disk never stops the engine. A file has one
//! writer: if another engine's keeper holds it, this one takes the next name.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::sync::{mpsc, oneshot};

/// Size of one log file. With two rotated files a log takes at most 48 MiB.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// Older files kept, as `NAME.1` and `NAME.2`.
const MAX_ROTATED_FILES: u32 = 2;

/// Chunks that may wait for the disk, 2 MiB in all.
///
/// Output that comes while the queue is full is not written to the file.
const MAX_QUEUED_CHUNKS: usize = 128;

/// How long to wait for a file that another keeper holds: the keeper of the engine's last life may
/// still write its last lines.
const LOCK_WAIT: Duration = Duration::from_secs(3);

/// Interval between two attempts to lock a file.
const LOCK_RETRY: Duration = Duration::from_millis(50);

/// Most names that are tried for one file.
const MAX_NAMES: u32 = 9;

/// Error messages that may wait to be reported.
const MAX_QUEUED_ERRORS: usize = 8;

/// Handle of the keeper on the file. Dropping it ends the thread once everything is written.
#[derive(Debug)]
pub(super) struct LogFileWriter {
    chunks: SyncSender<Bytes>,
    /// Bytes that did not reach the file.
    lost_bytes: usize,
}

/// Reports of the file's thread.
#[derive(Debug)]
pub(super) struct LogFileThread {
    /// Why the file cannot be written, once for each reason in a row.
    pub(super) errors: mpsc::Receiver<String>,
    /// Resolves once the output was dropped and everything is written.
    pub(super) written: oneshot::Receiver<()>,
}

impl LogFileWriter {
    /// Starts the thread.
    pub(super) fn open(path: PathBuf) -> io::Result<(Self, LogFileThread)> {
        let (chunks, waiting) = sync_channel(MAX_QUEUED_CHUNKS);
        let (complain, complaints) = mpsc::channel(MAX_QUEUED_ERRORS);
        let (done, written) = oneshot::channel();
        std::thread::Builder::new().name("engine-log".to_owned()).spawn(move || {
            write_all(&path, &waiting, &complain);
            // The receiver may be gone.
            let _ = done.send(());
        })?;
        Ok((Self { chunks, lost_bytes: 0 }, LogFileThread { errors: complaints, written }))
    }

    /// Hands a chunk to the thread.
    ///
    /// If the disk is slower than the engine's output, the engine matters more; the file then
    /// records how much it lacks.
    pub(super) fn write(&mut self, chunk: Bytes) {
        if self.lost_bytes > 0 {
            let notice = format!("\n[{} bytes of output are missing here]\n", self.lost_bytes);
            if self.chunks.try_send(notice.into()).is_ok() {
                self.lost_bytes = 0;
            }
        }
        let length = chunk.len();
        if self.chunks.try_send(chunk).is_err() {
            self.lost_bytes += length;
        }
    }
}

fn write_all(path: &Path, waiting: &Receiver<Bytes>, complain: &mpsc::Sender<String>) {
    let mut file = LogFile::new(path.to_owned(), MAX_FILE_BYTES);
    let mut failing = false;
    if let Err(held) = file.choose_name(LOCK_WAIT) {
        let text = format!(
            "{held}: the output of this engine goes to {}; give each agent a node name or a log folder of its own",
            file.path.display()
        );
        let _ = complain.try_send(text);
    }
    for chunk in waiting {
        match file.write(&chunk) {
            Ok(()) => failing = false,
            Err(error) if !failing => {
                failing = true;
                let text = format!("cannot write the engine's log {}: {error}; the engine goes on without it", path.display());
                // Enough error messages wait already.
                let _ = complain.try_send(text);
            }
            Err(_) => {}
        }
    }
}

/// A log file that is rotated when it is full.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    max_bytes: u64,
    open: Option<(File, u64)>,
}

impl LogFile {
    fn new(path: PathBuf, cap: u64) -> Self {
        Self { path, max_bytes: cap, open: None }
    }

    fn write(&mut self, chunk: &[u8]) -> io::Result<()> {
        let length = chunk.len() as u64;
        if matches!(self.open, Some((_, size)) if size + length > self.max_bytes) {
            self.open = None;
            self.rotate()?;
        }
        let (mut file, size) = match self.open.take() {
            Some(open) => open,
            None => self.append()?,
        };
        file.write_all(chunk)?;
        self.open = Some((file, size + length));
        Ok(())
    }

    /// Takes the first name that no other process writes to.
    ///
    /// Returns an error with the reason if that is not the given name.
    #[expect(clippy::disallowed_methods, reason = "the thread has nothing else to do, and what is to be written waits in its queue")]
    fn choose_name(&mut self, wait: Duration) -> Result<(), String> {
        let given = self.path.clone();
        let deadline = Instant::now() + wait;
        let mut number = 1;
        loop {
            match self.append() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => std::thread::sleep(LOCK_RETRY),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && number < MAX_NAMES => {
                    number += 1;
                    self.path = numbered(&given, number);
                }
                opened => {
                    // Other errors are reported with the first line.
                    self.open = opened.ok();
                    break;
                }
            }
        }
        if self.path == given { Ok(()) } else { Err(format!("another engine's keeper writes to the log {}", given.display())) }
    }

    /// Opens the file for appending, so that a restarted agent continues it.
    ///
    /// A log may contain prompts, so nobody else may read it.
    fn append(&self) -> io::Result<(File, u64)> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
        // Ignore other errors: some parallel filesystems have no locks, and names differ by host
        // and node there.
        if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let size = file.metadata()?.len();
        Ok((file, size))
    }

    fn rotate(&self) -> io::Result<()> {
        for number in (1..MAX_ROTATED_FILES).rev() {
            match fs::rename(self.rotated_path(number), self.rotated_path(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, self.rotated_path(1))
    }

    fn rotated_path(&self, number: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }
}

/// Numbers a name: `n0-e0.log` becomes `n0-e0-2.log`.
fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{number}.log"));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests;
