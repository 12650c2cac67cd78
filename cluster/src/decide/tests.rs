//! Each rule as a sentence. `tests/simulation` holds what follows from all of them together.

use std::time::Duration;

use super::*;
use crate::entry::FleetSize;
use crate::observation::{Demand, ObservedJob};

const MINUTE: u64 = 60;
const HOUR: u64 = 3600;

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// An entry with its jobs, as a test moves them.
struct Scene {
    entry: FleetEntry,
    memory: Memory,
    jobs: Vec<ObservedJob>,
    demand: Demand,
    now: u64,
}

impl Scene {
    fn new(size: FleetSize) -> Self {
        let entry = FleetEntry {
            name: "chat".to_owned(),
            model: "org/model".to_owned(),
            size,
            walltime: Duration::from_secs(12 * HOUR),
            engine_args: Vec::new(),
        };
        Self { entry, memory: Memory::default(), jobs: Vec::new(), demand: Demand::default(), now: 1_000_000 }
    }

    fn fixed(nodes: u32) -> Self {
        Self::new(FleetSize::Fixed(nodes))
    }

    fn elastic(min: u32, max: u32) -> Self {
        Self::new(FleetSize::Elastic { min, max, idle_after: Duration::from_secs(30 * MINUTE) })
    }

    /// Fixed, and all of its jobs serve: `j1`, `j2` and so on. They waited and loaded for a minute each, and end after 12 hours.
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
            submitted: Some(at(self.now)),
            started: None,
            ends: None,
            node: NodeState::NotAttached,
            in_flight: 0,
        });
    }

    fn start(&mut self, id: &str) {
        let (now, walltime) = (at(self.now), self.entry.walltime);
        let job = self.job(id);
        job.state = JobState::Running;
        job.started = Some(now);
        job.ends = Some(now + walltime);
        job.node = NodeState::Loading;
    }

    /// A job that waits and loads for a minute each while nobody decides anything.
    fn add_ready(&mut self, id: &str) {
        self.queue(id);
        self.start(id);
        self.job(id).node = NodeState::Ready;
    }

    fn job(&mut self, id: &str) -> &mut ObservedJob {
        self.jobs.iter_mut().find(|job| job.id == id).expect("the test has this job")
    }

    fn end(&mut self, id: &str) {
        self.jobs.retain(|job| job.id != id);
    }

    fn step(&mut self) -> Vec<Action> {
        let observation = Observation { jobs: self.jobs.clone(), demand: self.demand };
        let (actions, memory) = decide(&self.entry, &observation, &self.memory, at(self.now));
        self.memory = memory;
        self.now += 5;
        actions
    }

    /// Steps through so many seconds; the actions of all.
    fn pass(&mut self, seconds: u64) -> Vec<Action> {
        let until = self.now + seconds;
        let mut actions = Vec::new();
        while self.now < until {
            actions.extend(self.step());
        }
        actions
    }

    /// Steps until something is done, and says after how many seconds.
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

    /// Another controller, which finds nothing of what this one knew.
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

#[test]
fn a_new_entry_is_submitted_at_once_as_one_array_and_once() {
    let mut scene = Scene::fixed(3);
    assert_eq!(scene.step(), submit(3));
    assert_eq!(scene.pass(MINUTE), [], "its jobs are not listed yet");
    for id in ["j1", "j2", "j3"] {
        scene.queue(id);
    }
    scene.job("j2").state = JobState::Held;
    assert_eq!(scene.pass(5 * HOUR), []);
}

#[test]
fn an_entry_of_no_nodes_has_no_jobs() {
    assert_eq!(Scene::fixed(0).pass(HOUR), []);
}

#[test]
fn a_submission_that_is_never_listed_is_repeated_after_a_pause() {
    let mut scene = Scene::fixed(1);
    scene.step();
    let (waited, actions) = scene.wait(10 * MINUTE);
    assert_eq!(actions, submit(1));
    assert!((145..=155).contains(&waited), "two minutes and the first pause, not {waited} s");
}

#[test]
fn a_refused_submission_is_repeated_with_growing_pauses() {
    let mut scene = Scene::fixed(1);
    let mut pauses = Vec::new();
    assert_eq!(scene.step(), submit(1));
    for _ in 0..4 {
        scene.memory.record_refusal(at(scene.now));
        pauses.push(scene.wait(HOUR).0);
    }
    assert_eq!(pauses, [30, 60, 120, 240]);
}

#[test]
fn a_replacement_is_submitted_when_the_time_left_is_shorter_than_wait_and_start() {
    let mut scene = Scene::serving(1);
    let (waited, actions) = scene.wait(12 * HOUR);
    assert_eq!(actions, submit(1));
    // A minute in the queue, a minute to load, and the two in which jobs may leave early.
    let left = since(scene.jobs[0].ends.unwrap(), at(scene.now)).as_secs();
    assert!((225..=240).contains(&left), "{left} s were left after {waited} s");
}

#[test]
fn a_job_that_waits_longer_than_any_before_it_makes_the_others_due_earlier() {
    let mut scene = Scene::serving(2);
    scene.job("j1").ends = Some(at(scene.now + 3 * MINUTE));
    assert_eq!(scene.step(), submit(1));
    scene.queue("j3");
    scene.end("j1");
    scene.pass(2 * HOUR);
    scene.job("j2").ends = Some(at(scene.now + HOUR));
    assert_eq!(scene.step(), submit(1));
}

#[test]
fn the_old_job_drains_when_its_replacement_is_ready_and_not_before() {
    let mut scene = Scene::serving(2);
    scene.job("j2").ends = Some(at(scene.now + 2 * MINUTE));
    assert_eq!(scene.step(), submit(1));
    scene.queue("j3");
    assert_eq!(scene.step(), []);
    scene.start("j3");
    assert_eq!(scene.pass(30), []);
    scene.job("j3").node = NodeState::Ready;
    assert_eq!(scene.step(), drain("j2"));
    assert_eq!(scene.step(), drain("j2"), "it was not heard");
    scene.job("j2").node = NodeState::Draining;
    assert_eq!(scene.pass(MINUTE), []);
    scene.end("j2");
    assert_eq!(scene.pass(HOUR), []);
    assert_eq!(scene.memory.failures(), 0);
}

#[test]
fn a_replaced_job_whose_agent_has_left_counts_no_more() {
    let mut scene = Scene::serving(1);
    scene.job("j1").ends = Some(at(scene.now + 2 * MINUTE));
    assert_eq!(scene.step(), submit(1));
    scene.add_ready("j2");
    assert_eq!(scene.step(), drain("j1"));
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.pass(MINUTE), []);
}

#[test]
fn a_replacement_whose_agent_is_away_for_a_moment_drains_nobody() {
    let mut scene = Scene::serving(1);
    scene.job("j1").ends = Some(at(scene.now + 2 * MINUTE));
    assert_eq!(scene.step(), submit(1));
    scene.add_ready("j2");
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.step(), [], "only one of the two is ready");
    scene.job("j1").node = NodeState::Ready;
    scene.job("j2").node = NodeState::NotAttached;
    assert_eq!(scene.step(), [], "only the other one is ready");
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.step(), []);
    scene.job("j1").node = NodeState::Ready;
    scene.job("j2").node = NodeState::Ready;
    assert_eq!(scene.step(), drain("j1"));
}

#[test]
fn a_restarted_router_that_knows_no_node_yet_changes_nothing() {
    let mut scene = Scene::serving(3);
    scene.jobs.iter_mut().for_each(|job| job.node = NodeState::NotAttached);
    assert_eq!(scene.pass(10 * MINUTE), []);
}

#[test]
fn a_replacement_that_has_waited_is_kept_when_estimates_become_shorter() {
    let mut scene = Scene::serving(2);
    scene.job("j1").ends = Some(at(scene.now + 2 * MINUTE));
    assert_eq!(scene.step(), submit(1));
    scene.queue("j3");
    // As after `qalter`: j1 has hours left.
    scene.job("j1").ends = Some(at(scene.now + 5 * HOUR));
    assert_eq!(scene.pass(10 * MINUTE), []);
}

#[test]
fn a_walltime_shorter_than_wait_and_start_has_one_replacement_for_each_job() {
    let mut scene = Scene::serving(1);
    scene.job("j1").ends = Some(at(scene.now + 100));
    assert_eq!(scene.pass(30), submit(1));
    scene.queue("j2");
    scene.end("j1");
    assert_eq!(scene.pass(5 * HOUR), [], "the one job of the entry waits");
}

#[test]
fn a_job_that_dies_is_submitted_again_after_a_pause_that_grows() {
    let mut scene = Scene::fixed(1);
    let mut pauses = Vec::new();
    scene.step();
    for number in 0..7 {
        let id = format!("j{number}");
        scene.queue(&id);
        scene.step();
        scene.start(&id);
        scene.pass(20);
        scene.end(&id);
        let (pause, actions) = scene.wait(HOUR);
        assert_eq!(actions, submit(1));
        pauses.push(pause);
    }
    assert_eq!(pauses, [30, 60, 120, 240, 480, 960, 960]);
}

#[test]
fn a_job_that_has_served_for_a_while_ends_the_row_of_failures() {
    let mut scene = Scene::fixed(1);
    scene.step();
    for number in 0..3 {
        let id = format!("j{number}");
        scene.queue(&id);
        scene.step();
        scene.end(&id);
        scene.wait(HOUR);
    }
    assert_eq!(scene.memory.failures(), 3);
    scene.add_ready("j9");
    scene.pass(11 * MINUTE);
    assert_eq!(scene.memory.failures(), 0);
    scene.end("j9");
    assert_eq!(scene.wait(HOUR), (30, submit(1).to_vec()));
}

#[test]
fn a_job_that_reaches_its_end_without_having_been_ready_has_failed() {
    let mut scene = Scene::fixed(1);
    scene.step();
    scene.queue("j1");
    scene.step();
    scene.start("j1");
    scene.job("j1").ends = Some(at(scene.now + 60));
    scene.pass(60);
    scene.end("j1");
    assert_eq!(scene.wait(HOUR), (30, submit(1).to_vec()));
}

#[test]
fn a_job_that_reaches_its_end_is_no_failure() {
    let mut scene = Scene::serving(1);
    scene.job("j1").ends = Some(at(scene.now + MINUTE));
    scene.step();
    scene.queue("j2");
    scene.end("j1");
    scene.pass(MINUTE);
    assert_eq!(scene.memory.failures(), 0);
}

#[test]
fn a_node_whose_replicas_have_failed_is_cancelled_and_replaced_after_a_pause() {
    let mut scene = Scene::serving(1);
    scene.job("j1").node = NodeState::Failed;
    assert_eq!(scene.step(), cancel("j1"));
    scene.job("j1").state = JobState::Ending;
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.wait(HOUR), (25, submit(1).to_vec()));
    assert_eq!(scene.memory.failures(), 1);
}

#[test]
fn a_job_whose_agent_stays_away_is_given_up_after_half_an_hour() {
    let mut scene = Scene::serving(1);
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.wait(HOUR), (30 * MINUTE, cancel("j1").to_vec()));
}

#[test]
fn a_drained_job_that_does_not_end_is_cancelled() {
    let mut scene = Scene::serving(1);
    scene.entry.size = FleetSize::Fixed(0);
    assert_eq!(scene.step(), drain("j1"));
    scene.job("j1").node = NodeState::Draining;
    let (waited, actions) = scene.wait(HOUR);
    assert_eq!(actions, cancel("j1"));
    assert!((9 * MINUTE..=10 * MINUTE).contains(&waited), "{waited} s");
}

#[test]
fn a_node_that_an_operator_drains_is_replaced() {
    let mut scene = Scene::serving(2);
    scene.job("j1").node = NodeState::Draining;
    assert_eq!(scene.step(), submit(1));
}

#[test]
fn a_suspended_job_counts() {
    let mut scene = Scene::serving(2);
    scene.job("j1").state = JobState::Suspended;
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.pass(5 * HOUR), []);
}

#[test]
fn a_job_that_is_requeued_counts_and_teaches_no_queue_wait() {
    let mut scene = Scene::serving(1);
    scene.pass(5 * HOUR);
    let job = scene.job("j1");
    (job.state, job.started, job.ends, job.node) = (JobState::Queued, None, None, NodeState::NotAttached);
    assert_eq!(scene.pass(MINUTE), []);
    scene.start("j1");
    assert_eq!(scene.pass(MINUTE), []);
    assert!(scene.memory.queue_wait() < Duration::from_secs(2 * MINUTE), "{:?}", scene.memory.queue_wait());
}

#[test]
fn a_router_and_a_controller_that_start_anew_together_learn_no_cold_start() {
    let mut scene = Scene::serving(1);
    scene.pass(5 * HOUR);
    scene.lose_memory();
    scene.job("j1").node = NodeState::NotAttached;
    scene.pass(30);
    scene.job("j1").node = NodeState::Ready;
    let learned = scene.memory.cold_start();
    scene.step();
    assert_eq!(scene.memory.cold_start(), learned);
}

#[test]
fn a_smaller_size_cancels_what_waits_then_what_loads_and_drains_what_ends_first() {
    let mut scene = Scene::serving(2);
    scene.entry.size = FleetSize::Fixed(6);
    scene.job("j2").ends = Some(at(scene.now + 5 * HOUR));
    assert_eq!(scene.step(), submit(4));
    for id in ["j3", "j4", "j5", "j6"] {
        scene.queue(id);
        scene.now += 1;
    }
    scene.start("j3");
    scene.start("j4");
    assert_eq!(scene.step(), []);
    scene.entry.size = FleetSize::Fixed(5);
    assert_eq!(scene.step(), cancel("j6"));
    scene.end("j6");
    scene.entry.size = FleetSize::Fixed(3);
    assert_eq!(scene.step(), [cancel("j5"), cancel("j4")].concat());
    scene.end("j5");
    scene.end("j4");
    scene.entry.size = FleetSize::Fixed(1);
    assert_eq!(scene.step(), [cancel("j3"), drain("j2")].concat());
    scene.end("j3");
    scene.job("j2").node = NodeState::Draining;
    assert_eq!(scene.pass(MINUTE), []);
    scene.end("j2");
    assert_eq!(scene.pass(HOUR), []);
}

#[test]
fn a_smaller_size_does_without_the_job_that_has_no_agent() {
    let mut scene = Scene::serving(3);
    scene.job("j3").node = NodeState::NotAttached;
    scene.entry.size = FleetSize::Fixed(2);
    assert_eq!(scene.step(), cancel("j3"));
}

#[test]
fn a_size_of_zero_ends_replacements_and_absent_jobs_too() {
    let mut scene = Scene::serving(2);
    scene.job("j1").ends = Some(at(scene.now + 2 * MINUTE));
    scene.step();
    scene.queue("j3");
    scene.job("j2").node = NodeState::NotAttached;
    scene.entry.size = FleetSize::Fixed(0);
    assert_eq!(scene.step(), [cancel("j3"), cancel("j2"), drain("j1")].concat());
}

#[test]
fn a_lost_memory_submits_nothing_that_a_controller_before_it_may_have_submitted() {
    let mut scene = Scene::fixed(2);
    scene.step();
    scene.lose_memory();
    assert_eq!(scene.pass(100), []);
    scene.queue("j1");
    scene.queue("j2");
    assert_eq!(scene.pass(HOUR), []);
}

#[test]
fn a_lost_memory_of_an_entry_without_jobs_costs_two_minutes() {
    let mut scene = Scene::fixed(2);
    scene.lose_memory();
    assert_eq!(scene.wait(HOUR), (2 * MINUTE, submit(2).to_vec()));
}

#[test]
fn a_kept_memory_waits_for_the_jobs_that_were_submitted_before_the_restart() {
    let mut scene = Scene::fixed(2);
    scene.step();
    scene.memory = serde_json::from_str(&serde_json::to_string(&scene.memory).unwrap()).unwrap();
    assert_eq!(scene.pass(100), []);
    scene.queue("j1");
    scene.queue("j2");
    assert_eq!(scene.pass(HOUR), []);
}

#[test]
fn a_lost_memory_takes_jobs_beyond_the_size_for_replacements() {
    let mut scene = Scene::serving(2);
    scene.job("j1").ends = Some(at(scene.now + 3 * HOUR));
    scene.queue("j3");
    scene.lose_memory();
    assert_eq!(scene.pass(3 * MINUTE), [], "j3 stays, although j1 has hours left");
    scene.start("j3");
    scene.step();
    scene.job("j3").node = NodeState::Ready;
    assert_eq!(scene.step(), drain("j1"));
}

#[test]
fn a_job_that_was_taken_for_a_replacement_is_not_replaced_itself_when_it_is_lost() {
    let mut scene = Scene::serving(1);
    scene.queue("j2");
    scene.lose_memory();
    assert_eq!(scene.pass(5 * MINUTE), []);
    scene.end("j2");
    assert_eq!(scene.pass(5 * HOUR), []);
}

#[test]
fn requests_that_wait_for_a_while_add_one_node_at_a_time_up_to_the_most() {
    let mut scene = Scene::elastic(1, 3);
    scene.bring_up(1);
    scene.demand = Demand { waiting: 5, in_flight: 9, last_request: Some(Duration::ZERO) };
    assert_eq!(scene.pass(30), [], "requests wait for moments too");
    assert_eq!(scene.step(), submit(1));
    scene.queue("j2");
    assert_eq!(scene.pass(HOUR), [], "a job that waits will help");
    scene.start("j2");
    assert_eq!(scene.pass(MINUTE), [], "a node that loads will help");
    scene.job("j2").node = NodeState::Ready;
    assert_eq!(scene.wait(HOUR), (30, submit(1).to_vec()));
    scene.add_ready("j3");
    assert_eq!(scene.pass(HOUR), [], "three are the most");
}

#[test]
fn a_replacement_on_its_way_does_not_hinder_growth() {
    let mut scene = Scene::elastic(1, 3);
    scene.bring_up(1);
    scene.job("j1").ends = Some(at(scene.now + 2 * MINUTE));
    assert_eq!(scene.step(), submit(1));
    scene.queue("j2");
    scene.demand = Demand { waiting: 5, in_flight: 9, last_request: Some(Duration::ZERO) };
    assert_eq!(scene.wait(HOUR), (30, submit(1).to_vec()));
}

#[test]
fn idle_nodes_leave_down_to_the_least() {
    let mut scene = Scene::elastic(1, 3);
    scene.bring_up(1);
    scene.demand = Demand { waiting: 1, ..Demand::default() };
    scene.pass(40);
    scene.add_ready("j2");
    scene.demand = Demand { waiting: 0, in_flight: 1, last_request: Some(Duration::ZERO) };
    scene.job("j2").in_flight = 1;
    let (waited, actions) = scene.wait(HOUR);
    assert_eq!(actions, drain("j1"), "the one that ends first");
    assert!((25 * MINUTE..=30 * MINUTE).contains(&waited), "{waited} s");
    scene.end("j1");
    scene.demand = Demand::default();
    scene.job("j2").in_flight = 0;
    assert_eq!(scene.pass(5 * HOUR), []);
}

#[test]
fn an_entry_goes_to_zero_when_idle_and_comes_back_with_one_job_for_a_request() {
    let mut scene = Scene::elastic(0, 2);
    assert_eq!(scene.pass(HOUR), [], "nobody has asked");
    scene.demand = Demand { waiting: 1, in_flight: 0, last_request: Some(Duration::ZERO) };
    scene.bring_up(1);
    scene.demand = Demand { waiting: 0, in_flight: 0, last_request: Some(Duration::from_secs(40 * MINUTE)) };
    let (waited, actions) = scene.wait(HOUR);
    assert_eq!(actions, drain("j1"));
    assert!((29 * MINUTE..=30 * MINUTE).contains(&waited), "{waited} s after it was ready");
    scene.end("j1");
    assert_eq!(scene.pass(HOUR), []);
    // It was refused, because the queue is long.
    scene.demand.last_request = Some(Duration::from_secs(2));
    assert_eq!(scene.step(), submit(1));
    assert_eq!(scene.pass(MINUTE), []);
}

#[test]
fn a_job_that_waits_for_longer_than_its_clients_is_not_idle() {
    let mut scene = Scene::elastic(0, 2);
    scene.demand = Demand { waiting: 1, in_flight: 0, last_request: Some(Duration::ZERO) };
    assert_eq!(scene.step(), submit(1));
    scene.demand = Demand { waiting: 0, in_flight: 0, last_request: Some(Duration::from_secs(2 * HOUR)) };
    assert_eq!(scene.pass(100), [], "it is not listed yet");
    scene.queue("j1");
    assert_eq!(scene.pass(10 * HOUR), []);
    scene.start("j1");
    assert_eq!(scene.pass(MINUTE), []);
    scene.job("j1").node = NodeState::Ready;
    assert_eq!(scene.wait(HOUR), (30 * MINUTE, drain("j1").to_vec()));
}

#[test]
fn a_model_that_cannot_start_is_tried_only_as_long_as_somebody_wants_it() {
    let mut scene = Scene::elastic(0, 1);
    scene.demand = Demand { waiting: 1, in_flight: 0, last_request: Some(Duration::ZERO) };
    scene.step();
    scene.queue("j1");
    scene.step();
    scene.end("j1");
    scene.demand = Demand { waiting: 0, in_flight: 0, last_request: Some(Duration::from_secs(HOUR)) };
    assert_eq!(scene.pass(5 * HOUR), []);
}

#[test]
fn a_lost_memory_of_an_elastic_entry_finds_its_size_in_its_jobs() {
    let mut scene = Scene::elastic(0, 4);
    for id in ["j1", "j2", "j3"] {
        scene.add_ready(id);
    }
    scene.job("j2").ends = Some(at(scene.now + 11 * MINUTE));
    scene.queue("j4");
    scene.demand = Demand { waiting: 0, in_flight: 3, last_request: Some(Duration::ZERO) };
    scene.jobs.iter_mut().take(3).for_each(|job| job.in_flight = 1);
    scene.lose_memory();
    assert_eq!(scene.pass(10 * MINUTE), [], "three nodes, and a replacement for j2");
    assert_eq!(scene.memory.size, Some(3));
}

#[test]
fn decisions_are_the_same_for_the_same_view_in_any_order() {
    let mut scene = Scene::serving(4);
    scene.jobs[1].ends = Some(at(scene.now + 2 * MINUTE));
    scene.jobs[2].node = NodeState::Failed;
    let forward = Observation { jobs: scene.jobs.clone(), demand: scene.demand };
    let backward = Observation { jobs: scene.jobs.iter().rev().cloned().collect(), demand: scene.demand };
    let now = at(scene.now);
    assert_eq!(decide(&scene.entry, &forward, &scene.memory, now), decide(&scene.entry, &backward, &scene.memory, now));
}
