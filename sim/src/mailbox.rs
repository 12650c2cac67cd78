//! Mailbox in which the stepping task leaves the tokens of one request for the request's
//! connection.
//!
//! Tokens that the connection has not taken yet are merged into one delta, as in vLLM. So a stalled
//! client costs four bytes a token and never more than its token limit, and never delays a step.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    /// The request's token limit, or the context length.
    Length,
    /// The engine shuts down.
    Abort,
    Error,
}

impl Finish {
    /// Value in `finish_reason` and in the metric label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// New tokens of one choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Delta {
    pub(crate) choice: usize,
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Option<Finish>,
}

/// The mailbox of one request, which has one or more choices.
#[derive(Debug)]
pub(crate) struct Mailbox {
    state: Mutex<MailboxState>,
    cancelled: AtomicBool,
    /// Tokens that make an event; see `--stream-interval`.
    interval: usize,
}

#[derive(Debug, Default)]
struct MailboxState {
    deltas: Vec<Delta>,
    /// Whether `deltas` should be sent now.
    is_due: bool,
    cached_tokens: usize,
    waker: Option<Waker>,
}

impl Mailbox {
    pub(crate) fn new(interval: usize) -> Self {
        Self { state: Mutex::default(), cancelled: AtomicBool::new(false), interval }
    }

    /// Leaves a token. `first` says that it is the first one of its choice.
    pub(crate) fn push(&self, choice: usize, token: u32, first: bool, finish: Option<Finish>) {
        let waker = {
            let mut state = self.state.lock();
            let delta = state.delta(choice);
            delta.tokens.push(token);
            delta.finish = finish;
            state.is_due |= first || finish.is_some() || state.delta(choice).tokens.len() >= self.interval;
            if state.is_due { state.waker.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends a choice without a token.
    pub(crate) fn end(&self, choice: usize, finish: Finish) {
        let waker = {
            let mut state = self.state.lock();
            state.delta(choice).finish = Some(finish);
            state.is_due = true;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Moves arrived deltas into `taken`, which is emptied before.
    pub(crate) fn poll_deltas(&self, context: &mut Context<'_>, taken: &mut Vec<Delta>) -> Poll<()> {
        taken.clear();
        let mut state = self.state.lock();
        if state.is_due {
            state.is_due = false;
            std::mem::swap(&mut state.deltas, taken);
            return Poll::Ready(());
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            state.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }

    /// Adds prompt tokens that were found in the cache; known before the first token.
    pub(crate) fn add_cached_tokens(&self, tokens: usize) {
        self.state.lock().cached_tokens += tokens;
    }

    /// Prompt tokens found in the cache at the first computation of all choices.
    pub(crate) fn cached_tokens(&self) -> usize {
        self.state.lock().cached_tokens
    }

    /// Marks the client as gone; the stepping task drops the sequences before its next step.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

impl MailboxState {
    fn delta(&mut self, choice: usize) -> &mut Delta {
        let found = self.deltas.iter().position(|delta| delta.choice == choice);
        let index = found.unwrap_or_else(|| {
            self.deltas.push(Delta { choice, tokens: Vec::new(), finish: None });
            self.deltas.len() - 1
        });
        &mut self.deltas[index]
    }
}
