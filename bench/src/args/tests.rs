//! Tests of the command line.

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Alone {
    #[command(flatten)]
    args: BenchArgs,
}

pub(crate) fn parsed(flags: &[&str]) -> BenchArgs {
    try_parse(flags).unwrap_or_else(|error| panic!("{error}"))
}

fn try_parse(flags: &[&str]) -> Result<BenchArgs, clap::Error> {
    Alone::try_parse_from(std::iter::once("bench").chain(flags.iter().copied())).map(|alone| alone.args)
}

#[test]
fn flags_may_stand_before_and_after_the_scenario() {
    for flags in [["sustained", "--rate", "2.5", "--target", "unix:/a"], ["--rate", "2.5", "--target", "unix:/a", "sustained"]] {
        let args = parsed(&flags);
        assert_eq!((args.common.rate, args.common.target.len()), (Some(2.5), 1));
        assert_eq!(args.target_name(0), "unix:/a");
    }
}

#[test]
fn targets_of_one_run_need_distinct_names() {
    let args = parsed(&["burst", "--target", "http://a:1", "--name", "one", "--target", "http://b:1", "--name", "two"]);
    args.check().unwrap();
    assert_eq!((args.target_name(0), args.target_name(1)), ("one".to_owned(), "two".to_owned()));
    let refused = [
        &["sustained", "--target", "http://a:1", "--target", "http://a:1"][..],
        &["sustained", "--target", "http://a:1", "--target", "http://b:1", "--name", "one"],
        &["sustained", "--target", "http://a:1", "--target", "http://b:1", "--metrics", "http://b:1"],
        &["burst", "--rate", "3"],
        &["sweep", "--concurrency", "3"],
    ];
    for flags in refused {
        assert!(parsed(flags).check().is_err(), "{flags:?}");
    }
}

#[test]
fn conversations_with_start_times_make_an_open_loop() {
    let open = [&["burst"][..], &["trace", "a.jsonl"], &["chat", "--rate", "1"]];
    let closed = [&["sustained"][..], &["sweep"], &["trace", "a.jsonl", "--concurrency", "4"]];
    assert!(open.iter().all(|flags| parsed(flags).is_open()) && !closed.iter().any(|flags| parsed(flags).is_open()));
    assert_eq!(parsed(&["sustained"]).at_once(), CONCURRENCY);
    assert_eq!(parsed(&["sustained", "--concurrency", "7"]).at_once(), 7);
    assert_eq!(parsed(&["sustained", "--rate", "7"]).at_once(), MOST_AT_ONCE);
}

#[test]
fn every_load_has_an_end() {
    assert_eq!(parsed(&["sustained"]).duration(), Some(DURATION));
    assert_eq!(parsed(&["sustained", "--requests", "5"]).duration(), None);
    assert_eq!(parsed(&["trace", "a.jsonl"]).duration(), None);
    assert_eq!(parsed(&["trace", "a.jsonl", "--duration", "5s"]).duration(), Some(Duration::from_secs(5)));
    for flags in [
        ["sustained", "--duration", "0s"],
        ["sustained", "--rate", "0"],
        ["sustained", "--rate", "nan"],
        ["sustained", "--concurrency", "0"],
    ] {
        assert!(try_parse(&flags).is_err(), "{flags:?}");
    }
    assert!(try_parse(&["sustained", "--rate", "1", "--concurrency", "1"]).is_err());
}

#[test]
fn the_settings_name_everything_that_decides_the_figures() {
    let settings = parsed(&["chat", "--rate", "2", "--slo-ttft", "200ms", "--seed", "9"]).settings();
    assert_eq!(settings["load"], "open loop, 2 a second at random");
    assert_eq!((settings["slo-ttft"].as_str(), settings["seed"].as_str(), settings["duration"].as_str()), ("200ms", "9", "30s"));
    assert!(!settings.contains_key("slo-itl") && !settings.contains_key("requests"));
}
