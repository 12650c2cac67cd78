use hostler_cluster::FleetSize;
use hostler_scheduler::Scheduler;

use super::*;

fn entry(walltime: u64, engine_args: &[&str]) -> FleetEntry {
    FleetEntry {
        nodes_per_replica: 1,
        queue: String::new(),
        account: String::new(),
        resources: String::new(),
        budget: hostler_cluster::Budget::default(),
        asked: 0,
        name: "qwen3-8b".into(),
        model: "Qwen/Qwen3-8B".into(),
        size: FleetSize::Fixed(2),
        walltime: Duration::from_secs(walltime),
        engine_args: engine_args.iter().map(|word| (*word).to_owned()).collect(),
    }
}

/// Submission of an entry, with the fleet's folder at `/home/anna/fleet`.
fn rendered(scheduler: Scheduler, entry: &FleetEntry, parts: u32, config: &ClusterConfig) -> String {
    let (place, folder) = crate::folder::tests::folder();
    let agent = JobProgram {
        program: Path::new("/home/anna/.local/bin/hostler"),
        config: Some(Path::new("/home/anna/.config/hostler/hostler.toml")),
    };
    let rendered = scheduler.render(&build_submission(entry, parts, config, &folder, &agent));
    let shown = rendered.to_string().replace(&folder.job_name(&entry.name), "hostler-qwen3-8b-ab12");
    let shown = shown.replace(&place.path().display().to_string(), "/home/anna");
    // The digest depends on the folder, which differs each time.
    let digest = rendered.script_file.as_deref().and_then(Path::file_stem).and_then(|stem| stem.to_str());
    digest.map_or(shown.clone(), |digest| shown.replace(digest, "DIGEST"))
}

fn site(resources: &str, options: &[&str]) -> ClusterConfig {
    ClusterConfig {
        account: "climate".into(),
        queue: "debug".into(),
        resources: resources.into(),
        options: options.iter().map(|word| (*word).to_owned()).collect(),
        setup: vec!["module load conda".into(), ". ~/vllm/bin/activate".into()],
        ..ClusterConfig::default()
    }
}

#[test]
fn pbs_jobs_are_a_login_shell_that_becomes_the_agent() {
    let site = site("1:ncpus=64:ngpus=4", &["-l", "filesystems=home:eagle"]);
    let shown = rendered(Scheduler::Pbs, &entry(7200, &["--max-model-len", "16384"]), 2, &site);
    insta::assert_snapshot!(shown);
}

#[test]
fn slurm_jobs_are_a_script_whose_step_is_the_agent() {
    let site = site("--gpus-per-node=4 --cpus-per-task=64", &["--constraint=gpu"]);
    let shown = rendered(Scheduler::Slurm, &entry(7200, &["--max-model-len", "16384"]), 1, &site);
    insta::assert_snapshot!(shown);
}

#[test]
fn short_slurm_jobs_get_no_early_leave_signal() {
    let shown = |walltime| rendered(Scheduler::Slurm, &entry(walltime, &[]), 1, &ClusterConfig::default());
    assert!(shown(400).contains("--signal=USR1@40"), "{}", shown(400));
    assert!(!shown(399).contains("--signal"), "{}", shown(399));
}

#[test]
fn an_agent_without_settings_gets_no_config_flag() {
    let (_place, folder) = crate::folder::tests::folder();
    let agent = JobProgram { program: Path::new("/bin/hostler"), config: None };
    let submission = build_submission(&entry(7200, &[]), 1, &ClusterConfig::default(), &folder, &agent);
    assert_eq!(submission.name, folder.job_name("qwen3-8b"));
    assert!(!submission.program.iter().any(|word| word == "--config" || word == "--"), "{:?}", submission.program);
}

#[test]
fn the_controllers_job_has_its_own_options_and_name() {
    let (place, folder) = crate::folder::tests::folder();
    let config = ClusterConfig { controller_options: ["-q", "small"].map(str::to_owned).to_vec(), ..site("1:ngpus=4", &["-l", "x=y"]) };
    let program = JobProgram { program: Path::new("/bin/hostler"), config: Some(Path::new("/home/anna/hostler.toml")) };
    let submission = build_controller_submission(&config, &folder, &program, Some("12.head"));
    let rendered = Scheduler::Pbs.render(&submission);
    let shown = rendered.to_string().replace(&submission.name, "NAME").replace(&place.path().display().to_string(), "/home/anna");
    let digest = rendered.script_file.as_deref().and_then(Path::file_stem).and_then(|stem| stem.to_str()).unwrap();
    insta::assert_snapshot!(shown.replace(digest, "DIGEST"), @r"
    install -D -m 600 /dev/stdin /home/anna/fleet/controller/DIGEST.sh <<'END_OF_JOB'
    #!/bin/bash -l
    module load conda
    . ~/vllm/bin/activate
    exec /bin/hostler controller --job --config /home/anna/hostler.toml
    END_OF_JOB
    qsub -f -N NAME -r y -j oe -o /home/anna/fleet/jobs/ -l 'walltime=24:00:00' -A climate -W 'depend=afterany:12.head' -q small -- /bin/bash -l /home/anna/fleet/controller/DIGEST.sh
    ");
    assert!(!submission.name.starts_with("hostler-"), "{}", submission.name);
}

#[test]
fn the_queue_account_and_resources_of_an_entry_come_before_the_sites() {
    let own = FleetEntry { queue: "preemptable".into(), resources: "1:ngpus=8".into(), ..entry(3600, &[]) };
    let shown = rendered(Scheduler::Pbs, &own, 1, &site("1:ngpus=4", &[]));
    assert!(shown.contains("-q preemptable") && shown.contains("-A climate") && shown.contains("select=1:ngpus=8"), "{shown}");
    assert!(!shown.contains("debug") && !shown.contains("ngpus=4"), "{shown}");
    let charged = FleetEntry { account: "ocean".into(), ..entry(3600, &[]) };
    assert!(rendered(Scheduler::Slurm, &charged, 1, &site("", &[])).contains("ocean"));
}
