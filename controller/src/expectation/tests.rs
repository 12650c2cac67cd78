use hostler_cluster::{FleetEntry, Memory, Observation, decide};
use hostler_proto::agent::v1 as agent;
use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::{ListResponse, Node};

use super::*;
use crate::observation::observe;
use crate::observation::tests::{at, entry, job, node};

const ELASTIC: FleetSize = FleetSize::Elastic { min: 0, max: 2, idle_after: Duration::from_secs(1800) };

fn announced(entry: &FleetEntry, memory: &Memory, jobs: &[ScheduledJob], nodes: &[Node], second: u64) -> (Option<u64>, String) {
    let view = EntryView { entry, names: &["qwen".to_owned()], memory, jobs, nodes, refusal: "" };
    let model = expect(&view, at(second)).unwrap();
    (model.expected_in_ms, model.reason)
}

/// Memory after a job that waited for 300 s and was ready 60 s after its start.
fn learned() -> Memory {
    let fleet = entry(FleetSize::Fixed(1));
    let mut memory = Memory::default();
    for (second, state, phase) in [
        (380, JobState::Queued, None),
        (401, JobState::Running, Some(Phase::Loading)),
        (440, JobState::Running, Some(Phase::Loading)),
        (460, JobState::Running, Some(Phase::Ready)),
    ] {
        let nodes = phase.map(|phase| node("12.head", &[(phase, 0)])).into_iter().collect();
        let listed = ListResponse { nodes, ..ListResponse::default() };
        (_, memory) = decide(&fleet, &observe(&[job("12.head", state)], &listed, &[], at(second)), &memory, at(second));
    }
    memory
}

#[test]
fn an_unknown_model_has_no_promised_arrival() {
    let (memory, elastic) = (Memory::default(), entry(ELASTIC));
    assert_eq!(announced(&elastic, &memory, &[], &[], 500), (None, "it has no job; one is submitted for this request".into()));
    let waiting = [job("12.head", JobState::Queued)];
    assert_eq!(announced(&elastic, &memory, &waiting, &[], 500), (None, "1 job waits".into()));
    let view = EntryView { entry: &entry(FleetSize::Fixed(0)), names: &[], memory: &memory, jobs: &[], nodes: &[], refusal: "" };
    assert_eq!(expect(&view, at(500)), None);
}

#[test]
fn the_schedulers_estimate_precedes_learned_waits() {
    let (memory, fleet) = (learned(), entry(FleetSize::Fixed(2)));
    let learned = [job("13.head", JobState::Queued)];
    assert_eq!(announced(&fleet, &memory, &learned, &[], 150).0, Some(310_000));
    // The job has waited for longer than any before it.
    assert_eq!(announced(&fleet, &memory, &learned, &[], 500).0, None);
    let comment = "Not Running: Insufficient amount of resource: ngpus";
    let estimated = ScheduledJob { estimated_start: Some(at(520)), comment: comment.into(), ..learned[0].clone() };
    let jobs = [learned[0].clone(), estimated];
    assert_eq!(announced(&fleet, &memory, &jobs, &[], 500), (Some(80_000), format!("2 jobs wait: {comment}")));
    assert_eq!(announced(&fleet, &memory, &[], &[], 500).0, Some(360_000));
}

#[test]
fn a_starting_job_is_expected_before_a_waiting_one() {
    let (memory, fleet) = (learned(), entry(FleetSize::Fixed(2)));
    let jobs = [job("13.head", JobState::Running), job("14.head", JobState::Queued)];
    assert_eq!(announced(&fleet, &memory, &jobs, &[], 410), (Some(50_000), "1 job starts; 1 job waits".into()));
    let mut loading = node("13.head", &[(Phase::Loading, 0)]);
    let progress = agent::Progress { stage: "loading weights".into(), percent: 45, seconds_left: 20 };
    loading.replicas[0].state.as_mut().unwrap().progress = Some(progress);
    let expectation = announced(&fleet, &memory, &jobs, &[loading], 410);
    assert_eq!(expectation, (Some(20_000), "1 job starts: loading weights 45 %; 1 job waits".into()));
    assert_eq!(announced(&fleet, &memory, &jobs, &[node("13.head", &[(Phase::Ready, 0)])], 410).0, Some(0));
}

#[test]
fn an_entry_without_a_job_says_why() {
    let fleet = entry(FleetSize::Fixed(1));
    let (_, submitting) = decide(&fleet, &Observation::default(), &Memory::default(), at(10));
    assert_eq!(announced(&fleet, &submitting, &[], &[], 11).1, "a job is being submitted for it");
    let mut failed = submitting;
    failed.record_refusal(at(12));
    assert_eq!(announced(&fleet, &failed, &[], &[], 12).1, "its last job failed; the next one is submitted in 31 s");
    let names = ["qwen".to_owned()];
    let view = EntryView { entry: &fleet, names: &names, memory: &failed, jobs: &[], nodes: &[], refusal: "qsub: no such queue" };
    assert_eq!(expect(&view, at(12)).unwrap().reason, "the scheduler refused a job: qsub: no such queue");
}

#[test]
fn a_model_name_is_announced_once_by_its_earliest_entry() {
    let model = |names: &[&str], expected_in_ms| ExpectedModel {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        expected_in_ms,
        reason: String::new(),
        ..ExpectedModel::default()
    };
    let announced = announce(vec![model(&["a", "b"], None), model(&["a"], Some(5)), model(&["\n", ""], Some(1))], Vec::new());
    assert_eq!(announced.models, [model(&["a"], Some(5)), model(&["b"], None)]);
    let many = (0..300).map(|number| model(&[&number.to_string()], None)).collect();
    assert_eq!(announce(many, Vec::new()).models.len(), 256);
}

#[test]
fn a_model_named_by_a_path_is_announced_by_its_last_part_too() {
    let fleet = FleetEntry { model: "/models/tiny".into(), ..entry(FleetSize::Fixed(1)) };
    let alias = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let view = EntryView { entry: &fleet, names: &names, memory: &Memory::default(), jobs: &[], nodes: &[], refusal: "" };
        expect(&view, at(12)).unwrap().alias
    };
    assert_eq!(alias(&["/models/tiny"]), "tiny");
    assert_eq!(alias(&["chat"]), "", "of a user's own name");
}
