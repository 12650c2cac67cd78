//! A batch from its first request to its output; the only owner of the journal.
//!
//! It starts as many requests as may run at once, keeps the outcome of each, and writes the output
//! when all are answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hostler_batch_file::{Input, InputBounds, Journal, OutputLine, PRIORITY, RequestLine, parse_request, write_output};
use hostler_bench::{Call, Client, Target};
use hostler_boot::Shutdown;
use http::{HeaderName, HeaderValue, Method};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::args::BatchArgs;
use crate::error::BatchError;
use crate::progress::{Progress, ProgressWriter};
use crate::sender::{Sender, Sent, TimeLimits, Waiting};

/// Most bytes of lines whose requests are in flight, unless a single one has more.
///
/// Requests with images have some megabytes each.
const MAX_BYTES_IN_FLIGHT: usize = 256 << 20;

const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Summary of a batch that has its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    pub requests: usize,
    /// Requests without an answer of status 2xx.
    pub failed: usize,
}

/// A batch that may begin: its input was checked, and no other process writes its output.
#[derive(Debug)]
pub struct Batch {
    args: BatchArgs,
    target: Target,
    input: Input,
    journal: Journal,
}

impl Batch {
    /// Checks the input and finds earlier answers. A signal may end the process meanwhile.
    ///
    /// # Errors
    /// When a check fails; nothing was sent.
    pub fn open(args: &BatchArgs, target: Target) -> Result<Self, BatchError> {
        let input = Input::check(&args.input, &InputBounds::default())?;
        let journal = open_journal(args, &input)?;
        Ok(Self { args: args.clone(), target, input, journal })
    }

    /// Gets all requests answered and writes the output.
    ///
    /// `key` is the whole value of `authorization`.
    ///
    /// # Errors
    /// When there is no output; answers so far are kept in the journal.
    pub async fn run(self, key: Option<HeaderValue>, shutdown: &Shutdown, progress: &mut ProgressWriter) -> Result<Summary, BatchError> {
        if !self.journal.has_lock() {
            let path = self.journal.path().display();
            progress.tell(&format!("this file system has no locks: see to it that no other process writes {path}"));
        }
        if self.journal.answered() > 0 {
            progress.tell(&format!("{} of {} requests were answered before", self.journal.answered(), self.input.requests()));
        }
        let output = self.args.output.clone();
        let mut drive = Drive::new(self, key, shutdown);
        let ended = drive.answer_all(shutdown, progress).await;
        progress.end();
        drive.journal.sync()?;
        ended?;
        let summary = Summary { requests: drive.input.requests(), failed: drive.journal.failed() };
        drive.journal.finish(&output)?;
        Ok(summary)
    }
}

/// Opens the journal of an output that does not exist yet, or exists except for the journal's end.
fn open_journal(args: &BatchArgs, input: &Input) -> Result<Journal, BatchError> {
    let path = Journal::path_for(&args.output);
    let exists = || BatchError::OutputExists(args.output.clone());
    if args.output.exists() && !path.exists() {
        return Err(exists());
    }
    let journal = Journal::open(&path, input)?;
    if args.output.exists() && !journal.is_complete() {
        if journal.answered() == 0 {
            journal.remove()?;
        }
        return Err(exists());
    }
    Ok(journal)
}

struct Drive {
    input: Input,
    journal: Journal,
    target: Target,
    key: Option<HeaderValue>,
    sender: Sender,
    waiting: watch::Receiver<Waiting>,
    /// Most requests at once.
    concurrency: usize,
    grace: Duration,
    /// First request that was not examined yet.
    next: usize,
    running: JoinSet<Running>,
    bytes_in_flight: usize,
    /// Connections that no request uses now.
    idle: Vec<Client>,
    tokens: u64,
}

/// A request whose attempts have ended.
struct Running {
    number: usize,
    line: Bytes,
    sent: Sent,
    client: Client,
}

impl Drive {
    fn new(batch: Batch, key: Option<HeaderValue>, shutdown: &Shutdown) -> Self {
        let Batch { args, target, input, journal } = batch;
        let (sender, waiting) = watch::channel(Waiting::default());
        let limits = TimeLimits { request: args.deadline, attempt: args.request_timeout };
        let served: Arc<[AtomicBool]> = (0..input.model_count()).map(|_| AtomicBool::new(false)).collect();
        for number in (0..input.requests()).filter(|number| journal.has_succeeded(*number)) {
            served[input.model(number)].store(true, Ordering::Relaxed);
        }
        Self {
            input,
            journal,
            target,
            key,
            sender: Sender { limits, waiting: sender, served, shutdown: shutdown.clone() },
            waiting,
            concurrency: args.concurrency as usize,
            grace: args.grace,
            next: 0,
            running: JoinSet::new(),
            bytes_in_flight: 0,
            idle: Vec::new(),
            tokens: 0,
        }
    }

    async fn answer_all(&mut self, shutdown: &Shutdown, progress: &mut ProgressWriter) -> Result<(), BatchError> {
        let begun = Instant::now();
        let mut ticks = interval(PROGRESS_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let grace = self.grace;
        let is_over = async {
            shutdown.wait_drain().await;
            tokio::select! {
                () = tokio::time::sleep(grace) => {}
                () = shutdown.wait_stop() => {}
            }
        };
        tokio::pin!(is_over);
        let mut is_stopping = false;
        loop {
            while !shutdown.is_draining() && self.running.len() < self.concurrency && self.start_next()? {}
            tokio::select! {
                ended = self.running.join_next() => match ended {
                    Some(ended) => self.keep(ended.expect("a request neither panics nor is aborted before the batch's end"))?,
                    None => break,
                },
                _ = ticks.tick() => progress.show(&self.progress(begun.elapsed())),
                () = shutdown.wait_drain(), if !is_stopping => {
                    is_stopping = true;
                    let grace = humantime::format_duration(grace);
                    progress.tell(&format!("stopping: answers on their way have {grace}; a second signal stops at once"));
                }
                () = &mut is_over => break,
            }
        }
        progress.show(&self.progress(begun.elapsed()));
        if self.journal.is_complete() {
            return Ok(());
        }
        let (answered, total) = (self.journal.answered(), self.input.requests());
        Err(BatchError::Stopped { answered, total, journal: self.journal.path().to_owned() })
    }

    /// Starts the next request without an answer; `false` if none may start now.
    fn start_next(&mut self) -> Result<bool, BatchError> {
        while self.next < self.input.requests() && self.journal.has(self.next) {
            self.next += 1;
        }
        if self.next == self.input.requests() {
            return Ok(false);
        }
        let number = self.next;
        let length = self.input.line_length(number);
        if self.bytes_in_flight > 0 && self.bytes_in_flight + length > MAX_BYTES_IN_FLIGHT {
            return Ok(false);
        }
        let line = Bytes::from(self.input.read(number)?);
        let call = self.call(&line);
        let mut client = self.idle.pop().unwrap_or_else(|| Client::to(&self.target));
        let (sender, model) = (self.sender.clone(), self.input.model(number));
        self.running.spawn(async move {
            let sent = sender.send(&mut client, &call, model).await;
            Running { number, line, sent, client }
        });
        self.bytes_in_flight += length;
        self.next += 1;
        Ok(true)
    }

    fn call(&self, line: &Bytes) -> Call {
        let request = parse_again(line);
        let priority = (HeaderName::from_static("x-hostler-priority"), HeaderValue::from(PRIORITY));
        Call {
            method: Method::POST,
            path: format!("{}{}", self.target.path(), request.route),
            key: self.key.clone(),
            headers: if request.has_priority { Vec::new() } else { vec![priority] },
            body: line.slice_ref(request.body.as_bytes()),
        }
    }

    /// Keeps the outcome of a request.
    fn keep(&mut self, ended: Running) -> Result<(), BatchError> {
        self.bytes_in_flight -= ended.line.len();
        self.idle.push(ended.client);
        let outcome = match ended.sent {
            Sent::Ended(outcome) => outcome,
            Sent::Stopped => return Ok(()),
            Sent::KeyRefused(message) => {
                return Err(BatchError::KeyRefused { message, journal: self.journal.path().to_owned() });
            }
        };
        let request = parse_again(&ended.line);
        // This id is equal in every run of this batch, and in no other.
        let id = format!("batch_req_{:032x}_{}", self.input.digest(), ended.number);
        let OutputLine { json, is_failed, tokens } = write_output(&id, &request.custom_id, outcome);
        self.tokens += tokens;
        self.sender.served[self.input.model(ended.number)].fetch_or(!is_failed, Ordering::Relaxed);
        Ok(self.journal.append(ended.number, &json, is_failed)?)
    }

    fn progress(&self, elapsed: Duration) -> Progress {
        let waiting = self.waiting.borrow();
        Progress {
            elapsed,
            answered: self.journal.answered(),
            failed: self.journal.failed(),
            total: self.input.requests(),
            tokens: self.tokens,
            waiting: waiting.requests,
            reason: waiting.reason.clone(),
        }
    }
}

/// Parses a line of the input again.
fn parse_again(line: &[u8]) -> RequestLine<'_> {
    parse_request(line).expect("the line was checked, and is the same")
}

#[cfg(test)]
mod tests;
