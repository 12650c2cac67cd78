use super::*;

fn healthy() -> HostFacts {
    HostFacts {
        job: None,
        scheduler: Ok(Scheduler::Pbs),
        fleet: Ok("/home/me/.config/hostler/fleet".into()),
        state: Ok("/home/me/.local/state/hostler/fleet".into()),
        other_scheduler: None,
        process_limit: None,
        service: Some(Some(ControllerService::Crontab)),
        obstacle: None,
        router_findings: Vec::new(),
        clock_ahead: Some(0),
        proxy: None,
        no_proxy: String::new(),
        engine: InstalledEngine::Vllm("/soft/vllm/bin/vllm".into()),
        model: Some(Ok(None)),
        run_dir: Ok("/tmp/hostler-1000".into()),
        stage: None,
        router_socket: "/run/user/1000/hostler/router-65535.sock".into(),
        gpus: None,
    }
}

fn page(facts: &HostFacts) -> String {
    examine(facts).iter().flat_map(CheckResult::lines).collect::<Vec<_>>().join("\n")
}

/// Findings that differ from those of a healthy host.
fn unlike_healthy(facts: &HostFacts) -> String {
    let usual = examine(&healthy());
    examine(facts).iter().filter(|finding| !usual.contains(finding)).flat_map(CheckResult::lines).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_healthy_host_has_no_problems() {
    insta::assert_snapshot!(page(&healthy()), @r"
    ok       scheduler  pbs answers
    ok       fleet      its authority is in /home/me/.config/hostler/fleet
    ok       state      /home/me/.local/state/hostler/fleet is yours alone; compute nodes have to see it too
    ok       controller a line of your crontab starts it again on this host
    ok       clock      it agrees with the clock of the state folder's file system
    ok       proxy      none is set
    ok       engine     jobs find /soft/vllm/bin/vllm
    ok       model      it is there
    ok       sockets    an agent's fit into /tmp/hostler-1000
    ok       sockets    the router's fits into /run/user/1000/hostler
    ");
    assert!(examine(&healthy()).iter().all(|finding| finding.verdict == Verdict::Ok));
}

#[test]
fn foreign_fleets_are_problems_and_process_limits_are_notes() {
    let elsewhere = HostFacts { other_scheduler: Some("the fleet in F has its jobs at another scheduler".into()), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&elsewhere), @"problem  state      the fleet in F has its jobs at another scheduler");
    let limited = HostFacts { process_limit: Some("after 30m of CPU time, `ulimit -t`".into()), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&limited), @r#"note     controller this host ends processes of users (after 30m of CPU time, `ulimit -t`); where the controller cannot stay, cluster.controller = "job" has it in a job"#);
}

#[test]
fn a_job_that_no_node_could_run_is_a_problem() {
    let greedy = HostFacts { obstacle: Some("no host has ngpus=8: the most is 4".into()), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&greedy), @r"
    problem  resources  no host has ngpus=8: the most is 4
                        what to do: mend cluster.resources, cluster.queue and cluster.options: such a job would wait for ever
    ");
}

#[test]
fn a_controller_that_nothing_starts_again_is_noted() {
    let alone = HostFacts { service: Some(None), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&alone), @"note     controller nothing starts it again when this host restarts or it is killed: `hostler init --service` does");
    let logged_out = HostFacts { service: Some(Some(ControllerService::Timer { lingers: false })), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&logged_out), @"note     controller a timer of your systemd starts it again while you are logged in; for always, ask the site's support for `loginctl enable-linger`");
}

#[test]
fn missing_scheduler_commands_are_a_problem_only_outside_jobs() {
    let without = HostFacts { scheduler: Err("neither `qsub` nor `sbatch` were found".into()), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&without), @r"
    problem  scheduler  neither `qsub` nor `sbatch` were found
    ");
    let job = Some("pbs job 12.head".to_owned());
    insta::assert_snapshot!(unlike_healthy(&HostFacts { job: job.clone(), ..without }), @r"
    note     scheduler  inside of pbs job 12.head an agent does not know when the job ends: neither `qsub` nor `sbatch` were found
    ");
    insta::assert_snapshot!(unlike_healthy(&HostFacts { job, ..healthy() }), @r"
    ok       scheduler  pbs answers; this is inside of pbs job 12.head
    ");
}

#[test]
fn missing_fleets_and_open_state_folders_are_problems_with_remedies() {
    let fleet = Err("no fleet is set up: `hostler init` makes one".into());
    let state = Err("others may read or change /s (owner 1, mode 755): `chmod 700` it".into());
    insta::assert_snapshot!(unlike_healthy(&HostFacts { fleet, state, ..healthy() }), @r"
    problem  fleet      no fleet is set up: `hostler init` makes one
    problem  state      others may read or change /s (owner 1, mode 755): `chmod 700` it
    ");
}

#[test]
fn what_the_router_of_a_running_fleet_finds_is_a_problem() {
    let found = FleetFinding { kind: "node-lost".into(), evidence: "one node was lost".into(), advice: "look".into() };
    insta::assert_snapshot!(unlike_healthy(&HostFacts { router_findings: vec![found], ..healthy() }), @r"
    problem  fleet      one node was lost
                        what to do: look
    ");
}

#[test]
fn a_clock_off_by_over_a_minute_is_a_problem() {
    for ahead in [60, -60] {
        assert_eq!(unlike_healthy(&HostFacts { clock_ahead: Some(ahead), ..healthy() }), "");
    }
    insta::assert_snapshot!(unlike_healthy(&HostFacts { clock_ahead: Some(412), ..healthy() }), @r"
    problem  clock      this host is 412 s ahead of the state folder's file system
                        what to do: tell the site's support: certificates are refused where clocks differ by 300 s
    ");
    insta::assert_snapshot!(unlike_healthy(&HostFacts { clock_ahead: Some(-61), ..healthy() }), @r"
    problem  clock      this host is 61 s behind the state folder's file system
                        what to do: tell the site's support: certificates are refused where clocks differ by 300 s
    ");
}

#[test]
fn a_proxy_is_a_problem_unless_localhost_bypasses_it() {
    let proxy = Some(("http_proxy", "http://me:secret@proxy:3128".to_owned()));
    let behind = |no_proxy: &str| HostFacts { proxy: proxy.clone(), no_proxy: no_proxy.into(), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&behind("127.0.0.1")), @r#"
    problem  proxy      http_proxy has clients ask proxy:3128 for localhost
                        what to do: `eval "$(hostler env)"` excepts localhost in a shell, as `export no_proxy=localhost,127.0.0.1` does
    "#);
    insta::assert_snapshot!(unlike_healthy(&behind("127.0.0.1,localhost")), @r"
    ok       proxy      http_proxy is set, and localhost excepted
    ");
    assert!(!page(&behind("")).contains("secret"));
}

#[test]
fn missing_vllm_is_a_problem_unless_engines_are_simulated() {
    let engine = InstalledEngine::Missing { program: "vllm".into(), error: "module: command not found".into() };
    insta::assert_snapshot!(unlike_healthy(&HostFacts { engine, ..healthy() }), @r"
    problem  engine     a login shell finds no `vllm` after the lines of cluster.setup (module: command not found)
                        what to do: install it with `pip install vllm`, and let cluster.setup load its module or activate its environment
    ");
    insta::assert_snapshot!(unlike_healthy(&HostFacts { engine: InstalledEngine::Simulated, ..healthy() }), @r"
    ok       engine     simulated engines need nothing
    ");
}

#[test]
fn missing_models_are_problems_and_downloadable_ones_notes() {
    let missing = Err("--model /m: there is no such file or folder".to_owned());
    insta::assert_snapshot!(unlike_healthy(&HostFacts { model: Some(missing), ..healthy() }), @r"
    problem  model      --model /m: there is no such file or folder
    ");
    let unknown = Ok(Some("it is neither a folder nor downloaded: `hf download org/name` first".to_owned()));
    insta::assert_snapshot!(unlike_healthy(&HostFacts { model: Some(unknown), ..healthy() }), @r"
    note     model      it is neither a folder nor downloaded: `hf download org/name` first
    ");
    assert!(!page(&HostFacts { model: None, ..healthy() }).contains("model"));
}

#[test]
fn a_job_without_a_gpu_is_a_problem() {
    let with = |gpus| HostFacts { gpus: Some(gpus), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&with(Err("there is no NVIDIA driver".into()))), @r"
    problem  gpu        none in this job: there is no NVIDIA driver
                        what to do: ask for GPUs in cluster.resources; those of other makers than NVIDIA are not seen
    ");
    insta::assert_snapshot!(unlike_healthy(&with(Ok(vec!["NVIDIA A100".into(), "NVIDIA A100".into()]))), @r"
    ok       gpu        2 × NVIDIA A100
    ");
}

#[test]
fn socket_paths_that_are_too_long_are_problems() {
    let run_dir = Err("the run directory /long is too long by 3 bytes for socket paths".into());
    insta::assert_snapshot!(unlike_healthy(&HostFacts { run_dir, ..healthy() }), @r"
    problem  sockets    the run directory /long is too long by 3 bytes for socket paths
    ");
    let of_length = |length: usize| HostFacts { router_socket: format!("/r/{}", "x".repeat(length - 3)).into(), ..healthy() };
    assert!(!page(&of_length(MAX_PATH_BYTES)).contains("problem"));
    insta::assert_snapshot!(unlike_healthy(&of_length(MAX_PATH_BYTES + 1)), @r"
    problem  sockets    /r/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx is too long for a Unix socket by 1 bytes
                        what to do: set router.operators_socket to a shorter path, in a folder of your own with mode 700
    ");
}

#[test]
fn what_keeps_an_image_from_running_is_a_problem() {
    let engine = InstalledEngine::NoRuntime(vec!["apptainer".into(), "singularity".into()]);
    insta::assert_snapshot!(unlike_healthy(&HostFacts { engine, ..healthy() }), @r"
    problem  engine     a login shell finds no `apptainer`, no `singularity` after the lines of cluster.setup, to run agent.image
                        what to do: let cluster.setup load its module, or name the program with agent.container
    ");
    let refused = || InstalledEngine::Refused("`apptainer` runs nothing in the image vllm.sif: no user namespaces; ask".into());
    insta::assert_snapshot!(unlike_healthy(&HostFacts { engine: refused(), ..healthy() }), @r"
    problem  engine     `apptainer` runs nothing in the image vllm.sif: no user namespaces; ask
                        what to do: login nodes may allow less than compute nodes: ask inside of a job too, as in `qsub -I` or `srun --pty`
    ");
    let in_a_job = HostFacts { engine: refused(), job: Some("pbs 12".into()), ..healthy() };
    assert!(!page(&in_a_job).contains("qsub -I"), "this is a compute node");
    let engine = InstalledEngine::Vllm("vLLM 0.32.0 in vllm.sif, which /usr/bin/apptainer runs".into());
    insta::assert_snapshot!(unlike_healthy(&HostFacts { engine, ..healthy() }), @r"
    ok       engine     jobs find vLLM 0.32.0 in vllm.sif, which /usr/bin/apptainer runs
    ");
}

#[test]
fn a_job_is_told_where_models_are_copied() {
    let staged = HostFacts { stage: Some(Ok("models are copied to /local/scratch, by agent.stage".into())), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&staged), @"ok       stage      models are copied to /local/scratch, by agent.stage");
    let none = HostFacts { stage: Some(Err("no node-local place takes it".into())), ..healthy() };
    insta::assert_snapshot!(unlike_healthy(&none), @"note     stage      no node-local place takes it");
}
