//! Keepers as they run under an agent.
//!
//! This test program plays the keeper, so the keepers are real and in their own processes.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use rustix::fs::{FlockOperation, flock};

use super::*;

/// Writes a program into this directory that is a keeper like `hostler keeper`.
pub(crate) fn program(directory: &Path) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    // The test harness prints its own line before each test, which must not look like the engine's.
    let script = format!(
        "#!/bin/sh\nexec 3>&1 >/dev/null\nexec '{}' --ignored --exact --nocapture --test-threads 1 keeper::tests::this_binary_plays_the_keeper -- \"$@\"\n",
        tests.display()
    );
    write_program(directory.join("keeper"), &script)
}

fn write_program(path: PathBuf, script: &str) -> PathBuf {
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    path
}

#[test]
#[ignore = "a part that other tests have this program play"]
fn this_binary_plays_the_keeper() {
    let arguments: Vec<OsString> = std::env::args_os().skip_while(|argument| argument != "keeper").skip(1).collect();
    let output = std::fs::File::options().write(true).open("/proc/self/fd/3").unwrap();
    rustix::stdio::dup2_stdout(&output).unwrap();
    drop(output);
    let _ = run_subcommand(&arguments);
}

/// A keeper and its engine, which must end however the test does.
struct Kept {
    /// Connection to the keeper; `None` once the agent is gone.
    connection: Option<(KeeperClient, KeeperNotices)>,
    directory: PathBuf,
    output: Vec<u8>,
    _parent: tempfile::TempDir,
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = crate::process::orphans::end_orphans(&self.directory);
    }
}

fn order(parent: &Path, script: &str) -> wire::LaunchSpec {
    let directory = parent.join("e0");
    crate::vllm::directory::prepare(&directory).unwrap();
    let process = wire::ProcessSpec {
        keeper: program(parent).into(),
        container: Vec::new(),
        program: "/bin/sh".into(),
        arguments: vec!["-c".into(), script.into()],
        set: vec![("VLLM_RPC_BASE_PATH".into(), directory.clone().into()), ("NAME".into(), "value".into())],
        unset: vec!["HOME".into()],
        directory: directory.into(),
    };
    wire::LaunchSpec {
        process,
        forks: false,
        log: parent.join("e0.log").into(),
        wait_seconds: None,
        cpus: Vec::new(),
        file_pool: None,
        life: wire::LifeRecord { node: "n0".to_owned(), index: 0, fingerprint: "f".to_owned(), epoch: 7, lives: 3, ready_in_ms: None },
    }
}

impl Kept {
    fn start(script: &str) -> Self {
        Self::start_with(script, |_| {})
    }

    fn start_with(script: &str, change: impl FnOnce(&mut wire::LaunchSpec)) -> Self {
        let parent = tempfile::tempdir().unwrap();
        let mut order = order(parent.path(), script);
        change(&mut order);
        let directory = PathBuf::from(&order.process.directory);
        let connection = Some(start(&PathBuf::from(&order.process.keeper).into(), order).unwrap());
        Self { connection, directory, output: Vec::new(), _parent: parent }
    }

    fn say(&self, request: &wire::KeeperRequest) {
        self.connection.as_ref().unwrap().0.send(request);
    }

    async fn next(&mut self) -> Option<wire::KeeperFrame> {
        let notices = &mut self.connection.as_mut().unwrap().1;
        tokio::time::timeout(Duration::from_secs(20), notices.next()).await.expect("the keeper says nothing").unwrap()
    }

    /// Next notice besides output.
    async fn next_notice(&mut self) -> Option<wire::KeeperNotice> {
        loop {
            match self.next().await? {
                wire::KeeperFrame::Output(output) => self.output.extend_from_slice(&output),
                wire::KeeperFrame::Notice(notice) => return Some(notice),
            }
        }
    }

    async fn started(&mut self) -> crate::process::LeaderProcess {
        assert_eq!(self.next_notice().await, Some(wire::KeeperNotice::Hello { protocol: wire::PROTOCOL, running: None }));
        match self.next_notice().await {
            Some(wire::KeeperNotice::Started(leader)) => leader,
            other => panic!("{other:?}"),
        }
    }

    async fn printed(&mut self, line: &str) {
        while !String::from_utf8_lossy(&self.output).lines().any(|printed| printed == line) {
            match self.next().await {
                Some(wire::KeeperFrame::Output(output)) => self.output.extend_from_slice(&output),
                Some(_) => {}
                None => panic!("the keeper is gone; printed was {}", String::from_utf8_lossy(&self.output)),
            }
        }
    }

    fn processes(&self) -> Vec<i32> {
        crate::process::orphans::orphans(&self.directory)
    }

    async fn until_nothing_is_left(&self) {
        let waiting = async {
            while !self.processes().is_empty() || !crate::process::orphans::keepers_of(&self.directory).is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap_or_else(|_| panic!("{:?} are left", self.processes()));
    }
}

/// Children that ignore SIGTERM, one of which left its group, its session and its parent.
const SPREAD: &str = "trap '' TERM; sleep 600 & (setsid sleep 600 &) ; sleep 0.05; echo up; wait; wait";

#[tokio::test]
async fn output_and_exit_are_passed_on_and_logged() {
    let mut kept = Kept::start("echo \"home=$HOME name=$NAME\" >&2; printf last; exit 3");
    kept.started().await;
    let exited = kept.next_notice().await;
    assert_eq!(exited, Some(wire::KeeperNotice::Exited(3 << 8)));
    kept.say(&wire::KeeperRequest::Kill);
    assert_eq!(kept.next_notice().await, Some(wire::KeeperNotice::Empty));
    assert_eq!(kept.next_notice().await, None, "a keeper without an engine ends");
    assert_eq!(String::from_utf8_lossy(&kept.output), "home= name=value\nlast");
    let log = std::fs::read_to_string(kept.directory.with_extension("log")).unwrap();
    assert_eq!(log, "hostler: life 7 of this engine begins\nhome= name=value\nlast");
}

#[tokio::test]
async fn an_engine_inherits_no_files_or_variables_of_its_keeper() {
    let mut kept = Kept::start_with("ls -l /proc/self/fd; env; echo done", |order| order.wait_seconds = Some(600));
    kept.started().await;
    kept.printed("done").await;
    let text = String::from_utf8_lossy(&kept.output).into_owned();
    assert!(text.contains("0 -> /dev/null") && text.contains("2 -> pipe:"), "{text}");
    for leaked in ["socket:", "eventpoll", "e0.log", crate::process::KEEPER_OF, ALLOCATOR_SETTING.0] {
        assert!(!text.contains(leaked), "{leaked} in {text}");
    }
}

#[tokio::test]
async fn a_kill_reaches_processes_outside_the_group_and_the_session() {
    let mut kept = Kept::start(SPREAD);
    let leader = kept.started().await;
    kept.printed("up").await;
    assert_eq!(kept.processes().len(), 3);
    let stray =
        kept.processes().into_iter().filter_map(crate::process::table::ProcessStat::read).any(|process| process.group != leader.pid);
    assert!(stray, "no process has left the group");
    kept.say(&wire::KeeperRequest::Kill);
    while kept.next_notice().await != Some(wire::KeeperNotice::Empty) {}
    assert_eq!(kept.processes(), Vec::<i32>::new(), "told empty with processes left");
}

#[tokio::test]
async fn keeper_and_engine_have_a_session_without_the_agent() {
    let mut kept = Kept::start("exec sleep 600");
    let leader = kept.started().await;
    let session = |pid| crate::process::table::ProcessStat::read(pid).unwrap().session;
    let keepers = crate::process::orphans::keepers_of(&kept.directory);
    assert_eq!(keepers.len(), 1);
    assert_eq!((session(leader.pid), session(keepers[0])), (keepers[0], keepers[0]));
    assert_ne!(session(std::process::id().cast_signed()), keepers[0]);
}

#[tokio::test]
async fn an_engines_session_is_as_nice_as_its_agent() {
    let niceness = (getpriority_process(None).unwrap() + 7).min(19);
    let mut kept = Kept::start_with("exec sleep 600", |order| {
        let keeper = PathBuf::from(&order.process.keeper);
        let script = format!("#!/bin/sh\nexec nice -n 7 '{}' \"$@\"\n", keeper.display());
        order.process.keeper = write_program(keeper.with_file_name("nice-keeper"), &script).into();
    });
    let leader = kept.started().await;
    let group = std::fs::read_to_string(format!("/proc/{}/autogroup", leader.pid)).unwrap_or_default();
    if group.is_empty() {
        eprintln!("skipped: this kernel makes no scheduling groups of sessions");
        return;
    }
    assert!(group.ends_with(&format!(" nice {niceness}\n")), "{group}");
}

#[tokio::test]
async fn files_of_an_engine_whose_agent_is_gone_are_removed_unless_another_agent_has_them() {
    for is_shared in [false, true] {
        let parent = tempfile::tempdir().unwrap();
        let pool = parent.path().join("hostler-kv-0");
        std::fs::create_dir_all(pool.join("0.33.0/model")).unwrap();
        let lock = std::fs::File::create(parent.path().join("hostler-kv-0.lock")).unwrap();
        flock(&lock, if is_shared { FlockOperation::LockShared } else { FlockOperation::Unlock }).unwrap();
        let mut kept = Kept::start_with("exec sleep 600", |order| order.file_pool = Some(pool.clone().into()));
        kept.started().await;
        kept.connection = None;
        kept.until_nothing_is_left().await;
        assert_eq!(pool.exists(), is_shared);
    }
}

#[tokio::test]
async fn no_process_is_left_when_the_agent_is_gone() {
    let mut kept = Kept::start(SPREAD);
    kept.started().await;
    kept.printed("up").await;
    // The connection ends, as when the kernel ends the agent.
    kept.connection = None;
    kept.until_nothing_is_left().await;
}

#[tokio::test]
async fn sigterm_goes_to_the_first_process_alone() {
    let mut kept = Kept::start("trap 'echo asked; exit 0' TERM; (trap '' TERM; exec sleep 600) & echo up; wait; wait");
    kept.started().await;
    kept.printed("up").await;
    kept.say(&wire::KeeperRequest::Terminate);
    assert_eq!(kept.next_notice().await, Some(wire::KeeperNotice::Exited(0)));
    kept.printed("asked").await;
    assert_eq!(kept.processes().len(), 1);
    kept.say(&wire::KeeperRequest::Kill);
    assert_eq!(kept.next_notice().await, Some(wire::KeeperNotice::Empty));
}

#[tokio::test]
async fn the_whole_tree_is_bound_to_its_cpus() {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let last = (0..rustix::thread::CpuSet::MAX_CPU).rfind(|cpu| allowed.is_set(*cpu)).unwrap();
    let mut kept = Kept::start_with("sh -c 'grep Cpus_allowed_list /proc/self/status'", |order| {
        order.cpus = vec![u32::try_from(last).unwrap()];
    });
    kept.started().await;
    kept.printed(&format!("Cpus_allowed_list:\t{last}")).await;
}

#[tokio::test]
async fn an_engine_runs_though_its_cpus_cannot_be_bound() {
    let mut kept = Kept::start_with("echo up; exec sleep 600", |order| order.cpus = vec![1023]);
    assert!(matches!(kept.next_notice().await, Some(wire::KeeperNotice::Hello { .. })));
    match kept.next_notice().await {
        Some(wire::KeeperNotice::Warning(text)) => assert!(text.contains("cannot be bound to CPUs [1023]"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(kept.next_notice().await, Some(wire::KeeperNotice::Started(_))));
    kept.printed("up").await;
}

#[tokio::test]
async fn a_missing_program_fails_the_start_with_its_name() {
    let mut kept = Kept::start_with("", |order| order.process.program = "/nonexistent/vllm".into());
    kept.started().await;
    match kept.next_notice().await {
        Some(wire::KeeperNotice::StartFailed(text)) => assert!(text.starts_with("cannot start /nonexistent/vllm: No such file"), "{text}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_unwritable_log_does_not_hurt_the_engine() {
    let mut kept = Kept::start_with("echo up; exec sleep 600", |order| order.log = "/dev/full".into());
    kept.started().await;
    match kept.next_notice().await {
        Some(wire::KeeperNotice::Warning(text)) => assert!(text.contains("/dev/full") && text.contains("goes on without it"), "{text}"),
        other => panic!("{other:?}"),
    }
    kept.printed("up").await;
    assert_eq!(kept.processes().len(), 1);
}

#[tokio::test]
async fn a_killed_keeper_takes_the_first_process_with_it() {
    let mut kept = Kept::start("exec sleep 600");
    let leader = kept.started().await;
    kept.connection.as_ref().unwrap().0.end_keeper();
    assert_eq!(kept.next_notice().await, None);
    while crate::process::table::ProcessStat::read(leader.pid).is_some_and(|process| !process.is_zombie) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_kept_engine_is_handed_over_with_its_output() {
    let mut kept = Kept::start_with("echo first; echo second; exec sleep 600", |order| order.wait_seconds = Some(600));
    let leader = kept.started().await;
    kept.printed("second").await;
    let life = wire::LifeRecord { node: "n0".to_owned(), index: 0, fingerprint: "g".to_owned(), epoch: 7, lives: 4, ready_in_ms: None };
    kept.say(&wire::KeeperRequest::Note(life.clone()));
    kept.connection = None;
    kept.output.clear();
    let survivor = SurvivingEngine::find(&kept.directory, "n0").unwrap();
    assert_eq!((survivor.leader, &survivor.life_record), (leader, &life));
    kept.connection = Some(survivor.adopt(AgentDeathPolicy::Keep { wait: Duration::from_secs(600) }).unwrap());
    kept.printed("second").await;
    assert_eq!(String::from_utf8_lossy(&kept.output), "first\nsecond\n");
    kept.say(&wire::KeeperRequest::Kill);
    assert!(matches!(kept.next_notice().await, Some(wire::KeeperNotice::Exited(_))));
    assert_eq!(kept.next_notice().await, Some(wire::KeeperNotice::Empty));
}

#[tokio::test]
async fn output_before_an_adoption_is_delivered_once() {
    let mut kept =
        Kept::start_with("echo first; while ! test -e go; do sleep 0.01; done; echo second; echo third > went; exec sleep 600", |order| {
            order.wait_seconds = Some(600);
            let at = format!("cd '{}'; {}", Path::new(&order.process.directory).display(), order.process.arguments[1].display());
            order.process.arguments[1] = at.into();
        });
    kept.started().await;
    kept.printed("first").await;
    kept.connection = None;
    kept.output.clear();
    let survivor = SurvivingEngine::find(&kept.directory, "n0").unwrap();
    std::fs::write(kept.directory.join("go"), "").unwrap();
    while !kept.directory.join("went").exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    kept.connection = Some(survivor.adopt(AgentDeathPolicy::Keep { wait: Duration::from_secs(600) }).unwrap());
    kept.printed("second").await;
    kept.say(&wire::KeeperRequest::Kill);
    while kept.next_notice().await.is_some() {}
    assert_eq!(String::from_utf8_lossy(&kept.output), "first\nsecond\n");
}

#[tokio::test]
async fn a_kept_engine_is_adopted_only_when_it_proves_itself() {
    let mut kept = Kept::start_with("exec sleep 600", |order| order.wait_seconds = Some(600));
    kept.started().await;
    let life = wire::LifeRecord { node: "n0".to_owned(), index: 0, fingerprint: "f".to_owned(), epoch: 7, lives: 3, ready_in_ms: Some(5) };
    kept.say(&wire::KeeperRequest::Note(life));
    kept.connection = None;
    // The engine was ready, so it must listen.
    assert_eq!(SurvivingEngine::find(&kept.directory, "n0").unwrap_err(), AdoptionError::NoSocket);
    let _listens = UnixListener::bind(kept.directory.join("engine.sock")).unwrap();
    assert!(SurvivingEngine::find(&kept.directory, "n0").is_ok());
    let record = kept.directory.join("engine.pid");
    // A valid engine of another node.
    assert_eq!(SurvivingEngine::find(&kept.directory, "n1").unwrap_err(), AdoptionError::OtherNode("n0".to_owned()));
    std::fs::write(&record, format!("1 1 1 {}", crate::process::table::boot_and_namespace())).unwrap();
    assert_eq!(SurvivingEngine::find(&kept.directory, "n0").unwrap_err(), AdoptionError::OtherProcess);
    assert_eq!(
        SurvivingEngine::find(&kept.directory, "n1").unwrap_err(),
        AdoptionError::OtherNode("n0".to_owned()),
        "nor is it ours to end"
    );
    std::fs::write(&record, "1 1 1 elsewhere").unwrap();
    assert_eq!(SurvivingEngine::find(&kept.directory, "n0").unwrap_err(), AdoptionError::OtherPidNamespace);
    assert!(matches!(SurvivingEngine::find(kept.directory.parent().unwrap(), "n0"), Err(AdoptionError::NoKeeper(_))));
}

#[tokio::test]
async fn a_kept_engine_that_nobody_takes_over_ends() {
    let mut kept = Kept::start_with(SPREAD, |order| order.wait_seconds = Some(0));
    kept.started().await;
    kept.printed("up").await;
    kept.connection = None;
    kept.until_nothing_is_left().await;
}

#[tokio::test]
async fn the_last_adopting_agent_decides_a_kept_engines_fate() {
    let mut kept = Kept::start_with(SPREAD, |order| order.wait_seconds = Some(600));
    kept.started().await;
    kept.printed("up").await;
    for fate in [AgentDeathPolicy::Keep { wait: Duration::from_secs(600) }, AgentDeathPolicy::Kill] {
        assert!(!kept.processes().is_empty());
        kept.connection = None;
        kept.output.clear();
        let survivor = SurvivingEngine::find(&kept.directory, "n0").unwrap();
        kept.connection = Some(survivor.adopt(fate).unwrap());
        kept.printed("up").await;
    }
    kept.connection = None;
    kept.until_nothing_is_left().await;
}

#[test]
fn engines_are_kept_only_where_the_agent_will_be_restarted() {
    let wait = Duration::from_secs(600);
    let own = std::process::id().to_string();
    let of = |setting, variables: &[(&str, &str)]| {
        AgentDeathPolicy::of(setting, wait, |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    };
    let keep = AgentDeathPolicy::Keep { wait };
    assert_eq!(of(IfAgentDies::Auto, &[]), AgentDeathPolicy::Kill);
    assert_eq!(of(IfAgentDies::Auto, &[("INVOCATION_ID", "a")]), keep);
    assert_eq!(of(IfAgentDies::Auto, &[("INVOCATION_ID", "a"), ("SYSTEMD_EXEC_PID", &own)]), keep);
    // A terminal that a service has opened.
    assert_eq!(of(IfAgentDies::Auto, &[("INVOCATION_ID", "a"), ("SYSTEMD_EXEC_PID", "1")]), AgentDeathPolicy::Kill);
    for job in ["PBS_JOBID", "SLURM_JOB_ID"] {
        assert_eq!(of(IfAgentDies::Auto, &[("INVOCATION_ID", "a"), (job, "1")]), AgentDeathPolicy::Kill);
        assert_eq!(of(IfAgentDies::Keep, &[(job, "1")]), keep);
    }
    assert_eq!(of(IfAgentDies::Kill, &[("INVOCATION_ID", "a")]), AgentDeathPolicy::Kill);
}

#[test]
fn a_fingerprint_covers_the_command_but_not_the_free_memory() {
    let line = |argument: &str, gib: &str| CommandLine {
        container: Vec::new(),
        program: "/bin/vllm".into(),
        arguments: vec!["serve".into(), argument.into()],
        set: vec![("VLLM_CPU_KVCACHE_SPACE", gib.into()), ("TMPDIR", "/tmp/e0/tmp".into())],
        unset: Vec::new(),
        withheld_routes: &[],
    };
    let name = |argument: &str, gib: &str, minor: u32| fingerprint(&line(argument, gib), Some(VllmVersion { major: 0, minor, patch: 0 }));
    assert_eq!(name("model", "4", 11), name("model", "5", 11));
    assert_ne!(name("model", "4", 11), name("other", "4", 11));
    assert_ne!(name("model", "4", 11), name("model", "4", 12), "vLLM was upgraded meanwhile");
    assert_eq!(name("model", "4", 11).len(), 64);
}

/// A spare that reports when it is ready, and becomes what the second word of its order says.
const SPARE: &str =
    "echo importing; printf '\\n' >&0; order=$(tr '\\0' '\\n' <&0); [ -n \"$order\" ] || exit 0; eval \"$(echo \"$order\" | sed -n 5p)\"";

/// A keeper with a spare, and the order for an engine that runs this script.
async fn prepared(parent: &Path, spare: &str, script: &str) -> (PreparedKeeper, wire::LaunchSpec) {
    let order = order(parent, script);
    let mut process = wire::ProcessSpec { arguments: vec!["-c".into(), spare.into()], ..order.process.clone() };
    process.directory = parent.join("spares").into();
    process.mark(1);
    let source = PathBuf::from(&order.process.keeper).into();
    (prepare(&source, process).unwrap(), order)
}

async fn until(keeper: &mut PreparedKeeper, wanted: impl Fn(&SpareState) -> bool) -> SpareState {
    let mut state = SpareState::Importing;
    let waiting = async {
        while !wanted(&state) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            state = keeper.state(state.clone());
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap();
    state
}

fn kept(keeper: PreparedKeeper, order: wire::LaunchSpec, parent: tempfile::TempDir) -> Kept {
    let directory = PathBuf::from(&order.process.directory);
    Kept { connection: Some(keeper.start(order).unwrap()), directory, output: Vec::new(), _parent: parent }
}

#[tokio::test]
async fn a_spare_becomes_the_engine_with_its_command_and_its_cpus() {
    let parent = tempfile::tempdir().unwrap();
    let (mut keeper, mut order) =
        prepared(parent.path(), SPARE, "grep Cpus_allowed_list /proc/self/status; ls -l /proc/self/fd; exec sleep 600").await;
    until(&mut keeper, |state| *state == SpareState::Waiting).await;
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let last = (0..rustix::thread::CpuSet::MAX_CPU).rfind(|cpu| allowed.is_set(*cpu)).unwrap();
    order.cpus = vec![u32::try_from(last).unwrap()];
    let mut kept = kept(keeper, order, parent);
    let leader = loop {
        if let wire::KeeperNotice::Started(leader) = kept.next_notice().await.unwrap() {
            break leader;
        }
    };
    kept.printed("importing").await;
    kept.printed(&format!("Cpus_allowed_list:\t{last}")).await;
    assert!(kept.processes().contains(&leader.pid), "it is found by the directory in which it began");
    assert_eq!(crate::process::orphans::keepers_of(&kept.directory).len(), 1);
    // Only the record knows where it began, once nobody who started it lives.
    kept.connection.as_ref().unwrap().0.end_keeper();
    kept.until_nothing_is_left().await;
}

#[tokio::test]
async fn an_order_that_comes_before_the_spare_is_ready_is_obeyed_then() {
    let parent = tempfile::tempdir().unwrap();
    let (keeper, order) = prepared(parent.path(), &format!("sleep 0.2; {SPARE}"), "echo up; exec sleep 600").await;
    let mut kept = kept(keeper, order, parent);
    kept.printed("up").await;
}

#[tokio::test]
async fn an_engine_starts_without_a_spare_that_has_ended() {
    for spare in ["echo no module; exit 1", "exec 0</dev/null; exec sleep 600"] {
        let parent = tempfile::tempdir().unwrap();
        let (mut keeper, order) = prepared(parent.path(), spare, "echo up; exec sleep 600").await;
        if spare.contains("exit") {
            assert_eq!(
                until(&mut keeper, |state| matches!(state, SpareState::Ended(_))).await,
                SpareState::Ended("exit status: 1".to_owned())
            );
        } else {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let mut kept = kept(keeper, order, parent);
        kept.printed("up").await;
        assert_eq!(kept.processes().len(), 1, "{spare}");
    }
}

#[tokio::test]
async fn a_spare_ends_with_its_agent() {
    let parent = tempfile::tempdir().unwrap();
    let (mut keeper, order) = prepared(parent.path(), SPARE, "").await;
    until(&mut keeper, |state| *state == SpareState::Waiting).await;
    let mark = parent.path().join("spares.1");
    assert!(!crate::process::orphans::orphans(&mark).is_empty());
    drop((keeper, order));
    while !crate::process::orphans::orphans(&mark).is_empty() || !crate::process::orphans::keepers_of(&mark).is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
