//! A run: requests arrive, a policy sends them to replicas, replicas compute. Driven by events in the order of simulated time, so it waits
//! for nothing and is the same each time.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use crate::engine::{Engine, Given, Load};
use crate::fleet::{Fleet, Report, Seen};
use crate::policy::Policy;
use crate::workload::{Start, Workload};

/// What became of a request. Times are seconds since the run began.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Record {
    pub(crate) arrived: f64,
    pub(crate) first: f64,
    pub(crate) last: f64,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    /// Tokens of the prompt that were cached.
    pub(crate) cached: u32,
    pub(crate) replica: usize,
}

/// What became of all of them.
#[derive(Debug)]
pub(crate) struct Run {
    /// In the order of the workload.
    pub(crate) records: Vec<Record>,
    /// Seconds that each replica computed.
    pub(crate) busy: Vec<f64>,
    pub(crate) preemptions: u64,
}

#[derive(Debug)]
enum Event {
    Arrives(usize),
    StepEnds(usize),
    Reported(usize, Report),
}

/// An event at its time; of those at the same time, the one that was made first comes first.
#[derive(Debug)]
struct At {
    time: f64,
    made: u64,
    event: Event,
}

impl Ord for At {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap's greatest is the earliest.
        other.time.total_cmp(&self.time).then_with(|| other.made.cmp(&self.made))
    }
}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for At {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for At {}

/// A run under way.
struct World<'a> {
    fleet: &'a Fleet,
    workload: &'a Workload,
    policy: Box<dyn Policy>,
    engines: Vec<Engine>,
    stepping: Vec<bool>,
    seen: Seen,
    events: BinaryHeap<At>,
    made: u64,
    /// Who comes after whose answer, and how long after.
    followers: FxHashMap<usize, Vec<(usize, f64)>>,
    run: Run,
}

/// Runs a workload to its end. `done` is called with each request that ends.
pub(crate) fn run(fleet: &Fleet, workload: &Workload, policy: Box<dyn Policy>, done: &dyn Fn()) -> Run {
    let replicas = usize::from(fleet.replicas);
    let requests = workload.arrivals.iter().map(|arrival| &arrival.request);
    let records = requests.map(|request| Record { prompt: request.prompt, output: request.output, ..Record::default() }).collect();
    let mut world = World {
        fleet,
        workload,
        policy,
        engines: (0..replicas).map(|_| Engine::new(fleet.hardware)).collect(),
        stepping: vec![false; replicas],
        seen: Seen { in_flight: vec![0; replicas], loads: vec![Load::default(); replicas] },
        events: BinaryHeap::new(),
        made: 0,
        followers: FxHashMap::default(),
        run: Run { records, busy: vec![0.0; replicas], preemptions: 0 },
    };
    for (id, arrival) in workload.arrivals.iter().enumerate() {
        match arrival.start {
            Start::At(time) => world.at(time, Event::Arrives(id)),
            Start::After(before, pause) => world.followers.entry(before).or_default().push((id, pause)),
        }
    }
    while let Some(At { time, event, .. }) = world.events.pop() {
        match event {
            Event::Arrives(id) => world.arrives(id, time),
            Event::StepEnds(replica) => world.step_ends(replica, time, done),
            Event::Reported(replica, report) => {
                world.seen.loads[replica] = report.load;
                world.policy.reported(replica, &report);
            }
        }
        while let Some((id, replica)) = world.policy.release(&world.seen, time) {
            world.send(id, replica, time);
        }
    }
    world.run.preemptions = world.engines.iter().map(Engine::preemptions).sum();
    world.run
}

impl World<'_> {
    fn at(&mut self, time: f64, event: Event) {
        self.made += 1;
        self.events.push(At { time, made: self.made, event });
    }

    fn arrives(&mut self, id: usize, now: f64) {
        self.run.records[id].arrived = now;
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
            self.step_begins(replica, now);
        }
    }

    fn step_begins(&mut self, replica: usize, now: f64) {
        self.stepping[replica] = true;
        let seconds = self.engines[replica].begin();
        self.run.busy[replica] += seconds;
        self.report(replica, now);
        self.at(now + seconds, Event::StepEnds(replica));
    }

    fn step_ends(&mut self, replica: usize, now: f64, done: &dyn Fn()) {
        for given in self.engines[replica].end() {
            match given {
                Given::First { id, cached } => {
                    (self.run.records[id].first, self.run.records[id].cached) = (now, cached);
                    self.policy.first(id, &self.seen, now);
                }
                Given::Last { id } => {
                    self.run.records[id].last = now;
                    self.seen.in_flight[replica] -= 1;
                    self.policy.last(id, &self.seen, now);
                    for (follower, pause) in self.followers.remove(&id).unwrap_or_default() {
                        self.at(now + pause, Event::Arrives(follower));
                    }
                    done();
                }
            }
        }
        if self.engines[replica].idle() {
            self.stepping[replica] = false;
            self.report(replica, now);
        } else {
            self.step_begins(replica, now);
        }
    }

    fn report(&mut self, replica: usize, now: f64) {
        let report = Report { load: self.engines[replica].load(), changes: self.engines[replica].changes() };
        self.at(now + self.fleet.delay, Event::Reported(replica, report));
    }
}

#[cfg(test)]
mod tests;
