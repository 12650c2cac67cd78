//! What each signal that asks a process to leave means, as a pure state machine. `Shutdown` feeds it.
//!
//! | Who sends signals | first | then |
//! | --- | --- | --- |
//! | operators: people, service managers | any drains | SIGUSR1 never counts; of the others the second stops |
//! | a scheduler | SIGUSR1, SIGINT and SIGHUP drain; SIGTERM drains within the scheduler's grace | SIGTERM shortens a drain to that grace, once; only a second SIGINT stops |
//! | an agent, to its engine | any but SIGUSR1 drains | the second stops |
//!
//! Schedulers send SIGTERM after SIGUSR1, and PBS may send it more than once. Neither is a sign of
//! impatience: the scheduler's own last word is SIGKILL. SIGINT comes from a person at a terminal,
//! in an interactive job too. An engine that gets SIGUSR1 dies of it, as vLLM does.

/// A signal that asks the process to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaveSignal {
    Interrupt,
    Terminate,
    HangUp,
    User1,
}

/// Who sends this process its signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalSource {
    /// People and service managers: a second signal means that they wait no longer.
    Operators,
    /// A batch scheduler, which sends several signals and kills when its grace is over.
    Scheduler,
    /// The agent of an engine.
    Agent,
}

/// What a signal does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignalEffect {
    Drain,
    /// Drain, and be gone when the sender's grace is over.
    Hurry,
    Stop,
    Ignore,
}

/// Which signals have come.
#[derive(Debug, Clone)]
pub(super) struct SignalHistory {
    source: SignalSource,
    is_draining: bool,
    is_hurried: bool,
    /// A signal came after which the next of its kind stops.
    is_impatient: bool,
}

impl SignalHistory {
    pub(super) fn new(source: SignalSource) -> Self {
        Self { source, is_draining: false, is_hurried: false, is_impatient: false }
    }

    /// What this signal does after those before it.
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
