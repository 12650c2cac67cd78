//! Merges two schemas that hold at once.
//!
//! `document` calls this for references, `allOf` and the branches of `anyOf`.

use serde_json::{Map, Value, json};

use super::SchemaError;

/// Schema of the values that fit both.
pub(super) fn merge(mut one: Map<String, Value>, other: Map<String, Value>) -> Result<Map<String, Value>, SchemaError> {
    for (key, value) in other {
        let merged = match one.remove(&key) {
            Some(known) if known != value => merge_keyword(&key, known, value)?,
            _ => value,
        };
        one.insert(key, merged);
    }
    Ok(one)
}

fn merge_keyword(key: &str, one: Value, other: Value) -> Result<Value, SchemaError> {
    Ok(match key {
        "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties" => larger(one, other),
        "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties" => smaller(one, other),
        "required" => joined(one, other),
        "type" => common_types(one, other)?,
        "enum" => common_members(one, &other)?,
        "properties" | "patternProperties" | "$defs" | "definitions" => both_maps(one, other),
        "items" | "additionalProperties" => both(one, other),
        "allOf" => joined(one, other),
        "anyOf" | "oneOf" => each_with(one, &json!({ key: other })),
        "uniqueItems" => Value::Bool(true),
        "const" => return Err(SchemaError::unsatisfiable("two constants")),
        "pattern" | "format" | "multipleOf" | "prefixItems" => {
            return Err(SchemaError::invalid(format!("two values of \"{key}\" at once are not supported")));
        }
        // Titles, descriptions and similar keywords.
        _ => one,
    })
}

fn larger(one: Value, other: Value) -> Value {
    if one.as_f64() >= other.as_f64() { one } else { other }
}

fn smaller(one: Value, other: Value) -> Value {
    if one.as_f64() <= other.as_f64() { one } else { other }
}

fn members(value: Value) -> Vec<Value> {
    match value {
        Value::Array(members) => members,
        single => vec![single],
    }
}

fn joined(one: Value, other: Value) -> Value {
    let mut all = members(one);
    for member in members(other) {
        if !all.contains(&member) {
            all.push(member);
        }
    }
    Value::Array(all)
}

/// Types that both allow. An integer is a number, too.
fn common_types(one: Value, other: Value) -> Result<Value, SchemaError> {
    let (one, other) = (members(one), members(other));
    let narrowed = |kind: &Value, among: &[Value]| among.contains(kind) || kind == "integer" && among.contains(&"number".into());
    let mut common: Vec<Value> = one.iter().filter(|kind| narrowed(kind, &other)).cloned().collect();
    common.extend(other.iter().filter(|kind| narrowed(kind, &one) && !one.contains(kind)).cloned());
    if common.is_empty() { Err(SchemaError::unsatisfiable("incompatible types")) } else { Ok(Value::Array(common)) }
}

fn common_members(one: Value, other: &Value) -> Result<Value, SchemaError> {
    let mut common = members(one);
    common.retain(|member| other.as_array().is_some_and(|others| others.contains(member)));
    if common.is_empty() { Err(SchemaError::unsatisfiable("enum is empty")) } else { Ok(Value::Array(common)) }
}

fn both(one: Value, other: Value) -> Value {
    match (&one, &other) {
        (Value::Bool(false), _) | (_, Value::Bool(true)) => one,
        (_, Value::Bool(false)) | (Value::Bool(true), _) => other,
        _ => json!({ "allOf": [one, other] }),
    }
}

fn both_maps(one: Value, other: Value) -> Value {
    let (Value::Object(mut merged), Value::Object(other)) = (one, other) else { return Value::Null };
    for (name, schema) in other {
        let schema = match merged.get(&name) {
            Some(known) if *known != schema => both(known.clone(), schema),
            _ => schema,
        };
        merged.insert(name, schema);
    }
    Value::Object(merged)
}

fn each_with(branches: Value, more: &Value) -> Value {
    members(branches).into_iter().map(|branch| json!({ "allOf": [branch, more] })).collect()
}
