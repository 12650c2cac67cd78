//! Simulates a thousand hours of controllers on a cluster, drawn from seeds.
//!
//! The draws cover queue waits, cold starts, deaths, suspensions, resizes, clients, and controllers
//! that die at any point of a step and restart with or without their memory. Each step is checked
//! against the controller's promises.

mod scheduler;
mod watch;

use std::ops::Range;
use std::time::{Duration, SystemTime};

use fastrand::Rng;

use crate::{Action, Demand, FleetEntry, FleetSize, Memory, Observation, decide};
use scheduler::SimulatedScheduler;
use watch::Watch;

const HOUR: u64 = 3600;

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// How the scheduler tells time.
#[derive(Debug, Clone, Copy, Default)]
struct Clock {
    /// Seconds by which the scheduler's clock is ahead of the controller's.
    skew: i64,
    /// Whether the scheduler reports how much of its limit a job has used, as PBS does.
    tells_use: bool,
}

impl Clock {
    fn show(self, moment: u64) -> SystemTime {
        at(moment.saturating_add_signed(self.skew))
    }
}

/// Distributions from which a run is drawn. Times are in seconds.
#[derive(Debug, Clone)]
struct Climate {
    queue_wait: Range<u64>,
    /// Queue wait from 20 to 8 o'clock; empty if nights are like days.
    queue_wait_at_night: Range<u64>,
    cold_start: Range<u64>,
    walltime: u64,
    /// Probability that a job dies at some moment before its end.
    death: f64,
    /// Probability that a controller dies in a step.
    controller_death: f64,
    /// Probability, per step, that the router knows no node for a minute.
    router_restart: f64,
    /// Probability, per step, that the entry gets another size.
    resize: f64,
    /// Probability that a job is suspended, once or several times in its life.
    suspension: f64,
    /// Part of each day in which no job lives to become ready.
    broken: Range<u64>,
    clock: Clock,
}

impl Climate {
    /// A climate in which jobs only wait, load, serve and reach their end.
    fn steady(queue_wait: u64, cold_start: u64, walltime: u64) -> Self {
        Self {
            queue_wait: queue_wait..queue_wait + 1,
            queue_wait_at_night: 0..0,
            cold_start: cold_start..cold_start + 1,
            walltime,
            death: 0.0,
            controller_death: 0.0,
            router_restart: 0.0,
            resize: 0.0,
            suspension: 0.0,
            broken: 0..0,
            clock: Clock::default(),
        }
    }

    fn draw(rng: &mut Rng) -> Self {
        let longest_wait = [60, 900, 2 * HOUR, 4 * HOUR][rng.usize(..4)];
        let longest_start = [90, 600, 1800][rng.usize(..3)];
        let broken_from = rng.u64(..20 * HOUR);
        Self {
            queue_wait: longest_wait / 10..longest_wait,
            queue_wait_at_night: 0..0,
            cold_start: longest_start / 3..longest_start,
            walltime: [HOUR, 2 * HOUR, 6 * HOUR, 12 * HOUR][rng.usize(..4)],
            death: rng.f64() * 0.3,
            controller_death: 0.002,
            router_restart: 0.001,
            resize: 0.0005,
            suspension: [0.0, 0.2, 0.6][rng.usize(..3)],
            broken: if rng.bool() { broken_from..broken_from + 3 * HOUR } else { 0..0 },
            // Slurm's clocks differ by five minutes at most.
            clock: if rng.bool() {
                Clock { skew: [0, -600, 600][rng.usize(..3)], tells_use: true }
            } else {
                Clock { skew: [0, -300, 300][rng.usize(..3)], tells_use: false }
            },
        }
    }

    /// Draws the queue wait of a job submitted now.
    fn draw_queue_wait(&self, rng: &mut Rng, now: u64) -> u64 {
        let is_night = !(8 * HOUR..20 * HOUR).contains(&(now % (24 * HOUR)));
        let wait = if is_night && !self.queue_wait_at_night.is_empty() { &self.queue_wait_at_night } else { &self.queue_wait };
        rng.u64(wait.clone())
    }

    fn is_broken(&self, now: u64) -> bool {
        self.broken.contains(&(now % (24 * HOUR)))
    }
}

/// An entry, its controller and the world around them.
struct Run {
    rng: Rng,
    climate: Climate,
    entry: FleetEntry,
    memory: Memory,
    controller_starts: u64,
    scheduler: SimulatedScheduler,
    /// Client load as a number of busy nodes, and the second at which it changes.
    load: (f64, u64),
    last_request: Option<u64>,
    routers_back: u64,
    watch: Watch,
    now: u64,
}

impl Run {
    fn new(seed: u64, climate: Climate, size: FleetSize) -> Self {
        let walltime = Duration::from_secs(climate.walltime);
        Self {
            rng: Rng::with_seed(seed),
            entry: FleetEntry {
                name: "chat".to_owned(),
                model: "org/model".to_owned(),
                size,
                walltime,
                engine_args: Vec::new(),
                nodes_per_replica: 1,
                queue: String::new(),
                account: String::new(),
                resources: String::new(),
                budget: crate::budget::Budget::default(),
                asked: 0,
            },
            memory: Memory::default(),
            controller_starts: 0,
            scheduler: SimulatedScheduler::new(climate.clock),
            load: (0.0, 0),
            last_request: None,
            routers_back: 0,
            watch: Watch::new(seed, &climate, size),
            now: 1_000 * HOUR,
            climate,
        }
    }

    fn run(&mut self, hours: u64) {
        let end = self.now + hours * HOUR;
        while self.now < end {
            self.step();
        }
    }

    /// Scales the entry to nothing, and requires its jobs to be gone within an hour. An absent
    /// agent takes up half of that.
    fn finish(mut self) -> Watch {
        self.entry.size = FleetSize::Fixed(0);
        (self.climate.controller_death, self.climate.resize) = (0.0, 0.0);
        self.run(1);
        assert!(self.scheduler.jobs.is_empty(), "{}: jobs are left an hour after the end: {:?}", self.watch, self.scheduler.jobs);
        self.watch.figures.counted = self.memory.node_time().total();
        self.watch
    }

    fn step(&mut self) {
        let length = self.rng.u64(5..15);
        self.now += length;
        self.change_world();
        let ends = self.scheduler.advance(self.now);
        self.watch.note_ends(&ends, self.now);
        if ends.suspensions > 0 {
            // The time for which an agent has been away is counted anew.
            self.watch.note_absence(&self.scheduler, self.now);
        }
        if self.now >= self.controller_starts {
            self.control();
        } else {
            self.watch.note_absence(&self.scheduler, self.now);
        }
        self.watch.measure(&self.scheduler, self.now, length);
    }

    fn change_world(&mut self) {
        if self.chance(self.climate.router_restart) {
            self.routers_back = self.now + 60;
        }
        if self.chance(self.climate.resize)
            && let FleetSize::Fixed(_) = self.entry.size
        {
            self.entry.size = FleetSize::Fixed(self.rng.u32(0..=self.watch.largest));
        }
        if self.now >= self.load.1 {
            let nodes = [0.0, 0.0, 0.5, 2.5][self.rng.usize(..4)];
            self.load = (nodes, self.now + self.rng.u64(600..6 * HOUR));
        }
        if self.load.0 > 0.0 {
            self.last_request = Some(self.now);
            self.watch.note_request(self.now);
        }
        self.scheduler.set_load(self.load.0);
    }

    /// Runs one step of a controller that may die before it writes its memory, or after any action.
    fn control(&mut self) {
        let knows_nodes = self.now >= self.routers_back;
        let observation = Observation { jobs: self.scheduler.list(self.now, knows_nodes), demand: self.demand(), ..Observation::default() };
        let (actions, memory) = decide(&self.entry, &observation, &self.memory, at(self.now));
        // Deaths between actions matter most, and few steps have actions.
        let acts = !actions.is_empty() && self.climate.controller_death > 0.0;
        let dies = self.chance(if acts { 0.2 } else { self.climate.controller_death });
        let is_written = !dies || self.rng.bool();
        let carried_out = match (dies, is_written) {
            (false, _) => actions.len(),
            (true, true) => self.rng.usize(..=actions.len()),
            (true, false) => 0,
        };
        if is_written {
            self.memory = memory;
            if self.memory.has_given_up() {
                self.watch.note_end_of_tries(self.now);
                // Somebody notices, and asks for the entry again.
                if self.rng.f64() < 0.005 {
                    self.entry.asked += 1;
                }
            }
            self.watch.note_size(self.memory.size.expect("a step decides the size"), self.now);
        }
        for action in &actions[..carried_out] {
            self.carry_out(action);
        }
        if dies {
            self.watch.note_controller_death(self.now);
            let longest = [30, 600][self.rng.usize(..2)];
            self.controller_starts = self.now + self.rng.u64(5..longest);
            if self.rng.bool() {
                self.memory = Memory::lost(at(self.controller_starts));
            }
        } else {
            self.watch.check(&self.scheduler, self.memory.is_recovering(), self.now);
        }
    }

    fn carry_out(&mut self, action: &Action) {
        match action {
            Action::Submit { .. } if self.chance(self.climate.death / 20.0) => {
                self.memory.record_refusal(at(self.now));
                self.watch.excuse(self.now);
            }
            Action::Submit { parts } => {
                self.watch.note_submission(*parts, self.now);
                for _ in 0..*parts {
                    self.scheduler.submit(&mut self.rng, &self.climate, self.now);
                }
            }
            Action::Drain { job } => self.scheduler.drain(&mut self.rng, job, self.now),
            Action::Cancel { job } => self.scheduler.cancel(job, self.now),
        }
    }

    fn demand(&self) -> Demand {
        let nodes = self.load.0.ceil();
        let ready = self.scheduler.ready(self.now);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a load is a few nodes")]
        let busy = (nodes as u32).min(ready);
        Demand {
            waiting: u32::from(self.load.0 > f64::from(ready)),
            in_flight: busy,
            last_request: self.last_request.map(|request| Duration::from_secs(self.now - request)),
        }
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.rng.f64() < probability
    }
}

fn fixed(seed: u64, climate: Climate, nodes: u32) -> Run {
    Run::new(seed, climate, FleetSize::Fixed(nodes))
}

#[test]
fn a_thousand_simulated_hours_keep_every_promise() {
    let mut total = watch::Figures::default();
    for seed in 0..20 {
        let mut rng = Rng::with_seed(seed);
        let climate = Climate::draw(&mut rng);
        let idle_after = Duration::from_secs([300, 1800][rng.usize(..2)]);
        let size = if rng.bool() { FleetSize::Fixed(4) } else { FleetSize::Elastic { min: rng.u32(..2), max: 4, idle_after } };
        let mut run = Run::new(seed, climate, size);
        run.run(49);
        let watch = run.finish();
        total += watch.figures;
    }
    println!("everything, 1000 hours: {total}");
    assert!(total.hours() >= 999.0);
    assert!(total.returns_from_zero > 20, "the simulation has lost its quiet hours: {total}");
    assert!(total.suspensions > 200, "the simulation has lost its suspensions: {total}");
    assert!(total.deaths > 50 && total.controller_deaths > 100, "the simulation has lost its faults: {total}");
}

#[test]
fn foreseeable_job_ends_leave_no_gap() {
    let mut total = watch::Figures::default();
    for (seed, (queue_wait, cold_start, walltime)) in
        [(0, 60, HOUR), (60, 300, HOUR), (1800, 600, 2 * HOUR), (3 * HOUR, 1800, 6 * HOUR)].into_iter().enumerate()
    {
        for skew in [0, -600, 600] {
            let clock = Clock { skew, tells_use: seed % 2 == 0 };
            let mut run = fixed(seed as u64, Climate { clock, ..Climate::steady(queue_wait, cold_start, walltime) }, 3);
            run.run(50);
            let watch = run.finish();
            let at_the_start = 3 * (queue_wait + cold_start + 20);
            assert!(watch.figures.gap <= at_the_start, "{watch}: {} s of gap", watch.figures.gap);
            assert!(watch.figures.submissions > 3 * 5, "{watch}: no job was replaced");
            watch.assert_node_time(0.01);
            total += watch.figures;
        }
    }
    println!("steady queues, 600 hours: {total}");
}

#[test]
fn varying_queue_waits_leave_little_gap() {
    let mut total = watch::Figures::default();
    for seed in 0..4 {
        let climate = Climate { queue_wait: 600..HOUR, cold_start: 300..600, ..Climate::steady(0, 0, 6 * HOUR) };
        let mut run = fixed(seed, climate, 3);
        run.run(2);
        let at_the_start = run.watch.figures.gap;
        run.run(48);
        let watch = run.finish();
        let later = watch.figures.gap - at_the_start;
        assert!(later * 100 < watch.figures.desired, "{watch}: {later} s of gap");
        total += watch.figures;
        total.gap -= at_the_start;
    }
    println!("queue waits of 10 to 60 minutes, 200 hours after the first two: {total}");
}

#[test]
fn suspended_jobs_are_replaced_and_resumed_ones_leave_no_surplus() {
    let mut total = watch::Figures::default();
    for seed in 0..8 {
        let clock = Clock { skew: if seed % 2 == 0 { 0 } else { 600 }, tells_use: seed % 4 < 2 };
        let mut run = fixed(seed, Climate { suspension: 1.0, clock, ..Climate::steady(60, 120, 12 * HOUR) }, 3);
        run.run(50);
        let watch = run.finish();
        assert!(watch.figures.suspensions > 40, "{watch}");
        total += watch.figures;
    }
    println!("suspended jobs, 400 hours: {total}");
    assert!(total.gap * 50 < total.desired, "{total}");
}

#[test]
fn jobs_shorter_than_their_queue_wait_have_one_replacement_each() {
    let mut run = fixed(1, Climate::steady(2 * HOUR, 600, HOUR), 2);
    run.run(100);
    let watch = run.finish();
    println!("jobs shorter than their queue wait, 100 hours: {}", watch.figures);
    // Two nodes, each with one job an hour and 2 h 10 min until the next is ready.
    assert!(watch.figures.submissions <= 2 * 100, "{watch}");
}

#[test]
fn a_model_that_cannot_start_costs_ten_tries() {
    for skew in [0, -600, 600] {
        let mut climate = Climate::steady(1, 60, 12 * HOUR);
        climate.broken = 0..24 * HOUR;
        climate.clock.skew = skew;
        let mut run = fixed(1, climate, 4);
        while !run.memory.has_given_up() {
            run.run(1);
        }
        // Four jobs that are submitted together count once.
        assert!((12..=13).contains(&run.watch.figures.submissions), "{}", run.watch);
        assert!(run.watch.figures.hours() < 3.0, "{}", run.watch);
    }
}

#[test]
fn short_jobs_and_long_learned_waits_make_no_storm() {
    for (walltime, cold_start) in [(120, 5), (600, 20), (600, 120), (HOUR, 300)] {
        let climate = Climate { queue_wait: 600..601, ..Climate::steady(0, cold_start, walltime) };
        let mut run = fixed(1, climate, 2);
        run.run(10);
        // The queue is empty from now on.
        run.climate.queue_wait = 0..1;
        run.watch.figures = watch::Figures::default();
        run.run(20);
        let figures = run.watch.figures;
        println!("jobs of {walltime} s that learned waits of 10 min, {cold_start} s to start: {figures}");
        let perfect = 20 * HOUR / (walltime - 120).max(60) * 2;
        assert!(figures.submissions < 2 * perfect, "{}: {figures}, {perfect} needed", run.watch);
    }
}

/// Node hours held without serving the desired size, in percent of those wanted. The measured share
/// is compared with that of a scheduler that knows all waits and starts in advance.
#[test]
fn node_hours_wasted_stay_near_those_of_a_perfect_forecast() {
    let busy_days =
        Climate { queue_wait: HOUR..3 * HOUR, queue_wait_at_night: 0..60, cold_start: 300..600, ..Climate::steady(0, 0, 6 * HOUR) };
    let preempted = Climate { queue_wait: 60..900, cold_start: 120..300, death: 0.5, ..Climate::steady(0, 0, 12 * HOUR) };
    let mut climates = vec![("busy days, idle nights", busy_days), ("half of all jobs preempted", preempted)];
    for (wait, walltime) in [(60, HOUR), (900, HOUR), (2 * HOUR, 6 * HOUR), (6 * HOUR, 12 * HOUR)] {
        climates.push((
            "waits of one length, then none",
            Climate { queue_wait: wait / 2..wait, cold_start: 60..300, ..Climate::steady(0, 0, walltime) },
        ));
    }
    for (name, climate) in climates {
        let mut total = watch::Figures::default();
        for seed in 0..2 {
            let mut run = fixed(seed, climate.clone(), 4);
            run.run(2);
            let (before, forgets) = (run.watch.figures, name.ends_with("none"));
            run.run(24);
            if forgets {
                // The queue is empty from now on, so the learned waits are wrong.
                run.climate.queue_wait = 0..1;
                run.run(12);
            }
            total += run.watch.figures.since(&before);
        }
        let (wasted, perfect) = (total.wasted_share(), total.perfect_waste_share(&climate));
        println!("{name}, jobs of {} h: {wasted:.1} % wasted, {perfect:.1} % by a perfect forecast; {total}", climate.walltime / HOUR);
        assert!(wasted <= perfect + 2.0, "{name}: {wasted:.1} % wasted, {perfect:.1} % by a perfect forecast; {total}");
    }
}

#[test]
fn a_seed_reproduces_its_run() {
    let figures = |seed| {
        let mut run = fixed(seed, Climate::draw(&mut Rng::with_seed(seed)), 4);
        run.run(24);
        run.finish().figures.to_string()
    };
    assert_eq!(figures(7), figures(7));
    assert_ne!(figures(7), figures(8));
}
