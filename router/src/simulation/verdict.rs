//! Checks what a client got: all of the answer and nothing else, or a beginning of it and one error
//! at the end.

use serde_json::Value;

use super::client::{AnswerEnd, Form, Pace, Question, SeenAnswer};
use super::model::{self, ModelAnswer};
use crate::resumption::SEAM;

/// How a faultless request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Verdict {
    Whole,
    /// Whole, by more than one engine.
    Resumed,
    /// The router has said that no engine answers.
    Refused,
    /// A stream with an error event at its end, or an answer that broke.
    Failed,
    /// As `Failed`, but within an event, from where no other engine can go on.
    Torn,
    /// The client left, or its router died.
    Cut,
}

/// The parts of a stream that a client has read.
#[derive(Debug, Default)]
struct ReadStream {
    text: String,
    ids: Vec<String>,
    finish: Vec<String>,
    usage: Vec<Value>,
    errors: usize,
    is_done: bool,
    seams: usize,
    /// Whether the stream broke within an event.
    is_torn: bool,
    /// Data after the end or an error, or that is no event.
    odd: Vec<String>,
}

impl ReadStream {
    fn of(question: &Question, body: &str) -> Self {
        let mut read = Self::default();
        let mut events = body.split_inclusive("\n\n").peekable();
        while let Some(event) = events.next() {
            let is_last = events.peek().is_none();
            if !event.ends_with("\n\n") && is_last {
                // The connection broke within the event.
                read.is_torn = true;
                continue;
            }
            if event.starts_with(':') {
                read.seams += usize::from(event.as_bytes() == &SEAM[..]);
                continue;
            }
            if event == "\n\n" {
                continue;
            }
            let data = event.strip_prefix("data: ").unwrap_or_default().trim_end();
            if read.is_done || read.errors > 0 {
                read.odd.push(event.to_owned());
            } else if data == "[DONE]" {
                read.is_done = true;
            } else if let Ok(event) = serde_json::from_str::<Value>(data) {
                read.read_event(question, &event);
            } else if events.peek().is_some_and(|next| next.contains("\"error\"")) {
                // An event that an error interrupts does not count as one.
                read.is_torn = true;
            } else {
                read.odd.push(event.to_owned());
            }
        }
        read
    }

    fn read_event(&mut self, question: &Question, event: &Value) {
        if event.get("error").is_some() {
            self.errors += 1;
            return;
        }
        self.ids.push(event["id"].to_string());
        if event.to_string().contains("token_ids\":[") {
            self.odd.push("tokens that nobody has asked for".to_owned());
        }
        if let Some(usage) = event.get("usage").filter(|usage| !usage.is_null()) {
            self.usage.push(usage.clone());
        }
        let Some(choice) = event["choices"].get(0) else { return };
        let text = if question.form == Form::Chat { &choice["delta"]["content"] } else { &choice["text"] };
        if !self.finish.is_empty() {
            self.odd.push(format!("an event after the finish reason: {event}"));
        }
        self.text.push_str(text.as_str().unwrap_or_default());
        self.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
}

/// Judges an answer.
///
/// # Errors
/// The fault of the answer.
pub(super) fn judge(question: &Question, seen: &SeenAnswer) -> Result<Verdict, String> {
    let right = question.model_request().answer();
    let body = String::from_utf8_lossy(&seen.body);
    match (&seen.end, seen.status) {
        (AnswerEnd::Never, _) => Err("it has no end".into()),
        (AnswerEnd::Left | AnswerEnd::RouterGone, Some(200)) if question.is_stream => {
            check_beginning(&ReadStream::of(question, &body), &right).map(|()| Verdict::Cut)
        }
        (AnswerEnd::Left | AnswerEnd::RouterGone, _) => Ok(Verdict::Cut),
        (AnswerEnd::Clean, Some(200)) if question.is_stream => judge_whole_stream(question, &ReadStream::of(question, &body), &right),
        (AnswerEnd::Clean, Some(200)) => judge_plain(question, &body, &right),
        (AnswerEnd::Broken(_), Some(200)) if question.is_stream => judge_failed_stream(question, &ReadStream::of(question, &body), &right),
        (AnswerEnd::Broken(_), Some(200)) => Ok(Verdict::Failed),
        (AnswerEnd::Clean, Some(400..)) if body.contains("\"error\"") => Ok(Verdict::Refused),
        (end, status) => Err(format!("it ended so: {end:?} {status:?} {body}")),
    }
}

fn judge_whole_stream(question: &Question, read: &ReadStream, right: &ModelAnswer) -> Result<Verdict, String> {
    let text = model::text(&right.tokens);
    if read.text != text {
        return Err(format!("its text is {:?}, and should be {text:?}", read.text));
    }
    if !read.is_done || read.errors > 0 || read.finish != [right.finish] || !read.odd.is_empty() {
        return Err(format!("it ends cleanly, and is not whole: {read:?}"));
    }
    if read.ids.iter().any(|id| *id != read.ids[0]) {
        return Err(format!("it has several names: {:?}", read.ids));
    }
    let usage = model::usage(model::prompt_tokens(question.number).len(), right.tokens.len());
    let is_right = if question.wants_usage { read.usage == [usage] } else { read.usage.is_empty() };
    if !is_right {
        return Err(format!("its usage is {:?}, of {} tokens", read.usage, right.tokens.len()));
    }
    Ok(if read.seams > 0 { Verdict::Resumed } else { Verdict::Whole })
}

fn judge_failed_stream(question: &Question, read: &ReadStream, right: &ModelAnswer) -> Result<Verdict, String> {
    check_beginning(read, right)?;
    // The connection has a moment (`BREAK_DELAY`) to send the error. A client that is further
    // behind sees only the break.
    let is_behind = matches!(question.pace, Pace::Pauses(_)) && read.errors == 0;
    if (read.errors != 1 && !is_behind) || read.is_done || !read.odd.is_empty() {
        return Err(format!("it breaks, and not with one error event: {read:?}"));
    }
    Ok(if read.is_torn { Verdict::Torn } else { Verdict::Failed })
}

/// Checks that nothing is repeated or missing, as far as the text goes.
fn check_beginning(read: &ReadStream, right: &ModelAnswer) -> Result<(), String> {
    let text = model::text(&right.tokens);
    // A stopped engine may say something else with its last event.
    if text.starts_with(&read.text) { Ok(()) } else { Err(format!("its text is {:?}, and should begin {text:?}", read.text)) }
}

fn judge_plain(question: &Question, body: &str, right: &ModelAnswer) -> Result<Verdict, String> {
    let answer: Value = serde_json::from_str(body).map_err(|_| format!("it is no JSON: {body}"))?;
    let choice = &answer["choices"][0];
    let text = if question.form == Form::Chat { &choice["message"]["content"] } else { &choice["text"] };
    let is_right = text.as_str() == Some(&*model::text(&right.tokens)) && choice["finish_reason"] == right.finish;
    if is_right { Ok(Verdict::Whole) } else { Err(format!("it is {body}, and should be {right:?}")) }
}
