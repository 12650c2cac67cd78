use std::io::{BufRead, BufReader};
use std::process::Command;

use proptest::prelude::*;

use super::*;

/// A plain job without any optional part.
pub(crate) fn plain() -> Submission {
    Submission {
        hosts: 1,
        name: "hostler-chat".into(),
        parts: 1,
        walltime: Duration::from_secs(7200),
        account: String::new(),
        queue: String::new(),
        resources: String::new(),
        after: None,
        options: Vec::new(),
        log_dir: "/home/anna/.local/state/hostler/jobs".into(),
        script_dir: "/home/anna/.local/state/hostler/scripts/chat".into(),
        setup: Vec::new(),
        program: ["/home/anna/bin/hostler", "agent", "--router", "login1:8001"].map(str::to_owned).to_vec(),
        drain_lead: Duration::ZERO,
    }
}

/// An array with every option, in words that a shell would change.
pub(crate) fn full(resources: &str, options: &[&str]) -> Submission {
    Submission {
        parts: 4,
        walltime: Duration::from_millis(90_061_500),
        account: "climate".into(),
        queue: "gpu".into(),
        resources: resources.into(),
        after: None,
        options: options.iter().map(|word| (*word).to_owned()).collect(),
        log_dir: "/lus/anna's 100%/jobs/".into(),
        script_dir: "/lus/anna's 100%/scripts".into(),
        setup: ["module load cuda/12.8 # for vLLM", "export HF_HOME=\"$HOME/models\""].map(str::to_owned).to_vec(),
        program: ["/home/anna/bin/hostler", "agent", "--model", "Qwen/Qwen3-8B", "--node", "", "--engine-arg", "it's $HOME;"]
            .map(str::to_owned)
            .to_vec(),
        drain_lead: Duration::from_secs(120),
        ..plain()
    }
}

#[test]
fn a_schedulers_name_is_spelled_the_same_everywhere() {
    for scheduler in [Scheduler::Pbs, Scheduler::Slurm] {
        assert_eq!(scheduler.as_str().parse(), Ok(scheduler));
        assert_eq!(serde_json::to_value(scheduler).unwrap(), scheduler.as_str());
        assert_eq!(serde_json::from_value::<Scheduler>(scheduler.as_str().into()).unwrap(), scheduler);
    }
    let error = "lsf".parse::<Scheduler>().unwrap_err();
    assert_eq!(error.to_string(), "there is no scheduler `lsf`: use `pbs` or `slurm`");
}

#[test]
fn the_scheduler_is_chosen_by_its_installed_commands() {
    assert_eq!(Scheduler::choose(true, false), Ok(Scheduler::Pbs));
    assert_eq!(Scheduler::choose(false, true), Ok(Scheduler::Slurm));
    assert_eq!(Scheduler::choose(true, true), Err(NoScheduler::Ambiguous));
    let absent = Scheduler::choose(false, false).unwrap_err().to_string();
    assert!(absent.contains("neither `qsub` and `qstat` nor `sbatch` and `squeue`") && absent.contains("/opt/pbs/bin"), "{absent}");
}

#[test]
fn scheduler_identities_differ_only_by_kind_or_name() {
    let identity = |kind, name: &str| SchedulerIdentity { kind, name: Some(name.to_owned()).filter(|name| !name.is_empty()) };
    let head = identity(Scheduler::Pbs, "head");
    for same in ["head", "head.example.org", ""] {
        let other = identity(Scheduler::Pbs, same);
        assert!(head.may_be(&other) && other.may_be(&head), "{same}");
    }
    for other in [identity(Scheduler::Pbs, "head2"), identity(Scheduler::Pbs, "other"), identity(Scheduler::Slurm, "head")] {
        assert!(!head.may_be(&other) && !other.may_be(&head), "{other}");
    }
    let (one, other) = (identity(Scheduler::Pbs, "pbs.polaris.org"), identity(Scheduler::Pbs, "pbs.aurora.org"));
    assert!(!one.may_be(&other));
    assert_eq!([one.to_string(), identity(Scheduler::Slurm, "").to_string()], ["pbs pbs.polaris.org", "slurm"]);
}

#[test]
fn a_job_id_is_the_last_printed_line() {
    assert_eq!(read_id("12.head\n"), Ok("12.head".into()));
    assert_eq!(read_id("12[].head\n"), Ok("12[].head".into()));
    assert_eq!(read_id("4711;perlmutter\n"), Ok("4711".into()));
    assert_eq!(read_id("Welcome to Polaris\n\n  12.head \n\n"), Ok("12.head".into()));
    for other in ["", "\n", "Submitted batch job 4711", "12 jobs"] {
        assert_eq!(read_id(other), Err("no id of a job"), "{other}");
    }
}

#[test]
fn a_walltime_is_never_shorter_than_asked_for() {
    let formatted = |milliseconds| format_walltime(Duration::from_millis(milliseconds));
    assert_eq!([formatted(59_000), formatted(59_001), formatted(360_000_000)], ["00:00:59", "00:01:00", "100:00:00"]);
}

#[test]
fn setup_lines_never_appear_on_a_command_line() {
    let submission = Submission { setup: vec!["export HF_TOKEN=hf_secret".into()], ..plain() };
    for scheduler in [Scheduler::Pbs, Scheduler::Slurm] {
        let rendered = scheduler.render(&submission);
        assert!(rendered.script.contains("hf_secret"), "{rendered}");
        assert!(!rendered.arguments.iter().any(|word| word.contains("hf_secret")), "{rendered}");
    }
}

#[test]
fn a_changed_setup_gets_a_new_script_file() {
    let file = |line: &str| Scheduler::Pbs.render(&Submission { setup: vec![line.into()], ..plain() }).script_file.unwrap();
    assert_eq!(file("module load cuda/12"), file("module load cuda/12"));
    assert_ne!(file("module load cuda/12"), file("module load cuda/13"));
}

/// Words of a command line as a shell parses them.
fn words_in_shell(line: &str) -> Vec<String> {
    let output = Command::new("/bin/bash").args(["-c", line]).output().unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
    let mut words: Vec<String> = String::from_utf8(output.stdout).unwrap().split('\0').map(str::to_owned).collect();
    assert_eq!(words.pop().as_deref(), Some(""));
    words
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_argument_reaches_the_program_unchanged(arguments in prop::collection::vec("[^\0]*", 1..5), setup in "[a-z #]{0,8}") {
        let mut program = vec!["/usr/bin/printf".to_owned(), "%s\\0".to_owned()];
        program.extend(arguments.clone());
        let submission = Submission { program, setup: vec![format!(": {setup}")], ..plain() };
        let pbs = Scheduler::Pbs.render(&submission);
        prop_assert_eq!(&words_in_shell(&pbs.script), &arguments);
        let slurm = Scheduler::Slurm.render(&submission);
        prop_assert_eq!(&words_in_shell(&format!("srun() {{ shift; \"$@\"; }}\n{}", slurm.script)), &arguments);
    }

    #[test]
    fn a_shown_submission_runs_as_printed(option in "[^\0]*", line in "(END_OF_JOB_?|[^\0]*)") {
        let submission = Submission { options: vec![option], setup: vec![line], ..plain() };
        for scheduler in [Scheduler::Pbs, Scheduler::Slurm] {
            let rendered = scheduler.render(&submission);
            let (mut expected, input) = match &rendered.script_file {
                Some(file) => (["-D", "-m", "600", "/dev/stdin", file.to_str().unwrap(), &rendered.script].map(str::to_owned).to_vec(), ""),
                None => (Vec::new(), rendered.script.as_str()),
            };
            expected.extend(rendered.arguments.iter().map(String::as_str).chain([input]).map(str::to_owned));
            let stand_in = |program| format!("{program}() {{ printf '%s\\0' \"$@\"; cat; printf '\\0'; }}\n");
            let nothing = if input.is_empty() { " </dev/null" } else { "" };
            let shown = format!("{}{}{rendered}{nothing}\n", stand_in("install"), stand_in(rendered.program));
            prop_assert_eq!(words_in_shell(&shown), expected);
        }
    }
}

#[test]
fn a_following_job_waits_for_any_end_of_its_predecessor() {
    let submission = Submission { after: Some("12.head".into()), ..plain() };
    let words = |scheduler: Scheduler| scheduler.render(&submission).arguments.join(" ");
    assert!(words(Scheduler::Pbs).contains("-W depend=afterany:12.head"), "{}", words(Scheduler::Pbs));
    assert!(words(Scheduler::Slurm).contains("--dependency=afterany:12.head"), "{}", words(Scheduler::Slurm));
}

#[test]
fn a_pbs_job_id_may_have_the_servers_full_name() {
    assert!(is_same_job("12.head", "12.head.example.org") && is_same_job("4711", "4711"));
    assert!(!is_same_job("12.head", "13.head") && !is_same_job("4711", "4711_1") && !is_same_job("1", "12"));
}

#[test]
fn a_job_of_several_hosts_has_them_for_itself_and_starts_on_each() {
    let several = Submission { hosts: 2, ..full("1:ncpus=16:ngpus=4", &[]) };
    let pbs = Scheduler::Pbs.render(&several);
    assert!(pbs.arguments.join(" ").contains("-l select=2:ncpus=16:ngpus=4 -l place=scatter:excl"), "{pbs}");
    assert!(pbs.script.contains("pbsdsh"), "{}", pbs.script);
    let chunks = |resources: &str| {
        let rendered = Scheduler::Pbs.render(&Submission { hosts: 3, resources: resources.into(), ..plain() });
        rendered.arguments.iter().find_map(|word| word.strip_prefix("select=").map(str::to_owned)).unwrap()
    };
    assert_eq!(["", "ncpus=8", "1:ncpus=8", "1"].map(chunks), ["3", "3:ncpus=8", "3:ncpus=8", "3"]);
    let slurm = Scheduler::Slurm.render(&Submission { hosts: 2, ..plain() });
    assert!(slurm.arguments.join(" ").contains("--nodes=2 --ntasks-per-node=1 --exclusive"), "{slurm}");
}

#[test]
fn a_slurm_job_of_several_hosts_ends_with_the_agent_of_any() {
    let ends_with_any = |hosts| Scheduler::Slurm.render(&Submission { hosts, ..plain() }).script.contains(" --kill-on-bad-exit=1 ");
    assert!(ends_with_any(2) && !ends_with_any(1));
}

#[test]
fn the_script_of_several_pbs_hosts_runs_once_on_each_and_ends_with_any() {
    let folder = tempfile::tempdir().unwrap();
    let (script, seen, hosts) = (folder.path().join("job.sh"), folder.path().join("seen"), folder.path().join("hosts"));
    assert!(Command::new("mkfifo").arg(&seen).status().unwrap().success());
    // Open for both, so that the end of one writer is not the end of the file.
    let pipe = std::fs::OpenOptions::new().read(true).write(true).open(&seen).unwrap();
    // What `select=3:mpiprocs=2` gives.
    std::fs::write(&hosts, "n1\nn1\nn2\nn2\nn3\nn3\n").unwrap();
    // Stands in for PBS: it runs the command without the job's variables, and says for which line.
    let pbsdsh = folder.path().join("pbsdsh");
    std::fs::write(&pbsdsh, "#!/bin/sh\nline=$2; shift 3; exec env -i LINE=\"$line\" \"$@\"\n").unwrap();
    std::fs::set_permissions(&pbsdsh, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    // Tasks end once the first host's program waits for its end.
    let program = r#"trap 'echo ended >> "$0"; exit' TERM
        echo "$USER on line ${LINE:-0}" >> "$0"
        [ -n "$LINE" ] && until [ -e "$0.waits" ]; do sleep 0.01; done && exit
        touch "$0.waits"; while :; do sleep 0.01; done"#;
    let program = ["/bin/sh", "-c", program].map(str::to_owned).into_iter().chain([seen.display().to_string()]).collect();
    let setup = vec!["set -eu".to_owned(), format!("PATH={}:$PATH", folder.path().display())];
    std::fs::write(&script, Scheduler::Pbs.render(&Submission { hosts: 3, program, setup, ..plain() }).script).unwrap();
    let mut job = Command::new("/bin/bash");
    job.arg("-l").arg(&script).env("PBS_NODEFILE", &hosts).envs([("USER", "anna"), ("LOGNAME", "anna"), ("SHELL", "/bin/bash")]);
    assert!(job.status().unwrap().success());
    let mut lines: Vec<String> = BufReader::new(pipe).lines().take(4).map(Result::unwrap).collect();
    lines.sort();
    assert_eq!(lines, ["anna on line 0", "anna on line 2", "anna on line 4", "ended"]);
}
