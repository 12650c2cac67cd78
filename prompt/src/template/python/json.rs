//! Python's `json.dumps`: the same separators, escapes and numbers, because a template's output for
//! tools and arguments becomes tokens.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

#[derive(Debug)]
pub(super) struct JsonLayout {
    pub(super) ascii: bool,
    pub(super) sorted: bool,
    /// Indent per level; `None` writes one line.
    pub(super) indent: Option<String>,
    pub(super) between_items: String,
    pub(super) after_key: String,
}

impl Default for JsonLayout {
    fn default() -> Self {
        Self { ascii: false, sorted: false, indent: None, between_items: ", ".to_owned(), after_key: ": ".to_owned() }
    }
}

/// Most levels, deeper than any tool; a template can build values that contain themselves or more.
const MAX_LEVELS: usize = 200;

pub(super) fn dumps(value: &Value, layout: &JsonLayout) -> Result<String, Error> {
    let mut writer = JsonWriter { text: String::new(), layout, level: 0 };
    writer.value(value)?;
    Ok(writer.text)
}

struct JsonWriter<'l> {
    text: String,
    layout: &'l JsonLayout,
    level: usize,
}

impl JsonWriter<'_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.text.push_str(&value.to_string()),
            ValueKind::Number => self.text.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => string(&mut self.text, value.as_str().unwrap_or_default(), self.layout.ascii),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.collect();
                self.container(['[', ']'], items, |writer, item| writer.value(&item))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.layout.sorted {
                    keys.sort_by_key(ToString::to_string);
                }
                self.container(['{', '}'], keys, |writer, key| {
                    writer.key(&key)?;
                    writer.text.push_str(&writer.layout.after_key);
                    writer.value(&value.get_item(&key)?)
                })?;
            }
            kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("an object of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    /// Writes a key. A JSON key is a string, whatever the value was.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        if key.kind() == ValueKind::String {
            return self.value(key);
        }
        self.text.push('"');
        self.value(key)?;
        self.text.push('"');
        Ok(())
    }

    fn container(
        &mut self,
        [open, close]: [char; 2],
        items: Vec<Value>,
        mut write: impl FnMut(&mut Self, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.level == MAX_LEVELS {
            return Err(Error::new(ErrorKind::InvalidOperation, "a value for tojson has too many levels"));
        }
        let empty = items.is_empty();
        self.text.push(open);
        self.level += 1;
        for (position, item) in items.into_iter().enumerate() {
            if position > 0 {
                self.text.push_str(&self.layout.between_items);
            }
            self.new_line();
            write(self, item)?;
        }
        self.level -= 1;
        if !empty {
            self.new_line();
        }
        self.text.push(close);
        Ok(())
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.layout.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(self.level));
        }
    }
}

fn string(text: &mut String, value: &str, ascii: bool) {
    text.push('"');
    for character in value.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            control if control < ' ' => escape(text, control),
            other if ascii && !other.is_ascii() => escape(text, other),
            '\u{7f}' if ascii => text.push_str("\\u007f"),
            other => text.push(other),
        }
    }
    text.push('"');
}

fn escape(text: &mut String, character: char) {
    for unit in character.encode_utf16(&mut [0; 2]) {
        text.push_str(&format!("\\u{unit:04x}"));
    }
}

/// Python's `repr` of a float: the shortest digits, and an exponent with a sign and two digits.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let shortest = format!("{value:?}");
    match shortest.split_once('e') {
        None => shortest,
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}
