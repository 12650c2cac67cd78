use super::*;
use crate::report::tests::outcome;

fn measures(cut: f64, ttft_mean: f64) -> Measures {
    Measures { cut, ..outcome("jobs", "hostler", ttft_mean).measures }
}

#[test]
fn known_job_ends_must_save_answers_at_bounded_wait() {
    let passed = |known: (f64, f64)| judge(&measures(known.0, known.1), &measures(0.02, 0.1)).map(|gate| gate.passed);
    assert_eq!(passed((0.001, 0.11)), [true, true]);
    assert_eq!(passed((0.0011, 0.11)), [false, true]);
    assert_eq!(passed((0.0, 0.111)), [true, false]);
    let [cut, _] = judge(&measures(0.0005, 0.1), &measures(0.02, 0.1));
    assert_eq!(cut.text, "jobs that end: 0.050 % of the answers cut, at most 1/20 of 2.000 % where their ends are not known");
}
