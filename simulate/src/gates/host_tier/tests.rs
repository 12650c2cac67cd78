use super::*;
use crate::report::tests::outcome;

fn passed(results: &[GateResult]) -> Vec<bool> {
    results.iter().map(|gate| gate.passed).collect()
}

#[test]
fn a_tier_may_cost_no_workload_more_than_luck() {
    let without = [outcome("one", "hostler", 1.0), outcome("two", "hostler", 1.0), outcome("one", "dynamo", 0.1)];
    let with = [outcome("one", "hostler", 1.02), outcome("two", "hostler", 1.04)];
    assert_eq!(passed(&judge_ample(&without, &with)), [true, false]);
}

#[test]
fn no_other_policy_may_be_as_good_where_memory_is_short() {
    let panel = |own| [outcome("small", "hostler", own), outcome("small", "hostler-no-queue", 0.1), outcome("small", "dynamo", 1.0)];
    assert_eq!(passed(&judge_short(&panel(0.99))), [true]);
    assert_eq!(passed(&judge_short(&panel(1.0))), [false]);
    assert!(judge_short(&panel(1.0))[0].text.ends_with("less than dynamo with 1.00 s"));
}
