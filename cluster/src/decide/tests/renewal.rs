//! When jobs are replaced, and when the old job leaves.

use super::*;

#[test]
fn a_replacement_is_submitted_in_time_for_wait_and_start() {
    for skew in SKEWS {
        let mut scene = Scene { skew, ..Scene::fixed(1) };
        scene.bring_up(1);
        let end = scene.now - MINUTE - 5 + 12 * HOUR;
        assert_eq!(scene.wait(12 * HOUR).1, submit(1));
        // A minute in the queue, a minute to load, and two minutes in which jobs may leave early.
        let left = end - scene.now;
        assert!((225..=240).contains(&left), "{left} s were left with a scheduler that is {skew} s ahead");
    }
}

#[test]
fn a_longer_queue_wait_makes_replacements_due_earlier() {
    let mut scene = Scene::serving(2);
    scene.end_in("j1", 3 * MINUTE);
    assert_eq!(scene.step(), submit(1));
    scene.queue("j3");
    scene.end("j1");
    scene.pass(2 * HOUR);
    scene.end_in("j2", HOUR);
    assert_eq!(scene.step(), submit(1));
}

#[test]
fn an_old_job_drains_only_when_its_replacement_is_ready() {
    let mut scene = Scene::serving(2);
    scene.end_in("j2", 2 * MINUTE);
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
fn a_replaced_job_without_agent_no_longer_counts() {
    let mut scene = Scene::serving(1);
    scene.end_in("j1", 2 * MINUTE);
    assert_eq!(scene.step(), submit(1));
    scene.add_ready("j2");
    assert_eq!(scene.step(), drain("j1"));
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.pass(MINUTE), []);
}

#[test]
fn a_briefly_absent_replacement_drains_nobody() {
    let mut scene = Scene::serving(1);
    scene.end_in("j1", 2 * MINUTE);
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
fn a_queued_replacement_is_kept_when_estimates_shrink() {
    let mut scene = Scene::serving(2);
    scene.end_in("j1", 2 * MINUTE);
    assert_eq!(scene.step(), submit(1));
    scene.queue("j3");
    // As after `qalter`: j1 has hours left.
    scene.end_in("j1", 5 * HOUR);
    assert_eq!(scene.pass(10 * MINUTE), []);
}

#[test]
fn jobs_shorter_than_their_wait_get_one_replacement_each() {
    let mut scene = Scene::serving(1);
    scene.end_in("j1", 100);
    assert_eq!(scene.pass(30), submit(1));
    scene.queue("j2");
    scene.end("j1");
    assert_eq!(scene.pass(5 * HOUR), [], "the one job of the entry waits");
}

#[test]
fn a_node_that_an_operator_drains_is_replaced() {
    let mut scene = Scene::serving(2);
    scene.job("j1").node = NodeState::Draining;
    assert_eq!(scene.step(), submit(1));
}

#[test]
fn a_job_repeatedly_suspended_for_moments_still_counts() {
    let mut scene = Scene::serving(2);
    for _ in 0..20 {
        scene.suspend("j1");
        assert_eq!(scene.pass(55), []);
        scene.resume("j1");
        assert_eq!(scene.pass(55), []);
    }
}

#[test]
fn a_job_suspended_for_a_minute_is_replaced_once() {
    let mut scene = Scene::serving(2);
    scene.suspend("j1");
    assert_eq!(scene.wait(HOUR), (MINUTE, submit(1).to_vec()));
    scene.add_ready("j3");
    assert_eq!(scene.pass(5 * HOUR), []);
    assert_eq!(scene.memory.failures(), 0);
}

#[test]
fn a_resumed_job_cancels_its_queued_replacement() {
    let mut scene = Scene::serving(2);
    scene.suspend("j1");
    scene.pass(2 * MINUTE);
    scene.queue("j3");
    assert_eq!(scene.step(), []);
    scene.resume("j1");
    assert_eq!(scene.step(), cancel("j3"));
    scene.end("j3");
    assert_eq!(scene.pass(HOUR), []);
}

#[test]
fn a_resumed_job_is_surplus_beside_its_ready_replacement() {
    let mut scene = Scene::serving(2);
    scene.suspend("j1");
    scene.pass(2 * MINUTE);
    scene.add_ready("j3");
    scene.pass(HOUR);
    scene.resume("j1");
    assert_eq!(scene.step(), drain("j1"), "it ends first");
    scene.job("j1").node = NodeState::Draining;
    assert_eq!(scene.pass(MINUTE), []);
    scene.end("j1");
    assert_eq!(scene.pass(HOUR), []);
}

#[test]
fn suspended_jobs_are_kept_only_up_to_the_wanted_size() {
    let mut scene = Scene::serving(2);
    scene.suspend("j1");
    scene.suspend("j2");
    scene.end_in("j2", 5 * HOUR);
    assert_eq!(scene.pass(2 * MINUTE), submit(2));
    scene.add_ready("j3");
    scene.add_ready("j4");
    assert_eq!(scene.pass(MINUTE), []);
    scene.entry.size = FleetSize::Fixed(1);
    assert_eq!(scene.step(), [cancel("j2"), drain("j3")].concat());
    scene.end("j2");
    scene.end("j3");
    scene.entry.size = FleetSize::Fixed(0);
    assert_eq!(scene.step(), [cancel("j1"), drain("j4")].concat());
}

#[test]
fn a_lost_memory_keeps_the_replacement_of_a_suspended_job() {
    let mut scene = Scene::serving(1);
    scene.suspend("j1");
    assert_eq!(scene.pass(2 * MINUTE), submit(1));
    scene.queue("j2");
    scene.lose_memory();
    assert_eq!(scene.pass(HOUR), []);
}

#[test]
fn a_requeued_job_counts_and_skews_no_queue_wait() {
    let mut scene = Scene::serving(1);
    scene.pass(5 * HOUR);
    let job = scene.job("j1");
    (job.state, job.started, job.run_time, job.node) = (JobState::Queued, None, None, NodeState::NotAttached);
    assert_eq!(scene.pass(MINUTE), []);
    scene.start("j1");
    assert_eq!(scene.pass(MINUTE), []);
    assert!(scene.memory.queue_wait() < Duration::from_secs(2 * MINUTE), "{:?}", scene.memory.queue_wait());
}

#[test]
fn jobs_waiting_with_old_settings_are_submitted_anew() {
    let mut scene = Scene::serving(1);
    scene.entry.size = FleetSize::Fixed(3);
    assert_eq!(scene.step(), submit(2));
    scene.queue("j2");
    scene.queue("j3");
    assert_eq!(scene.step(), []);
    scene.form = 1;
    assert_eq!(scene.step(), [cancel("j2"), cancel("j3"), submit(2)].concat());
    assert_eq!(scene.step(), [cancel("j2"), cancel("j3")].concat(), "they are listed still");
    scene.end("j2");
    scene.end("j3");
    scene.queue("j4");
    scene.queue("j5");
    assert_eq!(scene.pass(HOUR), [], "what runs stays, and is renewed in its time");
    assert_eq!(scene.memory.failures(), 0);
}
