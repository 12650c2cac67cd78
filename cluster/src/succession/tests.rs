use std::collections::BTreeMap;

use fastrand::Rng;

use super::*;

const HOUR: u64 = 3600;

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn job(id: &str, state: JobState) -> ScheduledJob {
    ScheduledJob {
        id: id.into(),
        state,
        comment: String::new(),
        submitted: None,
        started: None,
        run_time: None,
        estimated_start: None,
        host: String::new(),
    }
}

/// A controller in `1.head` with this many of 24 hours left.
fn own(hours_left: u64, standby: Option<&str>) -> ControllerJob<'_> {
    let [limit, left] = [24, hours_left].map(|hours| Duration::from_secs(hours * HOUR));
    ControllerJob { id: "1.head", predecessor: None, limit, left, drain_timeout: Duration::from_secs(30), standby }
}

fn decide(own: &ControllerJob<'_>, listed: &[ScheduledJob], memory: &mut SuccessionMemory, now: u64) -> Option<SuccessionAction> {
    let (action, after) = decide_succession(own, listed, memory, at(now));
    *memory = after;
    action
}

fn cancel(job: &str) -> Option<SuccessionAction> {
    Some(SuccessionAction::Cancel { jobs: vec![job.into()] })
}

#[test]
fn a_controllers_job_has_a_held_then_a_free_successor() {
    let [running, held] = [job("1.head", JobState::Running), job("2.head", JobState::Held)];
    let mut memory = SuccessionMemory::default();
    let mut step = |own: &ControllerJob<'_>, listed: &[ScheduledJob], now| {
        let action = decide(own, listed, &mut memory, now);
        if let Some(SuccessionAction::Submit { after_own_end }) = action {
            memory.note_submitted(if after_own_end { "2.head" } else { "3.head" }.into());
        }
        action
    };
    assert_eq!(step(&own(24, None), std::slice::from_ref(&running), 0), Some(SuccessionAction::Submit { after_own_end: true }));
    assert_eq!(step(&own(24, None), std::slice::from_ref(&running), 5), None, "the list may lag");
    assert_eq!(step(&own(23, None), &[running.clone(), held.clone()], HOUR), None);
    let submit = Some(SuccessionAction::Submit { after_own_end: false });
    assert_eq!(step(&own(6, None), &[running.clone(), held.clone()], 18 * HOUR), submit, "the first stays: the scheduler may refuse");
    assert_eq!(step(&own(6, None), &[running.clone(), held.clone()], 18 * HOUR + 5), None, "the list may lag");
    let [queued, started] = [JobState::Queued, JobState::Running].map(|state| job("3.head", state));
    assert_eq!(step(&own(6, None), &[running.clone(), held, queued.clone()], 18 * HOUR + 10), cancel("2.head"));
    assert_eq!(step(&own(5, None), &[running.clone(), queued], 19 * HOUR), None);
    assert_eq!(step(&own(4, None), &[running.clone(), started.clone()], 20 * HOUR), None, "its controller does not run yet");
    assert_eq!(step(&own(4, Some("3.head.example.org")), &[running, started], 20 * HOUR), Some(SuccessionAction::Leave));
}

#[test]
fn duplicate_successors_are_cancelled_but_one() {
    let listed = [job("1.head", JobState::Running), job("2.head", JobState::Queued), job("3.head", JobState::Held)];
    assert_eq!(decide(&own(24, None), &listed, &mut SuccessionMemory::default(), 0), cancel("3.head"));
    let listed = [job("1.head", JobState::Running), job("2.head", JobState::Running), job("3.head", JobState::Held)];
    assert_eq!(decide(&own(24, Some("2.head")), &listed, &mut SuccessionMemory::default(), 0), cancel("2.head"));
}

#[test]
fn a_replaced_controllers_job_is_not_cancelled() {
    let own = ControllerJob { id: "2.head", predecessor: Some("1.head"), ..own(24, None) };
    let listed = [job("1.head", JobState::Running), job("2.head", JobState::Running)];
    let action = decide(&own, &listed, &mut SuccessionMemory::default(), 0);
    assert_eq!(action, Some(SuccessionAction::Submit { after_own_end: true }));
}

#[test]
fn a_controllers_job_leaves_in_time_without_a_successor() {
    let own = ControllerJob { left: Duration::from_secs(45), ..own(1, None) };
    assert_eq!(decide(&own, &[job("1.head", JobState::Running)], &mut SuccessionMemory::default(), 0), Some(SuccessionAction::Leave));
}

#[test]
fn a_controllers_job_leaves_in_time_for_its_routers_drain() {
    let with = |left, limit, drain| {
        let [limit, left, drain_timeout] = [limit, left, drain].map(Duration::from_secs);
        ControllerJob { limit, left, drain_timeout, ..own(1, None) }.is_over()
    };
    assert!(with(135, 24 * HOUR, 120) && !with(136, 24 * HOUR, 120));
    assert!(with(60, 960, 120) && !with(61, 960, 120));
}

#[test]
fn successors_that_fail_at_once_are_two_minutes_apart() {
    let mut memory = SuccessionMemory::default();
    let submitted =
        (0..HOUR).step_by(5).filter(|now| decide(&own(24, None), &[job("1.head", JobState::Running)], &mut memory, *now).is_some());
    assert_eq!(submitted.count(), 30);
}

/// The fleet's controller jobs, a scheduler with one queue, and the processes in running jobs.
struct World {
    rng: Rng,
    now: u64,
    /// How long a job stays queued once it may start.
    wait: u64,
    limit: u64,
    jobs: BTreeMap<u32, SimulatedJob>,
    next: u32,
    leader: Option<(u32, Option<u32>, SuccessionMemory)>,
    standby: Option<String>,
}

struct SimulatedJob {
    after: Option<u32>,
    eligible: Option<u64>,
    started: Option<u64>,
    /// When the job ends because it was asked to, or has left.
    ends: Option<u64>,
}

/// Time from a job's start to that of its controller.
const STARTUP: u64 = 10;

impl World {
    fn new(seed: u64, wait: u64, limit: u64) -> Self {
        let mut world =
            Self { rng: Rng::with_seed(seed), now: 0, wait, limit, jobs: BTreeMap::new(), next: 1, leader: None, standby: None };
        world.submit(None);
        world
    }

    fn submit(&mut self, after: Option<u32>) -> u32 {
        let id = self.next;
        self.next += 1;
        self.jobs.insert(id, SimulatedJob { after, eligible: None, started: None, ends: None });
        id
    }

    fn list(&self) -> Vec<ScheduledJob> {
        let state = |job: &SimulatedJob| match (job.started, job.ends, job.after) {
            (_, Some(_), _) => JobState::Ending,
            (Some(_), ..) => JobState::Running,
            (None, _, Some(_)) => JobState::Held,
            _ => JobState::Queued,
        };
        self.jobs.iter().map(|(id, of)| job(&format!("{id}.head"), state(of))).collect()
    }

    /// Runs one step of the scheduler.
    fn schedule(&mut self) {
        let now = self.now;
        let is_over =
            |job: &SimulatedJob| job.ends.is_some_and(|ends| ends <= now) || job.started.is_some_and(|began| began + self.limit <= now);
        self.jobs.retain(|_, job| !is_over(job));
        let ids: Vec<u32> = self.jobs.keys().copied().collect();
        for job in self.jobs.values_mut() {
            if job.after.is_some_and(|after| !ids.contains(&after)) {
                job.after = None;
            }
            if job.after.is_none() && job.eligible.is_none() {
                job.eligible = Some(now + self.rng.u64(0..=self.wait));
            }
            if job.started.is_none() && job.ends.is_none() && job.eligible.is_some_and(|eligible| eligible <= now) {
                job.started = Some(now);
            }
        }
    }

    /// Runs one step of the controllers. Running ones take the place one after the other.
    fn control(&mut self) {
        let is_here = |(id, ..): &(u32, Option<u32>, SuccessionMemory)| self.jobs.get(id).is_some_and(|job| job.ends.is_none());
        let former = self.leader.as_ref().map(|(id, ..)| *id);
        self.leader = self.leader.take().filter(is_here);
        let now = self.now;
        let running = self
            .jobs
            .iter()
            .find(|(id, job)| Some(**id) != former && job.ends.is_none() && job.started.is_some_and(|began| began + STARTUP <= now));
        let running = running.map(|(id, _)| *id);
        let Some((id, predecessor, memory)) = self.leader.take() else {
            self.leader = running.map(|id| (id, former, SuccessionMemory::default()));
            return;
        };
        self.standby = running.map(|id| format!("{id}.head"));
        let began = self.jobs[&id].started.unwrap();
        let [own_id, before] = [Some(id), predecessor].map(|id| id.map(|id| format!("{id}.head")));
        let own = ControllerJob {
            id: own_id.as_deref().unwrap(),
            predecessor: before.as_deref(),
            limit: Duration::from_secs(self.limit),
            left: Duration::from_secs((began + self.limit).saturating_sub(now)),
            drain_timeout: Duration::from_secs(30),
            standby: self.standby.as_deref(),
        };
        let (action, mut memory) = decide_succession(&own, &self.list(), &memory, at(now));
        match action {
            None => {}
            Some(SuccessionAction::Submit { after_own_end }) => {
                let submitted = self.submit(after_own_end.then_some(id));
                memory.note_submitted(format!("{submitted}.head"));
            }
            Some(SuccessionAction::Cancel { jobs }) => {
                for cancelled in jobs {
                    let cancelled = cancelled.split('.').next().unwrap().parse().unwrap();
                    self.jobs.get_mut(&cancelled).unwrap().ends = Some(now);
                }
            }
            Some(SuccessionAction::Leave) => self.jobs.get_mut(&id).unwrap().ends = Some(now + 30),
        }
        self.leader = Some((id, predecessor, memory));
    }

    /// Jobs that run a controller or will, and are not leaving.
    fn count(&self) -> usize {
        self.jobs.values().filter(|job| job.ends.is_none()).count()
    }
}

/// Runs a fleet's controllers for some days. Returns the longest time without one after the first,
/// and how many had the place.
fn run_days(seed: u64, wait: u64, limit: u64, dies_every: Option<u64>) -> (u64, u32) {
    let (mut world, mut without, mut longest, mut last) = (World::new(seed, wait, limit), 0, 0, None);
    let (mut lives, mut crowded) = (0, 0);
    while world.now < 5 * 24 * HOUR {
        world.schedule();
        world.control();
        // The job that waits for this one's end goes once that for its place is listed.
        crowded = if world.count() > 2 { crowded + 1 } else { 0 };
        assert!(world.count() <= 3 && crowded <= 1, "seed {seed}, {} s: {} jobs", world.now, world.count());
        let leader = world.leader.as_ref().map(|(id, ..)| *id);
        if leader.is_some() && leader != last {
            (lives, last) = (lives + 1, leader);
        }
        without = if leader.is_some() || last.is_none() { 0 } else { without + 5 };
        longest = longest.max(without);
        if let (Some(id), Some(every)) = (leader, dies_every)
            && world.rng.u64(0..every) < 5
        {
            world.jobs.remove(&id);
        }
        world.now += 5;
    }
    assert!(world.count() > 0, "seed {seed}: the fleet has lost its controllers");
    (longest, lives)
}

#[test]
fn controllers_succeed_each_other_without_gap_in_short_queues() {
    for seed in 0..4 {
        let (gap, lives) = run_days(seed, 4 * HOUR, 24 * HOUR, None);
        assert!(gap <= 15, "seed {seed}: {gap} s");
        assert!((5..=7).contains(&lives), "seed {seed}: {lives}");
    }
}

#[test]
fn a_dead_controller_is_succeeded_as_the_queue_allows() {
    for seed in 0..6 {
        let (gap, lives) = run_days(seed, 600, 24 * HOUR, Some(8 * HOUR));
        // The job meant to start at once may have died too, or may have just been submitted.
        assert!(gap <= 600 + STARTUP + 30, "seed {seed}: {gap} s");
        assert!(lives > 8, "seed {seed}: {lives}");
    }
}
