//! Texts of the progress.

use super::*;

fn at(seconds: u64, answered: usize, tokens: u64) -> Progress {
    Progress { elapsed: Duration::from_secs(seconds), answered, total: 1_000, tokens, ..Progress::default() }
}

#[test]
fn the_time_left_follows_from_the_last_minute() {
    let mut rates = RateWindow::default();
    for second in 0..=100 {
        // A fleet that came late, to a batch with 400 earlier answers.
        let answered = usize::try_from(second).unwrap().saturating_sub(40) * 2;
        rates.add(&at(second, 400 + answered, answered as u64 * 50));
    }
    let now = at(100, 520, 6_000);
    assert_eq!(line(&now, &rates), "520 of 1000 done, 0 failed, 100 tokens/s, 4m left");
    assert!(rates.0.len() <= 62, "{}", rates.0.len());
}

#[test]
fn an_unreachable_fleet_is_shown_as_retrying() {
    let mut rates = RateWindow::default();
    rates.add(&at(0, 10, 0));
    let away = Progress { waiting: 16, reason: "Connection refused".to_owned(), failed: 2, ..at(30, 10, 0) };
    assert_eq!(line(&away, &rates), "10 of 1000 done, 2 failed, 0 tokens/s; 16 retry later: Connection refused");
}

#[test]
fn progress_promises_nothing_at_the_start() {
    let mut rates = RateWindow::default();
    rates.add(&at(0, 0, 0));
    assert_eq!(line(&at(0, 0, 0), &rates), "0 of 1000 done, 0 failed");
}
