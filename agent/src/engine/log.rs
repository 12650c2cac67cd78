//! What one engine prints: its last lines kept in memory, to be shown with a failure, and all of it in a rotated file. The file is written by a thread of its own, so that a stalled disk never stalls the engine.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

/// Lines kept in memory.
const TAIL_LINES: usize = 200;

/// Bytes kept of one line in memory; the file has all of it.
const LINE_CAP: usize = 2_000;

/// Size of one log file; with the two before it a log takes at most 48 MiB.
const FILE_CAP: u64 = 16 * 1024 * 1024;

/// Older files kept, as `NAME.1` and `NAME.2`.
const OLDER_FILES: u32 = 2;

/// Bytes read from the engine at once.
const CHUNK: usize = 16 * 1024;

/// Chunks waiting for the disk, 2 MiB in all; what comes while it is full is not written to the file.
const WAITING_CHUNKS: usize = 128;

/// What vLLM prints when it is past its imports and starts to build the engine.
const LOADING_SIGNS: [&str; 2] = ["Initializing a V1 LLM engine", "Starting to load model"];

/// Whether a line says that the engine has begun to load its model.
pub(crate) fn is_sign_of_loading(line: &str) -> bool {
    LOADING_SIGNS.iter().any(|sign| line.contains(sign))
}

/// The log of one engine over all its lives. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Log {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    tail: Tail,
    /// Where the thread gets its bytes; `None` once closed.
    chunks: Option<SyncSender<Bytes>>,
    /// Bytes that did not reach the file.
    lost: usize,
}

impl Log {
    /// Begins the log's thread. The receiver resolves after `close`, when everything is written.
    pub(crate) fn open(path: PathBuf) -> (Self, oneshot::Receiver<()>) {
        let (chunks, waiting) = sync_channel(WAITING_CHUNKS);
        let (written, all_written) = oneshot::channel();
        let thread = std::thread::Builder::new().name("engine-log".to_owned()).spawn(move || {
            write_all(&path, &waiting);
            // Nobody may be waiting any more.
            let _ = written.send(());
        });
        if let Err(error) = thread {
            tracing::warn!(%error, "cannot start the log's thread; engine output is kept in memory only");
        }
        let shared = Shared { tail: Tail::default(), chunks: Some(chunks), lost: 0 };
        let log = Self { shared: Arc::new(Mutex::new(shared)) };
        (log, all_written)
    }

    /// Ends the file; what was printed last stays in memory.
    pub(crate) fn close(&self) {
        self.shared.lock().chunks = None;
    }

    /// Writes a line of the agent's own, which begins a new life.
    pub(crate) fn begin(&self, line: &str) {
        let mut shared = self.shared.lock();
        shared.tail.finish();
        shared.tail.take(line.as_bytes());
        shared.tail.finish();
        shared.tail.life = 0;
        shared.write(Bytes::from(format!("{line}\n")));
    }

    /// The last lines, oldest first.
    pub(crate) fn last(&self, count: usize) -> Vec<String> {
        self.shared.lock().tail.last(count)
    }

    /// The last lines of the present life, oldest first.
    pub(crate) fn last_of_life(&self, count: usize) -> Vec<String> {
        let shared = self.shared.lock();
        shared.tail.last(count.min(shared.tail.life))
    }

    /// Reads what the engine prints until its last process is gone; calls `on_line` for each whole line.
    pub(crate) async fn follow(&self, mut output: pipe::Receiver, mut on_line: impl FnMut(&str)) {
        loop {
            let mut chunk = BytesMut::with_capacity(CHUNK);
            match output.read_buf(&mut chunk).await {
                Ok(0) => break,
                Ok(_) => {
                    let mut shared = self.shared.lock();
                    shared.tail.read(&chunk, &mut on_line);
                    shared.write(chunk.freeze());
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot read the engine's output");
                    break;
                }
            }
        }
        let mut shared = self.shared.lock();
        if shared.tail.finish() {
            shared.write(Bytes::from_static(b"\n"));
        }
    }
}

impl Shared {
    /// Hands a chunk to the log's thread. When the disk is slower than the engine talks, the engine matters more: the file then says how much it lacks.
    fn write(&mut self, chunk: Bytes) {
        let Some(chunks) = &self.chunks else { return };
        if self.lost > 0 {
            let notice = format!("\n[{} bytes of output are missing here]\n", self.lost);
            if chunks.try_send(notice.into()).is_ok() {
                self.lost = 0;
            }
        }
        let length = chunk.len();
        if chunks.try_send(chunk).is_err() {
            self.lost += length;
        }
    }
}

/// The last lines, and the one that is not finished.
#[derive(Debug, Default)]
struct Tail {
    lines: VecDeque<String>,
    unfinished: Vec<u8>,
    /// Lines since the present life began.
    life: usize,
}

impl Tail {
    /// Takes bytes as they come, cut anywhere.
    fn read(&mut self, bytes: &[u8], on_line: &mut impl FnMut(&str)) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.take(&rest[..end]);
            if self.finish() {
                on_line(self.lines.back().expect("a line was just finished"));
            }
            rest = &rest[end + 1..];
        }
        self.take(rest);
    }

    fn take(&mut self, bytes: &[u8]) {
        let room = LINE_CAP.saturating_sub(self.unfinished.len());
        self.unfinished.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Ends the unfinished line; false if there was nothing in it.
    fn finish(&mut self) -> bool {
        if self.unfinished.is_empty() {
            return false;
        }
        let line = String::from_utf8_lossy(&self.unfinished).trim_end().to_owned();
        self.unfinished.clear();
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
        self.life += 1;
        true
    }

    fn last(&self, count: usize) -> Vec<String> {
        let skipped = self.lines.len().saturating_sub(count);
        self.lines.iter().skip(skipped).cloned().collect()
    }
}

/// Writes until the log is closed. A file that cannot be written is complained about once for each reason in a row.
fn write_all(path: &Path, waiting: &Receiver<Bytes>) {
    let mut file = LogFile::new(path.to_owned(), FILE_CAP);
    let mut failing = false;
    for chunk in waiting {
        match file.write(&chunk) {
            Ok(()) => failing = false,
            Err(error) if !failing => {
                failing = true;
                tracing::warn!(%error, path = %path.display(), "cannot write the engine's log");
            }
            Err(_) => {}
        }
    }
}

/// A file that is set aside when it is full.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    cap: u64,
    open: Option<(File, u64)>,
}

impl LogFile {
    fn new(path: PathBuf, cap: u64) -> Self {
        Self { path, cap, open: None }
    }

    fn write(&mut self, chunk: &[u8]) -> io::Result<()> {
        let length = chunk.len() as u64;
        if matches!(self.open, Some((_, size)) if size + length > self.cap) {
            self.open = None;
            self.set_aside()?;
        }
        let (mut file, size) = match self.open.take() {
            Some(open) => open,
            None => self.append()?,
        };
        file.write_all(chunk)?;
        self.open = Some((file, size + length));
        Ok(())
    }

    /// Opens for appending: an agent that is started again goes on where the last one was. Prompts may be in a log, so nobody else may read it.
    fn append(&self) -> io::Result<(File, u64)> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
        let size = file.metadata()?.len();
        Ok((file, size))
    }

    fn set_aside(&self) -> io::Result<()> {
        for number in (1..OLDER_FILES).rev() {
            match fs::rename(self.numbered(number), self.numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, self.numbered(1))
    }

    fn numbered(&self, number: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }
}

#[cfg(test)]
mod tests;
