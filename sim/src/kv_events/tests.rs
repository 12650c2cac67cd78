//! Events against the recorded bytes, and the sockets against a subscriber.

use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use super::*;
use crate::tests::{RunningEngine, fixture_text};

fn bytes_of(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

/// Time of a batch in its bytes: an array of three, then a double.
fn timestamp(payload: &[u8]) -> f64 {
    assert_eq!(payload[..2], [0x93, 0xcb]);
    f64::from_be_bytes(payload[2..10].try_into().unwrap())
}

#[test]
fn recorded_batches_encode_to_their_own_bytes() {
    let decoded = fixture_text("kv_0.32_int.decoded.jsonl");
    let frames = fixture_text("kv_0.32_int.frames.hex");
    assert_eq!(decoded.lines().count(), frames.lines().count());
    for (decoded, frames) in decoded.lines().zip(frames.lines()) {
        let message: Value = serde_json::from_str(decoded).unwrap();
        let events: Vec<Event> = serde_json::from_value(message["batch"][1].clone()).unwrap();
        let payload = bytes_of(frames.split(' ').nth(2).unwrap());
        assert_eq!(encode(timestamp(&payload), &events, 0), payload);
    }
}

#[test]
fn removals_and_resets_encode_as_the_release_does() {
    let releases: Value = serde_json::from_str(&fixture_text("kv_wire_by_version.json")).unwrap();
    let release = &releases["0.30.0"];
    let payload = bytes_of(release["payload_int_hashes_hex"].as_str().unwrap());
    let events: Vec<Event> = serde_json::from_value(release["decoded"][1].clone()).unwrap();
    let removed = [Event::removed(11), Event::AllBlocksCleared];
    assert_eq!(events[2..], removed);
    let ours = encode(0.0, &removed, 0);
    let header = 11;
    assert!(payload.ends_with(&ours[header..]), "the batch ends with the same events");
    assert_eq!(events[0], Event::stored(vec![11, 12_345_678_901_234_567_890], None, (0..32).collect(), vec![None, None]));
}

#[test]
fn the_configuration_has_the_defaults_of_vllm() {
    let parse = |json| KvEventsConfig::parse(Some(json)).unwrap();
    assert_eq!(KvEventsConfig::parse(None).unwrap(), None);
    assert_eq!(parse(r#"{"enable_kv_cache_events":false}"#), None);
    assert_eq!(parse(r#"{"enable_kv_cache_events":true,"publisher":"null"}"#), None);
    let config = parse(r#"{"enable_kv_cache_events":true,"endpoint":"tcp://127.0.0.1:5557"}"#).unwrap();
    assert_eq!((config.buffer_steps, config.binds()), (10_000, false));
    let ipc = KvEventsConfig { endpoint: "ipc:///tmp/x".to_owned(), ..config };
    assert!(ipc.binds());
}

async fn soon<T>(waiting: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("it comes soon")
}

#[tokio::test]
async fn a_subscriber_and_a_late_reader_get_the_same_batches() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = |name: &str| format!("ipc://{}/{name}", directory.path().display());
    let config = KvEventsConfig {
        enable_kv_cache_events: true,
        endpoint: endpoint("events"),
        replay_endpoint: Some(endpoint("replay")),
        topic: "kv-events".to_owned(),
        buffer_steps: 3,
        ..KvEventsConfig::default()
    };
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let publisher = Publisher::start(config, &tasks, &stop).await.unwrap();
    let mut subscriber = SubSocket::new();
    subscriber.connect(&endpoint("events")).await.unwrap();
    subscriber.subscribe("kv-events").await.unwrap();
    // A subscription takes effect some time after it is made, so publish until it has.
    let mut published = 0_u64;
    let first = soon(async {
        loop {
            publisher.publish(vec![Event::removed(published)]);
            published += 1;
            let waiting = tokio::time::timeout(Duration::from_millis(20), subscriber.recv());
            if let Ok(message) = waiting.await {
                return message.unwrap();
            }
        }
    })
    .await;
    let sequence = u64::from_be_bytes(first.get(1).unwrap().as_ref().try_into().unwrap());
    assert_eq!(first.get(0).unwrap().as_ref(), b"kv-events");
    let payload = first.get(2).unwrap();
    assert_eq!(*payload, encode(timestamp(payload), &[Event::removed(sequence)], 0));
    while published < 5 {
        publisher.publish(vec![Event::removed(published)]);
        published += 1;
    }

    let mut dealer = DealerSocket::new();
    dealer.connect(&endpoint("replay")).await.unwrap();
    let start = bytes::Bytes::copy_from_slice(&0_u64.to_be_bytes());
    let request = ZmqMessage::try_from(vec![bytes::Bytes::new(), start]).unwrap();
    // The buffer must have taken the last batch before it is requested.
    tokio::time::sleep(Duration::from_millis(50)).await;
    dealer.send(request).await.unwrap();
    let mut sequences = Vec::new();
    loop {
        let reply = soon(dealer.recv()).await.unwrap();
        assert_eq!(reply.len(), 4);
        assert!(reply.get(0).unwrap().is_empty());
        let sequence = i64::from_be_bytes(reply.get(2).unwrap().as_ref().try_into().unwrap());
        if sequence == -1 {
            assert!(reply.get(1).unwrap().is_empty() && reply.get(3).unwrap().is_empty());
            break;
        }
        assert_eq!(reply.get(1).unwrap().as_ref(), b"kv-events");
        sequences.push(sequence.cast_unsigned());
    }
    assert_eq!(sequences, [published - 3, published - 2, published - 1], "only the buffer is replayed");
    stop.cancel();
    tasks.close();
    soon(tasks.wait()).await;
}

#[tokio::test]
async fn resets_are_announced_and_salted_blocks_carry_their_salt() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = format!("ipc://{}/events", directory.path().display());
    let config = format!(r#"{{"enable_kv_cache_events":true,"endpoint":"{endpoint}"}}"#);
    let engine = RunningEngine::start(&["--kv-events-config", &config]).await;
    let mut subscriber = SubSocket::new();
    subscriber.connect(&endpoint).await.unwrap();
    subscriber.subscribe("").await.unwrap();
    let salts = |events: &[Event]| match events {
        [Event::BlockStored { extra_keys: Some(keys), .. }] => keys.iter().flatten().flatten().cloned().collect(),
        _ => Vec::new(),
    };
    // A subscription takes effect some time after it is made, so ask until it has.
    let mut salt = 0;
    let mut ask = async || {
        salt += 1;
        let body = format!(r#"{{"prompt":{:?},"max_tokens":1,"cache_salt":"{salt}"}}"#, [7; 20]);
        assert_eq!(engine.post("/v1/completions", &body).await.status, 200);
        salt
    };
    let next_batch = async |subscriber: &mut SubSocket| -> Option<Vec<Event>> {
        let message = tokio::time::timeout(Duration::from_millis(50), subscriber.recv()).await.ok()?.unwrap();
        let (_, events, _): (f64, Vec<Event>, u32) = rmp_serde::from_slice(message.get(2).unwrap()).unwrap();
        Some(events)
    };
    soon(async {
        let mut sent = ask().await;
        loop {
            match next_batch(&mut subscriber).await {
                Some(events) if salts(&events) == [sent.to_string()] => return,
                // An earlier request's answer came late.
                Some(_) => {}
                None => sent = ask().await,
            }
        }
    })
    .await;
    assert_eq!(engine.post("/reset_prefix_cache", "").await.body, br#"{"success":true}"#);
    assert_eq!(next_batch(&mut subscriber).await, None, "an idle engine takes no step");
    ask().await;
    let events = soon(async {
        loop {
            if let Some(events) = next_batch(&mut subscriber).await {
                return events;
            }
        }
    })
    .await;
    assert!(matches!(events[..], [Event::AllBlocksCleared, Event::BlockStored { .. }]), "{events:?}");
}
