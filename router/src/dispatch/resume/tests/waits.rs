//! Streams that no replica can continue for a while.

use super::*;
use crate::fleet::tests::{announce, detach, report};

const BODY: &str = r#"{"model":"m","messages":[],"stream":true,"temperature":0,"max_tokens":5000}"#;

/// A request whose stream is replayed.
const REPLAYED: &str = r#"{"model":"m","messages":[],"stream":true,"temperature":0,"stop":["x"]}"#;

/// The events without empty ones, which a replay may leave out.
fn telling(output: &str) -> Vec<String> {
    bare(output).split("\n\n").filter(|event| !event.contains(r#""delta":{"content":""}"#)).map(str::to_owned).collect()
}

fn in_phase(phase: Phase, epoch: u64, start_left: Option<Duration>) -> ReplicaChange {
    let status = ReplicaStatus { launch: Some(EngineLaunch::default()), start_left, ..state(phase, "m") };
    ReplicaChange { epoch, state: Some(status), ..ready(0) }
}

impl Fixture {
    /// The only replica, whose stream ends like this.
    async fn with_one(end: Death) -> Self {
        Self::start(1, &[(3, end)]).await
    }

    /// The agent is lost once the stream has begun.
    async fn lose_agent(&self) {
        sleep(Duration::from_millis(100)).await;
        detach(&self.dispatch.fleet, 1).await;
    }

    /// Another agent attaches with this life of the engine.
    async fn attach_again(&self, epoch: u64) {
        let lane = attach(&self.dispatch.fleet, 2, vec![in_phase(Phase::Ready, epoch, None)]).await;
        self.tasks.spawn(serve(lane, self.script.clone(), self.seen.clone()));
    }

    async fn enter_life(&self, phase: Phase, epoch: u64, start_left: Option<Duration>) {
        report(&self.dispatch.fleet, 1, false, vec![in_phase(phase, epoch, start_left)]).await;
    }

    /// The agent keeps reporting.
    async fn live(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            report(&self.dispatch.fleet, 1, false, Vec::new()).await;
            sleep(Duration::from_millis(500)).await;
        }
    }

    fn assert_resumed(&self, body: &str, (output, ended): (String, Result<(), String>)) {
        let uncut = answer(FrontEnd::Python, CHAT, body.as_bytes(), "cmpl-r1", &TEXTS).concat();
        assert_eq!((telling(&output), ended), (telling(&uncut), Ok(())));
        assert_eq!((output.matches(SEAM_TEXT).count(), self.seen.lock().len(), self.dispatch.metrics.retries.get()), (1, 2, 1));
        self.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_waits_for_the_kept_engine_of_its_agent() {
    for body in [BODY, REPLAYED] {
        let fixture = Fixture::with_one(Death::Fault(Fault::LaneLost)).await;
        let comes_back = async {
            fixture.lose_agent().await;
            sleep(Duration::from_millis(1300)).await;
            fixture.attach_again(1).await;
        };
        fixture.assert_resumed(body, tokio::join!(fixture.stream(CHAT, body), comes_back).0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_waits_for_the_next_life_of_its_engine() {
    for death in [Fault::EngineLost, Fault::EngineStopped] {
        let fixture = Fixture::with_one(Death::Fault(death)).await;
        let starts_again = async {
            // The process dies slowly.
            fixture.live(Duration::from_secs(5)).await;
            fixture.enter_life(Phase::Failed, 1, Some(Duration::from_secs(31))).await;
            fixture.live(Duration::from_secs(1)).await;
            fixture.enter_life(Phase::Loading, 2, None).await;
            fixture.live(Duration::from_secs(30)).await;
            fixture.enter_life(Phase::Ready, 2, None).await;
        };
        fixture.assert_resumed(BODY, tokio::join!(fixture.stream(CHAT, BODY), starts_again).0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_its_agent_stays_away() {
    let fixture = Fixture::with_one(Death::Fault(Fault::LaneLost)).await;
    let begun = Instant::now();
    let ((output, ended), ()) = tokio::join!(fixture.stream(CHAT, BODY), fixture.lose_agent());
    assert!(ended.is_err() && output.contains("n/0 has lost its agent; it waited 3."), "{output}");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(fixture.seen.lock().len(), 1);
    fixture.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_stream_does_not_wait_for_an_engine_that_stays() {
    for (phase, start_left) in [(Phase::Failed, None), (Phase::Stopped, None), (Phase::Failed, Some(Duration::from_secs(3600)))] {
        let fixture = Fixture::with_one(Death::Fault(Fault::EngineLost)).await;
        let fails = async {
            sleep(Duration::from_millis(100)).await;
            fixture.enter_life(phase, 1, start_left).await;
        };
        let begun = Instant::now();
        let ((output, ended), ()) = tokio::join!(fixture.stream(CHAT, BODY), fails);
        assert!(ended.is_err() && output.contains("it could not be resumed: "), "{output}");
        // The router is in its startup grace.
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        fixture.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_waits_no_longer_than_the_setting_allows() {
    let fixture = Fixture::with_one(Death::Fault(Fault::LaneLost)).await;
    let expected = async {
        fixture.lose_agent().await;
        loop {
            announce(&fixture.dispatch.fleet, &[("m", None)]).await;
            sleep(Duration::from_secs(10)).await;
        }
    };
    let begun = Instant::now();
    let (output, ended) = tokio::select! { output = fixture.stream(CHAT, BODY) => output, () = expected => unreachable!() };
    let words = "2 jobs wait: ngpus; it waited 60.0 s for a replica, as long as router.max_queue_wait allows";
    assert!(ended.is_err() && output.contains(words), "{output}");
    assert!(begun.elapsed() < Duration::from_secs(61), "{:?}", begun.elapsed());
    assert_eq!((fixture.seen.lock().len(), fixture.dispatch.metrics.retries.get()), (1, 0));
    let last_miss = fixture.dispatch.fleet.view().expectation(Some("m")).unwrap().last_miss();
    assert!(last_miss.is_some_and(|at| at.elapsed() < Duration::from_secs(1)), "its controller has learned of it");
    fixture.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_crashes_its_only_engine_twice_is_refused() {
    let crash = Death::Fault(Fault::EngineLost);
    let fixture = Fixture::start(1, &[(3, crash), (1, crash), (1, crash)]).await;
    let crashes = async {
        for epoch in 2..4 {
            sleep(Duration::from_secs(2)).await;
            fixture.enter_life(Phase::Failed, epoch - 1, Some(Duration::from_secs(2))).await;
            sleep(Duration::from_secs(1)).await;
            fixture.enter_life(Phase::Ready, epoch, None).await;
        }
    };
    let ((output, ended), ()) = tokio::join!(fixture.stream(CHAT, BODY), crashes);
    assert!(ended.is_err() && output.contains("data: {\"error\":"), "{output}");
    assert_eq!(fixture.seen.lock().len(), 2);
    fixture.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_ends_its_streams_wait() {
    let fixture = Fixture::with_one(Death::Fault(Fault::LaneLost)).await;
    let patience = tokio::time::timeout(Duration::from_secs(1), fixture.stream(CHAT, BODY));
    let (left, ()) = tokio::join!(patience, fixture.lose_agent());
    assert!(left.is_err() && fixture.seen.lock().len() == 1);
    fixture.assert_idle();
}
