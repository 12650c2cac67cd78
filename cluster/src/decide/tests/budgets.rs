//! An entry whose budget ends.

use super::*;
use crate::budget::Budget;

#[test]
fn nodes_leave_at_the_end_of_the_budgets_time_and_none_comes_after() {
    let mut scene = Scene::serving(2);
    scene.entry.budget = Budget { until: Some(at(scene.now + HOUR)), node_time: None, asked: 1 };
    assert_eq!(scene.pass(HOUR), []);
    assert_eq!(scene.step(), [drain("j1"), drain("j2")].concat());
    scene.end("j1");
    scene.end("j2");
    assert_eq!(scene.pass(HOUR), []);
    assert_eq!((scene.memory.desired_jobs(), scene.memory.failures()), (0, 0));
    scene.entry.budget = Budget { asked: 2, ..Budget::default() };
    assert_eq!(scene.step(), submit(2), "it has no budget any more");
}

#[test]
fn node_hours_are_counted_from_when_they_were_given() {
    let mut scene = Scene::serving(2);
    scene.pass(HOUR);
    scene.entry.budget = Budget { until: None, node_time: Some(Duration::from_secs(HOUR)), asked: 1 };
    let (waited, actions) = scene.wait(HOUR);
    assert_eq!(actions, [drain("j1"), drain("j2")].concat());
    assert!((1795..=1805).contains(&waited), "two nodes use an hour in half of one, not in {waited} s");
    let left = scene.memory.budget_left(&scene.entry, at(scene.now)).unwrap();
    assert!(left.is_over() && left.used >= Duration::from_secs(HOUR), "{left:?}");
}

#[test]
fn nothing_is_submitted_that_would_still_load_when_the_budget_ends() {
    let mut scene = Scene::serving(1);
    scene.entry.budget = Budget { until: Some(at(scene.now + 10 * MINUTE)), node_time: None, asked: 1 };
    scene.pass(9 * MINUTE + 30);
    scene.end("j1");
    assert_eq!(scene.pass(10 * MINUTE), [], "a cold start took a minute");
}

#[test]
fn an_elastic_entry_has_no_node_after_its_budget_whoever_waits() {
    let mut scene = Scene::elastic(0, 2);
    scene.demand.waiting = 3;
    scene.entry.budget = Budget { until: Some(at(scene.now)), node_time: None, asked: 1 };
    assert_eq!(scene.pass(HOUR), []);
}
