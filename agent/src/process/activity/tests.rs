//! Conclusions from two snapshots of an engine's processes, and a snapshot of real ones.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::*;

const LEADER: i32 = 10;

const TEN: Duration = Duration::from_secs(10);

/// Processes by id, name and CPU time used, in seconds.
type Processes<'a> = &'a [(i32, &'a str, f64)];

fn look(processes: Processes<'_>) -> ProcessSnapshot {
    let sample = |(pid, name, cpu): &(i32, &str, f64)| ProcessSample {
        pid: *pid,
        started: 7,
        name: (*name).to_owned(),
        stopped: false,
        blocked: false,
        ticks: format!("{:.0}", cpu * TICKS_PER_SECOND).parse().unwrap(),
    };
    ProcessSnapshot { leader: LEADER, processes: processes.iter().map(sample).collect() }
}

/// Activity of an engine whose processes used this much CPU time in ten seconds, in seconds.
fn did(processes: Processes<'_>) -> ProcessActivity {
    let earlier: Vec<_> = processes.iter().map(|(pid, name, _)| (*pid, *name, 100.0)).collect();
    let later: Vec<_> = processes.iter().map(|(pid, name, used)| (*pid, *name, 100.0 + used)).collect();
    look(&later).activity_since(&look(&earlier), TEN)
}

#[test]
fn an_engine_computes_when_core_or_front_end_is_busy() {
    use ProcessActivity::{Computing, Idle, Unknown};
    let (core, worker) = ("VLLM::EngineCor", "VLLM::Worker_TP");
    let cases: [(Processes<'_>, ProcessActivity); 13] = [
        (&[], Unknown),
        (&[(LEADER, "vllm", 0.0), (11, core, 0.4)], Idle),
        (&[(LEADER, "vllm", 0.0), (11, core, 0.6)], Computing),
        // Probes cost the front-end this much.
        (&[(LEADER, "vllm", 1.5), (11, core, 0.1)], Idle),
        (&[(LEADER, "vllm", 9.0), (11, core, 0.1)], Computing),
        (&[(LEADER, "vllm", 0.0), (11, core, 0.1), (12, worker, 10.0)], Computing),
        (&[(LEADER, "vllm", 0.0), (11, core, 0.1), (12, worker, 0.0)], Idle),
        // A resource tracker or a shell does not count as the core if there is one.
        (&[(LEADER, "vllm", 0.0), (11, core, 0.1), (12, "python3", 1.0)], Idle),
        // A compiler on a busy host.
        (&[(LEADER, "vllm", 0.0), (11, core, 0.1), (12, "cc1plus", 0.6)], Computing),
        // Without such names, all processes but the first count, or the first one alone.
        (&[(LEADER, "keeper", 1.0), (11, "hostler", 0.1)], Idle),
        (&[(LEADER, "keeper", 0.0), (11, "hostler", 1.0)], Computing),
        (&[(LEADER, "hostler", 1.0)], Computing),
        (&[(LEADER, "hostler", 0.2)], Idle),
    ];
    for (processes, expected) in cases {
        assert_eq!(did(processes), expected, "{processes:?}");
    }
}

#[test]
fn one_stopped_process_means_a_stopped_engine() {
    let earlier = look(&[(LEADER, "vllm", 1.0), (11, "VLLM::EngineCor", 1.0)]);
    let mut later = look(&[(LEADER, "vllm", 11.0), (11, "VLLM::EngineCor", 11.0)]);
    assert_eq!(later.activity_since(&earlier, TEN), ProcessActivity::Computing);
    later.processes[1].stopped = true;
    assert_eq!(later.activity_since(&earlier, TEN), ProcessActivity::Stopped("VLLM::EngineCor (pid 11)".to_owned()));
}

#[test]
fn a_reused_process_id_is_another_process() {
    let earlier = look(&[(LEADER, "VLLM::EngineCor", 50.0)]);
    let mut later = look(&[(LEADER, "VLLM::EngineCor", 5.0)]);
    assert_eq!(later.activity_since(&earlier, TEN), ProcessActivity::Idle);
    later.processes[0].started = 8;
    assert_eq!(later.activity_since(&earlier, TEN), ProcessActivity::Computing);
}

#[test]
fn only_an_ended_core_or_worker_is_missed() {
    let (front_end, core, worker) = ((LEADER, "vllm", 1.0), (11, "VLLM::EngineCor", 1.0), (12, "VLLM::Worker_TP", 1.0));
    let earlier = look(&[front_end, core, worker, (13, "cicc", 1.0)]);
    assert_eq!(look(&[front_end, core, worker, (14, "VLLM::Worker_TP", 0.1)]).process_lost_since(&earlier), None);
    assert_eq!(look(&[front_end, core]).process_lost_since(&earlier), Some("VLLM::Worker_TP (pid 12)".to_owned()));
    let mut again = look(&[front_end, core, worker]);
    again.processes[1].started = 8;
    assert_eq!(again.process_lost_since(&earlier), Some("VLLM::EngineCor (pid 11)".to_owned()), "another process with its id");
    assert_eq!(look(&[]).process_lost_since(&look(&[front_end])), None, "whose processes have no such names");
}

#[test]
fn new_compilers_and_cores_reading_disk_count_as_computing() {
    let (core, child) = ((11, "VLLM::EngineCor", 1.0), (12, "cicc", 0.1));
    let earlier = look(&[(LEADER, "vllm", 1.0), core]);
    let mut later = look(&[(LEADER, "vllm", 1.0), core, child]);
    assert_eq!(later.activity_since(&earlier, TEN), ProcessActivity::Computing);
    assert_eq!(later.activity_since(&later, TEN), ProcessActivity::Idle, "one that stays and rests");
    later.processes[1].blocked = true;
    assert_eq!(later.activity_since(&later, TEN), ProcessActivity::Computing);
}

#[test]
fn activity_is_judged_by_the_engines_own_recent_time() {
    let (earlier, later) = (look(&[(LEADER, "VLLM::EngineCor", 1.0)]), look(&[(LEADER, "VLLM::EngineCor", 6.0)]));
    assert_eq!(later.activity_since(&earlier, TEN), ProcessActivity::Computing);
    assert_eq!(later.activity_since(&earlier, Duration::from_secs(3600)), ProcessActivity::Idle);
}

#[tokio::test]
async fn a_compiler_with_a_session_of_its_own_is_seen() {
    let compiling = Group::start("setsid sh -c 'while kill -0 $0; do :; done' $$ & wait");
    until(&compiling, |found| *found == ProcessActivity::Computing).await;
}

#[test]
fn a_stat_line_of_the_kernel_is_parsed() {
    let line = "42 (VLLM::EngineCor) T 1 40 39 0 -1 4194560 1 0 0 0 500 26 0 0 20 0 3 0 987654 1 2 3";
    let sample = ProcessSample::parse(42, 9, line).unwrap();
    assert_eq!(
        sample,
        ProcessSample { pid: 42, started: 9, name: "VLLM::EngineCor".to_owned(), stopped: true, blocked: false, ticks: 526 }
    );
    assert_eq!(ProcessSample::parse(42, 9, "42 (a) b (c) R 1 40 39 0 -1 0 1 0 0 0 5 6 0 0 20").unwrap().name, "a) b (c");
    assert_eq!(ProcessSample::parse(7, 9, "7 (x) S 1"), None);
    assert_eq!(ProcessSample::parse(7, 9, ""), None);
}

/// A shell as leader of its own group, killed with it.
struct Group(Child);

impl Group {
    fn start(script: &str) -> Self {
        Self(Command::new("/bin/sh").args(["-c", script]).process_group(0).stdout(Stdio::null()).spawn().unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        kill_process_group(self.pid(), Signal::KILL).unwrap();
        self.0.wait().unwrap();
    }
}

/// Takes snapshots until the engine has this activity.
async fn until(group: &Group, expected: impl Fn(&ProcessActivity) -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let earlier = ProcessSnapshot::take(Some(group.0.id())).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let found = ProcessSnapshot::take(Some(group.0.id())).await.activity_since(&earlier, Duration::from_millis(300));
        if expected(&found) {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "still {found:?}");
    }
}

#[tokio::test]
async fn real_processes_are_seen_computing_idle_and_stopped() {
    let spinning = Group::start("while :; do :; done");
    until(&spinning, |found| *found == ProcessActivity::Computing).await;
    kill_process(spinning.pid(), Signal::STOP).unwrap();
    until(&spinning, |found| matches!(found, ProcessActivity::Stopped(name) if name.starts_with("sh (pid "))).await;
    let resting = Group::start("sleep 600 & wait");
    until(&resting, |found| *found == ProcessActivity::Idle).await;
    assert_eq!(ProcessSnapshot::take(None).await.activity_since(&ProcessSnapshot::take(None).await, TEN), ProcessActivity::Unknown);
}
