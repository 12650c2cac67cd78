//! Number of jobs for fixed, changed and elastic sizes.

use super::*;

#[test]
fn a_new_entry_is_submitted_once_as_one_array() {
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
fn a_smaller_size_cancels_waiting_jobs_before_draining_serving_ones() {
    let mut scene = Scene::serving(2);
    scene.entry.size = FleetSize::Fixed(6);
    scene.end_in("j2", 5 * HOUR);
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
fn a_smaller_size_first_cancels_jobs_without_an_agent() {
    let mut scene = Scene::serving(3);
    scene.job("j3").node = NodeState::NotAttached;
    scene.entry.size = FleetSize::Fixed(2);
    assert_eq!(scene.step(), cancel("j3"));
}

#[test]
fn a_size_of_zero_ends_replacements_and_absent_jobs_too() {
    let mut scene = Scene::serving(2);
    scene.end_in("j1", 2 * MINUTE);
    scene.step();
    scene.queue("j3");
    scene.job("j2").node = NodeState::NotAttached;
    scene.entry.size = FleetSize::Fixed(0);
    assert_eq!(scene.step(), [cancel("j3"), cancel("j2"), drain("j1")].concat());
}

#[test]
fn waiting_requests_add_nodes_one_by_one_up_to_max() {
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
fn a_pending_replacement_does_not_hinder_growth() {
    let mut scene = Scene::elastic(1, 3);
    scene.bring_up(1);
    scene.end_in("j1", 2 * MINUTE);
    assert_eq!(scene.step(), submit(1));
    scene.queue("j2");
    scene.demand = Demand { waiting: 5, in_flight: 9, last_request: Some(Duration::ZERO) };
    assert_eq!(scene.wait(HOUR), (30, submit(1).to_vec()));
}

#[test]
fn idle_nodes_are_drained_down_to_the_minimum() {
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
fn an_idle_entry_shrinks_to_zero_and_returns_on_demand() {
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
    // The router refused this request because the queue is long.
    scene.demand.last_request = Some(Duration::from_secs(2));
    assert_eq!(scene.step(), submit(1));
    assert_eq!(scene.pass(MINUTE), []);
}

#[test]
fn a_job_queued_longer_than_its_clients_is_not_idle() {
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
fn a_model_that_cannot_start_is_retried_only_on_demand() {
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
fn short_requests_between_two_steps_keep_a_node() {
    let mut scene = Scene::elastic(0, 2);
    scene.demand = Demand { waiting: 1, ..Demand::default() };
    scene.bring_up(1);
    scene.demand = Demand::default();
    for minute in 0..120 {
        scene.job("j1").served = minute;
        assert_eq!(scene.pass(MINUTE), []);
    }
    assert_eq!(scene.wait(HOUR).1, drain("j1"), "the last one was long ago");
}
