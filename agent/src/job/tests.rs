use super::*;

fn detect(variables: &[(&str, &str)]) -> Option<Job> {
    Job::detect(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
}

#[test]
fn the_environment_names_job_run_and_array_index() {
    let facts = |variables: &[(&str, &str)]| detect(variables).map(|job| (job.scheduler.as_str(), job.id, job.array_index, job.run));
    assert_eq!(facts(&[]), None);
    assert_eq!(facts(&[("PBS_NODEFILE", "/f"), ("PBS_JOBID", "")]), None);
    assert_eq!(facts(&[("PBS_JOBID", "12.head")]), Some(("pbs", "12.head".into(), None, 1)));
    let part = [("PBS_JOBID", "19[3].head"), ("PBS_ARRAY_INDEX", "3"), ("PBS_ARRAY_ID", "19[].head")];
    assert_eq!(facts(&part), Some(("pbs", "19[3].head".into(), Some(3), 1)));
    assert_eq!(facts(&[("SLURM_JOB_ID", "4711"), ("SLURM_RESTART_COUNT", "2")]), Some(("slurm", "4711".into(), None, 3)));
    let part = [("SLURM_JOB_ID", "4714"), ("SLURM_ARRAY_JOB_ID", "4711"), ("SLURM_ARRAY_TASK_ID", "3")];
    assert_eq!(facts(&part), Some(("slurm", "4711_3".into(), Some(3), 1)));
}

#[test]
fn node_names_differ_between_jobs_and_array_parts_only() {
    let name = |variables: &[(&str, &str)]| detect(variables).unwrap().node_name("x3001c0s1b0n0");
    let names = [
        name(&[("PBS_JOBID", "12.head")]),
        name(&[("PBS_JOBID", "19[3].head"), ("PBS_ARRAY_INDEX", "3")]),
        name(&[("PBS_JOBID", "19[4].head"), ("PBS_ARRAY_INDEX", "4")]),
        name(&[("SLURM_JOB_ID", "4711")]),
        name(&[("SLURM_JOB_ID", "4714"), ("SLURM_ARRAY_JOB_ID", "4711"), ("SLURM_ARRAY_TASK_ID", "3")]),
    ];
    let expected = ["x3001c0s1b0n0.12", "x3001c0s1b0n0.19-3", "x3001c0s1b0n0.19-4", "x3001c0s1b0n0.4711", "x3001c0s1b0n0.4711-3"];
    assert_eq!(names, expected);
    assert!(names.iter().all(|name| hostler_tls::check_name(name).is_ok()));
    assert_eq!(name(&[("SLURM_JOB_ID", "4711"), ("SLURM_RESTART_COUNT", "1")]), names[3]);
}

#[test]
fn the_default_grace_is_shorter_than_the_schedulers() {
    assert_eq!(default_grace(Scheduler::Pbs), Duration::from_secs(6));
    assert_eq!(default_grace(Scheduler::Slurm), Duration::from_secs(25));
}

#[test]
fn a_join_token_names_the_whole_array_as_its_job() {
    let of = |given: &[(&str, &str)]| {
        name_for_token(|name| given.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    };
    assert_eq!(of(&[]), "");
    assert_eq!(of(&[("PBS_JOBID", "12[3].host")]), "12[3].host");
    assert_eq!(of(&[("SLURM_JOB_ID", "9"), ("SLURM_ARRAY_JOB_ID", "7")]), "7");
}
