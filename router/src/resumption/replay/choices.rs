//! Reads events of chats and completions, each with one choice.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::event::{Retold, Telling, Text, json, place, replace};
use super::logprobs::tell_logprobs;
use super::transcript::{Channel, Difference, Transcript};

/// Kinds of channels and marks of a choice.
const CONTENT: u8 = 1;
const REASONING: u8 = 2;
const REASONING_CONTENT: u8 = 3;
const ARGUMENTS: u8 = 4;
const ROLE: u8 = 5;
const CALL: u8 = 6;
const FINISH: u8 = 7;

/// Kinds of lanes.
const TEXT_LANE: u8 = 0;
pub(super) const TOKEN_LANE: u8 = 1;

/// The finish reason of a stopped engine, which is no part of the answer.
const ABORT: &str = "abort";

/// Up to here all events of a stream are alike.
const CHOICES: &[u8] = b"\"choices\":[";

/// The kinds of events in a chat or a completion.
pub(super) enum ChoiceEvent<'a> {
    /// Part of one choice.
    Of(Box<Choice<'a>>),
    /// Nothing but the usage.
    Usage,
    /// The engine was stopped.
    Aborted,
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: Vec<Choice<'a>>,
}

/// A choice of an event. Unknown fields could mean anything, so an event with one is not
/// understood.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Choice<'a> {
    index: u32,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    logprobs: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<Text<'a>>,
    #[serde(borrow)]
    stop_reason: Option<&'a RawValue>,
    #[serde(default, rename = "token_ids")]
    _token_ids: Nothing,
    #[serde(default, rename = "prompt_token_ids")]
    _prompt_token_ids: Nothing,
    #[serde(default, rename = "prompt_logprobs")]
    _prompt_logprobs: Nothing,
}

/// A field that must be empty here.
type Nothing = Option<Unexpected>;

/// A type without values.
#[derive(Deserialize)]
enum Unexpected {}

#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Delta<'a> {
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    role: Option<Text<'a>>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    content: Option<Text<'a>>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    reasoning: Option<Text<'a>>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<Text<'a>>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<Call<'a>>>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Call<'a> {
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    id: Option<Text<'a>>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    r#type: Option<Text<'a>>,
    index: u32,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    function: Option<Function<'a>>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Function<'a> {
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    name: Option<Text<'a>>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    arguments: Option<Text<'a>>,
}

/// The common beginning of a stream's events, taken from one of them.
pub(super) fn head(event: &[u8]) -> Option<&[u8]> {
    memchr::memmem::find(event, CHOICES).map(|at| &event[..at + CHOICES.len()])
}

impl<'a> ChoiceEvent<'a> {
    /// `None` if the event has another form.
    pub(super) fn parse(data: &'a [u8]) -> Option<Self> {
        let Chunk { mut choices } = serde_json::from_slice(data).ok()?;
        match choices.pop() {
            None => Some(Self::Usage),
            Some(choice) if choice.finish_reason.as_ref().is_some_and(|reason| reason.0 == ABORT) => Some(Self::Aborted),
            Some(choice) => choices.is_empty().then(|| Self::Of(Box::new(choice))),
        }
    }
}

impl Choice<'_> {
    pub(super) fn is_last(&self) -> bool {
        self.finish_reason.is_some()
    }

    /// Compares the event with the transcript.
    pub(super) fn tell(self, event: &[u8], transcript: &mut Transcript) -> Result<Retold, Difference> {
        let lane = transcript.lane((self.index, TEXT_LANE))?;
        let mut telling = Telling::new(transcript, lane);
        let raw = self.delta.xor(self.text).ok_or(Difference)?;
        let mut delta = Delta::default();
        if self.delta.is_some() {
            delta = serde_json::from_str(raw.get()).map_err(|_| Difference)?;
            delta.tell(&mut telling)?;
        } else {
            delta.content = serde_json::from_str(raw.get()).map_err(|_| Difference)?;
            telling.text(Channel::new(CONTENT, 0), &mut delta.content)?;
        }
        let is_finish_known = match &self.finish_reason {
            Some(Text(reason)) => telling.mark(FINISH, &[reason, self.stop_reason.map_or("null", RawValue::get)])?,
            None => false,
        };
        let (mut has_new, mut has_known) = (telling.has_new, telling.has_known);
        let mut tokens = None;
        if let Some(raw) = self.logprobs {
            let lane = transcript.lane((self.index, TOKEN_LANE))?;
            let mut telling = Telling::new(transcript, lane);
            tokens = tell_logprobs(raw, &mut telling)?.map(|rest| (place(event, raw), rest));
            (has_new, has_known) = (has_new || telling.has_new, has_known || telling.has_known);
        }
        match (has_new, has_known) {
            // Nothing of a choice comes behind its end.
            (true, _) if is_finish_known => Err(Difference),
            (false, _) => Ok(Retold::Known),
            (true, false) => Ok(Retold::New),
            (true, true) => {
                let rest = if self.delta.is_some() { json(&delta) } else { json(&delta.content) };
                let mut values: Vec<_> = [(place(event, raw), rest)].into_iter().chain(tokens).collect();
                values.sort_by_key(|(place, _)| place.start);
                Ok(Retold::Partly(replace(event, &values)))
            }
        }
    }
}

impl Delta<'_> {
    /// Compares the fields in the order in which a model produces them, and removes known parts.
    fn tell(&mut self, telling: &mut Telling<'_>) -> Result<(), Difference> {
        if let Some(Text(role)) = &self.role
            && telling.mark(ROLE, &[role])?
        {
            self.role = None;
        }
        telling.text(Channel::new(REASONING, 0), &mut self.reasoning)?;
        telling.text(Channel::new(REASONING_CONTENT, 0), &mut self.reasoning_content)?;
        telling.text(Channel::new(CONTENT, 0), &mut self.content)?;
        let Some(calls) = &mut self.tool_calls else { return Ok(()) };
        let mut rest = Vec::with_capacity(calls.len());
        for mut call in calls.drain(..) {
            if call.tell(telling)? {
                rest.push(call);
            }
        }
        self.tool_calls = (!rest.is_empty()).then_some(rest);
        Ok(())
    }
}

impl Call<'_> {
    /// Returns whether some part of the call is new. The call's id differs in each replay.
    fn tell(&mut self, telling: &mut Telling<'_>) -> Result<bool, Difference> {
        let had_new = std::mem::take(&mut telling.has_new);
        let name = self.function.as_ref().and_then(|function| function.name.as_ref());
        if self.id.is_some() || self.r#type.is_some() || name.is_some() {
            let parts = [&*self.index.to_string(), self.r#type.as_ref().map_or("", |kind| &kind.0), name.map_or("", |name| &name.0)];
            if telling.mark(CALL, &parts)? {
                (self.id, self.r#type) = (None, None);
                self.function.iter_mut().for_each(|function| function.name = None);
            }
        }
        if let Some(function) = &mut self.function {
            telling.text(Channel::new(ARGUMENTS, self.index), &mut function.arguments)?;
        }
        let has_new = telling.has_new;
        telling.has_new |= had_new;
        Ok(has_new)
    }
}
