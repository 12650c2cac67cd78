use hostler_prompt::Dialect;
use proptest::prelude::*;

use super::super::samples::{Grouping, event_count, replayed_answer, resumed_stream, understood};
use super::*;

/// Requests of each kind: with tools and reasoning, log probabilities, several choices, or a text
/// with usage.
const REQUESTS: [(ReplayApi, &str, &str); 9] = [
    (ReplayApi::Chat, "/v1/chat/completions", r#"{"tools":[]}"#),
    (ReplayApi::Chat, "/v1/chat/completions", r#"{"tools":[],"logprobs":true,"stream_options":{"include_usage":true}}"#),
    (ReplayApi::Chat, "/v1/chat/completions", r#"{"n":2}"#),
    (ReplayApi::Chat, "/v1/chat/completions", r#"{"stream_options":{"include_usage":true}}"#),
    (ReplayApi::Completions, "/v1/completions", r"{}"),
    (ReplayApi::Completions, "/v1/completions", r#"{"n":2,"logprobs":1}"#),
    (ReplayApi::Completions, "/v1/completions", r#"{"logprobs":1,"stream_options":{"include_usage":true}}"#),
    (ReplayApi::Messages, "/v1/messages", r#"{"tools":[]}"#),
    (ReplayApi::Messages, "/v1/messages", r"{}"),
];

fn events(request: usize, name: usize, group: usize) -> Vec<String> {
    let (_, path, body) = REQUESTS[request];
    replayed_answer(path, body.as_bytes(), Grouping { name, group, front_end: Dialect::Python })
}

fn stream_of(front_end: Dialect, request: usize, engines: &[(usize, usize)]) -> Result<String, Difference> {
    let (_, path, body) = REQUESTS[request];
    resumed_stream(front_end, path, body, engines)
}

#[test]
fn a_stream_replayed_in_any_grouping_equals_an_uncut_one() {
    for (front_end, (request, kind)) in
        Dialect::ALL.into_iter().flat_map(|front_end| REQUESTS.iter().enumerate().map(move |of| (front_end, of)))
    {
        for (group, other_group) in [(1, 1), (1, 3), (3, 1), (2, 5), (5, 2), (4, 40), (40, 4)] {
            let uncut = understood(&stream_of(front_end, request, &[(group, 0)]).unwrap());
            for cut in 1..event_count(front_end, kind.1, kind.2, group) {
                let output = stream_of(front_end, request, &[(group, cut), (other_group, 0)]).unwrap();
                assert_eq!(
                    understood(&output),
                    uncut,
                    "{front_end:?} {kind:?} in {group} cut behind {cut}, then in {other_group}: {output}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]
    #[test]
    fn a_stream_may_be_replayed_several_times(
        front_end in prop::sample::select(Dialect::ALL.to_vec()),
        request in 0..REQUESTS.len(),
        engines in prop::collection::vec((1_usize..6, 0_usize..30), 2..5),
    ) {
        let uncut = understood(&stream_of(front_end, request, &[(1, 0)]).unwrap());
        let mut engines = engines;
        // The first engine has sent something.
        engines[0].1 = engines[0].1.max(1);
        prop_assert_eq!(understood(&stream_of(front_end, request, &engines).unwrap()), uncut);
    }
}

/// Replays events after these and returns what is new.
fn replay(api: ReplayApi, first: &[String], again: &[String]) -> Result<String, Difference> {
    let mut record = ReplayRecord::new(api, &RecordMemory::default());
    first.iter().for_each(|event| record.observe(event.as_bytes()));
    assert!(record.is_known());
    record.rewind();
    let mut output = String::new();
    for event in again {
        output.push_str(std::str::from_utf8(&record.retell(event.as_bytes())?).unwrap());
    }
    Ok(output)
}

#[test]
fn any_deviation_of_a_replay_is_detected() {
    for (request, (api, ..)) in REQUESTS.iter().enumerate() {
        let first = events(request, 0, 1);
        let count = first.len();
        for (from, to) in [("Let", "Lot"), (": ", ":  "), ("find", "fund"), ("Z", "X"), (" x", " z")] {
            let again: Vec<String> =
                events(request, 1, 2).iter().map(|event| event.replace(&format!("\"{from}"), &format!("\"{to}"))).collect();
            if again == events(request, 1, 2) {
                continue;
            }
            assert_eq!(replay(*api, &first[..count - 2], &again), Err(Difference), "{:?} {from}", REQUESTS[request]);
        }
        // The replay ends before the stream did.
        let mut short = events(request, 1, 1);
        short.drain(2..count - 3);
        assert_eq!(replay(*api, &first[..count - 2], &short), Err(Difference), "{:?}", REQUESTS[request]);
    }
}

#[test]
fn an_event_of_another_form_breaks_or_prevents_replay() {
    let plain = events(3, 0, 1);
    for odd in [
        r#"data: {"id":"x","choices":[{"index":0,"delta":{"content":"a","audio":{}},"logprobs":null,"finish_reason":null}]}"#,
        r#"data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null,"token_ids":[1]}]}"#,
        r#"data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"a"}}]}"#,
        r#"data: {"id":"x","choices":[{"index":0,"delta":{"content":"\ud83e"},"logprobs":null,"finish_reason":null}]}"#,
        "data: nonsense",
        "unknown: field",
    ] {
        let odd = format!("{odd}\n\n");
        assert_eq!(replay(ReplayApi::Chat, &plain[..2], std::slice::from_ref(&odd)), Err(Difference), "{odd}");
        let mut record = ReplayRecord::new(ReplayApi::Chat, &RecordMemory::default());
        record.observe(odd.as_bytes());
        record.observe(plain[0].as_bytes());
        assert!(!record.is_known(), "{odd}");
    }
}

#[test]
fn an_engines_errors_and_aborts_go_to_the_scanner() {
    let plain = events(3, 0, 1);
    let error = "data: {\"error\": {\"message\": \"EngineCore encountered an issue.\"}}\n\n".to_owned();
    let aborted = plain[0].replace("\"finish_reason\":null", "\"finish_reason\":\"abort\"");
    for event in [error, aborted] {
        // The end of the stream may come in the same piece.
        let failed = event + "data: [DONE]\n\n";
        assert_eq!(replay(ReplayApi::Chat, &plain[..2], &[plain[0].clone(), failed.clone()]), Ok(failed));
    }
}

#[test]
fn most_events_are_parsed_by_their_predecessors_form() {
    for (request, common) in [(3, 2), (4, 2), (8, 2), (0, 5)] {
        let mut record = ReplayRecord::new(REQUESTS[request].0, &RecordMemory::default());
        let mut count = 0;
        for event in events(request, 0, 1) {
            if record.observe_common(event.as_bytes()) {
                count += 1;
            } else {
                record.observe(event.as_bytes());
            }
        }
        assert!(count >= common, "{count} of {:?}", REQUESTS[request]);
        assert!(record.is_known());
    }
}

#[test]
fn a_stream_too_long_to_record_frees_its_memory() {
    let memory = RecordMemory::default();
    let mut record = ReplayRecord::new(ReplayApi::Chat, &memory);
    let event = |text: &str| {
        format!(
            "data: {{\"id\":\"x\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
        )
    };
    record.observe(event("begin").as_bytes());
    assert!(record.is_known() && memory.taken() > 0);
    for _ in 0..20 {
        record.observe(event(&"long ".repeat(20_000)).as_bytes());
    }
    assert_eq!((record.is_known(), memory.taken()), (false, 0));
}

#[test]
fn a_replay_beyond_the_memory_goes_on_unrecorded() {
    let memory = RecordMemory::with_bound(1000);
    let mut record = ReplayRecord::new(ReplayApi::Chat, &memory);
    let events = events(3, 0, 1);
    events[..3].iter().for_each(|event| record.observe(event.as_bytes()));
    record.rewind();
    let text = "x".repeat(2000);
    let long = events[3].replace("\"content\":\"", &format!("\"content\":\"{text}"));
    let mut output = String::new();
    for event in events[..3].iter().chain([&long]).chain(&events[4..]) {
        output.push_str(std::str::from_utf8(&record.retell(event.as_bytes()).unwrap()).unwrap());
    }
    assert!(output.contains(&text) && output.ends_with("data: [DONE]\n\n") && record.is_told(), "{output}");
    assert_eq!((record.is_known(), memory.taken()), (false, 0));
}
