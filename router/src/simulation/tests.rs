use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

/// Seeds that have failed once. 50 and 93: a slow client does not see the error event. 109: an
/// engine is stopped within an event. 28847: an agent gets a name between another agent's hello and
/// its snapshot.
const FAILED_ONCE: [u64; 9] = [50, 93, 109, 1086, 1339, 1829, 4714, 26315, 28847];

/// The seeds to run. `make simulation` sets their number and the first one.
fn seeds() -> std::ops::Range<u64> {
    let read = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let first = read("HOSTLER_SIMULATION_FIRST_SEED").unwrap_or(0);
    first..first + read("HOSTLER_SIMULATION_SEEDS").unwrap_or(20)
}

/// Runs all seeds on all cores. Returns their outcomes in order.
fn run_all(seeds: std::ops::Range<u64>) -> Vec<(u64, Outcome)> {
    let next = AtomicU64::new(seeds.start);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut outcomes: Vec<(u64, Outcome)> = std::thread::scope(|scope| {
        let work = || {
            let mut outcomes = Vec::new();
            while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds.end) {
                let outcome = run(seed, None);
                if !outcome.violations.is_empty() {
                    println!("seed {seed} has failed");
                }
                outcomes.push((seed, outcome));
            }
            outcomes
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().flat_map(|thread| thread.join().expect("a panic is told where it happens")).collect()
    });
    outcomes.sort_by_key(|(seed, _)| *seed);
    outcomes
}

fn assert_no_violations(outcomes: &[(u64, Outcome)]) {
    let failed: Vec<String> = outcomes
        .iter()
        .filter(|(_, outcome)| !outcome.violations.is_empty())
        .map(|(seed, outcome)| format!("seed {seed}: {}\n{}", outcome.violations.join("\n"), outcome.excerpt))
        .collect();
    let count = failed.len();
    assert!(
        failed.is_empty(),
        "{count} of {} seeds have failed; make simulation SEED=N repeats one\n{}",
        outcomes.len(),
        failed.join("\n")
    );
}

#[test]
fn a_fleet_under_faults_keeps_its_promises() {
    let outcomes = run_all(seeds());
    let mut verdicts = BTreeMap::<Verdict, usize>::new();
    for (verdict, count) in outcomes.iter().flat_map(|(_, outcome)| &outcome.verdicts) {
        *verdicts.entry(*verdict).or_default() += count;
    }
    // The combined hash is the same in every process.
    let hash = outcomes.iter().fold(0, |hash: u64, (_, outcome)| hash.rotate_left(1) ^ outcome.hash);
    println!("{} seeds: {verdicts:?}, all that has happened: {hash:016x}", outcomes.len());
    if let [(_, only)] = &outcomes[..] {
        only.lines.iter().for_each(|line| println!("{line}"));
    }
    assert_no_violations(&outcomes);
    // A run in which nothing is ever resumed or refused would show nothing.
    if outcomes.len() >= 100 {
        for verdict in [Verdict::Whole, Verdict::Resumed, Verdict::Refused, Verdict::Failed, Verdict::Cut] {
            assert!(verdicts.get(&verdict).is_some_and(|count| *count >= 10), "{verdict:?} has hardly occurred: {verdicts:?}");
        }
        let often = [
            "is fenced",
            "serves in the place of",
            "has lost its session",
            "has lost its session: it leaves",
            "RouterDies",
            "the order was answered: Ok",
            " sleeps",
            "streams moved, draining",
            "streams moved, silent",
            " 2 seams",
        ];
        for what in often {
            let count = outcomes.iter().flat_map(|(_, outcome)| &outcome.lines).filter(|line| line.contains(what)).count();
            println!("{what:?}: {count} times");
            assert!(count >= 5, "{what:?} has hardly occurred: {count} times");
        }
    }
}

#[test]
fn seeds_that_failed_once_pass() {
    assert_no_violations(&FAILED_ONCE.map(|seed| (seed, run(seed, None))));
}

#[test]
fn a_seed_reproduces_its_run() {
    for seed in 300..316 {
        let once = run(seed, None);
        // Another thread draws other keys for maps, and other random numbers in tokio.
        let again = std::thread::spawn(move || run(seed, None)).join().expect("a panic is told where it happens");
        let differs = once.lines.iter().zip(&again.lines).find(|(once, again)| once != again);
        assert!(once.hash == again.hash, "seed {seed} differs at {differs:?}");
    }
}

/// The first of two hundred seeds that shows a sabotage.
fn find(sabotage: Sabotage) -> Option<(u64, Outcome)> {
    // In other scenarios a stream may be given up.
    let may_show = |seed: &u64| sabotage != Sabotage::StreamGivenUp || Scenario::draw(*seed).is_survivable();
    (0..200).filter(may_show).map(|seed| (seed, run(seed, Some(sabotage)))).find(|(_, outcome)| !outcome.violations.is_empty())
}

#[test]
fn the_simulation_finds_a_token_resumed_twice() {
    let (seed, outcome) = find(Sabotage::TokenTwice).expect("it is found within 200 seeds");
    assert!(outcome.violations.iter().any(|violation| violation.contains("its text is")), "seed {seed}: {:?}", outcome.violations);
}

#[test]
fn the_simulation_finds_a_stream_given_up_for_nothing() {
    let (seed, outcome) = find(Sabotage::StreamGivenUp).expect("it is found within 200 seeds");
    assert!(outcome.violations.iter().any(|violation| violation.contains("could go on")), "seed {seed}: {:?}", outcome.violations);
}

#[test]
fn the_simulation_finds_a_leaked_permit() {
    let (seed, outcome) = find(Sabotage::PermitKept).expect("it is found within 200 seeds");
    assert!(outcome.violations.iter().any(|violation| violation.contains("permits: ")), "seed {seed}: {:?}", outcome.violations);
}
