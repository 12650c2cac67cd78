//! Check that a client may get an answer, whatever happens to the fleet.
//!
//! It may get the right text whole, a beginning of it and an honest end, or a refusal that says to
//! come back. Pure.

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::client::{AnswerEnd, ObservedAnswer};
use crate::questions::SentRequest;

/// An allowed answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    Whole,
    /// The answer broke off with an error event.
    Broken,
    /// The router was killed under the answer, or was away.
    Cut,
    /// The request was refused with this status.
    Refused(u16),
    /// The client did not wait for the end.
    Left,
}

/// Content of a stream.
#[derive(Debug, Default)]
struct StreamContent {
    text: String,
    reasons: Vec<String>,
    errors: Vec<Value>,
    usage: Option<u64>,
    done: bool,
    /// The last event is an error.
    ends_with_error: bool,
    /// Whether there are bytes of an unfinished event.
    half: bool,
}

/// Judges an answer. `disturbed` says whether its router had a fault meanwhile.
///
/// # Errors
/// When no client may get such an answer.
pub(crate) fn judge(sent: &SentRequest, seen: &ObservedAnswer, disturbed: bool) -> anyhow::Result<Verdict> {
    ensure!(seen.ended != AnswerEnd::Late, "no end within the client's patience, {} bytes after its beginning", seen.body.len());
    let Some(status) = seen.status else {
        return match &seen.ended {
            AnswerEnd::Left => Ok(Verdict::Left),
            _ if disturbed => Ok(Verdict::Cut),
            ended => bail!("no answer of a router that is there: {ended:?}"),
        };
    };
    if status != 200 {
        return refused(status, seen, disturbed);
    }
    if sent.stream { streamed(sent, seen, disturbed) } else { plain(sent, seen, disturbed) }
}

fn refused(status: u16, seen: &ObservedAnswer, disturbed: bool) -> anyhow::Result<Verdict> {
    match &seen.ended {
        AnswerEnd::Left => return Ok(Verdict::Left),
        AnswerEnd::Broken(_) if disturbed => return Ok(Verdict::Cut),
        ended => ensure!(*ended == AnswerEnd::Clean, "an error that broke off: {ended:?}"),
    }
    let error: Value = serde_json::from_slice(&seen.body).with_context(|| format!("status {status} without JSON"))?;
    let error = &error["error"];
    ensure!(error["message"].is_string(), "status {status} without a message");
    match status {
        // Two engines died with this request.
        422 => ensure!(error["type"] == "request_kills_engines", "refused as wrong: {error}"),
        429 | 503 => ensure!(seen.may_retry, "status {status} without Retry-After: {error}"),
        _ => bail!("status {status}: {error}"),
    }
    Ok(Verdict::Refused(status))
}

fn plain(sent: &SentRequest, seen: &ObservedAnswer, disturbed: bool) -> anyhow::Result<Verdict> {
    match &seen.ended {
        AnswerEnd::Left => return Ok(Verdict::Left),
        AnswerEnd::Broken(_) if disturbed => return Ok(Verdict::Cut),
        ended => ensure!(*ended == AnswerEnd::Clean, "a plain answer that broke off: {ended:?}"),
    }
    let answer: Value = serde_json::from_slice(&seen.body).context("an answer that is no JSON")?;
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).context("an answer without text")?;
    ensure!(text == sent.text, "{}", difference(&sent.text, text));
    ensure!(choice["finish_reason"] == "length", "its finish reason is {}", choice["finish_reason"]);
    ensure!(answer["usage"]["completion_tokens"] == sent.tokens, "its usage is {}", answer["usage"]);
    Ok(Verdict::Whole)
}

fn streamed(sent: &SentRequest, seen: &ObservedAnswer, disturbed: bool) -> anyhow::Result<Verdict> {
    let content = read(&seen.body)?;
    let text = &content.text;
    ensure!(sent.text.starts_with(text), "{}", difference(&sent.text, text));
    ensure!(content.reasons.iter().all(|reason| reason == "length"), "finish reasons {:?}", content.reasons);
    ensure!(content.errors.len() <= 1 && (content.errors.is_empty() || content.ends_with_error), "something follows an error event");
    let well_formed = |error: &Value| error["message"].is_string() && error["code"].is_u64();
    ensure!(content.errors.iter().all(well_formed), "an error event like {:?}", content.errors);
    match &seen.ended {
        AnswerEnd::Left => Ok(Verdict::Left),
        AnswerEnd::Clean => {
            ensure!(content.done && content.errors.is_empty() && !content.half, "a clean end of a broken stream: {content:?}");
            ensure!(*text == sent.text, "a clean end after {} of {} bytes", text.len(), sent.text.len());
            ensure!(content.reasons.len() == 1, "{} finish reasons", content.reasons.len());
            ensure!(content.usage.is_none_or(|tokens| tokens == sent.tokens as u64), "a usage of {:?} tokens", content.usage);
            Ok(Verdict::Whole)
        }
        _ if disturbed => Ok(if content.errors.is_empty() { Verdict::Cut } else { Verdict::Broken }),
        ended => {
            ensure!(!content.done, "[DONE], and then a break: {ended:?}");
            ensure!(content.errors.len() == 1 && !content.half, "a break without an error event before it: {ended:?}, {content:?}");
            Ok(Verdict::Broken)
        }
    }
}

fn read(body: &[u8]) -> anyhow::Result<StreamContent> {
    let text = std::str::from_utf8(body).context("an answer that is no text")?;
    let mut content = StreamContent::default();
    let (whole, rest) = text.rsplit_once("\n\n").map_or(("", text), |(whole, rest)| (whole, rest));
    content.half = !rest.is_empty();
    for event in whole.split("\n\n").filter(|event| !event.is_empty()) {
        ensure!(!content.done, "an event after [DONE]: {event}");
        // Comments keep the connection alive.
        let Some(data) = event.strip_prefix("data: ") else {
            ensure!(event.starts_with(':'), "no event: {event}");
            continue;
        };
        if data == "[DONE]" {
            content.done = true;
            continue;
        }
        let event: Value = serde_json::from_str(data).with_context(|| format!("no JSON: {data}"))?;
        content.ends_with_error = event["error"].is_object();
        if content.ends_with_error {
            content.errors.push(event["error"].clone());
            continue;
        }
        content.usage = event["usage"]["completion_tokens"].as_u64().or(content.usage);
        let choice = &event["choices"][0];
        let piece = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        content.text.push_str(piece);
        content.reasons.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    Ok(content)
}

/// Describes where a text differs from the expected one.
fn difference(expected: &str, text: &str) -> String {
    let same = expected.bytes().zip(text.bytes()).take_while(|(left, right)| left == right).count();
    let after = |text: &str| String::from_utf8_lossy(&text.as_bytes()[same..text.len().min(same + 40)]).into_owned();
    format!("another text after {same} bytes: {:?} instead of {:?}", after(text), after(expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(stream: bool) -> SentRequest {
        SentRequest { path: "/", body: String::new(), stream, text: "one two three".into(), tokens: 3 }
    }

    fn seen(body: &str, ended: AnswerEnd) -> ObservedAnswer {
        ObservedAnswer { status: Some(200), may_retry: false, body: body.into(), ended, first_token: None }
    }

    fn event(text: &str) -> String {
        format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n")
    }

    const LAST: &str = "data: {\"choices\":[{\"delta\":{\"content\":\" three\"},\"finish_reason\":\"length\"}]}\n\n";
    const ERROR: &str = "data: {\"error\":{\"message\":\"lost\",\"type\":\"x\",\"code\":500}}\n\n";

    fn broken() -> AnswerEnd {
        AnswerEnd::Broken("reset".into())
    }

    #[test]
    fn a_stream_is_whole_or_ends_with_an_error() {
        let (one, two, done) = (event("one"), event(" two"), "data: [DONE]\n\n");
        let judged = |body: &str, ended, disturbed| judge(&sent(true), &seen(body, ended), disturbed).ok();
        let whole = format!("{one}{two}{LAST}{done}");
        assert_eq!(judged(&whole, AnswerEnd::Clean, false), Some(Verdict::Whole));
        assert_eq!(judged(&format!("{one}{ERROR}"), broken(), false), Some(Verdict::Broken));
        assert_eq!(judged(&one, broken(), true), Some(Verdict::Cut));
        assert_eq!(judged(&one, AnswerEnd::Left, false), Some(Verdict::Left));
        let wrong = [
            (one.clone(), AnswerEnd::Clean),
            (one.clone(), broken()),
            (one.clone(), AnswerEnd::Late),
            (format!("{one}{ERROR}"), AnswerEnd::Clean),
            (format!("{one}{ERROR}{done}"), broken()),
            (format!("{one}{ERROR}{two}"), broken()),
            (format!("{one}{}{ERROR}", &two[..9]), broken()),
            (format!("{one}{LAST}{done}"), AnswerEnd::Clean),
            (format!("{one}{two}{two}{LAST}{done}"), AnswerEnd::Clean),
            (format!("{one}{two}{done}"), AnswerEnd::Clean),
            (format!("{whole}{one}"), AnswerEnd::Clean),
            (whole.replace("length", "abort"), AnswerEnd::Clean),
            (whole, broken()),
            (event("two"), AnswerEnd::Left),
        ];
        for (body, ended) in wrong {
            assert_eq!(judged(&body, ended.clone(), false), None, "{body} {ended:?}");
        }
        assert_eq!(judged(&one, AnswerEnd::Clean, true), None, "no disturbance excuses a clean end");
        assert_eq!(judged(&event("two"), broken(), true), None, "nor a wrong text");
    }

    #[test]
    fn a_plain_answer_is_whole_or_fails() {
        let body =
            |text: &str| format!(r#"{{"choices":[{{"text":"{text}","finish_reason":"length"}}],"usage":{{"completion_tokens":3}}}}"#);
        let judged = |body: &str, ended| judge(&sent(false), &seen(body, ended), false).ok();
        assert_eq!(judged(&body("one two three"), AnswerEnd::Clean), Some(Verdict::Whole));
        assert_eq!(judged(&body("one two"), AnswerEnd::Clean), None);
        assert_eq!(judged(&body("one two three").replace("length", "abort"), AnswerEnd::Clean), None);
        assert_eq!(judged(&body("one two three")[..20], broken()), None);
    }

    #[test]
    fn a_refusal_says_when_to_retry() {
        let body = r#"{"error":{"message":"later","type":"x","code":503}}"#;
        let judged = |status, may_retry, body: &str| {
            judge(&sent(true), &ObservedAnswer { status: Some(status), may_retry, ..seen(body, AnswerEnd::Clean) }, false).ok()
        };
        assert_eq!(judged(503, true, body), Some(Verdict::Refused(503)));
        assert_eq!(judged(422, false, &body.replace('x', "request_kills_engines")), Some(Verdict::Refused(422)));
        for (status, may_retry) in [(503, false), (422, false), (500, true), (404, true), (400, true)] {
            assert_eq!(judged(status, may_retry, body), None, "{status}");
        }
        let nothing = |disturbed| judge(&sent(true), &ObservedAnswer { status: None, ..seen("", broken()) }, disturbed).ok();
        assert_eq!((nothing(true), nothing(false)), (Some(Verdict::Cut), None));
    }
}
