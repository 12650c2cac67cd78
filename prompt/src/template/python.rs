//! Python features that chat templates expect: functions, filters, tests and methods that the
//! template engine lacks, or has with other results.
//!
//! Only differences that change a template's output are here.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::strftime::strftime;

mod json;

/// Adds the features that chat templates expect to the environment.
pub(super) fn extend(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    environment.set_unknown_method_callback(method);
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

fn strftime_now(format: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, i64::try_from(now).unwrap_or_default())
}

/// Python's `json.dumps` with the arguments that `transformers` passes through; nothing is escaped
/// for HTML.
fn tojson(value: &Value, positional: Rest<Value>, keywords: Kwargs) -> Result<String, Error> {
    let argument = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        match positional.get(position) {
            Some(value) => Ok(Some(value.clone())),
            None => keywords.get::<Option<Value>>(name),
        }
    };
    let (ascii, indent, separators, sorted) =
        (argument(0, "ensure_ascii")?, argument(1, "indent")?, argument(2, "separators")?, argument(3, "sort_keys")?);
    keywords.assert_all_used()?;
    let given = |value: &Option<Value>| value.as_ref().is_some_and(Value::is_true);
    let mut layout = json::JsonLayout { ascii: given(&ascii), sorted: given(&sorted), ..json::JsonLayout::default() };
    if let Some(indent) = indent.filter(|indent| !indent.is_none()) {
        layout.indent = Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        });
        layout.between_items = ",".to_owned();
    }
    if let Some(separators) = separators.filter(|separators| !separators.is_none()) {
        let mut both = separators.try_iter()?;
        layout.between_items = both.next().unwrap_or_default().to_string();
        layout.after_key = both.next().unwrap_or_default().to_string();
    }
    json::dumps(value, &layout)
}

fn trim(value: &Value, characters: Option<&str>) -> String {
    strip_text(&value.to_string(), characters, true, true).to_owned()
}

/// Length of a value; undefined has length 0, as in Jinja.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("an object of type {} has no length", value.kind())))
}

/// Whether a value is a sequence, as in Jinja: any value with a length and items, including texts,
/// mappings and undefined.
fn is_sequence(value: &Value) -> bool {
    value.is_undefined() || matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || matches!(value.kind(), ValueKind::Iterable)
}

fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match name {
            "strip" | "lstrip" | "rstrip" => {
                let (characters,): (Option<&str>,) = from_args(arguments)?;
                return Ok(Value::from(strip_text(text, characters, name != "rstrip", name != "lstrip")));
            }
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(arguments)?;
                return Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(arguments)?;
                return Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)));
            }
            _ => {}
        }
    }
    pycompat::unknown_method_callback(state, value, name, arguments)
}

/// Whether Python treats a character as white space.
///
/// It does so for four control characters, unlike Unicode.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

fn strip_text<'t>(text: &'t str, characters: Option<&str>, left: bool, right: bool) -> &'t str {
    let goes = |character: char| characters.map_or_else(|| is_space(character), |characters| characters.contains(character));
    let text = if left { text.trim_start_matches(goes) } else { text };
    if right { text.trim_end_matches(goes) } else { text }
}

#[cfg(test)]
mod tests;
