use super::*;

fn job(id: &str, state: &str) -> JobStatus {
    JobStatus { id: id.into(), state: state.into(), comment: String::new(), host: String::new(), starts_in: None, ends_in: None }
}

fn queued(id: &str, comment: &str, starts_in: Option<u64>) -> JobStatus {
    JobStatus { comment: comment.into(), starts_in, ..job(id, "queued") }
}

fn on(host: &str, id: &str, state: &str) -> JobStatus {
    JobStatus { host: host.into(), ..job(id, state) }
}

fn entry(ready: u32, jobs: Vec<JobStatus>) -> EntryStatus {
    EntryStatus {
        name: "chat".into(),
        model: "org/chat".into(),
        wanted: 2,
        ready,
        jobs,
        failures: 0,
        pause: None,
        given_up: false,
        asked: 0,
        limited: None,
        budget: None,
        refusal: String::new(),
        cold_start: std::collections::BTreeMap::new(),
    }
}

#[test]
fn queued_jobs_are_listed_together_with_the_schedulers_comment() {
    let mut progress = EntryProgress::default();
    let waits = |comment, starts_in| entry(0, vec![queued("12[1].head", comment, starts_in), queued("12[2].head", comment, None)]);
    assert_eq!(progress.lines(&waits("", None), ""), ["queued    12[1].head, 12[2].head"]);
    assert_eq!(
        progress.lines(&waits("Not Running: no ngpus", Some(300)), ""),
        ["queued    12[1].head, 12[2].head: Not Running: no ngpus; expected to start in 5m"]
    );
    assert!(progress.lines(&waits("Not Running: no ngpus", Some(240)), "").is_empty(), "an estimate that shrinks is no news");
}

#[test]
fn a_line_names_three_jobs_and_counts_the_rest() {
    let jobs = (1..=6).map(|part| job(&format!("12[{part}].head"), "held")).collect();
    let lines = EntryProgress::default().lines(&entry(0, jobs), "");
    assert_eq!(lines, ["held      12[1].head, 12[2].head, 12[3].head and 3 more"]);
}

#[test]
fn each_step_of_a_job_is_reported_once() {
    let mut progress = EntryProgress::default();
    let mut lines = |state: &str, ready| progress.lines(&entry(ready, vec![on("x3001", "12.head", state)]), "");
    assert_eq!(lines("waiting for its agent", 0), ["running   12.head on x3001: its agent is starting"]);
    assert_eq!(lines("loading", 0), ["loading   12.head on x3001"]);
    assert!(lines("loading", 0).is_empty());
    assert_eq!(lines("ready", 1), ["ready     1 of 2 nodes"]);
    assert!(lines("ready", 1).is_empty());
    assert_eq!(lines("draining", 0), ["draining  12.head on x3001"]);
}

#[test]
fn failures_and_refusals_are_reported_once_per_occurrence() {
    let mut progress = EntryProgress::default();
    let limited = EntryStatus { limited: Some(240), ..entry(1, Vec::new()) };
    assert!(
        EntryProgress::default().lines(&limited, "").iter().any(|line| line.starts_with("limited ") && line.ends_with("the next in 4m"))
    );
    let failed = EntryStatus { failures: 2, pause: Some(60), refusal: "qsub: Invalid account\n".into(), ..entry(0, Vec::new()) };
    let lines = ["failed    2 times in a row; submitted again in 1m", "refused   qsub: Invalid account", "trouble   qstat is late"];
    assert_eq!(progress.lines(&failed, "qstat is late"), lines);
    assert!(progress.lines(&EntryStatus { pause: Some(50), ..failed.clone() }, "qstat is late").is_empty());
    assert!(progress.lines(&failed, "").is_empty());
    assert_eq!(progress.lines(&failed, "qstat is late"), lines[2..]);
}

#[test]
fn an_ending_entry_lists_its_remaining_jobs() {
    let left = entry(1, vec![on("x3001", "12.head", "failed"), job("13.head", "queued")]);
    assert_eq!(describe_ending(&left), "ending    12.head on x3001, 13.head");
}

#[test]
fn an_entry_is_ready_when_all_wanted_nodes_serve() {
    assert_eq!(judge(&entry(1, vec![job("1", "ready"), job("2", "loading")]), 0), Outlook::Coming);
    assert_eq!(judge(&entry(2, Vec::new()), 0), Outlook::Ready);
    assert_eq!(judge(&EntryStatus { wanted: 0, ..entry(0, Vec::new()) }, 0), Outlook::Ready);
}

#[test]
fn an_entry_fails_when_nothing_is_coming_after_a_failure() {
    let after_failure = |ready, jobs| EntryStatus { failures: 1, pause: Some(30), ..entry(ready, jobs) };
    assert_eq!(judge(&after_failure(0, Vec::new()), 0), Outlook::Failing);
    assert_eq!(judge(&after_failure(0, vec![job("1", "failed"), job("2", "ending")]), 0), Outlook::Failing);
    for state in ["queued", "held", "waiting for its agent", "loading", "suspended"] {
        assert_eq!(judge(&after_failure(0, vec![job("1", "failed"), job("2", state)]), 0), Outlook::Coming, "{state}");
    }
    assert_eq!(judge(&after_failure(1, Vec::new()), 0), Outlook::Coming, "a node serves, and the other is tried again");
    assert_eq!(judge(&EntryStatus { failures: 5, ..entry(0, Vec::new()) }, 5), Outlook::Coming, "it has just been submitted again");
}

#[test]
fn an_entry_with_repeated_node_failures_is_given_up() {
    let with_failures = |failures| EntryStatus { failures, ..entry(1, vec![job("1", "ready"), job("2", "loading")]) };
    assert_eq!(judge(&with_failures(4), 2), Outlook::Coming);
    assert_eq!(judge(&with_failures(5), 2), Outlook::Failing);
}

#[test]
fn a_model_that_is_given_up_says_how_to_try_again() {
    let given_up = EntryStatus { failures: 10, given_up: true, ..entry(0, Vec::new()) };
    assert_eq!(
        EntryProgress::default().lines(&given_up, ""),
        ["given up  failed 10 times in a row: mend the cause, and `hostler up` or `hostler scale` tries again"]
    );
    assert_eq!(judge(&given_up, 10), Outlook::Failing);
}

#[test]
fn changed_settings_name_the_jobs_that_are_submitted_anew() {
    let (waits, runs) = (job("1", "queued"), on("node1", "2", "ready"));
    assert_eq!(
        describe_changed_settings(&[&waits, &runs]),
        [
            "settings  changed: what waits is submitted anew (1)",
            "settings  changed: what runs stays, and its replacements have the new ones (2 on node1)"
        ]
    );
    assert!(describe_changed_settings(&[]).is_empty());
}
