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
fn the_gate_compares_with_the_best_foreign_policy() {
    assert_eq!((verdict(1.02, false).failed, verdict(1.04, false).failed), (0, 1));
    assert!(verdict(1.02, false).text.ends_with("\n1 passed, 0 failed\n"));
}

#[test]
fn hostler_must_be_twice_as_good_in_an_overload() {
    assert_eq!(verdict(1.0, true).failed, 0);
    let verdict = verdict(1.2, true);
    assert_eq!(verdict.failed, 2);
    assert!(verdict.text.ends_with("\n2 passed, 2 failed\n"));
    assert!(verdict.text.contains("FAIL  load: mean TTFT 1.20 s, at most 1/2 of radix-tight with 2.20 s\n"), "{}", verdict.text);
}
