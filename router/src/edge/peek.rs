//! The few fields of a JSON body that the router needs, read in one pass without copying; the body travels on as it came.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// What the router looks at. Fields of another type than expected count as absent: it is the engine that judges them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Peek {
    /// The model that the request names.
    pub(super) model: Option<String>,
}

/// Why a body is not JSON.
#[derive(Debug, thiserror::Error)]
#[error("the body is not valid JSON: {0}")]
pub(super) struct NotJson(#[from] serde_json::Error);

/// Reads a body, which must be JSON of any kind.
pub(super) fn peek(body: &[u8]) -> Result<Peek, NotJson> {
    let first = body.iter().find(|byte| !byte.is_ascii_whitespace());
    if first == Some(&b'{') {
        return Ok(serde_json::from_slice::<Peek>(body)?);
    }
    serde_json::from_slice::<IgnoredAny>(body)?;
    Ok(Peek::default())
}

impl<'de> Deserialize<'de> for Peek {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Fields)
    }
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = Peek;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    /// A name that stands twice counts as the engine counts it: the last one wins.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Peek, A::Error> {
        let mut peek = Peek::default();
        while let Some(name) = map.next_key::<Name<'de>>()? {
            if name.0 == "model" {
                peek.model = serde_json::from_str(map.next_value::<&RawValue>()?.get()).ok();
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(peek)
    }
}

/// A name, borrowed from the body unless it has escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);
