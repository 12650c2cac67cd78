use super::*;
use crate::tests::{full, plain};

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

#[test]
fn a_slurm_job_ends_at_a_second_or_never() {
    let read_end = |text| read_job(text).map(|reading| reading.ends_at);
    assert_eq!(read_end("1795435202\n"), Ok(Some(at(1_795_435_202))));
    for endless in ["N/A", "NONE\n", "UNLIMITED", "INVALID", "Unknown\n"] {
        assert_eq!(read_end(endless), Ok(None), "{endless}");
    }
    assert_eq!(read_job("1795435202|1795430000|1795430090\n").unwrap().queued, Some(Duration::from_secs(90)));
    assert_eq!(read_job("N/A|1795430000|N/A\n").unwrap().queued, None);
    assert_eq!(read_end("\n"), Err("no job"));
    assert_eq!(read_end("2026-11-23T12:00:02\n"), Err("no time in seconds"));
    assert_eq!(read_end("99999999999999999999\n"), Err("no time in seconds"));
}

#[test]
fn slurms_kill_wait_is_read_from_its_settings() {
    let config = "Configuration data as of 2026-11-23T12:00:02\nInactiveLimit           = 0 sec\nKillOnBadExit           = 0\n\
                  KillWait                = 30 sec\nLaunchParameters        = (null)\n";
    assert_eq!(read_kill_wait(config), Ok(Duration::from_secs(30)));
    assert_eq!(read_kill_wait("KillOnBadExit           = 0\n"), Err("no `KillWait`"));
}

#[test]
fn a_slurm_cluster_is_identified_by_its_name() {
    let config = "CliFilterPlugins        = (null)\nClusterName             = perlmutter\nCommunicationParameters = (null)\n";
    assert_eq!(read_cluster(config), Ok("perlmutter".into()));
    for nameless in ["ClusterName             = (null)\n", "KillWait                = 30 sec\n"] {
        assert_eq!(read_cluster(nameless), Err("no `ClusterName`"), "{nameless}");
    }
}

#[test]
fn a_plain_slurm_job_is_a_script_with_srun() {
    insta::assert_snapshot!(render(&plain()));
}

#[test]
fn a_slurm_array_keeps_setup_options_and_every_word() {
    insta::assert_snapshot!(render(&full("--gpus-per-node=4  --cpus-per-task=16", &["--constraint", "a100|h100"])));
}

/// Output of `squeue` of Slurm 22.05.8: an array of four parts submitted by this crate, a held job
/// and one for later. One part was suspended at the time.
const SQUEUE: &str = "\
12_3|PENDING|4294901752|1795515006|1795515187|1795515367||Resources
14|PENDING|4294901751|1795515006|1795518606|1795518786||BeginTime
13|PENDING|0|1795515006|N/A|N/A||JobHeldUser
12_2|RUNNING|4294901752|1795515006|1795515007|1795515187|n2|None
12_1|SUSPENDED|0|1795515006|1795515007|1795515187|n1|None
";

/// Output of the next two calls for these jobs: part 1 was cancelled, part 2 requeued and held.
const SQUEUE_AT_THE_END: &str = "\
12_1|COMPLETING|4294901750|1795515006|1795515007|1795515010|n1|None
12_2|COMPLETING|0|1795515006|1795515010|1795515190|n2|job requeued in held state
12_2|PENDING|0|1795515014|1795515020|1795515200||job requeued in held state
";

#[test]
fn slurm_jobs_and_parts_have_state_times_host_and_reason() {
    let jobs = read_jobs(SQUEUE).unwrap();
    let seen: Vec<_> = jobs.iter().map(|job| (job.id.as_str(), job.state, job.comment.as_str(), job.host.as_str())).collect();
    let expected = [
        ("12_3", JobState::Queued, "Resources", ""),
        ("14", JobState::Queued, "BeginTime", ""),
        ("13", JobState::Held, "JobHeldUser", ""),
        ("12_2", JobState::Running, "", "n2"),
        ("12_1", JobState::Suspended, "", "n1"),
    ];
    assert_eq!(seen, expected);
    let times = |job: &ScheduledJob| (job.submitted, job.started, job.run_time.map(|run| run.limit.as_secs()), job.estimated_start);
    let submitted = Some(at(1_795_515_006));
    assert_eq!(times(&jobs[0]), (submitted, None, None, Some(at(1_795_515_187))));
    assert_eq!(times(&jobs[2]), (submitted, None, None, None));
    assert_eq!(times(&jobs[3]), (submitted, Some(at(1_795_515_007)), Some(180), None));
}

#[test]
fn ending_and_held_slurm_jobs_are_listed_as_such() {
    let states: Vec<_> = read_jobs(SQUEUE_AT_THE_END).unwrap().into_iter().map(|job| (job.state, job.comment)).collect();
    let held = "job requeued in held state".to_owned();
    assert_eq!(states, [(JobState::Ending, String::new()), (JobState::Ending, held.clone()), (JobState::Held, held)]);
}

#[test]
fn a_slurm_job_that_has_ended_is_not_listed() {
    assert_eq!(read_jobs("\n"), Ok(vec![]));
    for ended in ["CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT"] {
        let text = SQUEUE.replace("RUNNING", ended);
        assert!(read_jobs(&text).unwrap().iter().all(|job| job.id != "12_2"), "{ended}");
    }
}

#[test]
fn a_slurm_job_without_limit_has_no_end() {
    let jobs = read_jobs("7|RUNNING|1|1795514792|1795514792|NONE|n2|down | by root\n").unwrap();
    assert_eq!((jobs[0].run_time, jobs[0].comment.as_str()), (None, "down | by root"));
}

#[test]
fn unexpected_squeue_output_is_an_error() {
    assert_eq!(read_jobs("slurm_load_jobs error: Socket timed out\n"), Err("a job without all its fields"));
    assert_eq!(read_jobs(&SQUEUE.replace("RUNNING", "DREAMING")), Err("a job in an unknown state"));
    assert_eq!(read_jobs(&SQUEUE.replace("1795515367", "2026-11-24T10:16:07")), Err("no time in seconds"));
    assert_eq!(read_jobs(&SQUEUE[..SQUEUE.len() - 40]), Err("a job without all its fields"));
}

#[test]
fn what_sbatch_says_of_an_impossible_job_is_quoted_alone() {
    // Slurm 22.05: `sbatch --test-only --gpus-per-node=8`.
    let words = "allocation failure: Requested node configuration is not available";
    assert_eq!(read_obstacle(words), "Requested node configuration is not available");
    assert_eq!(read_obstacle("sbatch: error: invalid partition specified: gpu"), "invalid partition specified: gpu");
}
