//! The stepping task: it plans a step, lets the step's time pass, and delivers one token to every
//! sequence that ran, all at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Command;
use crate::args::EngineArgs;
use crate::faults::Faults;
use crate::kv_events::Publisher;
use crate::mailbox::Finish;
use crate::metrics::Metrics;
use crate::nodes::FarWorkers;
use crate::scheduler::{Limits, Scheduler, Step};

/// State of the task; `run` is the task.
#[derive(Debug)]
pub(crate) struct Stepping {
    pub(super) scheduler: Scheduler,
    pub(super) limits: Limits,
    pub(super) args: Arc<EngineArgs>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) faults: Arc<Faults>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) publisher: Option<Publisher>,
    /// The engine accepts requests but does not step.
    pub(super) asleep: bool,
    pub(crate) far_workers: FarWorkers,
}

impl Stepping {
    /// Sets the publisher of KV events. Call this before `run`, while no sequence exists.
    pub(crate) fn publish_to(&mut self, publisher: Publisher) {
        self.publisher = Some(publisher);
        self.limits.kv_events = true;
        self.scheduler = Scheduler::new(self.limits);
    }

    /// Steps until the engine that created the task is dropped.
    pub(crate) async fn run(mut self) {
        while self.take_commands().await {
            if self.asleep {
                continue;
            }
            self.faults.wait_not_hung().await;
            let step = self.scheduler.plan();
            if step == Step::default() {
                // All sequences ended while they waited.
                self.metrics.record(&mut self.scheduler, None);
                if self.scheduler.is_idle() {
                    continue;
                }
            }
            if !self.wait_step(self.step_time(step)).await {
                return;
            }
            self.faults.wait_not_hung().await;
            self.far_workers.step().await;
            self.scheduler.commit();
            self.metrics.record(&mut self.scheduler, Some(step));
            self.publish();
        }
    }

    /// Applies the commands that have arrived, waiting for the first one when idle.
    ///
    /// `false` if there will be no more.
    async fn take_commands(&mut self) -> bool {
        if self.scheduler.is_idle() || self.asleep {
            match self.commands.recv().await {
                Some(command) => self.apply(command),
                None => return false,
            }
        }
        while let Ok(command) = self.commands.try_recv() {
            self.apply(command);
        }
        true
    }

    /// Waits for the end of a step while commands keep arriving.
    async fn wait_step(&mut self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(end) => return true,
                command = self.commands.recv() => match command {
                    Some(command) => self.apply(command),
                    None => return false,
                },
            }
        }
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Run(sequences) => {
                for sequence in sequences {
                    self.scheduler.add(sequence);
                }
            }
            Command::EndAll(finish) => {
                self.scheduler.end_all(finish);
                self.metrics.record(&mut self.scheduler, None);
            }
            Command::ResetCache(reply) => {
                // The requester may have gone.
                let _ = reply.send(self.scheduler.reset_cache());
            }
            Command::Sleep(done) => {
                self.scheduler.end_all(Finish::Abort);
                self.scheduler.reset_cache();
                self.metrics.record(&mut self.scheduler, None);
                self.asleep = true;
                let _ = done.send(());
            }
            Command::Wake(done) => {
                self.asleep = false;
                let _ = done.send(());
            }
        }
    }

    fn step_time(&self, step: Step) -> Duration {
        let time = self.args.step_time(step);
        let slowed = time.as_secs_f64() * self.faults.slowness().max(0.0);
        // A huge factor must not overflow the clock.
        Duration::try_from_secs_f64(slowed).unwrap_or(time).min(Duration::from_secs(3600))
    }

    fn publish(&mut self) {
        if let Some(publisher) = &self.publisher {
            let events = self.scheduler.take_events();
            if !events.is_empty() {
                publisher.publish(events);
            }
        }
    }
}
