//! Converts `google.protobuf.Struct` to JSON. All its numbers are floating; those without a
//! fraction become integers, as engines want them.

use prost_types::value::Kind;
use prost_types::{Struct, Value};
use serde_json::{Map, Number, Value as Json};

/// Integers up to this size are exact as `f64`.
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

pub(super) fn object(of: Struct) -> Map<String, Json> {
    of.fields.into_iter().map(|(name, value)| (name, json(value))).collect()
}

fn json(value: Value) -> Json {
    match value.kind {
        None | Some(Kind::NullValue(_)) => Json::Null,
        Some(Kind::BoolValue(value)) => Json::Bool(value),
        Some(Kind::NumberValue(value)) => number(value),
        Some(Kind::StringValue(value)) => Json::String(value),
        Some(Kind::ListValue(list)) => Json::Array(list.values.into_iter().map(json).collect()),
        Some(Kind::StructValue(of)) => Json::Object(object(of)),
    }
}

/// JSON has no infinity and no NaN.
fn number(value: f64) -> Json {
    #[allow(clippy::cast_possible_truncation, reason = "whole and within what is exact")]
    let whole = (value.fract() == 0.0 && value.abs() <= MAX_EXACT_INTEGER).then_some(value as i64);
    whole.map(Json::from).or_else(|| Number::from_f64(value).map(Json::Number)).unwrap_or(Json::Null)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_stay_whole_and_everything_keeps_its_kind() {
        let of = |kind| Value { kind: Some(kind) };
        let list =
            prost_types::ListValue { values: vec![of(Kind::NumberValue(2.5)), of(Kind::StringValue("b".into())), Value { kind: None }] };
        let inner = Struct { fields: [("yes".to_owned(), of(Kind::BoolValue(true)))].into() };
        let outer = Struct {
            fields: [
                ("count".to_owned(), of(Kind::NumberValue(7.0))),
                ("huge".to_owned(), of(Kind::NumberValue(1e300))),
                ("inner".to_owned(), of(Kind::StructValue(inner))),
                ("list".to_owned(), of(Kind::ListValue(list))),
                ("never".to_owned(), of(Kind::NumberValue(f64::NAN))),
            ]
            .into(),
        };
        assert_eq!(
            Json::Object(object(outer)).to_string(),
            r#"{"count":7,"huge":1e+300,"inner":{"yes":true},"list":[2.5,"b",null],"never":null}"#
        );
    }
}
