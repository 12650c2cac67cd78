//! Streams that leave a living engine.

use super::*;
use crate::fleet::tests::{attach_node, report};

const BODY: &str = r#"{"model":"m","messages":[],"stream":true,"temperature":0,"max_tokens":5000}"#;

impl Fixture {
    /// The replica that got the first request begins to drain while the stream is under way.
    async fn drain_meanwhile(&self, path: &str, body: &str) -> (String, Result<(), String>) {
        let drain = async {
            sleep(Duration::from_millis(100)).await;
            self.enter(0, Phase::Draining).await;
        };
        tokio::join!(self.stream(path, body), drain).0
    }

    /// The replica that got this request enters a phase.
    async fn enter(&self, request: usize, phase: Phase) {
        let index = self.seen.lock()[request].0.replica;
        let status = ReplicaStatus { launch: Some(EngineLaunch::default()), ..state(phase, "m") };
        report(&self.dispatch.fleet, 1, false, vec![ReplicaChange { state: Some(status), ..ready(index) }]).await;
    }

    fn moved(&self) -> u64 {
        self.dispatch.fleet.view().replicas.iter().map(|replica| replica.local_load.stream_moves.moved()).sum()
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_on_a_draining_replica_resumes_elsewhere() {
    for (path, body) in [(CHAT, BODY), (COMPLETIONS, r#"{"model":"m","prompt":[1,2],"stream":true,"max_tokens":5000}"#)] {
        let uncut = answer(FrontEnd::Python, path, body.as_bytes(), "cmpl-r1", &TEXTS).concat();
        let events = uncut.matches("\n\n").count();
        // Behind the finish reason nothing is left to move.
        for cut in 1..events - 1 {
            let fixture = Fixture::start(2, &[(cut, Death::Silence)]).await;
            let begun = Instant::now();
            let (output, ended) = fixture.drain_meanwhile(path, body).await;
            assert_eq!((bare(&output), ended), (bare(&uncut), Ok(())), "{body} behind {cut}");
            assert!(begun.elapsed() < Duration::from_secs(1), "{:?} behind {cut}", begun.elapsed());
            assert_eq!((output.matches(SEAM_TEXT).count(), fixture.seen.lock().len(), fixture.moved()), (1, 2, 1), "behind {cut}");
            sleep(Duration::from_millis(100)).await;
            fixture.assert_idle();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_stays_on_a_draining_replica_without_another() {
    let fixture = Fixture::start(1, &[(3, Death::Stall(5))]).await;
    let (output, ended) = fixture.drain_meanwhile(CHAT, BODY).await;
    assert_eq!((output, ended), (answer(FrontEnd::Python, CHAT, BODY.as_bytes(), "", &TEXTS).concat(), Ok(())));
    assert_eq!((fixture.seen.lock().len(), fixture.moved()), (1, 0));
    fixture.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_stream_about_to_end_stays_on_its_draining_replica() {
    let fixture = Fixture::start(2, &[(4, Death::Stall(1))]).await;
    let body = BODY.replace("5000", "6");
    let (output, ended) = fixture.drain_meanwhile(CHAT, &body).await;
    assert_eq!((output, ended), (answer(FrontEnd::Python, CHAT, body.as_bytes(), "", &TEXTS).concat(), Ok(())));
    assert_eq!((fixture.seen.lock().len(), fixture.moved()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_stream_stays_when_no_other_engine_begins_in_time() {
    let fixture = Fixture::start(2, &[(3, Death::Stall(9)), (0, Death::Silence)]).await;
    let (output, ended) = fixture.drain_meanwhile(CHAT, BODY).await;
    assert_eq!((output, ended), (answer(FrontEnd::Python, CHAT, BODY.as_bytes(), "", &TEXTS).concat(), Ok(())));
    assert_eq!(fixture.moved(), 0);
    assert!(fixture.seen.lock().len() >= 2);
    sleep(Duration::from_millis(100)).await;
    fixture.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_stream_leaves_a_silent_agent_unless_tokens_still_come() {
    for (end, moves) in [(Death::Silence, 1), (Death::Stall(3), 0)] {
        let fixture = Fixture::start(1, &[(3, end)]).await;
        let launch = Some(EngineLaunch::default());
        let other = ReplicaChange { state: Some(ReplicaStatus { launch, ..state(Phase::Ready, "m") }), ..ready(0) };
        let fleet = &fixture.dispatch.fleet;
        let streaming = fixture.stream(CHAT, BODY);
        let others = async {
            sleep(Duration::from_millis(100)).await;
            let lane = attach_node(fleet, 2, "o", vec![other]).await;
            fixture.tasks.spawn(serve(lane, fixture.script.clone(), fixture.seen.clone()));
            loop {
                sleep(Duration::from_millis(500)).await;
                report(fleet, 2, false, Vec::new()).await;
            }
        };
        let (output, ended) = tokio::select! { output = streaming => output, () = others => unreachable!() };
        assert_eq!((bare(&output), ended), (bare(&answer(FrontEnd::Python, CHAT, BODY.as_bytes(), "", &TEXTS).concat()), Ok(())));
        assert_eq!(fixture.moved(), moves, "{end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_leaves_a_replica_for_sleep_and_may_return() {
    let fixture = Fixture::start(2, &[(3, Death::Silence), (2, Death::Silence)]).await;
    let moves = async {
        sleep(Duration::from_millis(100)).await;
        fixture.enter(0, Phase::Sleeping).await;
        sleep(Duration::from_millis(200)).await;
        // The engine's life is unchanged.
        fixture.enter(0, Phase::Ready).await;
        fixture.enter(1, Phase::Draining).await;
    };
    let ((output, ended), ()) = tokio::join!(fixture.stream(CHAT, BODY), moves);
    assert_eq!((bare(&output), ended), (bare(&answer(FrontEnd::Python, CHAT, BODY.as_bytes(), "", &TEXTS).concat()), Ok(())));
    let replicas: Vec<u32> = fixture.seen.lock().iter().map(|(head, _)| head.replica).collect();
    assert_eq!((output.matches(SEAM_TEXT).count(), replicas[0], replicas.len()), (2, replicas[2], 3));
    sleep(Duration::from_millis(100)).await;
    fixture.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_stream_stays_when_the_other_engine_refuses_it() {
    let fixture = Fixture::start(2, &[(3, Death::Stall(3)), (0, Death::EngineRefusal), (0, Death::EngineRefusal)]).await;
    let (output, ended) = fixture.drain_meanwhile(CHAT, BODY).await;
    assert_eq!((output, ended), (answer(FrontEnd::Python, CHAT, BODY.as_bytes(), "", &TEXTS).concat(), Ok(())));
    assert_eq!(fixture.moved(), 0);
    sleep(Duration::from_millis(100)).await;
    fixture.assert_idle();
}
