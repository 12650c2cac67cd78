//! What a driver tells of its engine: the sentence for each state, and the status that everybody reads.

use std::sync::Arc;

use tokio::time::Instant;

use super::Driver;
use crate::engine::Status;
use crate::engine::diagnosis::Kind;
use crate::engine::life::Life;
use crate::engine::state::{Event, Stage, State, Then};

/// Lines of the engine's log that are shown with a failure.
const SHOWN_LINES: usize = 10;

/// Said with each quarantine.
const RELEASE: &str = "`hostler release` brings it back";

impl Driver {
    /// Tells how far a start has come, or what it waits for.
    pub(super) fn comment(&mut self) -> Option<Event> {
        let warm = self.life.as_ref().is_some_and(|life| life.story.borrow().facts.compiled);
        if let Some(turn) = self.turn.as_ref().filter(|_| warm) {
            turn.warmed();
        }
        let reason = (self.machine.state() == State::Waiting).then(|| self.reason());
        self.publish(reason);
        None
    }

    pub(super) fn quarantined(&self) -> String {
        let why = if self.order.is_empty() { "the engine is out of service" } else { &self.order };
        format!("{why}; {RELEASE}")
    }

    /// The sentence for the state just entered.
    pub(super) fn reason(&self) -> String {
        match self.machine.state() {
            State::Waiting => {
                let turn = self.parts.spec.turns.waits_for(self.parts.spec.index);
                turn.unwrap_or_else(|| "about to start".to_owned())
            }
            State::Quarantined | State::Killing { then: Then::Quarantine } => self.quarantined(),
            State::Stopped if self.machine.is_quarantined() => format!("the engine was asked to stop; {}", self.quarantined()),
            State::Alive(Stage::Sleeping) if self.order.is_empty() => "the engine sleeps until it is woken".to_owned(),
            State::Alive(Stage::Sleeping) => self.order.clone(),
            State::Alive(Stage::Starting) => "the engine's process has started".to_owned(),
            State::Alive(Stage::Loading) => "the engine loads its model".to_owned(),
            State::Alive(Stage::Ready) => "the engine serves".to_owned(),
            State::Draining { then: Then::Quarantine, .. } | State::Stopping { then: Then::Quarantine, .. } => {
                format!("the engine leaves service: {}", self.quarantined())
            }
            State::Draining { then, .. } => {
                format!("requests may finish; then the engine {}", then.in_words())
            }
            State::Stopping { then, .. } => {
                format!("the engine was told to stop; then it {}", then.in_words())
            }
            State::Killing { .. } if self.crashed => self.cause.clone(),
            State::Killing { .. } => "the engine's processes are being ended".to_owned(),
            State::Stopped => "the engine was asked to stop".to_owned(),
            State::BackingOff { until } => self.in_full(until),
        }
    }

    /// What happened, what to do, when it goes on, and what the engine said last.
    pub(super) fn in_full(&self, until: Instant) -> String {
        let pause = until.saturating_duration_since(Instant::now()).as_secs_f32().ceil();
        let mut text = match &self.failure {
            // A conclusion from silence: what was seen comes first.
            Some(failure) if failure.kind == Kind::CoreDied => format!("{}: {}", self.cause, failure.cause),
            Some(failure) => failure.cause.clone(),
            None => self.cause.clone(),
        };
        if let Some(remedy) = self.failure.as_ref().map(|failure| &failure.remedy).filter(|remedy| !remedy.is_empty()) {
            text.push_str("; ");
            text.push_str(remedy);
        }
        text.push_str(&format!("; next start in {pause} s"));
        let shown = self.parts.log.last_of_life(SHOWN_LINES);
        if !shown.is_empty() {
            text.push_str("; its last lines:\n");
            text.push_str(&shown.join("\n"));
        }
        tracing::error!(engine = self.parts.spec.index, log = %self.parts.spec.log.display(), "{text}");
        text
    }

    pub(super) fn publish(&self, reason: Option<String>) {
        let life = self.life.as_ref();
        let starts = matches!(self.machine.state(), State::Alive(Stage::Starting | Stage::Loading));
        let story = life.map(|life| life.story.borrow().clone()).unwrap_or_default();
        let elapsed = |life: &Life| life.reader.lock().progress(life.spawned.elapsed());
        // Once the log has begun to tell, the clock goes on between two lines.
        let progress = story.progress.and(life.map(elapsed)).filter(|_| starts);
        self.status.send_if_modified(|status| {
            let next = Status {
                phase: self.machine.state().into(),
                epoch: self.last_epoch,
                reason: reason.unwrap_or_else(|| status.reason.clone()),
                pid: life.and_then(|life| life.leader),
                restarts: self.lives.saturating_sub(1),
                version: self.parts.spec.version,
                models: life.map(|life| Arc::clone(&life.models)).unwrap_or_default(),
                ready_in: life.and_then(|life| life.ready_in),
                progress,
                failure: self.failure.clone(),
                facts: story.facts,
                front_end: self.line().front_end(),
            };
            let changed = *status != next;
            *status = next;
            changed
        });
    }
}
