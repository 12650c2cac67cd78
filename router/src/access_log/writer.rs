//! The only thread that writes the access log, so that a full disk or a stopped terminal holds up
//! no request. It writes the gathered lines every few milliseconds: a request then costs no
//! wake-up, and a busy router writes many lines at once.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;

use super::line::AccessLine;
use crate::config::AccessFormat;

/// Most queued lines, of about 400 bytes each. With a batch every 20 ms this allows 400,000
/// requests a second; the queue fills only if writing is stuck.
const MAX_QUEUED_LINES: usize = 8192;

const BATCH_INTERVAL: Duration = Duration::from_millis(20);

/// How often the file is checked for having been moved away.
const ROTATION_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How long the last lines may take on shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// Approximate bytes per write.
const WRITE_BYTES: usize = 64 * 1024;

#[derive(Debug, thiserror::Error)]
#[error("router.access_log_file: cannot open {}: {source}", path.display())]
pub struct AccessLogError {
    path: PathBuf,
    source: std::io::Error,
}

/// A line, or `None` at the end. The queue allocates all its places at the start, so they are
/// small.
type QueuedLine = Option<Box<AccessLine>>;

#[derive(Debug, Clone)]
pub(super) struct LineSender {
    sender: SyncSender<QueuedLine>,
    dropped: Counter,
}

impl LineSender {
    /// Sends a line without waiting. A line that finds no room is counted and dropped.
    pub(super) fn send(&self, line: Box<AccessLine>) {
        if self.sender.try_send(Some(line)).is_err() {
            self.dropped.inc();
        }
    }
}

/// The writing thread. [`AccessLogWriter::flush`] makes it write what is left.
#[derive(Debug, Default)]
pub(crate) struct AccessLogWriter(Option<(SyncSender<QueuedLine>, JoinHandle<()>)>);

impl AccessLogWriter {
    /// Waits briefly until everything sent is written. A stuck thread is left behind.
    pub(crate) async fn flush(self) {
        let Some((sender, thread)) = self.0 else { return };
        let deadline = tokio::time::Instant::now() + FLUSH_TIMEOUT;
        let mut notified = sender.try_send(None).is_ok();
        while !thread.is_finished() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(2)).await;
            notified = notified || sender.try_send(None).is_ok();
        }
    }
}

pub(super) fn start(format: AccessFormat, path: &Path, dropped: Counter) -> Result<(LineSender, AccessLogWriter), AccessLogError> {
    let failed = |source| AccessLogError { path: path.to_owned(), source };
    let sink = LogSink::new(path).map_err(failed)?;
    let (sender, receiver) = sync_channel(MAX_QUEUED_LINES);
    let thread = Builder::new().name("access-log".into()).spawn(move || write_lines(&receiver, format, sink)).map_err(failed)?;
    Ok((LineSender { sender: sender.clone(), dropped }, AccessLogWriter(Some((sender, thread)))))
}

fn write_lines(receiver: &Receiver<QueuedLine>, format: AccessFormat, mut sink: LogSink) {
    let mut text = String::new();
    let mut looked = Instant::now();
    // The router and every request hold a sender.
    while let Ok(first) = receiver.recv() {
        let mut ends = append_line(first, format, &mut text);
        if !ends {
            wait_for_batch();
        }
        if looked.elapsed() >= ROTATION_CHECK_INTERVAL {
            looked = Instant::now();
            sink.reopen_if_moved();
        }
        while !ends && let Ok(line) = receiver.try_recv() {
            ends = append_line(line, format, &mut text);
            if text.len() >= WRITE_BYTES {
                sink.write(&mut text);
            }
        }
        sink.write(&mut text);
        if ends {
            return;
        }
    }
}

/// Appends a line. Returns `true` at the end of the log.
fn append_line(line: QueuedLine, format: AccessFormat, text: &mut String) -> bool {
    if let Some(line) = &line {
        line.write(format, text);
    }
    line.is_none()
}

/// Lets lines gather. A thread that waited at the channel would be woken for each line, at the cost
/// of the request that sends it.
#[expect(clippy::disallowed_methods, reason = "this thread is no runtime's")]
fn wait_for_batch() {
    std::thread::sleep(BATCH_INTERVAL);
}

#[derive(Debug)]
struct LogSink {
    /// `None` for standard error.
    file: Option<(PathBuf, File)>,
    /// Whether writing fails. A failure is logged once, until writing works again.
    is_failing: bool,
}

impl LogSink {
    fn new(path: &Path) -> std::io::Result<Self> {
        let file = if path.as_os_str().is_empty() { None } else { Some((path.to_owned(), open(path)?)) };
        Ok(Self { file, is_failing: false })
    }

    /// Opens the file anew if log rotation has moved or removed it.
    fn reopen_if_moved(&mut self) {
        let Some((path, file)) = &mut self.file else { return };
        let id = |of: std::fs::Metadata| (of.dev(), of.ino());
        let is_there = std::fs::metadata(&*path).ok().map(id) == file.metadata().ok().map(id);
        if !is_there && let Ok(anew) = open(path) {
            *file = anew;
        }
    }

    /// Writes the text and clears it.
    fn write(&mut self, text: &mut String) {
        let written = match &mut self.file {
            Some((_, file)) => file.write_all(text.as_bytes()),
            None => std::io::stderr().write_all(text.as_bytes()),
        };
        text.clear();
        match written {
            Ok(()) => self.is_failing = false,
            Err(error) if !self.is_failing => {
                self.is_failing = true;
                tracing::warn!(event = "access_log_failed", %error, "the access log cannot be written; requests are answered without");
            }
            Err(_) => {}
        }
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

#[cfg(test)]
mod tests;
