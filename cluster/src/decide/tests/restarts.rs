//! Restarts of a controller, with and without its memory.

use super::*;

#[test]
fn a_restarted_router_without_nodes_changes_nothing() {
    let mut scene = Scene::serving(3);
    scene.jobs.iter_mut().for_each(|job| job.node = NodeState::NotAttached);
    assert_eq!(scene.pass(10 * MINUTE), []);
}

#[test]
fn router_and_controller_restarting_together_learn_no_cold_start() {
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
fn a_lost_memory_never_repeats_its_predecessors_submission() {
    let mut scene = Scene::fixed(2);
    scene.step();
    scene.lose_memory();
    assert_eq!(scene.pass(100), []);
    scene.queue("j1");
    scene.queue("j2");
    assert_eq!(scene.pass(HOUR), []);
}

#[test]
fn a_lost_memory_delays_a_new_entry_by_two_minutes() {
    let mut scene = Scene::fixed(2);
    scene.lose_memory();
    assert_eq!(scene.wait(HOUR), (2 * MINUTE, submit(2).to_vec()));
}

#[test]
fn a_kept_memory_waits_for_jobs_submitted_before_the_restart() {
    let mut scene = Scene::fixed(2);
    scene.step();
    scene.memory = serde_json::from_str(&serde_json::to_string(&scene.memory).unwrap()).unwrap();
    assert_eq!(scene.pass(100), []);
    scene.queue("j1");
    scene.queue("j2");
    assert_eq!(scene.pass(HOUR), []);
}

#[test]
fn a_lost_memory_counts_surplus_jobs_as_replacements() {
    let mut scene = Scene::serving(2);
    scene.end_in("j1", 3 * HOUR);
    scene.queue("j3");
    scene.lose_memory();
    assert_eq!(scene.pass(3 * MINUTE), [], "j3 stays, although j1 has hours left");
    scene.start("j3");
    scene.step();
    scene.job("j3").node = NodeState::Ready;
    assert_eq!(scene.step(), drain("j1"));
}

#[test]
fn a_lost_surplus_job_is_not_replaced() {
    let mut scene = Scene::serving(1);
    scene.queue("j2");
    scene.lose_memory();
    assert_eq!(scene.pass(5 * MINUTE), []);
    scene.end("j2");
    assert_eq!(scene.pass(5 * HOUR), []);
}

#[test]
fn a_lost_memory_infers_an_elastic_size_from_its_jobs() {
    let mut scene = Scene::elastic(0, 4);
    for id in ["j1", "j2", "j3"] {
        scene.add_ready(id);
    }
    let started = at(scene.now - 12 * HOUR);
    scene.job("j2").started = Some(started);
    scene.end_in("j2", 11 * MINUTE);
    scene.queue("j4");
    scene.demand = Demand { waiting: 0, in_flight: 3, last_request: Some(Duration::ZERO) };
    scene.jobs.iter_mut().take(3).for_each(|job| job.in_flight = 1);
    scene.lose_memory();
    assert_eq!(scene.pass(10 * MINUTE), [], "three nodes, and a replacement for j2");
    assert_eq!(scene.memory.size, Some(3));
}

#[test]
fn decisions_do_not_depend_on_the_order_of_jobs() {
    let mut scene = Scene::serving(4);
    scene.end_in("j2", 2 * MINUTE);
    scene.jobs[2].node = NodeState::Failed;
    let forward = Observation { jobs: scene.jobs.clone(), demand: scene.demand, form: scene.form, ..Observation::default() };
    let backward =
        Observation { jobs: scene.jobs.iter().rev().cloned().collect(), demand: scene.demand, form: scene.form, ..Observation::default() };
    let now = at(scene.now);
    assert_eq!(decide(&scene.entry, &forward, &scene.memory, now), decide(&scene.entry, &backward, &scene.memory, now));
}

#[test]
fn the_parts_of_cold_starts_are_learned_and_kept() {
    let mut scene = Scene::fixed(1);
    scene.step();
    scene.queue("j1");
    scene.pass(MINUTE);
    scene.start("j1");
    scene.pass(MINUTE);
    let seconds = Duration::from_secs;
    let job = scene.job("j1");
    (job.node, job.start_parts) = (NodeState::Ready, vec![("stage".to_owned(), seconds(40)), ("load".to_owned(), seconds(9))]);
    scene.pass(MINUTE);
    scene.memory = serde_json::from_str(&serde_json::to_string(&scene.memory).unwrap()).unwrap();
    let learned: Vec<_> = scene.memory.learned_parts().collect();
    assert_eq!(learned, [("load", seconds(9)), ("stage", seconds(40))]);
}
