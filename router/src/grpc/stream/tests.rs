use hostler_prompt::Dialect;
use tonic::Code;

use super::*;
use crate::resumption::replay_samples::{event_count, resumed_stream};

/// A body as vLLM sent it, without the frames of its chunks.
fn recorded(raw: &[u8]) -> Vec<u8> {
    let head = memchr::memmem::find(raw, b"\r\n\r\n").unwrap();
    let (mut rest, mut body) = (&raw[head + 4..], Vec::new());
    loop {
        let line = memchr::memchr(b'\n', rest).unwrap();
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap().trim(), 16).unwrap();
        if length == 0 {
            return body;
        }
        body.extend_from_slice(&rest[line + 1..line + 1 + length]);
        rest = &rest[line + 1 + length + 2..];
    }
}

/// The events of a stream in pieces of this size, and how it ended.
fn translated(body: &[u8], piece: usize) -> (Vec<Event>, Result<(), Status>) {
    let mut lines = SseDecoder::default();
    let mut translation =
        EventTranslator { placement: wire::Placement { replica: "n/0".into(), ..Default::default() }, started: false, usage: None };
    let mut events = VecDeque::new();
    let mut ended = Ok(());
    let mut read = |lines: &mut SseDecoder, events: &mut VecDeque<_>| {
        while let Some(data) = lines.next_event()? {
            translation.translate(&data, events)?;
        }
        Ok(())
    };
    for piece in body.chunks(piece) {
        lines.push(piece);
        ended = ended.and_then(|()| read(&mut lines, &mut events));
    }
    lines.finish();
    ended = ended.and_then(|()| read(&mut lines, &mut events));
    if ended.is_ok() {
        events.extend(translation.finish());
    }
    (events.into_iter().map(|event| event.event.unwrap()).collect(), ended)
}

fn deltas(events: &[Event]) -> impl Iterator<Item = &wire::Delta> {
    events.iter().filter_map(|event| if let Event::Delta(delta) = event { Some(delta) } else { None })
}

#[test]
fn a_recorded_chat_parses_the_same_however_cut() {
    let body = recorded(include_bytes!("../../../../tests/fixtures/vllm/sse_chat_stream_usage.raw"));
    let (events, ended) = translated(&body, body.len());
    ended.unwrap();
    assert!(matches!(&events[0], Event::Started(started)
        if started.id == "chatcmpl-my-req-1" && started.model == "tiny" && started.placement.as_ref().unwrap().replica == "n/0"));
    assert_eq!(deltas(&events).map(|delta| delta.text.as_str()).collect::<String>(), "\n\n\n\n\n\n");
    let [.., Event::Finish(finish), Event::Usage(usage)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((finish.reason(), finish.word.as_str()), (wire::FinishReason::Length, "length"));
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (13, 6, None));
    for piece in [1, 2, 3, 7, 64, 1000] {
        assert_eq!(translated(&body, piece).0, events, "in pieces of {piece}");
    }
}

#[test]
fn a_recorded_completion_gives_prompt_token_ids_once() {
    let body = recorded(include_bytes!("../../../../tests/fixtures/vllm/sse_completions_usage.raw"));
    let (events, _) = translated(&body, 100);
    assert!(matches!(&events[0], Event::Started(started) if started.prompt_token_ids == [74, 75, 1348]));
    let ids: Vec<u32> = deltas(&events).flat_map(|delta| delta.token_ids.clone()).collect();
    assert_eq!(ids[..3], [1348, 1348, 1030]);
    assert!(matches!(events.last(), Some(Event::Usage(usage)) if usage.completion_tokens == ids.len() as u64));
}

#[test]
fn a_recorded_tool_call_arrives_in_pieces() {
    let body = recorded(include_bytes!("../../../../tests/fixtures/vllm/sse_chat_tool_required.raw"));
    let (events, ended) = translated(&body, 100);
    ended.unwrap();
    let calls: Vec<&wire::ToolCallDelta> = deltas(&events).flat_map(|delta| &delta.tool_calls).collect();
    assert_eq!((calls[0].name.as_str(), calls[0].id.as_str()), ("get_weather", "chatcmpl-tool-bf6474d0d72c5b92"));
    assert!(calls[1..].iter().all(|call| call.id.is_empty() && call.index == 0));
    let arguments: String = calls.iter().map(|call| call.arguments.as_str()).collect();
    assert!(arguments.starts_with("[\"") && arguments.len() > 4, "{arguments}");
}

#[test]
fn a_recorded_engine_crash_ends_in_a_status() {
    let body = recorded(include_bytes!("../../../../tests/fixtures/vllm/sse_error_midstream_worker_killed.raw"));
    let (events, ended) = translated(&body, 50);
    let status = ended.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert!(status.message().starts_with("EngineCore encountered an issue"), "{}", status.message());
    assert!(deltas(&events).count() > 1);
    assert!(!events.iter().any(|event| matches!(event, Event::Finish(_) | Event::Usage(_))));
}

#[test]
fn unknown_and_malformed_fields_break_nothing() {
    let body = concat!(
        ": keep-alive\n\n",
        "id: 7\nretry: 1\n\n",
        "data: {\"id\":null,\"new\":{\"deep\":[1,{\"a\":null}]},\"choices\":null,\"usage\":\"soon\"}\n\n",
        "event: message\r\ndata: {\"choices\":[{\"index\":0,\"delta\":{\"content\":null,\"reasoning\":\"hm\",\"extra\":1},\"logprobs\":7,\"token_ids\":[\"a\"]}]}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"so\",\"tool_calls\":null}},\n",
        "data: {\"index\":1,\"delta\":null,\"finish_reason\":\"sunset\",\"stop_reason\":151645}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":1,\"x\":2},\"completion_tokens_details\":{\"reasoning_tokens\":2}}}\n\n",
        "data: [DONE]",
    );
    let (events, ended) = translated(body.as_bytes(), 11);
    ended.unwrap();
    let delta = |reasoning: &str| Event::Delta(wire::Delta { reasoning: reasoning.into(), ..wire::Delta::default() });
    assert_eq!(events[1..3], [delta("hm"), delta("so")]);
    let Event::Finish(finish) = &events[3] else { panic!("{events:?}") };
    assert_eq!((finish.index, finish.reason(), finish.word.as_str()), (1, wire::FinishReason::Other, "sunset"));
    assert_eq!(finish.stopped_by, Some(wire::finish::StoppedBy::TokenId(151_645)));
    let usage = wire::Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: Some(1), reasoning_tokens: Some(2) };
    assert_eq!(events[4..], [Event::Usage(usage)]);
}

#[test]
fn an_event_that_is_not_json_ends_in_a_status() {
    let (events, ended) = translated(b"data: {\"choices\":[]}\n\ndata: <html>\n\n", 5);
    assert_eq!((events.len(), ended.unwrap_err().code()), (1, Code::Internal));
}

#[test]
fn an_endless_event_is_not_buffered_forever() {
    let mut lines = SseDecoder::default();
    lines.push(b"data: ");
    lines.push(&vec![b'x'; MAX_EVENT_BYTES]);
    assert_eq!(lines.next_event().unwrap_err().code(), Code::Internal);
}

/// A client's view of a stream: each text of a choice in one piece, its tokens, calls and end, and
/// the usage. Calls lack their ids, and log probabilities their numbers.
fn understood(body: &str) -> Vec<(String, String)> {
    let (events, ended) = translated(body.as_bytes(), 100);
    ended.unwrap();
    let mut understood = std::collections::BTreeMap::<String, String>::new();
    for event in events {
        let mut add = |name: String, text: &str| understood.entry(name).or_default().push_str(text);
        match event {
            Event::Started(started) => add("id".into(), &started.id),
            Event::Delta(delta) => {
                let choice = delta.index;
                add(format!("{choice} text"), &delta.text);
                add(format!("{choice} reasoning"), &delta.reasoning);
                delta.logprobs.iter().for_each(|token| add(format!("{choice} tokens"), &format!("{}|", token.token)));
                delta
                    .tool_calls
                    .iter()
                    .for_each(|call| add(format!("{choice} call {}", call.index), &format!("{}{}", call.name, call.arguments)));
            }
            Event::Finish(finish) => add(format!("{} end", finish.index), &finish.word),
            Event::Usage(usage) => add("usage".into(), &format!("{usage:?}")),
        }
    }
    understood.into_iter().collect()
}

#[test]
fn a_replayed_stream_gives_the_events_of_an_uncut_one() {
    let requests = [
        ("/v1/chat/completions", r#"{"tools":[],"logprobs":true,"stream_options":{"include_usage":true}}"#),
        ("/v1/chat/completions", r#"{"n":2,"stream_options":{"include_usage":true}}"#),
        ("/v1/completions", r#"{"n":2,"logprobs":1,"stream_options":{"include_usage":true}}"#),
    ];
    for (front_end, (path, body)) in Dialect::ALL.into_iter().flat_map(|front_end| requests.map(|request| (front_end, request))) {
        let uncut = understood(&resumed_stream(front_end, path, body, &[(1, 0)]).unwrap());
        for (group, other) in [(1, 1), (1, 3), (3, 1), (2, 5)] {
            for cut in 1..event_count(front_end, path, body, group) {
                let resumed = resumed_stream(front_end, path, body, &[(group, cut), (other, 0)]).unwrap();
                assert_eq!(understood(&resumed), uncut, "{front_end:?} {body} in {group} behind {cut}, then in {other}: {resumed}");
            }
        }
    }
}
