//! Meaning of each signal that asks a process to leave, as a pure state machine. `Shutdown` feeds
//! it.
//!
//! - Operators, which are people and service managers: any signal drains. Later SIGUSR1 never
//!   counts; of the others, the second stops.
//! - A scheduler: SIGUSR1, SIGINT and SIGHUP drain; SIGTERM drains within the scheduler's grace.
//!   Later SIGTERM shortens a drain to that grace, once; only a second SIGINT stops.
//! - An agent, to its engine: any signal but SIGUSR1 drains, and the second stops.
//!
//! Schedulers send SIGTERM after SIGUSR1, and PBS may send it more than once. Neither is a sign of
//! impatience: the scheduler's own last word is SIGKILL. SIGINT comes from a person at a terminal,
//! even in an interactive job. SIGUSR1 kills an engine, as it kills vLLM.

/// A signal that asks the process to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaveSignal {
    Interrupt,
    Terminate,
    HangUp,
    User1,
}

/// Sender of this process's signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalSource {
    /// People and service managers: a second signal means that they no longer wait.
    Operators,
    /// A batch scheduler, which sends several signals and kills when its grace is over.
    Scheduler,
    /// The agent of an engine.
    Agent,
}

/// Effect of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignalEffect {
    Drain,
    /// Drain, and end before the sender's grace is over.
    Hurry,
    Stop,
    Ignore,
}

/// History of the signals received.
#[derive(Debug, Clone)]
pub(super) struct SignalHistory {
    source: SignalSource,
    is_draining: bool,
    is_hurried: bool,
    /// Whether a signal came after which the next of its kind stops.
    is_impatient: bool,
}

impl SignalHistory {
    pub(super) fn new(source: SignalSource) -> Self {
        Self { source, is_draining: false, is_hurried: false, is_impatient: false }
    }

    /// Records a signal, and returns its effect after those before it.
    pub(super) fn record(&mut self, signal: LeaveSignal) -> SignalEffect {
        let can_stop = match self.source {
            SignalSource::Scheduler => signal == LeaveSignal::Interrupt,
            SignalSource::Operators | SignalSource::Agent => signal != LeaveSignal::User1,
        };
        if can_stop && std::mem::replace(&mut self.is_impatient, true) {
            return SignalEffect::Stop;
        }
        let is_first = !std::mem::replace(&mut self.is_draining, true);
        let hurries = self.source == SignalSource::Scheduler && signal == LeaveSignal::Terminate;
        if hurries && !std::mem::replace(&mut self.is_hurried, true) {
            return SignalEffect::Hurry;
        }
        if is_first { SignalEffect::Drain } else { SignalEffect::Ignore }
    }
}

#[cfg(test)]
mod tests;
