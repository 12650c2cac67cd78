//! Generator of a JSON document that fits a schema.
//!
//! Near its root it is as full as a model's answer would be, and far below as small as possible, so
//! that schemas which refer to themselves come to an end.

use serde_json::{Map, Number, Value};

use super::merge::merge;
use super::range::Range;
use super::{SchemaError, pattern};
use crate::tokens::Continuation;

/// Below this depth a document is as small as its schema allows.
const FULL_DEPTH: usize = 4;
/// Most parts of schemas that are examined for one document.
const MOST_PARTS: usize = 20_000;
/// Most levels of recursion: the stack of a thread is 2 MB. vLLM takes schemas of 64 levels.
const MOST_LEVELS: usize = 160;
/// Length of the longest array, and of the longest string in words.
const MOST_ITEMS: usize = 10_000;
/// Attempts to draw an item that differs from the others.
const DRAWS: usize = 64;
/// Number of names of one word, before those of two.
const NAMES: usize = 100;

/// Keywords that are ignored, so a document might not fit.
const UNIMPLEMENTED: [&str; 9] =
    ["not", "if", "then", "else", "contains", "propertyNames", "dependentRequired", "dependentSchemas", "$dynamicRef"];

const TYPES: [&str; 7] = ["object", "array", "string", "number", "integer", "boolean", "null"];

/// Examples of the formats that vLLM knows.
const FORMATS: [(&str, &str); 14] = [
    ("date-time", "2026-11-21T00:25:16Z"),
    ("date", "2026-11-21"),
    ("time", "00:25:16Z"),
    ("duration", "P3DT4H"),
    ("email", "water@example.com"),
    ("hostname", "water.example.com"),
    ("ipv4", "192.0.2.7"),
    ("ipv6", "2001:db8::7"),
    ("uuid", "3f2504e0-4f89-41d3-9a0c-0305e82c3301"),
    ("uri", "https://example.com/water"),
    ("uri-reference", "/water"),
    ("uri-template", "https://example.com/{name}"),
    ("json-pointer", "/water/0"),
    ("relative-json-pointer", "1/water"),
];

type Schema = Map<String, Value>;

/// Writes a document that fits `schema`; `words` decides the open choices.
pub(super) fn write(schema: &Value, words: &mut Continuation) -> Result<Value, SchemaError> {
    DocumentWriter { root: schema, words, parts: 0, levels: 0 }.value(schema, 0)
}

struct DocumentWriter<'a> {
    root: &'a Value,
    words: &'a mut Continuation,
    /// Parts examined so far.
    parts: usize,
    levels: usize,
}

impl DocumentWriter<'_> {
    fn value(&mut self, schema: &Value, depth: usize) -> Result<Value, SchemaError> {
        self.descend(|writer| {
            let schema = writer.flatten(schema)?;
            writer.flat_value(schema, depth)
        })
    }

    /// Counts a part and a level around `work`.
    fn descend<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, SchemaError>) -> Result<T, SchemaError> {
        self.parts += 1;
        if self.parts > MOST_PARTS {
            return Err(SchemaError::invalid("the JSON schema is too large"));
        }
        if self.levels == MOST_LEVELS {
            return Err(SchemaError::unsatisfiable("the document would have no end"));
        }
        self.levels += 1;
        let outcome = work(self);
        self.levels -= 1;
        outcome
    }

    /// Schema without references and `allOf`.
    fn flatten(&mut self, schema: &Value) -> Result<Schema, SchemaError> {
        let mut flat = match schema {
            Value::Object(fields) => fields.clone(),
            Value::Bool(true) => Schema::new(),
            Value::Bool(false) => return Err(SchemaError::unsatisfiable("schema is false")),
            _ => return Err(SchemaError::invalid("schema must be an object or boolean")),
        };
        if let Some(reference) = flat.remove("$ref") {
            let pointer = reference.as_str().unwrap_or_default();
            let root = self.root;
            let target = pointer.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
            let missing = || SchemaError::invalid(format!("Pointer '{}' does not exist", pointer.trim_start_matches('#')));
            let target = target.ok_or_else(missing)?;
            flat = merge(flat, self.descend(|writer| writer.flatten(target))?)?;
        }
        for part in list(&mut flat, "allOf")?.unwrap_or_default() {
            flat = merge(flat, self.descend(|writer| writer.flatten(&part))?)?;
        }
        let unknown: Vec<&str> = UNIMPLEMENTED.into_iter().filter(|key| flat.contains_key(*key)).collect();
        if unknown.is_empty() { Ok(flat) } else { Err(SchemaError::invalid(format!("Unimplemented keys: {unknown:?}"))) }
    }

    fn flat_value(&mut self, mut schema: Schema, depth: usize) -> Result<Value, SchemaError> {
        // A grammar cannot tell one match from two: like xgrammar, this treats `oneOf` as `anyOf`.
        for key in ["anyOf", "oneOf"] {
            if let Some(branches) = list(&mut schema, key)? {
                return self.branch(&schema, branches, depth);
            }
        }
        let types = types(&schema)?;
        if let Some(value) = schema.get("const") {
            return if fits_type(value, &types) { Ok(value.clone()) } else { Err(SchemaError::unsatisfiable("incompatible types")) };
        }
        if let Some(mut members) = list(&mut schema, "enum")? {
            members.retain(|member| fits_type(member, &types));
            return match members.len() {
                0 => Err(SchemaError::unsatisfiable("anyOf is empty")),
                count => Ok(members.swap_remove(self.words.pick(count))),
            };
        }
        let candidates = if types.is_empty() { vec![implied_type(&schema)] } else { types };
        self.first_possible(candidates, |kind| rank(&[*kind], depth), |writer, kind| writer.typed(kind, &schema, depth))
    }

    fn branch(&mut self, rest: &Schema, branches: Vec<Value>, depth: usize) -> Result<Value, SchemaError> {
        self.first_possible(
            branches,
            |branch| match branch.as_object() {
                Some(branch) if branch.contains_key("$ref") || branch.contains_key("anyOf") => rank(&["object"], depth),
                Some(branch) => rank(&types(branch).unwrap_or_default(), depth),
                None => 0,
            },
            |writer, branch| {
                let branch = writer.flatten(&branch)?;
                let schema = Value::Object(merge(rest.clone(), branch)?);
                writer.value(&schema, depth)
            },
        )
    }

    /// First of some choices that gives a value.
    ///
    /// The order is random, except that choices of a low rank come first.
    fn first_possible<T>(
        &mut self,
        mut choices: Vec<T>,
        rank: impl Fn(&T) -> usize,
        write: impl Fn(&mut Self, T) -> Result<Value, SchemaError>,
    ) -> Result<Value, SchemaError> {
        let mut outcome = Err(SchemaError::unsatisfiable("anyOf is empty"));
        if !choices.is_empty() {
            let first = self.words.pick(choices.len());
            choices.rotate_left(first);
            choices.sort_by_key(rank);
        }
        for choice in choices {
            outcome = write(self, choice);
            if !matches!(&outcome, Err(error) if !error.fatal) {
                return outcome;
            }
        }
        outcome
    }

    fn typed(&mut self, kind: &str, schema: &Schema, depth: usize) -> Result<Value, SchemaError> {
        match kind {
            "object" => self.object(schema, depth),
            "array" => self.array(schema, depth),
            "string" => self.string(schema),
            "boolean" => Ok(Value::Bool(self.words.pick(2) == 1)),
            "null" => Ok(Value::Null),
            kind => self.number(schema, kind == "integer"),
        }
    }

    fn object(&mut self, schema: &Schema, depth: usize) -> Result<Value, SchemaError> {
        let none = Schema::new();
        let properties = match schema.get("properties") {
            None => &none,
            Some(properties) => properties.as_object().ok_or_else(|| SchemaError::invalid("properties must be an object"))?,
        };
        let required = required(schema)?;
        let (least, most) = (size(schema, "minProperties").unwrap_or(0), size(schema, "maxProperties").unwrap_or(usize::MAX));
        let mut document = Map::new();
        let mut missing = required.len();
        for (name, property) in properties {
            let is_required = required.contains(&name.as_str());
            missing -= usize::from(is_required);
            if !is_required && (depth >= FULL_DEPTH || document.len() + missing >= most) {
                continue;
            }
            match self.value(property, depth + 1) {
                Ok(value) => drop(document.insert(name.clone(), value)),
                Err(error) if is_required || error.fatal => return Err(error),
                Err(_) => {}
            }
        }
        let additional = schema.get("additionalProperties").unwrap_or(&Value::Bool(true));
        for name in required {
            if document.contains_key(name) {
                continue;
            }
            if *additional == Value::Bool(false) {
                return Err(SchemaError::unsatisfiable(&format!("required property '{name}' is unsatisfiable")));
            }
            document.insert(name.to_owned(), self.value(additional, depth + 1)?);
        }
        let patterned = schema.get("patternProperties").and_then(Value::as_object).and_then(|patterns| patterns.iter().next());
        // A map describes its values, and names no property.
        let is_map = properties.is_empty() && (additional.is_object() || patterned.is_some());
        if patterned.is_some() && !(properties.is_empty() && document.is_empty()) {
            return Err(SchemaError::invalid("patternProperties beside other properties are not supported"));
        }
        let length = least.max(usize::from(is_map && depth < FULL_DEPTH && most > 0));
        for _ in 0..DRAWS * length.min(MOST_ITEMS) {
            if document.len() >= length {
                break;
            }
            let (name, value) = match patterned {
                Some((regex, value)) => (pattern::write(regex, self.words)?, value),
                None => (self.words.words(1 + document.len() / NAMES), additional),
            };
            if !document.contains_key(&name) {
                let value = self.value(value, depth + 1)?;
                document.insert(name, value);
            }
        }
        if document.len() < least || document.len() > most {
            return Err(SchemaError::unsatisfiable(&format!("minProperties ({least}) is greater than maxProperties ({most})")));
        }
        Ok(Value::Object(document))
    }

    fn array(&mut self, schema: &Schema, depth: usize) -> Result<Value, SchemaError> {
        let (least, most) = (size(schema, "minItems").unwrap_or(0), size(schema, "maxItems").unwrap_or(usize::MAX));
        if least > most {
            return Err(SchemaError::unsatisfiable(&format!("minItems ({least}) is greater than maxItems ({most})")));
        }
        if least > MOST_ITEMS {
            return Err(SchemaError::invalid("the JSON schema demands too long an array"));
        }
        // Before 2020, `items` was a list, followed by `additionalItems`.
        let is_tuple = schema.get("items").is_some_and(Value::is_array);
        let (first, rest) = if is_tuple { ("items", "additionalItems") } else { ("prefixItems", "items") };
        let first = schema.get(first).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let rest = schema.get(rest).unwrap_or(&Value::Bool(true));
        let free = if depth < FULL_DEPTH && *rest != Value::Bool(false) { 1 + self.words.pick(2) } else { 0 };
        let length = least.max(if first.is_empty() { free } else { first.len() }).min(most);
        let is_unique = schema.get("uniqueItems") == Some(&Value::Bool(true));
        let mut items: Vec<Value> = Vec::new();
        for position in 0..length {
            let schema = first.get(position).unwrap_or(rest);
            match self.item(schema, depth + 1, if is_unique { &items } else { &[] }) {
                Ok(item) => items.push(item),
                Err(error) if error.fatal || items.len() < least => return Err(error),
                Err(_) => break,
            }
        }
        Ok(Value::Array(items))
    }

    /// An item that differs from `others`.
    fn item(&mut self, schema: &Value, depth: usize, others: &[Value]) -> Result<Value, SchemaError> {
        for _ in 0..DRAWS {
            let item = self.value(schema, depth)?;
            if !others.contains(&item) {
                return Ok(item);
            }
        }
        Err(SchemaError::unsatisfiable("items are not unique"))
    }

    fn string(&mut self, schema: &Schema) -> Result<Value, SchemaError> {
        let (least, most) = (size(schema, "minLength").unwrap_or(0), size(schema, "maxLength").unwrap_or(usize::MAX));
        if least > most {
            return Err(SchemaError::unsatisfiable(&format!("minLength ({least}) is greater than maxLength ({most})")));
        }
        if least > MOST_ITEMS {
            return Err(SchemaError::invalid("the JSON schema demands too long a string"));
        }
        let fits = |text: &str| (least..=most).contains(&text.chars().count());
        if let Some(regex) = schema.get("pattern").and_then(Value::as_str) {
            let free = self.words.pick(3);
            for surplus in (free..=least.max(free)).chain(0..free) {
                let mut matched = pattern::write_sized(regex, surplus, self.words)?;
                // A pattern without anchors may match anywhere in a text.
                let missing = if matched.is_anchored { 0 } else { least.saturating_sub(matched.text.chars().count()) };
                matched.text.extend(std::iter::repeat_n('x', missing));
                let text = matched.text;
                if fits(&text) {
                    return Ok(text.into());
                }
            }
            return Err(SchemaError::unsatisfiable("no text matches the pattern in this length"));
        }
        if let Some(format) = schema.get("format").and_then(Value::as_str) {
            let known = FORMATS.iter().find(|(known, _)| *known == format);
            let (_, text) = known.ok_or_else(|| SchemaError::invalid(format!("Unknown format: {format}")))?;
            return if fits(text) { Ok((*text).into()) } else { Err(SchemaError::unsatisfiable("the format has another length")) };
        }
        let mut text = self.words.words(1 + self.words.clone().pick(3));
        while text.chars().count() < least {
            text.push(' ');
            text.push_str(&self.words.words(1));
        }
        Ok(text.chars().take(most).collect::<String>().into())
    }

    fn number(&mut self, schema: &Schema, is_integer: bool) -> Result<Value, SchemaError> {
        let range = Range::of(schema);
        let multiple = schema.get("multipleOf").and_then(Value::as_f64).filter(|multiple| *multiple > 0.0);
        // A whole multiple of 0.5 is also one of 1; no other fraction requires whole numbers.
        let step = match multiple {
            Some(multiple) if is_integer && multiple < 1.0 => 1.0,
            Some(multiple) => multiple,
            None if is_integer => 1.0,
            None => 0.25,
        };
        let middle = || range.middle().filter(|_| !is_integer && multiple.is_none());
        let value = range.multiple(step, self.words).or_else(middle).filter(|value| !is_integer || value.fract() == 0.0);
        let value = value.ok_or_else(|| range.contradiction())?;
        #[expect(clippy::cast_possible_truncation, reason = "it is whole, and saturates where the schema's own bounds do")]
        let number = if is_integer { Some(Number::from(value as i64)) } else { Number::from_f64(value) };
        Ok(number.map_or(Value::Null, Value::Number))
    }
}

/// Takes a list out of a schema.
fn list(schema: &mut Schema, key: &str) -> Result<Option<Vec<Value>>, SchemaError> {
    match schema.remove(key) {
        None => Ok(None),
        Some(Value::Array(members)) => Ok(Some(members)),
        Some(_) => Err(SchemaError::invalid(format!("{key} must be an array"))),
    }
}

fn size(schema: &Schema, key: &str) -> Option<usize> {
    schema.get(key).and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok())
}

fn required(schema: &Schema) -> Result<Vec<&str>, SchemaError> {
    let Some(required) = schema.get("required") else { return Ok(Vec::new()) };
    let names = required.as_array().ok_or_else(|| SchemaError::invalid(format!("Expected array for 'required', got {required}")))?;
    let mut names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// Types that a schema names.
fn types(schema: &Schema) -> Result<Vec<&'static str>, SchemaError> {
    let named = match schema.get("type") {
        None => return Ok(Vec::new()),
        Some(Value::Array(types)) => types.as_slice(),
        Some(single) => std::slice::from_ref(single),
    };
    let known = named.iter().map(|kind| {
        let known = TYPES.into_iter().find(|known| kind == known);
        known.ok_or_else(|| SchemaError::invalid(format!("Invalid type: {}", kind.as_str().unwrap_or_default())))
    });
    known.collect()
}

/// Type that a schema without one implies.
fn implied_type(schema: &Schema) -> &'static str {
    let has = |keys: &[&str]| keys.iter().any(|key| schema.contains_key(*key));
    if has(&["properties", "required", "additionalProperties", "patternProperties", "minProperties"]) {
        "object"
    } else if has(&["items", "prefixItems", "minItems", "uniqueItems"]) {
        "array"
    } else if has(&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]) {
        "number"
    } else {
        "string"
    }
}

fn fits_type(value: &Value, types: &[&str]) -> bool {
    let whole = value.as_f64().is_some_and(|number| number.fract() == 0.0);
    let fits = |kind: &&str| match *kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => whole,
        "boolean" => value.is_boolean(),
        _ => value.is_null(),
    };
    types.is_empty() || types.iter().any(fits)
}

/// Rank of a choice: a value before none, and far below the root types that cannot nest.
fn rank(types: &[&str], depth: usize) -> usize {
    if depth < FULL_DEPTH {
        usize::from(types == ["null"])
    } else {
        usize::from(types.iter().any(|kind| matches!(*kind, "object" | "array")))
    }
}
