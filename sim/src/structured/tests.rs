//! Written answers against an independent check of the requested forms.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::tokens::{encode, push_escaped};

/// Whether a document fits a schema, by the specification of JSON Schema.
fn fits(root: &Value, schema: &Value, value: &Value) -> bool {
    let Some(fields) = schema.as_object() else { return schema == true };
    fields.iter().all(|(key, rule)| keyword_allows(root, (key, rule), schema, value))
}

fn keyword_allows(root: &Value, (key, rule): (&str, &Value), schema: &Value, value: &Value) -> bool {
    let fits_all = |schemas: &Value| schemas.as_array().unwrap().iter().all(|part| fits(root, part, value));
    let fits_any = |schemas: &Value| schemas.as_array().unwrap().iter().any(|part| fits(root, part, value));
    let bound = rule.as_f64().unwrap_or(f64::NAN);
    let number_is = |holds: fn(f64, f64) -> bool| value.as_f64().is_none_or(|number| holds(number, bound));
    let length_is = |length: Option<usize>, holds: fn(f64, f64) -> bool| length.is_none_or(|length| holds(length as f64, bound));
    let characters = value.as_str().map(|text| text.chars().count());
    let items = value.as_array();
    match key {
        "type" => match rule {
            Value::Array(kinds) => kinds.iter().any(|kind| is_of(kind, value)),
            kind => is_of(kind, value),
        },
        "enum" => rule.as_array().unwrap().contains(value),
        "const" => rule == value,
        "$ref" => fits(root, root.pointer(rule.as_str().unwrap().trim_start_matches('#')).unwrap(), value),
        "allOf" => fits_all(rule),
        "anyOf" | "oneOf" => fits_any(rule),
        "minimum" => number_is(|number, bound| number >= bound),
        "maximum" => number_is(|number, bound| number <= bound),
        "exclusiveMinimum" => number_is(|number, bound| number > bound),
        "exclusiveMaximum" => number_is(|number, bound| number < bound),
        "multipleOf" => number_is(|number, step| (number / step - (number / step).round()).abs() < 1e-9),
        "minLength" => length_is(characters, |length, bound| length >= bound),
        "maxLength" => length_is(characters, |length, bound| length <= bound),
        "minItems" => length_is(items.map(Vec::len), |length, bound| length >= bound),
        "maxItems" => length_is(items.map(Vec::len), |length, bound| length <= bound),
        "minProperties" => length_is(value.as_object().map(|object| object.len()), |length, bound| length >= bound),
        "maxProperties" => length_is(value.as_object().map(|object| object.len()), |length, bound| length <= bound),
        "pattern" => value.as_str().is_none_or(|text| regex::Regex::new(rule.as_str().unwrap()).unwrap().is_match(text)),
        "uniqueItems" => items.is_none_or(|items| items.iter().enumerate().all(|(index, item)| !items[..index].contains(item))),
        "prefixItems" => items.is_none_or(|items| items.iter().zip(rule.as_array().unwrap()).all(|(item, rule)| fits(root, rule, item))),
        "items" => items.is_none_or(|items| {
            let first = schema["prefixItems"].as_array().map_or(0, Vec::len);
            items.iter().skip(first).all(|item| fits(root, rule, item))
        }),
        "required" => {
            value.as_object().is_none_or(|object| rule.as_array().unwrap().iter().all(|name| object.contains_key(name.as_str().unwrap())))
        }
        "properties" => value
            .as_object()
            .is_none_or(|object| object.iter().all(|(name, value)| rule.get(name).is_none_or(|rule| fits(root, rule, value)))),
        "patternProperties" => value.as_object().is_none_or(|object| {
            let rule_of = |name: &str| rule.as_object().unwrap().iter().find(|(regex, _)| regex::Regex::new(regex).unwrap().is_match(name));
            object.iter().all(|(name, value)| rule_of(name).is_none_or(|(_, rule)| fits(root, rule, value)))
        }),
        "additionalProperties" => value.as_object().is_none_or(|object| {
            object.iter().filter(|(name, _)| schema["properties"].get(name).is_none()).all(|(_, value)| fits(root, rule, value))
        }),
        _ => true,
    }
}

fn is_of(kind: &Value, value: &Value) -> bool {
    match kind.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "boolean" => value.is_boolean(),
        _ => value.is_null(),
    }
}

/// Text of an answer to a prompt, as a client gets it.
fn written(form: &StructuredOutput, prompt: &str) -> Result<String, String> {
    let prompt = encode(prompt);
    let tokens = form.tokens(&prompt, &mut Continuation::after(7, &prompt))?;
    let mut json = vec![b'"'];
    push_escaped(&tokens, &mut json);
    json.push(b'"');
    Ok(serde_json::from_slice(&json).expect("it is JSON"))
}

fn document_of(schema: &Value, prompt: &str) -> Result<Value, String> {
    written(&StructuredOutput::Json(schema.clone()), prompt).map(|text| serde_json::from_str(&text).expect("it is JSON"))
}

/// A schema that some document fits.
fn schema() -> impl Strategy<Value = Value> {
    let text =
        (0..9_usize, 0..9_usize).prop_map(|(least, more)| json!({ "type": "string", "minLength": least, "maxLength": least + more }));
    let pattern = prop::sample::select(&[r"^[a-z]{2,4}-\d+$", "a|bc|d{3}", r"^(?:\w+@)?x\.(com|org)$", "[^a-z]", ".*", r"^\S+$"][..])
        .prop_map(|regex| json!({ "type": "string", "pattern": regex, "minLength": 5 }));
    let format = prop::sample::select(&["date-time", "email", "uuid", "ipv6"][..]).prop_map(|format| json!({ "format": format }));
    let integer =
        (-50..50_i64, 0..9_i64).prop_map(|(low, more)| json!({ "type": "integer", "minimum": low, "exclusiveMaximum": low + more + 1 }));
    let number = (-50..50_i64, 1..9_i64)
        .prop_map(|(low, more)| json!({ "type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low as f64 + more as f64 / 8.0 }));
    let multiple = (-50..50_i64, 1..9_i64).prop_map(|(low, step)| json!({ "type": "integer", "minimum": low, "multipleOf": step }));
    let members =
        prop::collection::vec(prop_oneof![Just(json!(1)), Just(json!("é\n\"🚂")), Just(json!(null)), Just(json!({"a": []}))], 1..4);
    let other = prop_oneof![
        members.prop_map(|members| json!({ "enum": members })),
        Just(json!({ "const": ["<|im_end|>", 2.5] })),
        Just(json!({ "type": ["null", "boolean"] })),
        Just(json!(true)),
        Just(json!({ "$ref": "#/$defs/node" })),
    ];
    let leaf = prop_oneof![text, pattern, format, integer, number, multiple, other];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let array = (inner.clone(), 0..3_usize, 0..3_usize)
            .prop_map(|(items, least, more)| json!({ "type": "array", "items": items, "minItems": least, "maxItems": least + more }));
        let tuple = (prop::collection::vec(inner.clone(), 1..3), any::<bool>())
            .prop_map(|(first, open)| json!({ "type": "array", "prefixItems": first, "items": open }));
        let object = (prop::collection::vec((inner.clone(), any::<bool>()), 0..4), any::<bool>()).prop_map(|(properties, open)| {
            let names = ["name", "Größe", "a b", "\"q\""];
            let required: Vec<&str> = names.into_iter().zip(&properties).filter(|(_, (_, needed))| *needed).map(|(name, _)| name).collect();
            let properties: Map<String, Value> = names.iter().map(|name| (*name).to_owned()).zip(properties.iter().map(|(schema, _)| schema.clone())).collect();
            json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": open })
        });
        let map = (inner.clone(), 0..3_usize).prop_map(|(values, least)| json!({ "type": "object", "additionalProperties": values, "minProperties": least }));
        let either = (prop::collection::vec(inner.clone(), 1..4), prop::sample::select(&["anyOf", "oneOf"][..])).prop_map(|(branches, key)| json!({ key: branches }));
        let both = inner.prop_map(|schema| json!({ "allOf": [{ "properties": { "left": schema }, "required": ["left"] }, { "type": "object", "minProperties": 2 }] }));
        prop_oneof![array, tuple, object, map, either, both]
    })
}

proptest! {
    #[test]
    fn a_document_fits_its_schema(schema in schema(), prompt in "[a-z]{0,4}") {
        let node = json!({
            "type": "object",
            "properties": {
                "value": { "type": "integer" },
                "next": { "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] },
                "children": { "type": "array", "items": { "$ref": "#/$defs/node" } },
            },
            "required": ["value", "next"],
            "additionalProperties": false,
        });
        let root = json!({ "$defs": { "node": node }, "allOf": [schema] });
        let document = document_of(&root, &prompt);
        prop_assert!(document.is_ok(), "{root}: {document:?}");
        let document = document.unwrap();
        prop_assert!(fits(&root, &root, &document), "{root}: {document}");
    }

    #[test]
    fn a_text_matches_its_regular_expression(regex in r"(\[a-c\]|x|\\d|\.|\(\?:é\|zz\)){1,4}[+*?]?", prompt in "[a-z]{0,4}") {
        let text = written(&StructuredOutput::Regex(regex.clone()), &prompt);
        prop_assert!(text.is_ok(), "{regex}: {text:?}");
        let whole = regex::Regex::new(&format!("^(?:{regex})$")).unwrap();
        prop_assert!(whole.is_match(text.as_ref().unwrap()), "{regex}: {text:?}");
    }
}

#[test]
fn the_prompt_decides_what_the_schema_leaves_open() {
    let schema = json!({ "type": "object", "properties": { "city": { "type": "string" }, "degrees": { "type": "integer" } } });
    assert_eq!(document_of(&schema, "one"), document_of(&schema, "one"));
    assert_ne!(document_of(&schema, "one"), document_of(&schema, "two"));
}

#[test]
fn an_unsatisfiable_schema_is_refused_in_the_engines_words() {
    for (schema, why) in [
        (json!({ "type": "foo" }), "Invalid type: foo"),
        (json!({ "properties": { "a": { "type": "foo" } } }), "Invalid type: foo"),
        (json!({ "type": "object", "properties": 5 }), "properties must be an object"),
        (json!({ "$ref": "#/nope" }), "Pointer '/nope' does not exist"),
        (json!({ "type": "string", "minLength": 5, "maxLength": 2 }), "Unsatisfiable schema: minLength (5) is greater than maxLength (2)"),
        (json!({ "type": "integer", "minimum": 5, "maximum": 2 }), "Unsatisfiable schema: minimum (5) is greater than maximum (2)"),
        (json!({ "type": "array", "minItems": 3, "maxItems": 1 }), "Unsatisfiable schema: minItems (3) is greater than maxItems (1)"),
        (json!({ "enum": [] }), "Unsatisfiable schema: anyOf is empty"),
        (json!({ "type": "string", "pattern": "(" }), "regex parse error:\n    (\n    ^\nerror: unclosed group"),
        (json!({ "not": {} }), r#"Unimplemented keys: ["not"]"#),
        (json!({ "allOf": [{ "type": "string" }, { "type": "integer" }] }), "Unsatisfiable schema: incompatible types"),
        (json!({ "type": "object", "required": "a" }), "Expected array for 'required', got \"a\""),
        (json!({ "type": "string", "format": "foo" }), "Unknown format: foo"),
        (json!({ "required": ["a"], "additionalProperties": false }), "Unsatisfiable schema: required property 'a' is unsatisfiable"),
    ] {
        assert_eq!(document_of(&schema, "hi"), Err(why.to_owned()), "{schema}");
    }
}

#[test]
fn an_unbounded_schema_is_refused() {
    let endless = json!({ "type": "object", "properties": { "next": { "$ref": "#" } }, "required": ["next"] });
    assert!(document_of(&endless, "hi").unwrap_err().contains("no end"));
    let circle = json!({ "$ref": "#" });
    assert!(document_of(&circle, "hi").unwrap_err().contains("no end"));
    let twice = json!({ "anyOf": [{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/a" }], "$defs": { "a": { "items": { "$ref": "#" }, "minItems": 2 } } });
    assert!(document_of(&twice, "hi").is_err());
    for schema in [
        json!({ "type": "array", "minItems": 1_000_000_000 }),
        json!({ "minLength": 1_000_000_000 }),
        json!({ "pattern": "a{1000}{1000}" }),
    ] {
        assert!(document_of(&schema, "hi").unwrap_err().contains("too l"), "{schema}: {:?}", document_of(&schema, "hi"));
    }
}

#[test]
fn a_json_object_follows_the_schema_in_the_prompt() {
    let shown = r#"Answer in JSON: {"$defs": {"p": {"properties": {"x": {}}}}, "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]} Now {go}"#;
    assert_eq!(written(&StructuredOutput::JsonObject, shown).unwrap(), r#"{"colour": "red"}"#);
    for prompt in ["Answer in JSON", r#"{"properties": {"colour": {"type": "foo"}}}"#, "{{{{"] {
        let text = written(&StructuredOutput::JsonObject, prompt).unwrap();
        assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
    }
}

#[test]
fn a_calls_tokens_are_the_same_in_the_next_prompt() {
    let call = StructuredOutput::Call {
        name: "get_weather".to_owned(),
        parameters: json!({ "properties": { "city": { "enum": ["Zürich", "a, b: c"] } } }),
    };
    let text = written(&call, "hi").unwrap();
    let tokens = call.tokens(&encode("hi"), &mut Continuation::after(7, &encode("hi"))).unwrap();
    assert_eq!(tokens, encode(&text));
    let (name, arguments) = text.split_once(' ').unwrap();
    let object = serde_json::from_str(arguments).unwrap();
    let mut chat = crate::tokens::ChatText::default();
    chat.push_message("assistant", "", &[crate::tokens::ToolUse { name: name.to_owned(), object }]);
    assert!(chat.as_str().contains(&text), "{} has {text}", chat.as_str());
}
