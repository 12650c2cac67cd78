//! Recorded bytes of many releases, and bytes that no release sends.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::cache::tests::{batch, bytes_of, fixture, frames};

/// Event that this JSON stands for, read without the decoder under test.
fn expected(event: &Value) -> KvEvent {
    let named = |names: &[&str]| {
        let values = event.as_array().unwrap()[1..].iter();
        Value::Object(names.iter().map(|&name| name.to_owned()).zip(values.cloned()).collect())
    };
    let (tag, fields) = match event {
        Value::Array(array) => match array[0].as_str().unwrap() {
            "BlockStored" => ("BlockStored", named(&STORED_FIELDS)),
            "BlockRemoved" => ("BlockRemoved", named(&REMOVED_FIELDS)),
            tag => (tag, Value::Null),
        },
        map => (map["type"].as_str().unwrap(), map.clone()),
    };
    let text = |name: &str| fields.get(name).and_then(Value::as_str).map(str::to_owned);
    let group = || fields.get("group_idx").and_then(Value::as_u64).map(|group| u32::try_from(group).unwrap());
    let hashes = || fields["block_hashes"].as_array().unwrap().iter().map(hash).collect();
    match tag {
        "BlockStored" => KvEvent::Stored(Box::new(BlocksStored {
            hashes: hashes(),
            parent: Some(&fields["parent_block_hash"]).filter(|parent| !parent.is_null()).map(hash),
            tokens: serde_json::from_value(fields["token_ids"].clone()).unwrap(),
            block_size: serde_json::from_value(fields["block_size"].clone()).unwrap(),
            lora_id: fields["lora_id"].as_i64(),
            lora_name: text("lora_name"),
            medium: text("medium"),
            extra_keys: fields.get("extra_keys").map(list).unwrap_or_default(),
            group: group(),
            kind: text("kv_cache_spec_kind"),
        })),
        "BlockRemoved" => KvEvent::Removed(BlocksRemoved { hashes: hashes(), medium: text("medium"), group: group() }),
        "AllBlocksCleared" => KvEvent::Cleared,
        tag => panic!("{tag} is in no recording"),
    }
}

fn hash(hash: &Value) -> u64 {
    match hash.get("__bytes_hex__") {
        Some(hex) => u64::from_str_radix(&hex.as_str().unwrap()[48..], 16).unwrap(),
        None => hash.as_u64().unwrap(),
    }
}

fn list(keys: &Value) -> Vec<ExtraKey> {
    let extra = |extra: &Value| match extra {
        Value::Null => ExtraKey::Null,
        Value::String(text) => ExtraKey::Text(text.clone()),
        Value::Array(_) => ExtraKey::List(list(extra)),
        other => panic!("{other} is in no recording"),
    };
    keys.as_array().into_iter().flatten().map(extra).collect()
}

#[test]
fn kv_events_of_every_release_are_parsed() {
    let releases: Value = serde_json::from_str(&fixture("kv_wire_by_version.json")).unwrap();
    let releases = releases.as_object().unwrap();
    assert!(releases.len() >= 10);
    for (release, recorded) in releases {
        let payload = bytes_of(recorded["payload_int_hashes_hex"].as_str().unwrap());
        let expected: Vec<KvEvent> = recorded["decoded"][1].as_array().unwrap().iter().map(expected).collect();
        assert_eq!(parse_events(&payload).unwrap(), expected, "{release}");
        let payload = bytes_of(recorded["payload_byte_hashes_no_rank_hex"].as_str().unwrap());
        let [KvEvent::Stored(stored)] = &parse_events(&payload).unwrap()[..] else { panic!("{release} stores once") };
        assert_eq!((&stored.hashes[..], stored.parent), (&[0x0101_0101_0101_0101][..], Some(0x0202_0202_0202_0202)), "{release}");
    }
}

#[test]
fn recorded_kv_messages_decode_as_vllm_decoded_them() {
    for name in ["kv_0.32_int", "kv_0.32_bytes_cbor_bs32"] {
        let decoded = fixture(&format!("{name}.decoded.jsonl"));
        let frames = frames(&format!("{name}.frames.hex"));
        assert_eq!(decoded.lines().count(), frames.len());
        for (decoded, frames) in decoded.lines().zip(&frames) {
            let decoded: Value = serde_json::from_str(decoded).unwrap();
            let (sequence, payload) = parse_live(frames).unwrap();
            assert_eq!(Some(sequence), decoded["seq"].as_u64());
            let expected: Vec<KvEvent> = decoded["batch"][1].as_array().unwrap().iter().map(expected).collect();
            assert_eq!(parse_events(&payload).unwrap(), expected, "{name} {sequence}");
        }
    }
}

#[test]
fn both_replay_framings_are_parsed() {
    let frames = frames("kv_0.32_replay_from3.frames.hex");
    let live = |sequence: u64| {
        let name = "kv_0.32_int.frames.hex";
        let message = crate::cache::tests::frames(name).into_iter().find(|frames| frames[1] == sequence.to_be_bytes()[..]).unwrap();
        ReplayMessage::Batch(sequence, message[2].clone())
    };
    let expected = [live(3), live(4), live(5), live(6), ReplayMessage::End];
    let newer: Vec<ReplayMessage> = frames.iter().map(|frames| parse_replay(frames).unwrap()).collect();
    assert_eq!(newer, expected);
    let older = frames.iter().map(|frames| parse_replay(&[frames[0].clone(), frames[2].clone(), frames[3].clone()]).unwrap());
    assert_eq!(older.collect::<Vec<_>>(), expected);
}

#[test]
fn unknown_event_kinds_and_fields_are_skipped() {
    let payload = batch(&[
        json!(["BlockMoved", {"block_hashes": "elsewhere"}]),
        json!({"type": "BlockMoved", "block_hashes": "elsewhere", "to": [1, {"x": null}]}),
        json!(["BlockRemoved", [7], "GPU", 0, "later", [1, 2]]),
        json!({"type": "BlockRemoved", "block_hashes": [8], "medium": "GPU", "later": {"x": [1]}}),
        json!(["AllBlocksCleared", "later"]),
    ]);
    let removed = |hash, group| KvEvent::Removed(BlocksRemoved { hashes: vec![hash], medium: Some("GPU".to_owned()), group });
    let expected = [KvEvent::Unknown, KvEvent::Unknown, removed(7, Some(0)), removed(8, None), KvEvent::Cleared];
    assert_eq!(parse_events(&payload).unwrap(), expected);
}

#[test]
fn numbers_of_every_width_are_read() {
    let tokens = [1, 200, 300, 70_000, u32::MAX];
    let payload = batch(&[json!(["BlockStored", [1, 300, u64::MAX, -1, i64::MIN], -2, tokens, 1])]);
    let [KvEvent::Stored(stored)] = &parse_events(&payload).unwrap()[..] else { panic!("one is stored") };
    assert_eq!(stored.hashes, [1, 300, u64::MAX, u64::MAX, 1 << 63]);
    assert_eq!((stored.parent, &stored.tokens[..]), (Some(u64::MAX - 1), &tokens[..]));
}

#[test]
fn a_malformed_event_is_an_error() {
    for event in [
        json!(["BlockStored", [1]]),
        json!({"block_hashes": [1]}),
        json!([]),
        json!(["BlockRemoved", "seven"]),
        json!(["BlockStored", [1], null, [-1], 1]),
        json!(["BlockStored", [1], null, [4_294_967_296_u64], 1]),
        json!(1),
    ] {
        assert!(matches!(parse_events(&batch(std::slice::from_ref(&event))), Err(KvEventError::Payload(_))), "{event}");
    }
    assert!(matches!(parse_live(&[]), Err(KvEventError::Frames(0))));
    assert!(matches!(parse_live(&[Bytes::new(), Bytes::new(), Bytes::new()]), Err(KvEventError::Sequence(0))));
    assert!(matches!(parse_replay(&[Bytes::new(), Bytes::new()]), Err(KvEventError::Frames(2))));
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_an_error_at_worst(payload: Vec<u8>, frames: Vec<Vec<u8>>) {
        let _ = parse_events(&payload);
        let frames: Vec<Bytes> = frames.into_iter().map(Bytes::from).collect();
        let _ = (parse_live(&frames), parse_replay(&frames));
    }

    #[test]
    fn damaged_messages_are_an_error_at_worst(which: prop::sample::Index, cut: prop::sample::Index, at: prop::sample::Index, byte: u8) {
        let messages = frames("kv_0.32_int.frames.hex");
        let payload = which.get(&messages)[2].to_vec();
        let _ = parse_events(&payload[..cut.index(payload.len())]);
        let mut damaged = payload;
        let at = at.index(damaged.len());
        damaged[at] = byte;
        let _ = parse_events(&damaged);
    }
}

#[test]
fn a_truncated_message_is_an_error() {
    let payload = &frames("kv_0.32_int.frames.hex")[3][2];
    assert!(parse_events(payload).is_ok());
    for end in 0..payload.len() {
        assert!(parse_events(&payload[..end]).is_err(), "{end} bytes");
    }
}

#[test]
fn endless_nesting_is_an_error() {
    let mut payload = vec![0x93, 0xc0, 0x91, 0x98, 0xab];
    payload.extend_from_slice(b"BlockStored");
    payload.extend(std::iter::repeat_n(0x91, 1_000_000));
    assert!(parse_events(&payload).is_err());
}

#[test]
fn deep_nesting_and_long_batches_are_refused() {
    // [0.5, [{"type": "BlockStored", "zzz": [[[…]]]}], 0]
    let nested = |levels: usize| {
        let mut payload = vec![0x93, 0xca, 0x3f, 0, 0, 0, 0x91, 0x82, 0xa4];
        payload.extend_from_slice(b"type\xabBlockStored\xa3zzz");
        payload.extend(std::iter::repeat_n(0x91, levels));
        payload.extend_from_slice(&[0xc0, 0]);
        parse_events(&payload).unwrap_err().to_string()
    };
    assert!(nested(10).contains("missing field"), "{}", nested(10));
    assert!(nested(100_000).contains("depth limit exceeded"), "{}", nested(100_000));
    let long = parse_events(&vec![0; MAX_BATCH_BYTES + 1]).unwrap_err();
    assert!(matches!(long, KvEventError::Length(_)));
}
