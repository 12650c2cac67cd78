//! Reads events of `/v1/messages`, each with part of a content block.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::event::{Retold, Telling, Text, json, place, replace};
use super::transcript::{Channel, Difference, Transcript};

/// Kinds of channels and marks.
const TEXT: u8 = 1;
const THINKING: u8 = 2;
const INPUT: u8 = 3;
const MESSAGE_START: u8 = 4;
const BLOCK_START: u8 = 5;
const SIGNATURE: u8 = 6;
const BLOCK_STOP: u8 = 7;
const END: u8 = 8;

/// A message is one choice.
const LANE: (u32, u8) = (0, 0);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageEvent<'a> {
    #[serde(borrow)]
    r#type: Text<'a>,
    /// The message, with an id; clients keep the first stream's.
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    index: Option<u32>,
    #[serde(borrow)]
    content_block: Option<ContentBlock<'a>>,
    #[serde(borrow)]
    delta: Option<MessageDelta<'a>>,
    #[serde(borrow, rename = "usage")]
    _usage: Option<&'a RawValue>,
}

/// The start of a block, without content. A call's id differs in each replay.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContentBlock<'a> {
    #[serde(borrow)]
    r#type: Text<'a>,
    #[serde(borrow)]
    text: Option<Text<'a>>,
    #[serde(borrow)]
    thinking: Option<Text<'a>>,
    #[serde(borrow, rename = "id")]
    _id: Option<&'a RawValue>,
    #[serde(borrow)]
    name: Option<Text<'a>>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageDelta<'a> {
    #[serde(borrow, rename = "type")]
    _type: Option<&'a RawValue>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    thinking: Option<&'a RawValue>,
    #[serde(borrow)]
    partial_json: Option<&'a RawValue>,
    /// The signature differs in each replay.
    #[serde(borrow)]
    signature: Option<&'a RawValue>,
    #[serde(borrow)]
    stop_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    stop_sequence: Option<&'a RawValue>,
}

/// Compares an event with this JSON with the transcript.
pub(super) fn tell(event: &[u8], data: &[u8], transcript: &mut Transcript) -> Result<Retold, Difference> {
    let parsed: MessageEvent<'_> = serde_json::from_slice(data).map_err(|_| Difference)?;
    let lane = transcript.lane(LANE)?;
    let mut telling = Telling::new(transcript, lane);
    let index = parsed.index.map(|index| index.to_string());
    let is_known = match (&*parsed.r#type.0, index, &parsed.content_block, parsed.delta) {
        ("message_start", None, None, None) if parsed.message.is_some() => telling.mark(MESSAGE_START, &[])?,
        ("content_block_start", Some(index), Some(block), None) => {
            let name = block.name.as_ref().map_or("", |name| &name.0);
            block.is_empty().then_some(()).ok_or(Difference)?;
            telling.mark(BLOCK_START, &[&index, &block.r#type.0, name])?
        }
        ("content_block_delta", Some(_), None, Some(delta)) => {
            return delta.tell(event, parsed.index.unwrap_or_default(), &mut telling);
        }
        ("content_block_stop", Some(index), None, None) => telling.mark(BLOCK_STOP, &[&index])?,
        ("message_delta", None, None, Some(delta)) => {
            let raw = |value: Option<&RawValue>| value.map_or("null", RawValue::get).to_owned();
            telling.mark(END, &[&raw(delta.stop_reason), &raw(delta.stop_sequence)])?
        }
        ("message_stop", None, None, None) if telling.transcript.is_told() => false,
        ("ping", None, None, None) => false,
        _ => return Err(Difference),
    };
    Ok(if is_known { Retold::Known } else { Retold::New })
}

impl ContentBlock<'_> {
    fn is_empty(&self) -> bool {
        let is_bare = |text: &Option<Text<'_>>| text.as_ref().is_none_or(|text| text.0.is_empty());
        is_bare(&self.text) && is_bare(&self.thinking) && self.input.is_none_or(|input| input.get() == "{}")
    }
}

impl MessageDelta<'_> {
    fn tell(&self, event: &[u8], index: u32, telling: &mut Telling<'_>) -> Result<Retold, Difference> {
        let (kind, raw) = match (self.text, self.thinking, self.partial_json, self.signature) {
            (Some(text), None, None, None) => (TEXT, text),
            (None, Some(thinking), None, None) => (THINKING, thinking),
            (None, None, Some(input), None) => (INPUT, input),
            (None, None, None, Some(_)) => {
                let is_known = telling.mark(SIGNATURE, &[&index.to_string()])?;
                return Ok(if is_known { Retold::Known } else { Retold::New });
            }
            _ => return Err(Difference),
        };
        let mut text: Option<Text<'_>> = serde_json::from_str(raw.get()).map_err(|_| Difference)?;
        telling.text(Channel::new(kind, index), &mut text)?;
        Ok(match (telling.has_new, telling.has_known) {
            (false, _) => Retold::Known,
            (true, false) => Retold::New,
            (true, true) => Retold::Partly(replace(event, &[(place(event, raw), json(&text))])),
        })
    }
}
