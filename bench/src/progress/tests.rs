//! Display while a load runs.

use super::*;

fn at(seconds: u64, phase: Phase) -> Progress {
    Progress {
        target: "direct".into(),
        phase,
        elapsed: Duration::from_secs(seconds),
        most: Some(Duration::from_secs(10)),
        in_flight: 16,
        complete: 12 * seconds,
        failed: 1,
        tokens_per_second: 1234.5,
        ttft_p50_ms: 18.25,
    }
}

fn shown(look: ProgressStyle) -> String {
    let mut written = Vec::new();
    let mut shown = ProgressWriter::new(&mut written, look);
    for second in [0, 2] {
        shown.show(&at(second, Phase::WarmUp)).unwrap();
    }
    for second in 0..=10 {
        shown.show(&at(second, Phase::Round { number: 1, of: 2 })).unwrap();
    }
    shown.end().unwrap();
    String::from_utf8(written).unwrap()
}

#[test]
fn a_terminal_rewrites_one_line_for_each_phase() {
    let text = shown(ProgressStyle::Terminal { width: 200 });
    assert_eq!(text.matches('\n').count(), 2);
    assert_eq!(text.matches('\r').count(), 13);
    let last = text.trim_end().rsplit('\r').next().unwrap();
    insta::assert_snapshot!(last.trim_start_matches("\u{1b}[K"), @"direct       round 1/2    ████████████████████   10 of 10 s  16 in flight  120 done  1 failed  1234 tokens/s  TTFT p50 18.2 ms");
}

#[test]
fn a_narrow_terminal_is_not_wrapped() {
    let text = shown(ProgressStyle::Terminal { width: 40 });
    assert!(text.split(['\r', '\n']).all(|line| line.trim_start_matches("\u{1b}[K").chars().count() < 40), "{text}");
}

#[test]
fn a_log_gets_a_line_every_five_seconds_and_phase() {
    insta::assert_snapshot!(shown(ProgressStyle::Plain), @r"
    direct       warm-up         0 of 10 s  16 in flight  0 done  1 failed  1234 tokens/s  TTFT p50 18.2 ms
    direct       round 1/2       0 of 10 s  16 in flight  0 done  1 failed  1234 tokens/s  TTFT p50 18.2 ms
    direct       round 1/2       5 of 10 s  16 in flight  60 done  1 failed  1234 tokens/s  TTFT p50 18.2 ms
    direct       round 1/2      10 of 10 s  16 in flight  120 done  1 failed  1234 tokens/s  TTFT p50 18.2 ms
    ");
}

#[test]
fn quiet_writes_nothing() {
    assert_eq!(shown(ProgressStyle::Quiet), "");
}

#[test]
fn a_file_gets_lines_and_a_terminal_gets_bars() {
    assert_eq!(ProgressStyle::choose(false, true, Some("72")), ProgressStyle::Terminal { width: 72 });
    assert_eq!(ProgressStyle::choose(false, true, Some("wide")), ProgressStyle::Terminal { width: USUAL_WIDTH });
    assert_eq!(
        [ProgressStyle::choose(false, false, Some("72")), ProgressStyle::choose(true, true, None)],
        [ProgressStyle::Plain, ProgressStyle::Quiet]
    );
}
