//! Tests that the router's work on a body grows only in proportion to the body. Each repeatable
//! part of a request is doubled twice, and the processor times of the two readings are compared.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How much larger the larger body is. With a single doubling, an allocator's step would look like
/// growth.
const FACTOR: usize = 4;

/// Most growth in time: 2.5 for each doubling. Proportional growth is 2, quadratic 4; the rest is
/// for logarithms and caches.
const MAX_GROWTH: f64 = 2.5 * 2.5;

/// Bytes of the smaller body. The larger one is below every limit of the body's readers, and
/// comparing each name with all others would take most of its time.
const BODY_BYTES: usize = 12 * 1024;

/// Bytes for parts that take long to parse, which would hide other growth.
const LONG_BODY_BYTES: usize = 96 * 1024;

/// Fewest and most readings. The shortest time counts, and further readings are taken while growth
/// looks too large: other work on the machine only adds time.
const READINGS: usize = 2;
const MAX_READINGS: usize = 40;

/// A part of a request, repeated `count` times.
struct RepeatedPart {
    name: &'static str,
    /// The field that the part replaces; empty if no request needs it.
    field: &'static str,
    write: fn(count: usize) -> String,
    bytes: usize,
}

const fn part(name: &'static str, field: &'static str, write: fn(usize) -> String) -> RepeatedPart {
    RepeatedPart { name, field, write, bytes: BODY_BYTES }
}

const fn long_part(name: &'static str, field: &'static str, write: fn(usize) -> String) -> RepeatedPart {
    RepeatedPart { bytes: LONG_BODY_BYTES, ..part(name, field, write) }
}

fn list(count: usize, item: impl Fn(usize) -> String) -> String {
    (0..count).map(item).collect::<Vec<_>>().join(",")
}

const TURN: &str = r#"{"role":"user","content":"x"}"#;

const PARTS: &[RepeatedPart] = &[
    part("distinct fields", "", |count| list(count, |at| format!(r#""f{at:06}":0"#))),
    part("distinct fields of null", "", |count| list(count, |at| format!(r#""f{at:06}":null"#))),
    part("distinct fields with escapes", "", |count| list(count, |at| format!(r#""\u0066{at:06}":null"#))),
    part("one field", "", |count| list(count, |_| r#""seed":1"#.to_owned())),
    part("salts", "", |count| list(count, |_| r#""cache_salt":"a""#.to_owned())),
    part("salts and prompts", "prompt", |count| list(count, |_| r#""cache_salt":"a","prompt":0"#.to_owned())),
    part("limits", "max_tokens", |count| list(count, |_| r#""max_tokens":"6_0""#.to_owned())),
    part("limits of one sampling", "", |count| format!(r#""sampling_params":{{{}}}"#, list(count, |_| r#""n":1"#.to_owned()))),
    part("samplings", "", |count| list(count, |_| r#""sampling_params":{"n":1}"#.to_owned())),
    part("digits", "max_tokens", |count| format!(r#""max_tokens":"{}""#, "1".repeat(count))),
    part("letters with escapes", "prompt", |count| format!(r#""prompt":"{}""#, r"\u0061".repeat(count))),
    part("token ids", "prompt", |count| format!(r#""prompt":[{}]"#, list(count, |_| "17".to_owned()))),
    part("prompts", "prompt", |count| format!(r#""prompt":[{}]"#, list(count, |_| r#""x""#.to_owned()))),
    part("prompts of token ids", "prompt", |count| format!(r#""prompt":[{}]"#, list(count, |_| "[1]".to_owned()))),
    part("messages", "messages", |count| messages(&list(count, |_| TURN.to_owned()))),
    part("texts of a message", "messages", |count| content("user", count, r#"{"type":"text","text":"x"}"#)),
    part("images of a message", "messages", |count| content("user", count, r#"{"type":"image_url","image_url":{"url":"http://h/x"}}"#)),
    part("sources of a message", "messages", |count| {
        content("user", count, r#"{"type":"image","source":{"type":"url","url":"http://h/x"}}"#)
    }),
    part("calls of a message", "messages", |count| content("assistant", count, r#"{"type":"tool_use","id":"i","name":"f","input":{}}"#)),
    part("results of a message", "messages", |count| content("user", count, r#"{"type":"tool_result","tool_use_id":"i","content":"x"}"#)),
    part("texts of a system", "", |count| format!(r#""system":[{}]"#, list(count, |_| r#"{"type":"text","text":"x"}"#.to_owned()))),
    long_part("calls and results without a call", "messages", |count| {
        let calls = list(count, |at| format!(r#"{{"id":"i{at:06}","function":{{"name":"f"}}}}"#));
        let results = list(count, |_| r#"{"role":"tool","tool_name":"g","tool_call_id":"none"}"#.to_owned());
        messages(&format!(r#"{{"role":"assistant","tool_calls":[{calls}]}},{results}"#))
    }),
    long_part("calls and results from the last", "messages", |count| {
        let calls = list(count, |at| format!(r#"{{"id":"i{at:06}","function":{{"name":"f"}}}}"#));
        let results = list(count, |at| format!(r#"{{"role":"tool","tool_call_id":"i{:06}"}}"#, count - at - 1));
        messages(&format!(r#"{{"role":"assistant","tool_calls":[{calls}]}},{results}"#))
    }),
    part("images in base64", "messages", |count| {
        messages(&format!(r#"{{"role":"user","images":[{}]}}"#, list(count, |_| r#""aaaa""#.to_owned())))
    }),
    part("messages of an input", "input", |count| input(count, r#"{"role":"assistant","content":"x"}"#)),
    part("calls of an input", "input", |count| input(count, r#"{"type":"function_call","call_id":"i","name":"f","arguments":"{}"}"#)),
    part("thoughts of an input", "input", |count| input(count, r#"{"type":"reasoning","summary":[{"text":"x"}]}"#)),
    part("tools of a chat", "", |count| tools(count, r#"{"type":"function","function":{"name":"f","parameters":{}}}"#)),
    part("tools of a message", "", |count| tools(count, r#"{"name":"f","input_schema":{}}"#)),
    part("tools of a response", "", |count| tools(count, r#"{"type":"function","name":"f","parameters":{}}"#)),
    part("tools that are none", "", |count| tools(count, "0")),
    part("properties of a schema", "", |count| {
        let schema = format!(r#"{{"properties":{{{}}}}}"#, list(count, |at| format!(r#""p{at:06}":{{}}"#)));
        format!(
            r#""response_format":{{"type":"json_schema","json_schema":{{"schema":{schema}}}}},"format":{schema},"text":{{"format":{{"type":"json_schema","schema":{schema}}}}}"#
        )
    }),
    part("levels of a schema", "", |count| format!(r#""metadata":{}0{}"#, r#"{"a":"#.repeat(count), "}".repeat(count))),
    part("stop strings", "", |count| {
        let words = list(count, |_| r#""x""#.to_owned());
        format!(r#""stop":[{words}],"stop_sequences":[{words}]"#)
    }),
    part("biases", "", |count| format!(r#""logit_bias":{{{}}}"#, list(count, |at| format!(r#""{at}":1"#)))),
    part("options", "", |count| format!(r#""options":{{{}}}"#, list(count, |at| format!(r#""f{at:06}":0"#)))),
    part("parts to include", "", |count| format!(r#""include":[{}]"#, list(count, |_| r#""x""#.to_owned()))),
];

fn messages(turns: &str) -> String {
    format!(r#""messages":[{turns}]"#)
}

fn content(role: &str, count: usize, block: &str) -> String {
    messages(&format!(r#"{{"role":"{role}","content":[{}]}}"#, list(count, |_| block.to_owned())))
}

fn input(count: usize, item: &str) -> String {
    format!(r#""input":[{}]"#, list(count, |_| item.to_owned()))
}

fn tools(count: usize, tool: &str) -> String {
    format!(r#""tools":[{}]"#, list(count, |_| tool.to_owned()))
}

impl RepeatedPart {
    /// A body with these `needed` fields and the part `count` times.
    fn body(&self, needed: &[(&str, &str)], count: usize) -> Vec<u8> {
        let others = needed.iter().filter(|(name, _)| *name != self.field);
        let fields: String = others.map(|(name, value)| format!(r#""{name}":{value},"#)).collect();
        format!("{{{fields}{}}}", (self.write)(count)).into_bytes()
    }

    fn bytes_of_one(&self) -> usize {
        ((self.write)(200).len() - (self.write)(100).len()) / 100
    }
}

/// Asserts that a body with four times a part takes about four times as long to read. `needed` are
/// the fields without which a body of this kind is not read to its end.
///
/// # Panics
/// If it takes longer.
pub(crate) fn assert_linear(reading: &str, needed: &[(&str, &str)], read: impl Fn(&[u8])) {
    for part in PARTS {
        let count = part.bytes / part.bytes_of_one();
        assert_proportional(&format!("{reading}: {}", part.name), count, |count| part.body(needed, count), &read);
    }
}

/// Asserts that four times `count` of the output of `write` takes about four times as long to read.
///
/// # Panics
/// If it takes longer.
pub(crate) fn assert_proportional(what: &str, count: usize, write: impl Fn(usize) -> Vec<u8>, read: impl Fn(&[u8])) {
    let bodies = [count, FACTOR * count].map(write);
    let mut times = [Duration::MAX; 2];
    let is_linear = (1..=MAX_READINGS).any(|readings| {
        for (time, body) in times.iter_mut().zip(&bodies) {
            *time = (*time).min(processor_time(|| read(body)));
        }
        readings >= READINGS && times[1] <= times[0].mul_f64(MAX_GROWTH)
    });
    assert!(is_linear, "{what}, {count} times: {:?}, {FACTOR} times as many: {:?}", times[0], times[1]);
}

/// The time that this thread was on a processor, whatever else the machine does.
fn processor_time(work: impl FnOnce()) -> Duration {
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a thread has run since its start");
    let begun = now();
    work();
    now() - begun
}
