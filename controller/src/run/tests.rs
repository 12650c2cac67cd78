use std::path::PathBuf;

use hostler_cluster::Observation;
use hostler_scheduler::{CommandError, JobState};

use super::*;
use crate::folder::tests::{endpoint, folder};
use crate::observation::tests::{entry, job};
use crate::{ClusterConfig, JobSettings};

#[test]
fn a_controller_steps_every_five_seconds_by_default() {
    assert_eq!(step_interval(|_| None), STEP_INTERVAL);
    for (text, milliseconds) in [("500", 500), ("0", 5000), ("soon", 5000)] {
        assert_eq!(step_interval(|_| Some(text.into())), Duration::from_millis(milliseconds), "{text}");
    }
}

/// A controller whose router never answers.
fn controller(folder: &FleetFolder, endpoint: Endpoint) -> Controller {
    let [authority, program] = ["/nowhere/fleet", "/nowhere/hostler"].map(PathBuf::from);
    let jobs = JobSettings { program, settings_file: None, engine_args: vec![], cluster: ClusterConfig::default() };
    let setup = ControllerSetup {
        folder: folder.clone(),
        jobs,
        scheduler: Scheduler::Pbs,
        endpoint,
        authority,
        predecessor: None,
        began: SystemTime::now(),
        drain_timeout: Duration::from_secs(30),
    };
    Controller::new(setup).unwrap()
}

#[tokio::test]
async fn a_controller_whose_place_is_taken_ends_without_writing() {
    let (_place, folder) = folder();
    let (own, other) = (endpoint("login1"), endpoint("login2"));
    folder
        .change_entries(|entries| {
            entries.push(FleetEntry { model: "m".into(), walltime: MEMORY_INTERVAL * 4, ..removed_entry("chat".into()) });
        })
        .unwrap();
    folder.write_endpoint(&own).unwrap();
    let controller = controller(&folder, own);
    controller.setup.check_place().unwrap();
    folder.write_endpoint(&other).unwrap();
    let error = controller.setup.check_place().unwrap_err();
    assert!(error.is_final() && error.to_string().contains("on login2"), "{error}");
    controller.run(Shutdown::new()).await;
    assert_eq!((folder.status().unwrap(), folder.endpoint().unwrap()), (None, Some(other)));
    assert!(!folder.is_controller_gone().unwrap(), "the other one goes on");
}

#[tokio::test]
async fn a_controller_with_a_lost_endpoint_ends() {
    let (_place, folder) = folder();
    controller(&folder, endpoint("login1")).run(Shutdown::new()).await;
    assert_eq!(folder.status().unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn the_heartbeat_goes_on_whatever_a_step_waits_for() {
    let (_place, folder) = folder();
    let own = endpoint("login1");
    folder.write_endpoint(&own).unwrap();
    folder.retire_endpoint(&own).unwrap();
    assert!(folder.is_controller_gone().unwrap());
    tokio::time::timeout(HEARTBEAT_INTERVAL * 2, repeat_heartbeat(&folder, &own, &Shutdown::new())).await.unwrap_err();
    assert!(!folder.is_controller_gone().unwrap());
}

#[test]
fn only_a_failed_submission_counts_as_refused() {
    let program = || PathBuf::from("/usr/bin/qsub");
    assert!(is_refusal(&CommandError::Failed { program: program(), status: "exit status: 1".into(), words: "no such queue".into() }));
    assert!(!is_refusal(&CommandError::Late { program: program(), deadline: CALL_TIMEOUT }));
    assert!(!is_refusal(&CommandError::Unreadable { program: program(), what: "no id of a job", words: "nothing".into() }));
}

#[tokio::test]
async fn a_job_first_listed_is_remembered_at_once() {
    let (_place, folder) = folder();
    let own = endpoint("login1");
    folder.write_endpoint(&own).unwrap();
    let mut controller = controller(&folder, own);
    let entry = entry(FleetSize::Fixed(1));
    let none = ListResponse::default();
    let form = job_form(&controller.setup.jobs, &entry, &folder, Scheduler::Pbs);
    let observation = Observation { form, ..observe(&[], &none, &[], SystemTime::now()) };
    let (actions, memory) = decide(&entry, &observation, &Memory::default(), SystemTime::now());
    assert_eq!(actions, [Action::Submit { parts: 1 }]);
    let written = Some(Instant::now());
    let mut record = EntryRecord { memory, written, refusal: String::new(), status: None, expected: None, node_use: None };
    // Otherwise a successor would wait for this job, even if it has ended meanwhile.
    controller.act(&entry, &mut record, &[job("11.head", JobState::Queued)], &none).await.unwrap();
    assert_eq!(folder.memory(&entry.name).unwrap(), Some(record.memory));
}

#[tokio::test]
async fn settings_that_are_written_count_in_the_next_step() {
    let (_place, folder) = folder();
    let mut controller = controller(&folder, endpoint("login1"));
    let entry = FleetEntry { model: "m".into(), ..removed_entry("chat".into()) };
    let form = |controller: &Controller| job_form(&controller.setup.jobs, &entry, &folder, Scheduler::Pbs);
    let before = controller.setup.jobs.clone();
    folder.change_entries(|entries| entries.push(FleetEntry { walltime: MEMORY_INTERVAL * 4, ..entry.clone() })).unwrap();
    controller.setup.adopt_job_settings(folder.fleet_file().unwrap().jobs);
    assert_eq!(controller.setup.jobs, before, "nobody has said how");
    let cluster = ClusterConfig { account: "right".into(), ..ClusterConfig::default() };
    let right = JobSettings { cluster, ..before.clone() };
    let former = form(&controller);
    for expected in [false, false] {
        assert_eq!(folder.change_wanted(right.clone(), |entries| entries.len()).unwrap(), (1, expected));
        controller.setup.adopt_job_settings(folder.fleet_file().unwrap().jobs);
        assert_eq!(controller.setup.jobs, right);
    }
    assert_ne!(form(&controller), former);
    assert!(folder.change_wanted(before, |_| ()).unwrap().1);
}
