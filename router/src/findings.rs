//! What is wrong about the fleet as its clients see it. Pure: `operators` gathers the facts.
//!
//! The engines may all be well while nobody is served: the findings of replicas say nothing of a
//! queue that is full.

use hostler_proto::fleet::v1::{FirstTokens, FleetFinding};
use strum::{IntoStaticStr, VariantNames};

use crate::outcome::{AnswerOutcome, EndCounts, RefusalReason, Verdict};

/// Fewer failures are no trouble of the fleet.
const MIN_FAILED: u64 = 5;

/// Requests of which one failure is trouble.
const TROUBLING_SHARE: u64 = 20;

/// Streams and seconds from which the wait for the first token is trouble.
const SLOW_STREAMS: u32 = 5;
const SLOW_SECONDS: f64 = 5.0;

/// Requests and seconds from which the wait for a replica with room is trouble.
const LONG_WAITS: u32 = 5;
const LONG_WAIT_SECONDS: f64 = 10.0;

/// What can be wrong. Each has an alert of its name: `requests-fail` is `HostlerRequestsFail`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub(crate) enum FindingKind {
    RequestsFail,
    FleetBelowHalf,
    EngineCrashLoop,
    RequestBanned,
    QueueWait,
    FirstTokensSlow,
    ReplicaQuarantined,
    NodeLost,
    JobsEnd,
    BudgetEnds,
    KeyFileUnusable,
}

/// What findings follow from.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FleetFacts {
    /// Requests that ended in the last minute.
    pub(crate) ends: EndCounts,
    /// Seconds until the first tokens of streams in the last five minutes.
    pub(crate) first_tokens: Option<FirstTokens>,
    /// How many requests of the last minute had to wait for a replica with room, and the seconds
    /// that one in ten of them waited at least.
    pub(crate) queue_waits: Option<(u32, f64)>,
    /// Requests that wait now.
    pub(crate) queued: usize,
    pub(crate) replicas: usize,
    /// Replicas that have failed, are quarantined, or whose agent is silent.
    pub(crate) down: usize,
    pub(crate) quarantined: usize,
    /// Replicas whose engines have failed again and again in the last half hour.
    pub(crate) crash_loops: usize,
    /// Nodes that were lost in the last ten minutes.
    pub(crate) nodes_lost: usize,
    /// How many replicas serve, and how many of those the end of their batch jobs leaves in half an
    /// hour; `None` where a controller brings others.
    pub(crate) serving: Option<(usize, usize)>,
    /// Entries of the fleet whose budgets end within half an hour, or have ended.
    pub(crate) budgets_end: usize,
    pub(crate) is_key_file_unusable: bool,
}

/// What is wrong, the gravest first.
pub(crate) fn list(facts: &FleetFacts) -> Vec<FleetFinding> {
    let FleetFacts { ends, first_tokens, queued, .. } = facts;
    [
        failing_requests(ends),
        fleet_below_half(facts),
        crash_loop(facts.crash_loops),
        banned_request(ends),
        long_queue(facts),
        slow_first_tokens(*first_tokens, *queued),
        quarantine(facts.quarantined),
        lost_nodes(facts.nodes_lost),
        ending_jobs(facts.serving),
        ending_budgets(facts.budgets_end),
        unusable_key_file(facts.is_key_file_unusable),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn finding(kind: FindingKind, evidence: String, advice: &str) -> FleetFinding {
    FleetFinding { kind: <&str>::from(kind).to_owned(), evidence, advice: advice.to_owned() }
}

/// A fleet that fails its clients. What is wrong with a request itself, with its key or by its
/// tenant's limit is no failure of the fleet.
fn failing_requests(ends: &EndCounts) -> Option<FleetFinding> {
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
    let evidence = format!("{failed} of the {all} requests that ended in the last minute failed: {}", words.join(", "));
    Some(finding(FindingKind::RequestsFail, evidence, advice))
}

/// A fleet most of which does not serve. Engines that start are none of those.
fn fleet_below_half(facts: &FleetFacts) -> Option<FleetFinding> {
    let FleetFacts { replicas, down, .. } = *facts;
    let evidence = format!("{down} of {replicas} replicas have failed, are quarantined or silent");
    (2 * down > replicas).then(|| finding(FindingKind::FleetBelowHalf, evidence, "`hostler ps` says what each of them failed of"))
}

fn crash_loop(replicas: usize) -> Option<FleetFinding> {
    let evidence = format!("the engine of {} has failed three times or more within half an hour", some(replicas, "replica"));
    let advice = "`hostler ps` says what it failed of, `hostler logs` what it wrote; `hostler drain` takes it out of service meanwhile";
    (replicas > 0).then(|| finding(FindingKind::EngineCrashLoop, evidence, advice))
}

fn banned_request(ends: &EndCounts) -> Option<FleetFinding> {
    let refused = ends.refused[RefusalReason::CrashSuspect as usize];
    let evidence = format!("{refused} requests of the last minute were refused, because engines have crashed with them");
    let advice = "the access log names them (cause=crash_suspect): find out what they have in common";
    (refused > 0).then(|| finding(FindingKind::RequestBanned, evidence, advice))
}

fn quarantine(replicas: usize) -> Option<FleetFinding> {
    let evidence = format!("{} stays out of service until somebody releases it", some(replicas, "replica"));
    let advice = "`hostler ps` says why; then `hostler release`";
    (replicas > 0).then(|| finding(FindingKind::ReplicaQuarantined, evidence, advice))
}

fn lost_nodes(nodes: usize) -> Option<FleetFinding> {
    let evidence = format!("{} was lost within ten minutes: its agent went without having stopped its engines", some(nodes, "node"));
    let advice = "the events say which; that host's own log says what happened, if it is alive";
    (nodes > 0).then(|| finding(FindingKind::NodeLost, evidence, advice))
}

/// A fleet of jobs most of which end, and that nobody is known to replace.
fn ending_jobs(serving: Option<(usize, usize)>) -> Option<FleetFinding> {
    let (now, later) = serving.filter(|(now, later)| 2 * later < *now)?;
    let evidence = format!("of the {now} replicas that serve, {later} will be there in half an hour: the batch jobs of the others end");
    Some(finding(FindingKind::JobsEnd, evidence, "submit other jobs now, if the fleet is to go on; `hostler ps` says which end, and when"))
}

fn ending_budgets(entries: usize) -> Option<FleetFinding> {
    let words = if entries == 1 { "the budget of one model ends".to_owned() } else { format!("the budgets of {entries} models end") };
    let evidence = format!("{words} within half an hour, or has ended: its nodes leave then");
    let advice = "`hostler ps` says which; `hostler up` with another --until or --node-hours gives it a new one";
    (entries > 0).then(|| finding(FindingKind::BudgetEnds, evidence, advice))
}

fn unusable_key_file(is_unusable: bool) -> Option<FleetFinding> {
    let evidence = "the key file has changed and cannot be read: a key that was revoked since then is still valid".to_owned();
    is_unusable.then(|| finding(FindingKind::KeyFileUnusable, evidence, "`hostler keys list` says what is wrong with it"))
}

fn some(count: usize, what: &str) -> String {
    if count == 1 { format!("one {what}") } else { format!("each of {count} {what}s") }
}

/// A fleet that has more work than it has room for.
fn long_queue(facts: &FleetFacts) -> Option<FleetFinding> {
    let (waited, seconds) = facts.queue_waits.filter(|(waited, seconds)| *waited >= LONG_WAITS && *seconds >= LONG_WAIT_SECONDS)?;
    let evidence = format!(
        "of {waited} requests that had to wait for a replica with room, one in ten waited {seconds:.0} s and longer; {} wait now",
        facts.queued
    );
    Some(finding(
        FindingKind::QueueWait,
        evidence,
        "add replicas, or send less at once; `hostler explain` says what one of them waited for",
    ))
}

/// A fleet that has more work than it can begin.
fn slow_first_tokens(first_tokens: Option<FirstTokens>, queued: usize) -> Option<FleetFinding> {
    let FirstTokens { streams, p50, .. } = first_tokens.filter(|of| of.streams >= SLOW_STREAMS && of.p50 >= SLOW_SECONDS)?;
    let waiting = if queued > 0 { format!("; {queued} requests wait in the router") } else { String::new() };
    let evidence = format!("half of the last {streams} streams waited {p50:.1} s and longer for their first token{waiting}");
    let advice = "`hostler explain` says what one of them waited for; more replicas shorten the wait of all";
    Some(finding(FindingKind::FirstTokensSlow, evidence, advice))
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

    fn ended(ends: EndCounts) -> Vec<FleetFinding> {
        list(&FleetFacts { ends, ..FleetFacts::default() })
    }

    /// Facts of streams half of which waited so long for their first token.
    fn slow(p50: f64) -> FleetFacts {
        FleetFacts { ends: ends(100, &[]), first_tokens: Some(FirstTokens { streams: 40, p50, p99: 9.0 }), ..FleetFacts::default() }
    }

    #[test]
    fn a_storm_of_refusals_is_found_with_its_cause() {
        let found = ended(ends(63, &[(RefusalReason::Full, 37_734), (RefusalReason::Fleet, 3)]));
        assert_eq!(found[0].kind, "requests-fail");
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
        assert_eq!(ended(ends(10, &theirs)), []);
        assert_eq!(ended(ends(0, &[(RefusalReason::Full, 4)])), []);
        assert_eq!(ended(ends(1000, &[(RefusalReason::Full, 40)])), []);
    }

    #[test]
    fn errors_that_engines_answer_with_are_found() {
        let mut counts = ends(60, &[]);
        counts.answers[AnswerOutcome::Error as usize] = 30;
        counts.answers[AnswerOutcome::Full as usize] = 10;
        counts.answers[AnswerOutcome::Rejected as usize] = 900;
        let found = ended(counts);
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
            assert_eq!(ended(counts).iter().any(|found| found.evidence.contains("failed: 5 ")), is_failure, "{outcome:?}");
        }
        for reason in RefusalReason::iter() {
            let counts = ends(0, &[(reason, MIN_FAILED)]);
            let is_failure = Verdict::from(reason).is_failure();
            assert_eq!(ended(counts).iter().any(|found| found.evidence.contains("failed: 5 ")), is_failure, "{reason:?}");
        }
    }

    #[test]
    fn slow_first_tokens_are_found_although_all_replicas_are_ready() {
        let found = list(&FleetFacts { queued: 329, ..slow(7.7) });
        assert_eq!(
            found[0].evidence,
            "half of the last 40 streams waited 7.7 s and longer for their first token; 329 requests wait in the router"
        );
        assert_eq!(list(&slow(0.7)), []);
    }

    #[test]
    fn a_long_queue_is_found_although_its_streams_begin_at_once() {
        let facts = FleetFacts { queue_waits: Some((40, 24.2)), queued: 38, ..slow(0.02) };
        let [found] = &list(&facts)[..] else { panic!("{:?}", list(&facts)) };
        assert_eq!((found.kind.as_str(), found.evidence.contains("waited 24 s and longer; 38 wait now")), ("queue-wait", true));
        assert_eq!(list(&FleetFacts { queue_waits: Some((4, 24.2)), ..facts }), []);
        assert_eq!(list(&FleetFacts { queue_waits: Some((40, 3.0)), ..facts }), []);
    }

    #[test]
    fn a_fleet_most_of_which_is_down_is_found() {
        let down = |down| list(&FleetFacts { replicas: 8, down, ..FleetFacts::default() });
        assert_eq!((down(4), down(5)[0].kind.as_str()), (Vec::new(), "fleet-below-half"));
        assert_eq!(list(&FleetFacts::default()), [], "nothing has come yet");
    }

    #[test]
    fn what_an_alert_tells_of_engines_nodes_and_jobs_is_found() {
        let kinds = |facts: FleetFacts| list(&facts).into_iter().map(|found| found.kind).collect::<Vec<_>>();
        let facts = FleetFacts { replicas: 8, ..FleetFacts::default() };
        assert_eq!(kinds(FleetFacts { quarantined: 1, crash_loops: 2, ..facts }), ["engine-crash-loop", "replica-quarantined"]);
        assert_eq!(kinds(FleetFacts { nodes_lost: 1, is_key_file_unusable: true, ..facts }), ["node-lost", "key-file-unusable"]);
        assert_eq!(kinds(FleetFacts { serving: Some((8, 3)), ..facts }), ["jobs-end"]);
        assert_eq!(kinds(FleetFacts { budgets_end: 1, ..facts }), ["budget-ends"]);
        assert!(kinds(FleetFacts { serving: Some((8, 4)), ..facts }).is_empty() && kinds(FleetFacts { serving: None, ..facts }).is_empty());
        assert_eq!(ended(ends(100, &[(RefusalReason::CrashSuspect, 1)]))[0].kind, "request-banned");
    }

    /// An operator who reads of one finds the other.
    #[test]
    fn each_finding_has_an_alert_of_its_name() {
        let rules = include_str!("../../deploy/observability/alerts.yml");
        for kind in FindingKind::VARIANTS {
            let words = kind.split('-').map(|word| word[..1].to_uppercase() + &word[1..]);
            let alert = format!("- alert: Hostler{}\n", words.collect::<String>());
            assert!(rules.contains(&alert), "{alert}");
        }
    }
}
