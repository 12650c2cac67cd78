//! Streams whose request is sent again.

use super::*;
use crate::resumption::replay_samples::{Grouping, replayed_answer, understood};

const MESSAGES: &str = "/v1/messages";

/// Requests for greedy streams that have no tier of tokens.
const REQUESTS: [(&str, &str); 8] = [
    (CHAT, r#"{"model":"m","messages":[],"stream":true,"temperature":0,"tools":[{}]}"#),
    (
        CHAT,
        r#"{"model":"m","messages":[],"stream":true,"temperature":0,"tools":[{}],"logprobs":true,"stream_options":{"include_usage":true}}"#,
    ),
    (CHAT, r#"{"model":"m","messages":[],"stream":true,"temperature":0,"response_format":{"type":"json_object"}}"#),
    (CHAT, r#"{"model":"m","messages":[],"stream":true,"temperature":0,"stop":["x"],"presence_penalty":1}"#),
    (CHAT, r#"{"model":"m","messages":[],"stream":true,"temperature":1,"seed":7,"n":2}"#),
    (COMPLETIONS, r#"{"model":"m","prompt":"x","stream":true,"temperature":0,"logprobs":1,"echo":true}"#),
    (MESSAGES, r#"{"model":"m","messages":[],"stream":true,"temperature":0,"tools":[{}]}"#),
    (MESSAGES, r#"{"model":"m","messages":[],"stream":true,"temperature":0}"#),
];

/// Engines that give their answers in these groups of tokens, one engine after another.
async fn start(groups: &'static [usize], script: &[(usize, Death)]) -> Fixture {
    let front_ends = vec![FrontEnd::Python; groups.len()];
    let fixture = Fixture::start_telling(&front_ends, script, move |head, body, attempt| {
        let group = groups[attempt.min(groups.len() - 1)];
        replayed_answer(&head.path, body, Grouping { name: attempt, group, front_end: FrontEnd::Python })
    });
    fixture.await
}

#[tokio::test(start_paused = true)]
async fn a_stream_replayed_anywhere_arrives_whole() {
    let deaths = [Death::Fault(Fault::EngineLost), Death::Fault(Fault::LaneLost), Death::Incomplete, Death::Silence];
    for (path, body) in REQUESTS {
        let uncut = replayed_answer(path, body.as_bytes(), Grouping { name: 0, group: 1, front_end: FrontEnd::Python });
        for (cut, death) in (1..uncut.len()).flat_map(|cut| [(cut, deaths[cut % deaths.len()]), (cut, Death::WithinEvent)]) {
            let fixture = start(&[1, 3], &[(cut, death)]).await;
            let (output, ended) = fixture.stream(path, body).await;
            assert_eq!((understood(&output), ended), (understood(&uncut.concat()), Ok(())), "{body} {death:?} behind {cut}: {output}");
            assert_eq!(output.matches(SEAM_TEXT).count(), 1);
            let seen = fixture.seen.lock().clone();
            assert!(seen.len() == 2 && seen.iter().all(|(head, sent)| head.path == path && sent == body), "{seen:?}");
            assert!(seen[0].0.replica != seen[1].0.replica && seen[0].0.fingerprint == seen[1].0.fingerprint);
            sleep(Duration::from_millis(100)).await;
            fixture.assert_idle();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_replays_are_lost_is_replayed_again() {
    let stopped = Death::Fault(Fault::EngineStopped);
    for (path, body) in REQUESTS {
        let fixture = start(&[1, 2, 4, 1], &[(3, stopped), (2, Death::WithinEvent), (2, Death::Incomplete)]).await;
        let (output, ended) = fixture.stream(path, body).await;
        let uncut = replayed_answer(path, body.as_bytes(), Grouping { name: 0, group: 1, front_end: FrontEnd::Python }).concat();
        assert_eq!((understood(&output), ended), (understood(&uncut), Ok(())), "{body}: {output}");
        assert_eq!(output.matches(SEAM_TEXT).count(), 3);
        fixture.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_with_another_answer_ends_with_an_error() {
    let [(path, body), ..] = REQUESTS;
    let fixture = Fixture::start_telling(&[FrontEnd::Python; 2], &[(6, Death::Fault(Fault::EngineStopped))], |head, body, attempt| {
        let events = replayed_answer(&head.path, body, Grouping { name: attempt, group: 1, front_end: FrontEnd::Python });
        events.iter().map(|event| if attempt == 0 { event.clone() } else { event.replace("\"Let\"", "\"Lat\"") }).collect()
    });
    let fixture = fixture.await;
    let (output, ended) = fixture.stream(path, body).await;
    assert_eq!(output.matches("data: {\"error\":").count(), 1, "{output}");
    assert!(output.contains("another one did not give the same answer") && ended.is_err(), "{output}");
    assert!(!output.contains("Lat") && !output.contains("[DONE]"), "{output}");
    assert_eq!(fixture.seen.lock().len(), 2);
    sleep(Duration::from_millis(100)).await;
    fixture.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn a_client_gets_comments_while_a_replay_catches_up() {
    let [(path, body), ..] = REQUESTS;
    let fixture = start(&[1, 1], &[(6, Death::Fault(Fault::EngineLost)), (4, Death::Stall(9))]).await;
    let permit = fixture.admission.admit(&Caller::anonymous("".into()), UsageEstimate::default()).unwrap();
    let mut answer = fixture.dispatch.send(request(path, body), permit).await.unwrap_or_else(|refusal| panic!("{refusal}"));
    answer.body.send_keep_alives(Duration::from_secs(2));
    let (output, ended) = read(answer.body).await;
    assert_eq!((output.matches(": keep-alive\n\n").count(), ended), (4, Ok(())), "{output}");
}

#[tokio::test(start_paused = true)]
async fn a_killer_request_is_not_replayed_through_the_fleet() {
    let lost = Death::Fault(Fault::EngineLost);
    for (path, body) in REQUESTS {
        let fixture = start(&[1; 6], &[(3, lost); 6]).await;
        let (output, ended) = fixture.stream(path, body).await;
        assert!(ended.is_err(), "{output}");
        assert_eq!((fixture.seen.lock().len(), output.matches("\"error\":").count()), (2, 1), "{output}");
        fixture.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_a_replay_leaves_nothing_behind() {
    let [(path, body), ..] = REQUESTS;
    // The stream is silent while it catches up, and before another engine has begun.
    for replay in [(4, Death::Silence), (0, Death::Silence)] {
        let fixture = start(&[1, 1], &[(6, Death::Fault(Fault::EngineStopped)), replay]).await;
        let permit = fixture.admission.admit(&Caller::anonymous("".into()), UsageEstimate::default()).unwrap();
        let mut answer = fixture.dispatch.send(request(path, body), permit).await.unwrap_or_else(|refusal| panic!("{refusal}"));
        let reading = async { while answer.body.frame().await.is_some_and(|frame| frame.is_ok()) {} };
        tokio::time::timeout(Duration::from_secs(1), reading).await.unwrap_err();
        assert_eq!(fixture.seen.lock().len(), 2);
        drop(answer);
        sleep(Duration::from_millis(100)).await;
        fixture.assert_idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_replayed_only_by_the_same_front_end() {
    let [(path, body), ..] = REQUESTS;
    for front_ends in [[FrontEnd::Rust; 2], [FrontEnd::Python, FrontEnd::Rust], [FrontEnd::Rust, FrontEnd::Python]] {
        let fixture = Fixture::start_telling(&front_ends, &[(6, Death::Fault(Fault::EngineStopped))], move |head, body, attempt| {
            replayed_answer(&head.path, body, Grouping { name: attempt, group: 1, front_end: front_ends[0] })
        });
        let fixture = fixture.await;
        let (output, ended) = fixture.stream(path, body).await;
        if front_ends[0] == front_ends[1] {
            let uncut = replayed_answer(path, body.as_bytes(), Grouping { name: 0, group: 1, front_end: front_ends[0] }).concat();
            assert_eq!((understood(&output), ended), (understood(&uncut), Ok(())), "{output}");
        } else {
            assert!(ended.is_err() && output.contains("data: {\"error\":") && !output.contains(SEAM_TEXT), "{output}");
            assert_eq!(fixture.seen.lock().len(), 1);
        }
        sleep(Duration::from_millis(100)).await;
        fixture.assert_idle();
    }
}
