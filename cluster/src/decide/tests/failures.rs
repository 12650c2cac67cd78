//! Behavior when jobs die or do not leave.

use super::*;

#[test]
fn an_unlisted_submission_is_repeated_after_a_pause() {
    let mut scene = Scene::fixed(1);
    scene.step();
    let (waited, actions) = scene.wait(10 * MINUTE);
    assert_eq!(actions, submit(1));
    assert!((145..=155).contains(&waited), "two minutes and the first pause, not {waited} s");
}

#[test]
fn a_confirmed_job_that_is_not_listed_has_failed_at_once() {
    let mut scene = Scene::fixed(2);
    assert_eq!(scene.step(), submit(2));
    scene.memory.confirm_submission();
    scene.queue("j1");
    assert_eq!(scene.step(), []);
    assert_eq!(scene.memory.failures(), 1, "the other part has ended before it was listed");
    scene.end("j1");
    assert_eq!(scene.wait(HOUR), (25, submit(1).to_vec()));
    assert_eq!(scene.memory.failures(), 1, "they came together");
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
fn a_job_that_was_told_to_leave_has_not_failed() {
    let mut scene = Scene::fixed(1);
    scene.step();
    for number in 0..4 {
        let id = format!("j{number}");
        scene.queue(&id);
        scene.step();
        scene.start(&id);
        scene.pass(20);
        scene.gone.push(GoneAgent { job: id.clone(), at: at(scene.now), has_drained: true });
        scene.end(&id);
        assert_eq!(scene.step(), submit(1), "the scheduler has preempted it while it loaded");
    }
    assert_eq!(scene.memory.failures(), 0);
}

#[test]
fn a_job_that_dies_is_resubmitted_with_growing_pauses() {
    for skew in SKEWS {
        let mut scene = Scene { skew, ..Scene::fixed(1) };
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
        assert_eq!(pauses, [30, 60, 120, 240, 480, 960, 960], "with a scheduler that is {skew} s ahead");
    }
}

#[test]
fn array_parts_dying_one_after_another_are_one_failure() {
    for skew in SKEWS {
        let mut scene = Scene { skew, ..Scene::fixed(3) };
        assert_eq!(scene.step(), submit(3));
        let ids = ["j1", "j2", "j3"];
        ids.iter().for_each(|id| scene.queue(id));
        for id in ids {
            scene.pass(10);
            scene.end(id);
        }
        assert_eq!(scene.wait(HOUR).1, submit(1), "one shows whether jobs can start");
        assert_eq!(scene.memory.failures(), 1, "with a scheduler that is {skew} s ahead");
        scene.queue("j4");
        assert_eq!(scene.pass(10 * MINUTE), []);
        scene.start("j4");
        scene.pass(MINUTE);
        scene.job("j4").node = NodeState::Ready;
        assert_eq!(scene.step(), submit(2));
    }
}

#[test]
fn a_job_that_served_a_while_resets_the_failures() {
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
    assert_eq!(scene.wait(HOUR), (0, submit(1).to_vec()));
}

#[test]
fn a_job_ended_from_outside_after_serving_is_replaced_at_once() {
    let mut scene = Scene::serving(4);
    for (number, id) in ["j1", "j2", "j3", "j4"].into_iter().enumerate() {
        scene.pass(MINUTE);
        scene.end(id);
        assert_eq!(scene.wait(HOUR), (0, submit(1).to_vec()), "{id}");
        scene.add_ready(&format!("n{number}"));
    }
    assert_eq!(scene.memory.failures(), 0);
}

#[test]
fn a_model_that_never_starts_is_given_up_until_asked_for_again() {
    let mut scene = Scene::fixed(4);
    let mut submitted = Vec::new();
    while !scene.memory.has_given_up() {
        let (_, actions) = scene.wait(HOUR);
        let [Action::Submit { parts }] = actions[..] else { panic!("{actions:?}") };
        (0..parts).for_each(|part| scene.queue(&format!("j{}-{part}", submitted.len())));
        submitted.push(parts);
        scene.step();
        scene.jobs.clear();
        scene.step();
    }
    assert_eq!(submitted, [4, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    assert_eq!(scene.pass(24 * HOUR), []);
    scene.entry.asked += 1;
    assert_eq!(scene.step(), submit(4));
}

#[test]
fn a_job_that_ends_without_having_been_ready_failed() {
    let mut scene = Scene::fixed(1);
    scene.step();
    scene.queue("j1");
    scene.step();
    scene.start("j1");
    scene.end_in("j1", 60);
    scene.pass(60);
    scene.end("j1");
    assert_eq!(scene.wait(HOUR), (30, submit(1).to_vec()));
}

#[test]
fn a_job_ending_at_its_walltime_is_no_failure() {
    let mut scene = Scene::serving(1);
    scene.end_in("j1", MINUTE);
    scene.step();
    scene.queue("j2");
    scene.end("j1");
    scene.pass(MINUTE);
    assert_eq!(scene.memory.failures(), 0);
}

#[test]
fn a_job_whose_replicas_failed_is_cancelled_and_replaced() {
    let mut scene = Scene::serving(1);
    scene.job("j1").node = NodeState::Failed;
    assert_eq!(scene.step(), cancel("j1"));
    scene.job("j1").state = JobState::Ending;
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.wait(HOUR), (25, submit(1).to_vec()));
    assert_eq!(scene.memory.failures(), 1);
}

#[test]
fn a_silent_node_is_replaced_after_minutes_and_cancelled_after_half_an_hour() {
    let mut scene = Scene::serving(3);
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.wait(HOUR), (3 * MINUTE, submit(1).to_vec()));
    scene.queue("j4");
    assert_eq!(scene.wait(HOUR).1, cancel("j1"));
    assert_eq!(scene.memory.failures(), 0);
}

#[test]
fn a_silent_node_that_comes_back_cancels_its_replacement() {
    let mut scene = Scene::serving(3);
    scene.job("j1").node = NodeState::NotAttached;
    assert_eq!(scene.wait(HOUR).1, submit(1));
    scene.queue("j4");
    scene.pass(MINUTE);
    scene.job("j1").node = NodeState::Ready;
    assert_eq!(scene.step(), cancel("j4"));
}

#[test]
fn silence_of_most_nodes_is_not_their_death() {
    let mut scene = Scene::serving(4);
    for id in ["j1", "j2", "j3"] {
        scene.job(id).node = NodeState::NotAttached;
    }
    assert_eq!(scene.wait(HOUR), (3 * MINUTE, submit(1).to_vec()));
    scene.queue("j5");
    assert_eq!(scene.pass(10 * MINUTE), []);
    scene.job("j4").node = NodeState::NotAttached;
    assert_eq!(scene.wait(HOUR).1, cancel("j5"), "the router knows of nobody");
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
fn a_jobs_node_time_ends_when_its_agent_went() {
    let mut scene = Scene::serving(1);
    let before = scene.memory.node_time().total();
    scene.now += 50;
    scene.gone.push(GoneAgent { job: "j1".to_owned(), at: at(scene.now - 10), has_drained: false });
    scene.end("j1");
    scene.step();
    let counted = scene.memory.node_time().total() - before;
    assert!((counted - 45.0).abs() < 1e-6, "{counted} s: a step was 5 s before");
}
