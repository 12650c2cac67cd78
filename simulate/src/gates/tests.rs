use super::*;
use crate::report::tests::outcome;

fn panel(hostler: f64) -> Vec<Outcome> {
    [("hostler", hostler), ("hostler-no-queue", 0.1), ("radix", 2.5), ("radix-tight", 2.2), ("least-request", 4.0), ("dynamo", 1.0)]
        .map(|(policy, ttft)| outcome("load", policy, ttft))
        .to_vec()
}

fn verdict(own: f64, overloaded: bool) -> Verdict {
    let outcomes = panel(own);
    sum_up(&outcomes, &judge(&outcomes, &[overloaded]))
}

#[test]
fn the_best_other_policy_is_the_measure_and_our_own_variant_is_not() {
    assert_eq!((verdict(1.02, false).failed, verdict(1.04, false).failed), (0, 1));
    assert!(verdict(1.02, false).text.ends_with("\n1 passed, 0 failed\n"));
}

#[test]
fn where_the_fleet_is_overloaded_it_must_be_twice_as_good_as_what_only_counts() {
    assert_eq!(verdict(1.0, true).failed, 0);
    let verdict = verdict(1.2, true);
    assert_eq!(verdict.failed, 2);
    assert!(verdict.text.ends_with("\n2 passed, 2 failed\n"));
    assert!(verdict.text.contains("FAIL  load: mean TTFT 1.20 s, at most 1/2 of radix-tight with 2.20 s\n"), "{}", verdict.text);
}
