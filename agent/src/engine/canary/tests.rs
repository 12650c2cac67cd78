//! When an engine is tested, and what its answers mean.

use tokio::time::Instant;

use super::super::Phase;
use super::super::health::tests::{Resting, Watched};
use super::*;
use crate::engine_client::api_client::tests::Scripted;

const S: Duration = Duration::from_secs(1);

/// An engine that answers by a script, and is tested after thirty quiet seconds.
fn watched(script: impl FnMut() -> Option<u16> + Send + 'static) -> (Watched, Scripted) {
    let mut script = script;
    let engine = Scripted::start(Box::new(move |_| script().map(|status| (status, String::new()))));
    let mut watched = Watched::at(&engine.socket);
    watched.subject.canary_interval = 30 * S;
    (watched, engine)
}

async fn within(watched: &Watched, time: Duration) -> Option<String> {
    timeout(time, watch(&watched.subject)).await.ok().map(|cause| cause.to_string())
}

fn request_count(engine: &Scripted) -> usize {
    engine.requests.lock().len()
}

#[tokio::test(start_paused = true)]
async fn an_idle_engine_is_tested_repeatedly_without_counting_as_requests() {
    let (watched, engine) = watched(|| Some(200));
    assert_eq!(within(&watched, 29 * S).await, None);
    assert_eq!(request_count(&engine), 0);
    assert_eq!(within(&watched, 95 * S).await, None);
    assert_eq!(request_count(&engine), 3);
    assert_eq!((watched.subject.traffic.served_total(), watched.subject.traffic.flow().last_progress()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn even_short_requests_postpone_the_canary() {
    let (watched, engine) = watched(|| Some(200));
    let requests = async {
        for _ in 0..5 {
            tokio::time::sleep(20 * S).await;
            drop(watched.enter());
        }
        let _running = watched.enter();
        tokio::time::sleep(100 * S).await;
    };
    tokio::select! {
        reason = watch(&watched.subject) => panic!("{reason}"),
        () = requests => {}
    }
    assert_eq!(request_count(&engine), 0);
}

#[tokio::test(start_paused = true)]
async fn two_failed_canaries_in_a_row_end_the_engines_life() {
    let mut answers = [Some(500), Some(200), Some(500), Some(503)].into_iter();
    let (watched, engine) = watched(move || answers.next().unwrap());
    let reason = within(&watched, 70 * S).await.unwrap();
    assert_eq!(reason, "a test completion failed 2 times in a row while no request was running: status 503");
    assert_eq!(request_count(&engine), 4);
}

#[tokio::test(start_paused = true)]
async fn an_engine_without_completions_is_not_tested_again() {
    let (watched, engine) = watched(|| Some(404));
    assert_eq!(within(&watched, 600 * S).await, None);
    assert_eq!(request_count(&engine), 1);
}

#[tokio::test(start_paused = true)]
async fn the_canary_skips_engines_not_serving_or_excluded() {
    let (mut watched, engine) = watched(|| Some(500));
    for phase in [Phase::Draining, Phase::Sleeping] {
        watched.has_phase(phase);
        assert_eq!(within(&watched, 300 * S).await, None);
    }
    watched.has_phase(Phase::Ready);
    watched.subject.canary_interval = Duration::ZERO;
    assert_eq!(within(&watched, 300 * S).await, None);
    assert_eq!(request_count(&engine), 0);
}

#[tokio::test(start_paused = true)]
async fn an_idle_engine_that_does_not_answer_the_canary_hangs() {
    let (watched, _engine) = watched(|| None);
    let process = Resting::start();
    watched.has_group(process.pid());
    let begun = Instant::now();
    let reason = watch(&watched.subject).await.to_string();
    assert_eq!(reason, "a test completion failed 2 times in a row while no request was running: no answer within 30 s");
    // 30 s of quiet, the long first deadline, a pause, and another such round: the engine was never
    // warm.
    assert!(begun.elapsed() < 93 * S, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_canary_during_a_suspension_proves_nothing() {
    let (watched, _engine) = watched(|| None);
    let mut canary = Canary::new(&watched.subject);
    let suspension = async {
        tokio::time::sleep(S).await;
        tokio::time::advance(3600 * S).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        outcome = canary.run_test("tiny") => assert_eq!(outcome, CanaryOutcome::Suspended),
        () = suspension => unreachable!("it has no end"),
    }
    assert_eq!(CanaryFailures(1).record(&CanaryOutcome::Suspended, false, &ProcessActivity::Idle), None);
    assert_eq!(canary.run_test("tiny").await, CanaryOutcome::TimedOut(FIRST_TEST_TIMEOUT));
}

#[test]
fn a_busy_engine_that_answers_late_is_just_slow() {
    let slow = || CanaryOutcome::TimedOut(10 * S);
    let stopped = ProcessActivity::Stopped("x (pid 7)".to_owned());
    // Columns: outcome, whether the engine made other progress, activity, whether the outcome
    // counts.
    let cases = [
        (slow(), false, ProcessActivity::Idle, true),
        (slow(), false, stopped.clone(), true),
        (slow(), true, ProcessActivity::Idle, false),
        (slow(), false, ProcessActivity::Computing, false),
        (slow(), false, ProcessActivity::Unknown, false),
        (CanaryOutcome::Failed("status 500".to_owned()), true, ProcessActivity::Computing, true),
        (CanaryOutcome::Computed, false, ProcessActivity::Idle, false),
    ];
    for (outcome, moved, activity, counts) in cases {
        let mut tally = CanaryFailures(1);
        assert_eq!(tally.record(&outcome, moved, &activity).is_some(), counts, "{outcome:?}, {moved}, {activity:?}");
        assert_eq!(tally.0 == 0, !counts);
    }
    let reason = CanaryFailures(1).record(&slow(), false, &stopped).unwrap().to_string();
    assert!(reason.ends_with("no answer within 10 s; x (pid 7) is stopped"), "{reason}");
}
