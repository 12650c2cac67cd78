//! Workloads: equal for equal seeds, in order, of the requested sizes, and sharing only what they
//! should.

use std::collections::{HashMap, HashSet};
use std::io::Write;

use clap::Parser;
use proptest::prelude::*;

use super::*;

#[derive(Parser)]
struct Alone {
    #[command(subcommand)]
    scenario: Scenario,
}

fn scenario(words: &str) -> Scenario {
    Alone::try_parse_from(["bench"].into_iter().chain(words.split(' '))).expect("flags written in code are valid").scenario
}

const SEED: Seed = Seed { shape: 7, words: 7 };

fn first(words: &str, shape: Shape, count: usize) -> Vec<Session> {
    sessions(&scenario(words), &shape, SEED).unwrap().take(count).collect()
}

fn open(rate: f64) -> Shape {
    Shape { rate: Some(rate), ..Shape::default() }
}

fn tokens(text: &str) -> usize {
    text.split(' ').count()
}

fn trace(lines: &[&str]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(lines.join("\n").as_bytes()).unwrap();
    file
}

fn read(file: &tempfile::NamedTempFile, shape: Shape) -> Result<Vec<Session>, TraceError> {
    let scenario = Scenario::Trace { file: file.path().to_owned(), speed: 2.0 };
    Ok(sessions(&scenario, &shape, SEED)?.collect())
}

const ALL: [&str; 6] = ["burst --size 3 --every 2s", "sustained", "mixed", "chat", "prefix --groups 5 --prefix-tokens 200", "sweep"];

proptest! {
    #[test]
    fn a_load_is_reproducible_by_seed_and_ordered_by_time(
        which in 0..ALL.len(), shape in any::<u64>(), words in any::<u64>(), rate in 0.1..1000.0_f64,
    ) {
        let load = |seed| sessions(&scenario(ALL[which]), &open(rate), seed).unwrap().take(40).collect::<Vec<_>>();
        let seed = Seed { shape, words };
        let ours = load(seed);
        prop_assert_eq!(&ours, &load(seed));
        prop_assert!(ours.is_sorted_by_key(|session| session.begins));
        prop_assert!(ours.iter().all(|session| session.begins.is_none() == (ALL[which] == "sweep")));
        // Different words, but everything else equal.
        let others = load(Seed { words: words ^ 1, ..seed });
        for (one, other) in ours.iter().zip(&others) {
            prop_assert_eq!((one.kind, one.begins, one.turns.len()), (other.kind, other.begins, other.turns.len()));
            for (one, other) in one.turns.iter().zip(&other.turns) {
                prop_assert_eq!((one.most_tokens, one.pause, tokens(&one.says)), (other.most_tokens, other.pause, tokens(&other.says)));
                prop_assert_ne!(&one.says, &other.says);
            }
        }
    }

    #[test]
    fn sizes_spread_by_the_given_share_or_a_tenth(
        which in 0..ALL.len(), input in 50..3000_u32, output in 1..3000_u32, seed in any::<u64>(), spread in prop::option::of(0.0..=1.0),
    ) {
        prop_assume!(ALL[which] != "mixed");
        let shape = Shape { input_tokens: Some(input), output_tokens: Some(output), output_spread: spread, ..Shape::default() };
        for session in sessions(&scenario(ALL[which]), &shape, Seed { shape: seed, words: seed }).unwrap().take(5) {
            for turn in &session.turns {
                prop_assert_eq!(tokens(&turn.says), input as usize);
                let bytes = turn.says.len() as f64 / f64::from(input);
                prop_assert!((3.7..=4.9).contains(&bytes), "{} bytes a token", bytes);
                prop_assert!(f64::from(turn.most_tokens.abs_diff(output)) <= (f64::from(output) * spread.unwrap_or(0.1)).max(1.0) && turn.most_tokens > 0);
            }
        }
    }

    #[test]
    fn lines_that_are_no_trace_are_refused_and_never_panic(line in ".{0,80}") {
        let _ = read(&trace(&[&line]), Shape::default());
    }
}

#[test]
fn prompts_share_beginnings_only_where_intended() {
    for words in ["sustained", "mixed", "burst", "chat --turns 1"] {
        let begins: HashSet<String> = first(words, open(1.0), 3000)
            .iter()
            .map(|session| session.turns[0].says.split(' ').take(4).collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(begins.len(), 3000, "{words}");
    }
}

#[test]
fn words_are_distinct_and_about_four_bytes_long() {
    let different: HashSet<&str> = text::WORDS.into_iter().collect();
    assert_eq!(different.len(), 256);
    let bytes: usize = text::WORDS.iter().map(|word| word.len() + 1).sum();
    assert!((3.6..=4.4).contains(&(bytes as f64 / 256.0)), "{bytes} bytes");
    assert!(text::WORDS.iter().all(|word| word.bytes().all(|byte| byte.is_ascii_lowercase())));
}

#[test]
fn open_loops_follow_their_rate_and_closed_ones_free_clients() {
    let last = first("sustained", open(50.0), 5000).pop().unwrap().begins.unwrap().as_secs_f64();
    assert!((95.0..=105.0).contains(&last), "{last} s for 100");
    assert!(first("sustained", Shape::default(), 3).iter().all(|session| session.begins.is_none()));
}

#[test]
fn bursts_start_at_once_and_repeat_after_a_while() {
    let begins: Vec<u64> =
        first("burst --size 3 --every 2s", Shape::default(), 7).iter().map(|session| session.begins.unwrap().as_secs()).collect();
    assert_eq!(begins, [0, 0, 0, 2, 2, 2, 4]);
}

#[test]
fn a_mixed_load_keeps_its_shares_and_sizes() {
    let mut counts: HashMap<&str, u32> = HashMap::new();
    for session in first("mixed", open(10.0), 4000) {
        *counts.entry(session.kind).or_default() += 1;
        let (input, output) = (tokens(&session.turns[0].says), session.turns[0].most_tokens);
        let (inputs, outputs) = match session.kind {
            "short chat" => (100..=320, 75..=250),
            "long context" => (4000..=8000, 75..=250),
            _ => (100..=320, 750..=1500),
        };
        assert!(inputs.contains(&input) && outputs.contains(&output), "{}: {input} in, {output} out", session.kind);
    }
    for (kind, share) in [("short chat", 2800), ("long context", 800), ("long answer", 400)] {
        assert!(counts[kind].abs_diff(share) < share / 5, "{counts:?}");
    }
}

#[test]
fn chat_users_think_before_every_turn_but_the_first() {
    for session in first("chat --turns 4 --think 10s", Shape::default(), 50) {
        assert_eq!((session.turns.len(), session.turns[0].pause), (4, Duration::ZERO));
        assert!(session.turns[1..].iter().all(|turn| (5.0..=15.0).contains(&turn.pause.as_secs_f64())));
    }
}

#[test]
fn groups_share_a_system_prompt_and_early_groups_are_frequent() {
    let mut counts: HashMap<Arc<str>, u32> = HashMap::new();
    for session in first("prefix --groups 10 --prefix-tokens 300", Shape::default(), 3000) {
        let system = session.system.unwrap();
        assert_eq!(tokens(&system), 300);
        *counts.entry(system).or_default() += 1;
    }
    let mut counts: Vec<u32> = counts.into_values().collect();
    counts.sort_unstable_by(|one, other| other.cmp(one));
    assert_eq!(counts.len(), 10);
    // 1/1 of the sum of 1/k up to 10, which is 2.93, and 1/10 of it.
    assert!((950..=1100).contains(&counts[0]) && (60..=150).contains(&counts[9]), "{counts:?}");
}

#[test]
fn a_trace_keeps_times_lengths_and_common_prefixes() {
    let file = trace(&[
        r#"{"timestamp": 3000, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}"#,
        "",
        r#"{"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [4, 8]}"#,
        r#"{"timestamp": 3000, "input_length": 600, "output_length": 1, "hash_ids": [4, 8]}"#,
    ]);
    let load = read(&file, Shape::default()).unwrap();
    let seen: Vec<_> = load
        .iter()
        .map(|session| {
            (session.begins.unwrap().as_millis(), session.turns[0].says.split_whitespace().count(), session.turns[0].most_tokens)
        })
        .collect();
    // The first request comes at once, and double speed means half of the time.
    assert_eq!(seen, [(0, 1024, 5), (1000, 1000, 7), (1000, 600, 1)]);
    let [whole, other, cut] = [0, 1, 2].map(|number: usize| load[number].turns[0].says.split(' ').collect::<Vec<_>>());
    assert_eq!(whole[..512], other[..512]);
    assert_ne!(whole[512..600], other[512..600]);
    assert_eq!(whole[..600], cut[..600]);
    let closed = read(&file, Shape { closed: true, ..Shape::default() }).unwrap();
    assert!(closed.iter().all(|session| session.begins.is_none()));
}

#[test]
fn an_invalid_trace_line_is_refused_with_what_was_expected() {
    let good = r#"{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}"#;
    for (line, what) in [
        ("{", "EOF"),
        (r#"{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}"#, "at least one token"),
        (r#"{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1]}"#, "do not fit"),
        (r#"{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [1]}"#, "from zero up"),
        (r#"{"timestamp": 0, "input_length": 4000000000, "output_length": 5, "hash_ids": [1]}"#, "more than"),
    ] {
        let error = read(&trace(&[good, line]), Shape::default()).unwrap_err().to_string();
        assert!(error.contains("line 2: ") && error.contains(what) && error.contains("expected {"), "{error}");
    }
    let empty = read(&trace(&["", " "]), Shape::default()).unwrap_err().to_string();
    assert!(empty.contains("holds no request"), "{empty}");
}
