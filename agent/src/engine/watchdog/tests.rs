//! Criteria of a hang: the decision as a table, the duration of a stall, and whole stalls of an
//! engine whose processes rest.

use rustix::process::{Pid, Signal, kill_process};

use super::super::Phase;
use super::super::health::tests::{Resting, Watched, waits};
use super::*;
use crate::engine_client::api_client::tests::{FullQueue, Scripted};
use crate::probe::EngineMetrics;

const S: Duration = Duration::from_secs(1);

#[test]
fn slow_streams_raise_the_limit_within_bounds() {
    let millis = Duration::from_millis;
    for (p99, expected) in
        [(None, 10 * S), (Some(millis(20)), 10 * S), (Some(millis(500)), 10 * S), (Some(2 * S), 40 * S), (Some(60 * S), MAX_STALL_LIMIT)]
    {
        assert_eq!(StallLimits::new(10 * S, p99, true), StallLimits { idle: expected, busy: 6 * expected }, "{p99:?}");
    }
    assert_eq!(StallLimits::new(300 * S, Some(60 * S), true).idle, 300 * S);
    assert_eq!(StallLimits::new(10 * S, None, false), StallLimits { idle: 10 * S, busy: 600 * S }, "without GPUs");
}

#[test]
fn a_stall_is_judged_by_the_activity_of_the_processes() {
    use ProcessActivity::{Computing, Idle, Stopped, Unknown};
    let stopped = || Stopped("VLLM::EngineCor (pid 7)".to_owned());
    let hung = |why: &str| StallVerdict::Hung(why.to_owned());
    let (nothing, computes) = ("its processes do nothing", "its processes compute, but for too long");
    // Columns: duration, whether the engine reports requests, whether it takes test completions,
    // activity.
    let cases = [
        (9, true, true, stopped(), StallVerdict::Wait),
        (9, true, true, Idle, StallVerdict::Wait),
        (10, true, true, stopped(), hung("its process VLLM::EngineCor (pid 7) is stopped")),
        (10, false, false, stopped(), hung("its process VLLM::EngineCor (pid 7) is stopped")),
        (10, true, true, Idle, hung(nothing)),
        (10, true, false, Idle, hung(nothing)),
        (10, false, true, Idle, StallVerdict::RunCanary),
        (60, false, true, Idle, StallVerdict::RunCanary),
        (59, false, false, Idle, StallVerdict::Wait),
        (60, false, false, Idle, hung(nothing)),
        (59, true, true, Computing, StallVerdict::Wait),
        (60, true, true, Computing, hung(computes)),
        (59, true, true, Unknown, StallVerdict::Wait),
        (60, true, true, Unknown, hung("its processes cannot be seen")),
    ];
    for (lasted, holds, testable, activity, expected) in cases {
        assert_eq!(
            judge(lasted * S, StallLimits::new(10 * S, None, true), holds, testable, &activity),
            expected,
            "{lasted} s, {holds}, {testable}, {activity:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_stall_counts_only_waiting_time_and_progress_clears_it() {
    let watched = Watched::at("s".as_ref());
    let progress = || watched.subject.work_counters();
    let start = Instant::now();
    let at = |quarters: u32| start + CHECK_INTERVAL * quarters;
    let mut stall = StallTimer::new(progress(), start);
    assert_eq!(stall.update(1, progress(), false, at(1)), CHECK_INTERVAL);
    assert_eq!(stall.update(2, progress(), false, at(2)), 2 * CHECK_INTERVAL);
    assert_eq!(stall.update(0, progress(), false, at(3)), 2 * CHECK_INTERVAL, "the clients have left");
    assert_eq!(stall.update(1, progress(), false, at(4)), 3 * CHECK_INTERVAL, "and others come");
    // This program was stopped for an hour.
    assert_eq!(stall.update(1, progress(), false, at(4) + 3600 * S), 3 * CHECK_INTERVAL + MAX_STALL_PER_CHECK);
    watched.says(EngineMetrics { prompt_tokens: 2048, ..EngineMetrics::default() });
    assert_eq!(stall.update(1, progress(), false, at(5) + 3600 * S), Duration::ZERO, "a prefill goes on");
}

#[tokio::test(start_paused = true)]
async fn an_outage_between_nodes_and_as_much_after_it_count_for_no_stall() {
    let watched = Watched::at("s".as_ref());
    let progress = || watched.subject.work_counters();
    let start = Instant::now();
    let mut stall = StallTimer::new(progress(), start);
    let mut lasted = |is_cut_off: bool, from: u32, to: u32| {
        (from..to).map(|second| stall.update(1, progress(), is_cut_off, start + (second + 1) * S)).last().unwrap()
    };
    assert_eq!(lasted(false, 0, 3), 3 * S, "until a member counts as silent");
    assert_eq!(lasted(true, 3, 23), Duration::ZERO);
    assert_eq!(lasted(false, 23, 40), Duration::ZERO, "packets that were lost are sent again");
    assert_eq!(lasted(false, 40, 50), 10 * S);
    watched.says(EngineMetrics { prompt_tokens: 2048, ..EngineMetrics::default() });
    assert_eq!(stall.update(1, progress(), false, start + 51 * S), Duration::ZERO);
    assert_eq!(stall.update(1, progress(), false, start + 52 * S), S, "what was excused is forgotten");
}

async fn within(watched: &Watched, time: Duration) -> Option<String> {
    tokio::time::timeout(time, watch(&watched.subject)).await.ok().map(|cause| cause.to_string())
}

fn busy() -> EngineMetrics {
    EngineMetrics { running: 1, ..EngineMetrics::default() }
}

fn resting() -> (Watched, Resting) {
    let (watched, process) = (Watched::at("/nonexistent/socket".as_ref()), Resting::start());
    watched.has_group(process.pid());
    (watched, process)
}

#[tokio::test(start_paused = true)]
async fn an_idle_engine_with_requests_hangs_after_ten_seconds() {
    let (watched, _process) = resting();
    watched.says(busy());
    let requests = [watched.enter(), watched.enter(), watched.enter()];
    let _waits: Vec<_> = requests.iter().map(waits).collect();
    let begun = Instant::now();
    let reason = watch(&watched.subject).await.to_string();
    assert_eq!(reason, "no token for 10.0 s while 3 requests wait: its processes do nothing");
    assert!(begun.elapsed() < 11 * S, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_stalls_cause_names_the_stopped_process() {
    let (watched, process) = resting();
    kill_process(Pid::from_raw(process.pid().cast_signed()).unwrap(), Signal::STOP).unwrap();
    let request = watched.enter();
    let _wait = waits(&request);
    let reason = watch(&watched.subject).await.to_string();
    assert_eq!(reason, format!("no token for 10.0 s while 1 request waits: its process sleep (pid {}) is stopped", process.pid()));
}

#[tokio::test(start_paused = true)]
async fn an_engine_suspended_with_its_agent_gets_time_to_resume() {
    let (watched, process) = resting();
    watched.says(busy());
    let request = watched.enter();
    let _wait = waits(&request);
    assert_eq!(within_while_suspended(&watched, &process).await, None);
    // Without a suspension, this stall is already a hang.
    let reason = within(&watched, 11 * S).await.unwrap();
    assert!(reason.starts_with("no token for 10.0 s"), "{reason}");
}

/// Watches for nine seconds.
///
/// Then the job is suspended for an hour, and the engine resumes two seconds later than the agent.
async fn within_while_suspended(watched: &Watched, process: &Resting) -> Option<String> {
    let pid = Pid::from_raw(process.pid().cast_signed()).unwrap();
    let suspension = async {
        tokio::time::sleep(9 * S).await;
        kill_process(pid, Signal::STOP).unwrap();
        tokio::time::advance(3600 * S).await;
        tokio::time::sleep(2 * S).await;
        kill_process(pid, Signal::CONT).unwrap();
        watched.says(EngineMetrics { steps: 1, ..busy() });
    };
    tokio::select! {
        cause = watch(&watched.subject) => Some(cause.to_string()),
        () = suspension => None,
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_makes_slow_progress_is_left_alone() {
    let (watched, _process) = resting();
    watched.says(busy());
    let request = watched.enter();
    let mut wait = waits(&request);
    let tokens = async {
        for _ in 0..10 {
            tokio::time::sleep(9 * S).await;
            wait.record_progress();
        }
        // Now a prefill in pieces, which shows only in the counters.
        for steps in 1..10 {
            tokio::time::sleep(9 * S).await;
            watched.says(EngineMetrics { steps, ..busy() });
        }
    };
    tokio::select! {
        reason = watch(&watched.subject) => panic!("{reason}"),
        () = tokens => {}
    }
}

#[tokio::test(start_paused = true)]
async fn requests_not_waiting_for_the_engine_prove_no_stall() {
    let (watched, _process) = resting();
    watched.says(busy());
    // The request's body is still on the way.
    let uploading = watched.enter();
    let _uploading = uploading.track_wait();
    // The client does not read the available answer.
    let blocked = watched.enter();
    let mut blocked = waits(&blocked);
    tokio::select! {
        reason = watch(&watched.subject) => panic!("{reason}"),
        () = blocked.pause_during(std::future::pending()) => unreachable!("it is never taken"),
        () = tokio::time::sleep(600 * S) => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_draining_or_sleeping_engine_need_not_make_progress() {
    let (watched, _process) = resting();
    watched.says(busy());
    let request = watched.enter();
    let _wait = waits(&request);
    for phase in [Phase::Draining, Phase::Sleeping, Phase::Loading] {
        watched.has_phase(phase);
        assert_eq!(within(&watched, 300 * S).await, None, "{phase:?}");
    }
    watched.has_phase(Phase::Ready);
    assert!(within(&watched, 11 * S).await.is_some());
}

#[tokio::test(start_paused = true)]
async fn clients_that_give_up_early_do_not_hide_a_hang() {
    let (watched, _process) = resting();
    watched.says(busy());
    let clients = async {
        loop {
            let request = watched.enter();
            let _wait = waits(&request);
            tokio::time::sleep(5 * S).await;
        }
    };
    tokio::select! {
        cause = watch(&watched.subject) => assert!(cause.to_string().contains("its processes do nothing"), "{cause}"),
        () = clients => unreachable!("they never end"),
        () = tokio::time::sleep(12 * S) => panic!("not seen"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_test_completion_decides_where_the_core_has_no_work() {
    for (answer, expected) in [
        (Some(200), None),
        (Some(500), Some("a test completion failed: status 500")),
        (None, Some("a test completion got no answer within 5 s")),
        // A pooling model takes no tests, so only much more time can tell.
        (Some(404), Some("its processes do nothing")),
    ] {
        let engine = Scripted::start(Box::new(move |_| answer.map(|status| (status, String::new()))));
        let (watched, process) = (Watched::at(&engine.socket), Resting::start());
        watched.has_group(process.pid());
        let request = watched.enter();
        let _wait = waits(&request);
        let limit = if answer == Some(404) { 61 * S } else { 16 * S };
        let reason = within(&watched, limit).await;
        assert_eq!(reason.as_deref().and_then(|reason| reason.split_once(": ")).map(|(_, why)| why), expected, "{answer:?}");
        assert_eq!(engine.requests.lock().first().map(String::as_str), Some("/v1/completions"));
        assert!(answer != Some(404) || within(&watched, 40 * S).await.is_none(), "it would have had less time");
    }
}

#[tokio::test(start_paused = true)]
async fn an_inactive_engine_that_accepts_no_connection_hangs() {
    let engine = FullQueue::start().await;
    let (watched, process) = (Watched::at(&engine.socket), Resting::start());
    watched.has_group(process.pid());
    let request = watched.enter();
    let _wait = waits(&request);
    let reason = within(&watched, 16 * S).await;
    assert_eq!(reason.as_deref(), Some("no token for 10.0 s while 1 request waits: a test completion got no answer within 5 s"));
}
