//! What is wrong about the fleet as its clients see it. Pure: `operators` gathers the facts.
//!
//! The engines may all be well while nobody is served: the findings of replicas say nothing of a
//! queue that is full.

use hostler_proto::fleet::v1::{FirstTokens, FleetFinding};

use crate::outcome::{AnswerOutcome, EndCounts, RefusalReason, Verdict};

/// Fewer failures are no trouble of the fleet.
const MIN_FAILED: u64 = 5;

/// Requests of which one failure is trouble.
const TROUBLING_SHARE: u64 = 20;

/// Streams and seconds from which the wait for the first token is trouble.
const SLOW_STREAMS: u32 = 5;
const SLOW_SECONDS: f64 = 5.0;

/// Findings about the last minute, the gravest first.
pub(crate) fn list(ends: &EndCounts, first_tokens: Option<FirstTokens>, queued: usize) -> Vec<FleetFinding> {
    failing_answers(ends).into_iter().chain(slow_first_tokens(first_tokens, queued)).collect()
}

/// A fleet that fails its clients. What is wrong with a request itself, with its key or by its
/// tenant's limit is no failure of the fleet.
fn failing_answers(ends: &EndCounts) -> Option<FleetFinding> {
    let answer = |outcome: AnswerOutcome| ends.answers[outcome as usize];
    let refused = |reason: RefusalReason| ends.refused[reason as usize];
    let causes = [
        (
            refused(RefusalReason::Full),
            "found the router full",
            "add replicas, or send less at once: `router.max_queued` only lengthens the wait",
        ),
        (answer(AnswerOutcome::Full), "were refused by an engine without room", "add replicas, or send less at once"),
        (
            answer(AnswerOutcome::Error),
            "were answered with an error by their engine",
            "`hostler logs` shows what the engine says; `hostler drain` takes one out of service that fails alone",
        ),
        (refused(RefusalReason::Fleet), "found no replica that could take them", "`hostler ps` says why replicas do not serve"),
        (answer(AnswerOutcome::Broken), "broke off", "`hostler ps` and `hostler logs` say what became of their engines"),
        (
            refused(RefusalReason::CrashSuspect),
            "are suspected of crashing engines",
            "the access log names them: find out what they have in common",
        ),
    ];
    let verdicts = ends.by_verdict();
    let failed = verdicts[Verdict::Full as usize] + verdicts[Verdict::Error as usize];
    let all = failed + verdicts[Verdict::Answered as usize];
    if failed < MIN_FAILED || failed * TROUBLING_SHARE < all {
        return None;
    }
    let words: Vec<String> = causes.iter().filter(|(count, ..)| *count > 0).map(|(count, words, _)| format!("{count} {words}")).collect();
    let (_, _, advice) = causes.iter().max_by_key(|(count, ..)| *count)?;
    Some(FleetFinding {
        kind: "answers-fail".to_owned(),
        evidence: format!("{failed} of the {all} requests that ended in the last minute failed: {}", words.join(", ")),
        advice: (*advice).to_owned(),
    })
}

/// A fleet that has more work than it can begin.
fn slow_first_tokens(first_tokens: Option<FirstTokens>, queued: usize) -> Option<FleetFinding> {
    let FirstTokens { streams, p50, .. } = first_tokens.filter(|of| of.streams >= SLOW_STREAMS && of.p50 >= SLOW_SECONDS)?;
    let waiting = if queued > 0 { format!("; {queued} requests wait in the router") } else { String::new() };
    Some(FleetFinding {
        kind: "first-tokens-slow".to_owned(),
        evidence: format!("half of the last {streams} streams waited {p50:.1} s and longer for their first token{waiting}"),
        advice: "`hostler explain` says what one of them waited for; more replicas shorten the wait of all".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;

    fn ends(complete: u64, refused: &[(RefusalReason, u64)]) -> EndCounts {
        let mut counts = EndCounts::default();
        counts.answers[AnswerOutcome::Complete as usize] = complete;
        for (reason, count) in refused {
            counts.refused[*reason as usize] = *count;
        }
        counts
    }

    #[test]
    fn a_storm_of_refusals_is_found_with_its_cause() {
        let found = list(&ends(63, &[(RefusalReason::Full, 37_734), (RefusalReason::Fleet, 3)]), None, 0);
        assert_eq!(found[0].kind, "answers-fail");
        assert_eq!(
            found[0].evidence,
            "37737 of the 37800 requests that ended in the last minute failed: 37734 found the router full, \
             3 found no replica that could take them"
        );
        assert!(found[0].advice.starts_with("add replicas"), "{}", found[0].advice);
    }

    #[test]
    fn faults_of_clients_and_single_failures_are_no_finding() {
        let theirs = [(RefusalReason::Request, 900), (RefusalReason::WrongKey, 900), (RefusalReason::Limit, 900)];
        assert_eq!(list(&ends(10, &theirs), None, 0), []);
        assert_eq!(list(&ends(0, &[(RefusalReason::Full, 4)]), None, 0), []);
        assert_eq!(list(&ends(1000, &[(RefusalReason::Full, 40)]), None, 0), []);
    }

    #[test]
    fn errors_that_engines_answer_with_are_found() {
        let mut counts = ends(60, &[]);
        counts.answers[AnswerOutcome::Error as usize] = 30;
        counts.answers[AnswerOutcome::Full as usize] = 10;
        counts.answers[AnswerOutcome::Rejected as usize] = 900;
        let found = list(&counts, None, 0);
        assert_eq!(
            found[0].evidence,
            "40 of the 100 requests that ended in the last minute failed: 10 were refused by an engine without room, \
             30 were answered with an error by their engine"
        );
        assert!(found[0].advice.contains("hostler logs"), "{}", found[0].advice);
    }

    #[test]
    fn every_end_but_a_clients_fault_is_a_cause_or_an_answer() {
        for outcome in AnswerOutcome::iter() {
            let mut counts = EndCounts::default();
            counts.answers[outcome as usize] = MIN_FAILED;
            let is_failure = Verdict::from(outcome).is_failure();
            assert_eq!(list(&counts, None, 0).iter().any(|found| found.evidence.contains("failed: 5 ")), is_failure, "{outcome:?}");
        }
        for reason in RefusalReason::iter() {
            let counts = ends(0, &[(reason, MIN_FAILED)]);
            let is_failure = Verdict::from(reason).is_failure();
            assert_eq!(list(&counts, None, 0).iter().any(|found| found.evidence.contains("failed: 5 ")), is_failure, "{reason:?}");
        }
    }

    #[test]
    fn slow_first_tokens_are_found_although_all_replicas_are_ready() {
        let found = list(&ends(100, &[]), Some(FirstTokens { streams: 40, p50: 7.7, p99: 9.0 }), 329);
        assert_eq!(
            found[0].evidence,
            "half of the last 40 streams waited 7.7 s and longer for their first token; 329 requests wait in the router"
        );
        assert_eq!(list(&ends(100, &[]), Some(FirstTokens { streams: 40, p50: 0.7, p99: 9.0 }), 0), []);
    }
}
