//! A run: requests arrive, a policy sends them to replicas, replicas compute.
//!
//! Events drive it in the order of simulated time, so it waits for nothing and gives equal results
//! each time.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use crate::engine::{EngineLoad, FoundTokens, SimulatedEngine, StepOutput};
use crate::fleet::{FleetState, ReplicaReport, SimulatedFleet};
use crate::policy::Policy;
use crate::workload::{ArrivalTime, Workload};

/// Most times that a request is placed, as in the router.
const MAX_ATTEMPTS: u8 = 3;

/// Outcome of a request. Times are seconds since the run began.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct RequestRecord {
    pub(crate) arrived: f64,
    pub(crate) first: f64,
    pub(crate) last: f64,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    pub(crate) found: FoundTokens,
    pub(crate) replica: usize,
    /// The replica ended before the answer did.
    pub(crate) cut: bool,
}

/// Outcomes of all requests.
#[derive(Debug)]
pub(crate) struct RunResult {
    /// Records in the order of the workload.
    pub(crate) records: Vec<RequestRecord>,
    /// Seconds that each replica computed.
    pub(crate) busy: Vec<f64>,
    pub(crate) preemptions: u64,
}

#[derive(Debug)]
enum SimEvent {
    Arrives(usize),
    /// A step ends on this replica, in this life of its engine.
    StepEnds(usize, u32),
    /// A prompt of this life of a replica's engine has been loaded from the host's memory.
    Loaded(usize, u32),
    Reported(usize, ReplicaReport),
    JobEnds(usize),
}

/// An event at its time. Among events at the same time, the one created first comes first.
#[derive(Debug)]
struct TimedEvent {
    time: f64,
    sequence: u64,
    event: SimEvent,
}

impl Ord for TimedEvent {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap's greatest is the earliest.
        other.time.total_cmp(&self.time).then_with(|| other.sequence.cmp(&self.sequence))
    }
}

impl PartialOrd for TimedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for TimedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for TimedEvent {}

/// A run under way.
struct Simulation<'a> {
    fleet: &'a SimulatedFleet,
    workload: &'a Workload,
    policy: Box<dyn Policy>,
    engines: Vec<SimulatedEngine>,
    stepping: Vec<bool>,
    /// Number of engines that each replica has had before.
    lives: Vec<u32>,
    /// How often each request was placed.
    attempts: Vec<u8>,
    /// Requests that have not ended.
    open: usize,
    seen: FleetState,
    events: BinaryHeap<TimedEvent>,
    next_sequence: u64,
    /// Requests that follow each request's answer, and how long after.
    followers: FxHashMap<usize, Vec<(usize, f64)>>,
    run: RunResult,
}

/// Runs a workload to its end. `done` is called with each request that ends.
pub(crate) fn run(fleet: &SimulatedFleet, workload: &Workload, policy: Box<dyn Policy>, done: &dyn Fn()) -> RunResult {
    let replicas = usize::from(fleet.replicas);
    let requests = workload.arrivals.iter().map(|arrival| &arrival.request);
    let records =
        requests.map(|request| RequestRecord { prompt: request.prompt, output: request.output, ..RequestRecord::default() }).collect();
    let mut world = Simulation {
        fleet,
        workload,
        policy,
        engines: (0..replicas).map(|_| SimulatedEngine::new(fleet.hardware)).collect(),
        stepping: vec![false; replicas],
        lives: vec![0; replicas],
        attempts: vec![0; workload.arrivals.len()],
        open: workload.arrivals.len(),
        seen: FleetState {
            in_flight: vec![0; replicas],
            loads: vec![EngineLoad::default(); replicas],
            job_ends: vec![f64::INFINITY; replicas],
        },
        events: BinaryHeap::new(),
        next_sequence: 0,
        followers: FxHashMap::default(),
        run: RunResult { records, busy: vec![0.0; replicas], preemptions: 0 },
    };
    for (id, arrival) in workload.arrivals.iter().enumerate() {
        match arrival.start {
            ArrivalTime::At(time) => world.schedule(time, SimEvent::Arrives(id)),
            ArrivalTime::After(before, pause) => world.followers.entry(before).or_default().push((id, pause)),
        }
    }
    for replica in 0..replicas {
        if let Some(end) = fleet.first_job_end(replica) {
            world.begin_job(replica, end);
        }
    }
    while let Some(TimedEvent { time, event, .. }) = world.events.pop() {
        match event {
            SimEvent::Arrives(id) => world.on_arrival(id, time),
            SimEvent::StepEnds(replica, life) if world.lives[replica] == life => world.end_step(replica, time, done),
            SimEvent::Loaded(replica, life) if world.lives[replica] == life => {
                if !world.stepping[replica] {
                    world.begin_step(replica, time);
                }
            }
            // The step or the transfer ended with the job of its engine.
            SimEvent::StepEnds(..) | SimEvent::Loaded(..) => {}
            SimEvent::JobEnds(replica) => world.end_job(replica, time, done),
            SimEvent::Reported(replica, report) => {
                world.seen.loads[replica] = report.load;
                world.policy.on_report(replica, &report);
            }
        }
        while let Some((id, replica)) = world.policy.release(&world.seen, time) {
            world.send(id, replica, time);
        }
    }
    world.run.preemptions = world.engines.iter().map(SimulatedEngine::preemptions).sum();
    world.run
}

impl Simulation<'_> {
    fn schedule(&mut self, time: f64, event: SimEvent) {
        self.next_sequence += 1;
        self.events.push(TimedEvent { time, sequence: self.next_sequence, event });
    }

    fn on_arrival(&mut self, id: usize, now: f64) {
        self.run.records[id].arrived = now;
        self.place(id, now);
    }

    fn place(&mut self, id: usize, now: f64) {
        self.attempts[id] += 1;
        let request = &self.workload.arrivals[id].request;
        if let Some(replica) = self.policy.place(id, request, &self.seen, now) {
            self.send(id, replica, now);
        }
    }

    fn send(&mut self, id: usize, replica: usize, now: f64) {
        self.run.records[id].replica = replica;
        self.seen.in_flight[replica] += 1;
        self.engines[replica].add(id, self.workload.arrivals[id].request.clone());
        if !self.stepping[replica] {
            self.begin_step(replica, now);
        }
    }

    /// Begins a step, or waits for what is being loaded if there is nothing to compute before.
    fn begin_step(&mut self, replica: usize, now: f64) {
        let (engine, life) = (&mut self.engines[replica], self.lives[replica]);
        let step = engine.begin_step(now).map(|seconds| seconds * self.fleet.noise_factor(replica, now));
        let next_loaded = if step.is_none() { engine.next_loaded(now) } else { None };
        self.report(replica, now);
        self.stepping[replica] = step.is_some();
        if let Some(seconds) = step {
            self.run.busy[replica] += seconds;
            self.schedule(now + seconds, SimEvent::StepEnds(replica, life));
        }
        if let Some(time) = next_loaded {
            self.schedule(time, SimEvent::Loaded(replica, life));
        }
    }

    fn end_step(&mut self, replica: usize, now: f64, done: &dyn Fn()) {
        for given in self.engines[replica].end_step() {
            match given {
                StepOutput::FirstToken { id, found } => {
                    (self.run.records[id].first, self.run.records[id].found) = (now, found);
                    self.policy.on_first_token(id, &self.seen, now);
                }
                StepOutput::LastToken { id } => {
                    self.seen.in_flight[replica] -= 1;
                    self.policy.on_last_token(id, &self.seen, now);
                    self.end_request(id, now, done);
                }
            }
        }
        self.begin_step(replica, now);
    }

    fn end_request(&mut self, id: usize, now: f64, done: &dyn Fn()) {
        self.run.records[id].last = now;
        for (follower, pause) in self.followers.remove(&id).unwrap_or_default() {
            self.schedule(now + pause, SimEvent::Arrives(follower));
        }
        self.open -= 1;
        done();
    }

    fn begin_job(&mut self, replica: usize, end: f64) {
        self.schedule(end, SimEvent::JobEnds(replica));
        if !self.fleet.hide_job_ends {
            self.seen.job_ends[replica] = end;
        }
    }

    /// Ends a job: begun answers are cut, unanswered requests are placed again, and another job's
    /// engine takes over.
    fn end_job(&mut self, replica: usize, now: f64, done: &dyn Fn()) {
        if self.open == 0 {
            return;
        }
        self.lives[replica] += 1;
        self.stepping[replica] = false;
        self.seen.in_flight[replica] = 0;
        self.begin_job(replica, now + self.fleet.job);
        let lost = self.engines[replica].restart();
        self.report(replica, now);
        for (id, had_tokens) in &lost {
            self.policy.on_cut(*id, *had_tokens, &self.seen, now);
        }
        for (id, had_tokens) in lost {
            if !had_tokens && self.attempts[id] < MAX_ATTEMPTS {
                self.place(id, now);
                continue;
            }
            let record = &mut self.run.records[id];
            record.cut = true;
            if !had_tokens {
                record.first = now;
            }
            self.end_request(id, now, done);
        }
    }

    fn report(&mut self, replica: usize, now: f64) {
        let engine = &mut self.engines[replica];
        let report =
            ReplicaReport { load: engine.load(now), changes: engine.take_cache_changes(), copy_changes: engine.take_copy_changes() };
        self.schedule(now + self.fleet.delay, SimEvent::Reported(replica, report));
    }
}

#[cfg(test)]
mod tests;
