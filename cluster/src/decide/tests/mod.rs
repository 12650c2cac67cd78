//! Each rule as a sentence. `simulation` tests what all of them do together.

mod budgets;
mod failures;
mod renewal;
mod restarts;
mod sizes;

use std::time::Duration;

use hostler_scheduler::RunTime;

use super::*;
use crate::entry::FleetSize;
use crate::observation::{Demand, GoneAgent, ObservedJob};

const MINUTE: u64 = 60;
const HOUR: u64 = 3600;

/// Seconds by which a scheduler's clock may be ahead of ours.
const SKEWS: [i64; 5] = [0, -600, -35, 35, 600];

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// An entry with its jobs, as a test moves them.
struct Scene {
    entry: FleetEntry,
    memory: Memory,
    jobs: Vec<ObservedJob>,
    demand: Demand,
    gone: Vec<GoneAgent>,
    now: u64,
    /// Form of the jobs submitted now.
    form: u64,
    /// Seconds by which the scheduler's clock is ahead.
    skew: i64,
}

impl Scene {
    fn new(size: FleetSize) -> Self {
        let entry = FleetEntry {
            name: "chat".to_owned(),
            model: "org/model".to_owned(),
            size,
            walltime: Duration::from_secs(12 * HOUR),
            engine_args: Vec::new(),
            nodes_per_replica: 1,
            queue: String::new(),
            account: String::new(),
            resources: String::new(),
            budget: crate::budget::Budget::default(),
            asked: 0,
        };
        Self {
            entry,
            memory: Memory::default(),
            jobs: Vec::new(),
            demand: Demand::default(),
            gone: Vec::new(),
            now: 1_000_000,
            form: 0,
            skew: 0,
        }
    }

    fn fixed(nodes: u32) -> Self {
        Self::new(FleetSize::Fixed(nodes))
    }

    fn elastic(min: u32, max: u32) -> Self {
        Self::new(FleetSize::Elastic { min, max, idle_after: Duration::from_secs(30 * MINUTE) })
    }

    /// A fixed entry whose jobs all serve: `j1`, `j2` and so on. They waited and loaded for a
    /// minute each, and end after 12 hours.
    fn serving(nodes: u32) -> Self {
        let mut scene = Self::fixed(nodes);
        scene.bring_up(nodes);
        scene
    }

    fn bring_up(&mut self, nodes: u32) {
        assert_eq!(self.step(), submit(nodes));
        let first = self.jobs.len() + 1;
        let ids: Vec<String> = (first..first + nodes as usize).map(|number| format!("j{number}")).collect();
        ids.iter().for_each(|id| self.queue(id));
        self.pass(MINUTE);
        ids.iter().for_each(|id| self.start(id));
        self.pass(MINUTE);
        ids.iter().for_each(|id| self.job(id).node = NodeState::Ready);
        assert_eq!(self.step(), []);
    }

    fn queue(&mut self, id: &str) {
        self.jobs.push(ObservedJob {
            id: id.to_owned(),
            state: JobState::Queued,
            submitted: Some(self.server_time()),
            started: None,
            run_time: None,
            node: NodeState::NotAttached,
            in_flight: 0,
            served: 0,
            start_parts: Vec::new(),
        });
    }

    fn start(&mut self, id: &str) {
        let (started, limit) = (self.server_time(), self.entry.walltime);
        let job = self.job(id);
        job.state = JobState::Running;
        job.started = Some(started);
        job.run_time = Some(RunTime { limit, used: None });
        job.node = NodeState::Loading;
    }

    fn suspend(&mut self, id: &str) {
        let job = self.job(id);
        (job.state, job.node) = (JobState::Suspended, NodeState::NotAttached);
    }

    fn resume(&mut self, id: &str) {
        let job = self.job(id);
        (job.state, job.node) = (JobState::Running, NodeState::Ready);
    }

    /// Adds a job that waits and loads for a minute each while nobody decides anything.
    fn add_ready(&mut self, id: &str) {
        self.queue(id);
        self.start(id);
        self.job(id).node = NodeState::Ready;
    }

    fn job(&mut self, id: &str) -> &mut ObservedJob {
        self.jobs.iter_mut().find(|job| job.id == id).expect("the test has this job")
    }

    /// Makes the job's run end after this many seconds.
    fn end_in(&mut self, id: &str, seconds: u64) {
        let end = self.server_time() + Duration::from_secs(seconds);
        let job = self.job(id);
        let limit = since(end, job.started.expect("only a job that has started is to end"));
        job.run_time = Some(RunTime { limit, used: None });
    }

    /// Time by the scheduler's clock.
    fn server_time(&self) -> SystemTime {
        at(self.now.saturating_add_signed(self.skew))
    }

    fn end(&mut self, id: &str) {
        self.jobs.retain(|job| job.id != id);
    }

    fn step(&mut self) -> Vec<Action> {
        let observation = Observation { jobs: self.jobs.clone(), gone: self.gone.clone(), demand: self.demand, form: self.form };
        let (actions, memory) = decide(&self.entry, &observation, &self.memory, at(self.now));
        self.memory = memory;
        self.now += 5;
        actions
    }

    /// Steps through this many seconds, and returns all actions.
    fn pass(&mut self, seconds: u64) -> Vec<Action> {
        let until = self.now + seconds;
        let mut actions = Vec::new();
        while self.now < until {
            actions.extend(self.step());
        }
        actions
    }

    /// Steps until there is an action, and returns the seconds that took.
    fn wait(&mut self, at_most: u64) -> (u64, Vec<Action>) {
        let begin = self.now;
        while self.now < begin + at_most {
            let waited = self.now - begin;
            let actions = self.step();
            if !actions.is_empty() {
                return (waited, actions);
            }
        }
        panic!("nothing was done within {at_most} s");
    }

    /// Replaces the controller with one that has no memory.
    fn lose_memory(&mut self) {
        self.memory = Memory::lost(at(self.now));
    }
}

fn submit(parts: u32) -> [Action; 1] {
    [Action::Submit { parts }]
}

fn drain(job: &str) -> [Action; 1] {
    [Action::Drain { job: job.to_owned() }]
}

fn cancel(job: &str) -> [Action; 1] {
    [Action::Cancel { job: job.to_owned() }]
}
