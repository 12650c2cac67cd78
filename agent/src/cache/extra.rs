//! Extra keys: what a block's content depends on besides its tokens, in the form an engine sends
//! it.
//!
//! They are stored unchanged, since only equality matters. `kv_event` reads them from an event;
//! `mirror` knows which of them is an adapter or a cache salt.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

/// A value that a block's content depends on, as the engine sent it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ExtraKey {
    Null,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    /// Several values; a map becomes a list of alternating keys and values.
    List(Vec<Self>),
}

impl ExtraKey {
    /// Appends an encoding that is equal only for equal values.
    pub(crate) fn write_canonical(&self, out: &mut Vec<u8>) {
        let mut tagged = |tag: u8, content: &[u8]| {
            out.push(tag);
            out.extend_from_slice(&(content.len() as u64).to_le_bytes());
            out.extend_from_slice(content);
        };
        match self {
            Self::Null => tagged(0, &[]),
            Self::Bool(flag) => tagged(1, &[u8::from(*flag)]),
            Self::Integer(number) => tagged(2, &number.to_le_bytes()),
            Self::Float(real) => tagged(3, &real.to_bits().to_le_bytes()),
            Self::Text(text) => tagged(4, text.as_bytes()),
            Self::Bytes(bytes) => tagged(5, bytes),
            Self::List(list) => {
                let mut content = Vec::new();
                list.iter().for_each(|extra| extra.write_canonical(&mut content));
                tagged(6, &content);
            }
        }
    }
}

impl<'de> Deserialize<'de> for ExtraKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ExtraKeyVisitor)
    }
}

struct ExtraKeyVisitor;

impl<'de> Visitor<'de> for ExtraKeyVisitor {
    type Value = ExtraKey;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("anything that a block's content may depend on")
    }

    fn visit_unit<E: de::Error>(self) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Null)
    }

    fn visit_bool<E: de::Error>(self, flag: bool) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Bool(flag))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Integer(number.into()))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Integer(number.into()))
    }

    fn visit_f64<E: de::Error>(self, real: f64) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Float(real))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Text(text.to_owned()))
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Bytes(bytes.to_vec()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ExtraKey, A::Error> {
        let mut all = Vec::new();
        while let Some(extra) = list.next_element()? {
            all.push(extra);
        }
        Ok(ExtraKey::List(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ExtraKey, A::Error> {
        let mut all = Vec::new();
        while let Some((key, value)) = map.next_entry()? {
            all.push(key);
            all.push(value);
        }
        Ok(ExtraKey::List(all))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn different_extra_keys_have_different_bytes() {
        let text = |text: &str| ExtraKey::Text(text.to_owned());
        let extras = [
            ExtraKey::Null,
            ExtraKey::Bool(false),
            ExtraKey::Integer(0),
            ExtraKey::Float(0.0),
            text(""),
            text("ab"),
            ExtraKey::Bytes(b"ab".to_vec()),
            ExtraKey::List(vec![]),
            ExtraKey::List(vec![text("a"), text("b")]),
            ExtraKey::List(vec![text("ab")]),
            ExtraKey::List(vec![ExtraKey::List(vec![text("ab")])]),
        ];
        let written = extras.iter().map(|extra| {
            let mut bytes = Vec::new();
            extra.write_canonical(&mut bytes);
            bytes
        });
        assert_eq!(written.collect::<HashSet<_>>().len(), extras.len());
    }
}
