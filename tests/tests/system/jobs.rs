//! Agents in batch jobs: real agents as processes, and stand-ins for the commands of the
//! schedulers.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{CHAT, Endpoint, Program, Workplace, chat, chat_stream, until};

/// Stand-in for `qstat -f -F dsv -D SEPARATOR ID` of `OpenPBS`: times as `ctime` writes them,
/// without a zone.
const QSTAT: &str = r#"#!/bin/sh
[ "$1 $2 $3 $4" = "-f -F dsv -D" ] || exit 2
. "$0.job" || exit 1
stime=$(LC_ALL=C date -d "@$started" '+%a %b %e %H:%M:%S %Y')
echo "Job Id: $6$5job_state=R$5Resource_List.walltime=$walltime$5stime=$stime$5run_count=$run"
"#;

/// Stand-in for `squeue -h -j ID -o %e|%V|%S`, which obeys `SLURM_TIME_FORMAT`.
const SQUEUE: &str = r#"#!/bin/sh
[ "$1 $2 $4 $5" = "-h -j -o %e|%V|%S" ] || exit 2
. "$0.job" || exit 1
date -d "@$ends" "+$SLURM_TIME_FORMAT"
"#;

const SCONTROL: &str = "#!/bin/sh\necho 'KillOnBadExit           = 0'\necho 'KillWait                = 17 sec'\n";

/// A host of a cluster: a router, and the scheduler's commands.
struct Host {
    workplace: Workplace,
    router: Program,
    agents_address: String,
}

impl Host {
    async fn new() -> Self {
        let workplace = Workplace::new();
        fs::create_dir(workplace.path().join("bin")).unwrap();
        let local = "127.0.0.1:0";
        let router = workplace.start("router", &["router", "--listen", local, "--agents-listen", local, "--admin-listen", local]);
        let agents_address = router.address("agents").await.to_string();
        Self { workplace, router, agents_address }
    }

    fn command(&self, name: &str) -> PathBuf {
        self.workplace.path().join("bin").join(name)
    }

    fn install(&self, name: &str, script: &str) {
        fs::write(self.command(name), script).unwrap();
        fs::set_permissions(self.command(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Sets the further answers of the scheduler's command.
    fn say(&self, name: &str, job: &str) {
        let file = self.command(&format!("{name}.job"));
        // Replace the file, because it may be read at any moment.
        let next = file.with_extension("next");
        fs::write(&next, job).unwrap();
        fs::rename(next, file).unwrap();
    }

    fn say_pbs(&self, walltime: &str, run: u32) {
        self.say("qstat", &format!("started={} walltime={walltime} run={run}", now()));
    }

    /// Starts an agent with these variables of a job.
    ///
    /// PATH is that of the tasks that `pbsdsh` starts.
    fn agent(&mut self, name: &str, variables: &[(&'static str, &str)], arguments: &[&str]) -> Program {
        let folder: &'static str = self.workplace.path().to_str().unwrap().to_owned().leak();
        self.workplace.environment = vec![("PBS_EXEC", folder), ("PATH", "/bin:/usr/bin"), ("HOSTLER_JOB_INTERVAL_MS", "100")];
        self.workplace.environment.extend(variables.iter().map(|(name, value)| (*name, &*(*value).to_owned().leak())));
        let fixed = ["agent", "--engine", "simulated", "--router", &self.agents_address, "--drain-timeout", "20s", "--stop-grace", "2s"];
        let engine = ["--", "--sim-start-ms", "50", "--sim-step-ms", "5"];
        self.workplace.start(name, &[&fixed[..], arguments, &engine].concat())
    }

    async fn ps(&self, arguments: &[&str]) -> String {
        let admin = self.router.admin().await.socket();
        let ended = self.workplace.run(&[&["ps", "--admin", admin], arguments].concat()).await;
        assert!(ended.success, "{}", ended.stderr);
        ended.stdout
    }

    /// Waits until `ps --json` meets this condition.
    async fn until_ps<T>(&self, what: &str, is: impl Fn(&Value) -> Option<T>) -> T {
        until(what, async || {
            let shown: Value = serde_json::from_str(&self.ps(&["--json"]).await).unwrap();
            is(&shown).ok_or_else(|| shown.to_string())
        })
        .await
    }

    async fn until_ready(&self, node: &str) {
        self.until_ps(&format!("{node} is ready"), |shown| (find(shown, node)?["replicas"][0]["phase"] == "ready").then_some(())).await;
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn find<'a>(shown: &'a Value, node: &str) -> Option<&'a Value> {
    shown["nodes"].as_array()?.iter().find(|shown| shown["node"] == node)
}

/// Default name of a node in a job.
fn node(job: &str) -> String {
    format!("{}.{job}", fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim())
}

const PBS_JOB: [(&str, &str); 1] = [("PBS_JOBID", "12.head")];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ps_shows_a_jobs_end_its_changes_and_its_loss() {
    let mut host = Host::new().await;
    host.install("qstat", QSTAT);
    host.say_pbs("01:30:00", 1);
    let agent = host.agent("agent", &PBS_JOB, &[]);
    let node = node("12");
    host.until_ready(&node).await;
    let job = host.until_ps("the job", |shown| Some(find(shown, &node)?["job"].clone())).await;
    let seconds = |job: &Value, which: &str| job[which].as_u64().unwrap();
    let (ends, leaves) = (seconds(&job, "ends_in_seconds"), seconds(&job, "leaves_in_seconds"));
    assert!((job["scheduler"] == "pbs" && job["id"] == "12.head" && job["run"] == 1) && (5300..=5400).contains(&ends), "{job}");
    assert!((21..=23).contains(&(ends - leaves)), "drain and stop take 22 s: {job}");
    let left = Endpoint::Tcp(host.router.address("admin").await).metric("hostler_node_leaves_in_seconds").await;
    assert!((5200.0..=5380.0).contains(&left), "{left}");
    let table = host.ps(&[]).await;
    assert!(table.contains("  JOB ") && table.contains("  12.head ends in 1h 2"), "{table}");

    host.say_pbs("00:20:00", 1);
    let is_shorter = |shown: &Value| find(shown, &node)?["job"]["ends_in_seconds"].as_u64().filter(|left| *left <= 1200);
    host.until_ps("the shorter limit", is_shorter).await;
    fs::remove_file(host.command("qstat.job")).unwrap();
    let complains = || agent.stderr().matches("cannot read when the job ends").count();
    until("a complaint", async || if complains() > 0 { Ok(()) } else { Err(agent.stderr()) }).await;
    host.until_ps("the last known end", is_shorter).await;
    assert_eq!(complains(), 1, "{}", agent.stderr());

    agent.signal(Signal::KILL);
    let gone = host.until_ps("the job is gone", |shown| shown["gone_jobs"].get(0).cloned()).await;
    assert!(gone["node"] == node && gone["job"]["id"] == "12.head" && gone["reason"] == "agent lost", "{gone}");
    let table = host.ps(&[]).await;
    assert!(
        table.lines().any(|line| line.starts_with(&format!("{node}: job 12.head run 1 gone ")) && line.ends_with(" ago: agent lost")),
        "{table}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_leaves_before_its_job_ends_without_broken_streams() {
    let mut host = Host::new().await;
    host.install("qstat", QSTAT);
    host.say_pbs("01:00:00", 1);
    let mut agent = host.agent("agent", &PBS_JOB, &[]);
    let node = node("12");
    host.until_ready(&node).await;
    let edge = Endpoint::Tcp(host.router.address("edge").await);
    let mut stream = edge.open(CHAT, &chat_stream(600)).await;
    stream.events(2).await;
    // The agent's drain and stop may take 22 s.
    host.say_pbs("00:00:24", 1);
    until("it leaves", async || if agent.stderr().contains("the job 12.head ends in ") { Ok(()) } else { Err(agent.stderr()) }).await;
    stream.finish().await.assert_whole_stream();
    assert!(agent.ended().await.success(), "{}", agent.stderr());
    assert!(host.workplace.left().is_empty(), "{:?}", host.workplace.left());
    let gone = host.until_ps("the job is gone", |shown| shown["gone_jobs"].get(0).cloned()).await;
    assert_eq!(gone["reason"], "drained", "{gone}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_array_parts_on_one_host_are_separate_nodes() {
    let mut host = Host::new().await;
    host.install("qstat", QSTAT);
    host.say_pbs("01:00:00", 1);
    let parts = ["1", "2"].map(|part| {
        let id = format!("19[{part}].head");
        host.agent(&format!("part{part}"), &[("PBS_JOBID", &*id), ("PBS_ARRAY_INDEX", part)], &[])
    });
    let nodes = [node("19-1"), node("19-2")];
    for (node, part) in nodes.iter().zip(1..) {
        host.until_ready(node).await;
        let job = host.until_ps("the job", |shown| Some(find(shown, node)?["job"].clone())).await;
        assert!(job["id"] == format!("19[{part}].head") && job["array_index"] == part, "{job}");
        let log = host.workplace.path().join(format!(".local/state/hostler/logs/{node}-e0.log"));
        assert!(log.exists(), "{}", log.display());
    }
    let edge = Endpoint::Tcp(host.router.address("edge").await);
    assert_eq!(edge.post(CHAT, &chat(3)).await.status, 200);
    assert!(parts.iter().all(|part| !part.stderr().contains("not attached")), "{}", parts[1].stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_run_of_a_job_has_its_node_name() {
    let mut host = Host::new().await;
    host.install("qstat", QSTAT);
    host.say_pbs("01:00:00", 1);
    let first = host.agent("first", &PBS_JOB, &[]);
    let node = node("12");
    host.until_ready(&node).await;
    host.say_pbs("01:00:00", 2);
    // The first one lives on, so nothing else frees the name.
    let second = host.agent("second", &PBS_JOB, &[]);
    let is_second = |shown: &Value| (find(shown, &node)?["job"]["run"] == 2 && find(shown, &node)?["attached"] == true).then_some(());
    host.until_ps("the second run", is_second).await;
    let gone = host.until_ps("the first run is gone", |shown| shown["gone_jobs"].get(0).cloned()).await;
    assert!(gone["job"]["run"] == 1 && gone["reason"] == "agent lost", "{gone}");
    host.until_ready(&node).await;
    assert!(host.ps(&[]).await.contains("  12.head run 2 ends in "));
    let advice = "end that one, or give this one a name of its own with --node";
    until("the first one is refused", async || if first.stderr().contains(advice) { Ok(()) } else { Err(first.stderr()) }).await;
    assert!(!second.stderr().contains("not attached"), "{}", second.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slurm_job_is_recognized_and_a_given_name_stays() {
    let mut host = Host::new().await;
    host.install("squeue", SQUEUE);
    host.install("scontrol", SCONTROL);
    host.say("squeue", &format!("ends={}", now() + 7200));
    let path = format!("{}:/bin:/usr/bin", host.command("").display());
    let variables = [("SLURM_JOB_ID", "4711"), ("SLURM_RESTART_COUNT", "1"), ("PATH", &*path)];
    let agent = host.agent("agent", &variables, &["--node", "mine"]);
    host.until_ready("mine").await;
    let job = host.until_ps("the job", |shown| Some(find(shown, "mine")?["job"].clone())).await;
    assert!(job["scheduler"] == "slurm" && job["id"] == "4711" && job["run"] == 2, "{job}");
    assert!((7000..=7200).contains(&job["ends_in_seconds"].as_u64().unwrap()), "{job}");
    assert!(agent.stderr().contains("grace=12s"), "KillWait and a margin: {}", agent.stderr());
}
