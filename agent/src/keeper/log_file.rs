//! The file of one engine's output: rotated, and written by a thread of its own, so that a disk that is slow, full or gone never stops the engine.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

/// Size of one log file; with the two before it a log takes at most 48 MiB.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// Older files kept, as `NAME.1` and `NAME.2`.
const MAX_ROTATED_FILES: u32 = 2;

/// Chunks waiting for the disk, 2 MiB in all; what comes while it is full is not written to the
/// file.
const MAX_QUEUED_CHUNKS: usize = 128;

/// Error messages that wait to be reported.
const MAX_QUEUED_ERRORS: usize = 8;

/// The file as the keeper holds it; dropping it ends the thread once all is written.
#[derive(Debug)]
pub(super) struct LogFileWriter {
    chunks: SyncSender<Bytes>,
    /// Bytes that did not reach the file.
    lost_bytes: usize,
}

/// What the file's thread reports.
#[derive(Debug)]
pub(super) struct LogFileThread {
    /// Why the file cannot be written, once for each reason in a row.
    pub(super) errors: mpsc::Receiver<String>,
    /// Resolves when the output was dropped and everything is written.
    pub(super) written: oneshot::Receiver<()>,
}

impl LogFileWriter {
    /// Begins the thread.
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

    /// Hands a chunk to the thread. If the disk is slower than the engine's output, the engine
    /// matters more; the file then says how much it lacks.
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

    /// Opens for appending, so that a restarted agent goes on where the last one was. A log may
    /// have prompts in it, so nobody else may read it.
    fn append(&self) -> io::Result<(File, u64)> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
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

#[cfg(test)]
mod tests;
