//! The stepping task and the way requests reach it.
//!
//! One task owns the scheduler and the clock. A request is a `Generation`, whose mailbox fills as
//! steps end; dropping it removes the request.

mod stepping;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

pub(crate) use stepping::Stepping;

use crate::args::EngineArgs;
use crate::faults::Faults;
use crate::mailbox::{Finish, Mailbox};
use crate::metrics::Metrics;
use crate::nodes::FarWorkers;
use crate::scheduler::{Limit, Limits, Scheduler, Sequence};
use crate::sleep::SleepState;
use crate::structured::StructuredOutput;
use crate::tokens::{Continuation, hash_text, mix};

/// Commands that may wait for the stepping task; senders wait when there are more.
const COMMAND_QUEUE: usize = 8192;

/// Value mixed into the seed of answers when the weights are lost.
///
/// As in vLLM, answers then change without a warning.
const NONSENSE: u64 = 0x6e6f_6e73_656e_7365;

#[derive(Debug)]
pub(crate) enum Command {
    Run(Vec<Sequence>),
    /// End every sequence now, with this reason.
    EndAll(Finish),
    /// Forget all cached blocks, if no sequence holds any.
    ///
    /// The answer says whether they were forgotten.
    ResetCache(oneshot::Sender<bool>),
    /// End every sequence, forget the cache and stop stepping.
    Sleep(oneshot::Sender<()>),
    Wake(oneshot::Sender<()>),
}

/// One prompt of a request.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) limit: Limit,
}

/// Generation that a request asks for: `choices` answers to each prompt.
#[derive(Clone, Debug)]
pub(crate) struct GenerationRequest {
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) choices: usize,
    pub(crate) seed: u64,
    pub(crate) salt: Option<String>,
    pub(crate) adapter: Option<String>,
    /// Form of the answers, if it is not left to the model.
    pub(crate) structured: Option<StructuredOutput>,
}

/// Why a request does not get to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The queue is full, or the `busy` fault is on.
    Busy,
    /// The engine has shut down while the request waited.
    Stopped,
    /// No answer can have the requested form, for this reason.
    Unsatisfiable(String),
}

/// Engine as requests see it.
#[derive(Debug)]
pub(crate) struct EngineHandle {
    args: Arc<EngineArgs>,
    commands: mpsc::Sender<Command>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) slumber: SleepState,
    /// Sequences waiting or running.
    queued: Arc<AtomicUsize>,
    /// Tracker with a token for each generation.
    generations: TaskTracker,
    stopping: CancellationToken,
    stopped: CancellationToken,
}

impl EngineHandle {
    /// Creates an engine and the task that the caller has to run for it.
    pub(crate) fn new(args: Arc<EngineArgs>) -> (Self, Stepping) {
        let (commands, incoming) = mpsc::channel(COMMAND_QUEUE);
        let core = Self {
            args: args.clone(),
            commands,
            faults: Arc::default(),
            metrics: Arc::default(),
            slumber: SleepState::default(),
            queued: Arc::default(),
            generations: TaskTracker::new(),
            stopping: CancellationToken::new(),
            stopped: CancellationToken::new(),
        };
        let limits = Limits {
            sequences: args.max_num_seqs,
            batched_tokens: args.max_num_batched_tokens,
            block_size: args.block_size,
            blocks: args.num_gpu_blocks_override.saturating_sub(1),
            host_blocks: args.sim_host_blocks,
            kv_events: false,
        };
        let stepping = Stepping {
            scheduler: Scheduler::new(limits),
            limits,
            args,
            commands: incoming,
            faults: core.faults.clone(),
            metrics: core.metrics.clone(),
            publisher: None,
            asleep: false,
            far_workers: FarWorkers::default(),
        };
        (core, stepping)
    }

    /// Submits a request. After `stop` it waits for the shutdown and is then refused, as in vLLM.
    pub(crate) async fn submit(&self, work: GenerationRequest) -> Result<Generation, Refusal> {
        if self.stopping.is_cancelled() {
            self.stopped.cancelled().await;
            return Err(Refusal::Stopped);
        }
        let sequences = work.prompts.len() * work.choices;
        let place = QueueSlot::take(&self.queued, sequences);
        let limit = self.args.max_num_queued_reqs.unwrap_or(usize::MAX);
        if self.faults.is_busy() || place.before + sequences > limit {
            self.metrics.record_rejection();
            return Err(Refusal::Busy);
        }
        let mailbox = Arc::new(Mailbox::new(self.args.stream_interval.max(1)));
        let generation =
            Generation { mailbox: mailbox.clone(), choices: sequences, _queue_slot: place, _running: self.generations.token() };
        let sequences = self.sequences(&mailbox, work).map_err(Refusal::Unsatisfiable)?;
        let command = Command::Run(sequences);
        self.commands.send(command).await.map_err(|_| Refusal::Stopped)?;
        Ok(generation)
    }

    /// Stops accepting requests, gives those in flight the grace of the arguments, and aborts the
    /// rest.
    pub(crate) async fn stop(&self) {
        self.stopping.cancel();
        self.generations.close();
        let grace = std::time::Duration::from_secs(self.args.shutdown_timeout);
        if !grace.is_zero() {
            let _ = tokio::time::timeout(grace, self.generations.wait()).await;
        }
        self.end_all(Finish::Abort).await;
        self.stopped.cancel();
    }

    /// Requests whose answers are not complete, for `/load`.
    pub(crate) fn in_flight(&self) -> usize {
        self.generations.len()
    }

    pub(crate) async fn end_all(&self, finish: Finish) {
        // A closed queue means that the stepping task is gone, and with it all sequences.
        let _ = self.commands.send(Command::EndAll(finish)).await;
    }

    /// Empties the prefix cache, unless sequences run, and returns whether it did.
    ///
    /// Waits for the stepping task. A hung task never answers; then the caller's client ends the
    /// wait.
    pub(crate) async fn reset_cache(&self) -> bool {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::ResetCache(reply)).await.is_ok() && answer.await.unwrap_or(false)
    }

    /// Puts the engine to sleep. Requests are still accepted, and wait until it wakes.
    pub(crate) async fn sleep(&self, level: u8) {
        let (reply, done) = oneshot::channel();
        if self.commands.send(Command::Sleep(reply)).await.is_ok() && done.await.is_ok() {
            self.slumber.sleep(level);
            self.metrics.record_sleep(level);
        }
    }

    /// Wakes these parts of its memory, or all, and returns whether the engine steps again.
    pub(crate) async fn wake(&self, tags: &[String]) -> bool {
        if !self.slumber.wake(tags) {
            return false;
        }
        let (reply, done) = oneshot::channel();
        self.metrics.record_sleep(0);
        self.commands.send(Command::Wake(reply)).await.is_ok() && done.await.is_ok()
    }

    fn sequences(&self, mailbox: &Arc<Mailbox>, work: GenerationRequest) -> Result<Vec<Sequence>, String> {
        let engine_seed = mix(self.args.seed, hash_text(self.args.served_name()));
        let seed_of = |choice: usize| {
            // vLLM's own rule for the seeds of several choices (`ParentRequest`).
            let seed = mix(engine_seed, work.seed.wrapping_add(choice as u64));
            let seed = work.adapter.as_deref().map_or(seed, |adapter| mix(seed, hash_text(adapter)));
            if self.slumber.has_lost_weights() { mix(seed, NONSENSE) } else { seed }
        };
        let mut sequences = Vec::with_capacity(work.prompts.len() * work.choices);
        for prompt in &work.prompts {
            for choice in 0..work.choices {
                let mut continuation = Continuation::after(seed_of(choice), &prompt.tokens);
                let structured = work.structured.as_ref().map(|form| form.tokens(&prompt.tokens, &mut continuation)).transpose()?;
                let index = sequences.len();
                let (tokens, limit) = (prompt.tokens.clone(), prompt.limit);
                let sequence = Sequence::new(mailbox.clone(), index, tokens, limit, continuation).with_answer(structured);
                sequences.push(sequence.with_hashes(self.args.block_size, work.salt.clone(), work.adapter.clone()));
            }
        }
        Ok(sequences)
    }
}

/// A running request.
///
/// Dropping it, because the answer is complete or the client is gone, ends the rest of it.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) mailbox: Arc<Mailbox>,
    /// Choices of all prompts together.
    pub(crate) choices: usize,
    _queue_slot: QueueSlot,
    _running: TaskTrackerToken,
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.mailbox.cancel();
    }
}

/// Sequences counted against the queue limit until this is dropped.
#[derive(Debug)]
struct QueueSlot {
    queued: Arc<AtomicUsize>,
    sequences: usize,
    /// Number of sequences already there.
    before: usize,
}

impl QueueSlot {
    fn take(queued: &Arc<AtomicUsize>, sequences: usize) -> Self {
        let before = queued.fetch_add(sequences, Ordering::Relaxed);
        Self { queued: queued.clone(), sequences, before }
    }
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.queued.fetch_sub(self.sequences, Ordering::Relaxed);
    }
}
