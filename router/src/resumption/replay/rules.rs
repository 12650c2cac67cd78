//! Decides which requests of `/v1/messages` may be replayed. Every field has a rule; a field
//! without a rule, or a repeated one, rules out a resumption.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::event::Text;
use crate::placement::mentions_media;
use crate::resume_tier::NotResumed;

/// Whether a request for a stream of messages with this body may be replayed.
///
/// # Errors
/// The reason why not.
pub(crate) fn check_message_request(body: &[u8]) -> Result<(), NotResumed> {
    if body.len() > super::super::sampling::MAX_BODY_BYTES {
        return Err(NotResumed::Size);
    }
    let Fields(fields) = serde_json::from_slice(body).map_err(|_| NotResumed::Body)?;
    let mut is_greedy = false;
    let mut names = BTreeSet::new();
    for (Text(name), value) in &fields {
        if !names.insert(name) {
            return Err(NotResumed::RepeatedField);
        }
        let raw = value.get();
        match (&**name, raw) {
            (_, "null") => {}
            ("messages" | "system", _) if mentions_media(raw.as_bytes()) => return Err(NotResumed::Media),
            ("temperature", _) => is_greedy = serde_json::from_str::<f64>(raw).is_ok_and(|temperature| temperature == 0.0),
            ("model" | "messages" | "system" | "max_tokens" | "stream" | "top_p" | "top_k" | "stop_sequences", _)
            | ("tools" | "tool_choice" | "metadata" | "thinking" | "output_config" | "cache_salt" | "chat_template_kwargs", _) => {}
            _ => return Err(NotResumed::Field),
        }
    }
    if is_greedy { Ok(()) } else { Err(NotResumed::Sampling) }
}

/// The fields of an object.
struct Fields<'a>(Vec<(Text<'a>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor).map(Fields)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Vec<(Text<'de>, &'de RawValue)>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = map.next_entry()? {
            fields.push(field);
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(fields: &str) -> Result<(), NotResumed> {
        check_message_request(format!(r#"{{"model":"m","max_tokens":9,"messages":[],"stream":true{fields}}}"#).as_bytes())
    }

    #[test]
    fn a_greedy_message_with_known_fields_may_be_replayed() {
        for (fields, expected) in [
            (r#","temperature":0"#, Ok(())),
            (r#","temperature":0.0,"tools":[{"name":"x"}],"tool_choice":{"type":"any"},"thinking":null"#, Ok(())),
            ("", Err(NotResumed::Sampling)),
            (r#","temperature":1"#, Err(NotResumed::Sampling)),
            (r#","temperature":"0""#, Err(NotResumed::Sampling)),
            (r#","temperature":0,"invented":1"#, Err(NotResumed::Field)),
            (r#","temperature":0,"invented":null"#, Ok(())),
            (r#","temperature":1,"temper\u0061ture":0"#, Err(NotResumed::RepeatedField)),
            (r#","temperature":0,"system":[{"type":"image","source":{"type":"base64"}}]"#, Err(NotResumed::Media)),
        ] {
            assert_eq!(check(fields), expected, "{fields}");
        }
        assert_eq!(check_message_request(b"[]"), Err(NotResumed::Body));
    }
}
