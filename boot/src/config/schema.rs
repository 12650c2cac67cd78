//! List of the settings, derived from their structs.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use toml::Value;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueKind {
    /// Text, such as a path, an address or a duration.
    Text,
    Integer,
    Number,
    Bool,
    /// Several texts: the flag may be repeated, and the environment variable is split at commas.
    List,
    Choice(Vec<String>),
}

impl ValueKind {
    pub(super) fn is_list(&self) -> bool {
        *self == Self::List
    }

    pub(super) fn placeholder(&self) -> String {
        match self {
            Self::Text | Self::List => "TEXT".into(),
            Self::Integer => "N".into(),
            Self::Number => "X".into(),
            Self::Bool => "BOOL".into(),
            Self::Choice(words) => words.join("|"),
        }
    }

    /// Parses an environment variable's text.
    pub(super) fn parse_list(&self, text: &str) -> Result<Value, String> {
        if self.is_list() {
            let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
            return Ok(Value::Array(parts.map(|part| Value::String(part.to_owned())).collect()));
        }
        self.parse_one(text)
    }

    /// Parses a flag's values as one value.
    pub(super) fn parse(&self, texts: &[&String]) -> Result<Value, String> {
        if self.is_list() {
            return Ok(Value::Array(texts.iter().map(|text| Value::String((*text).clone())).collect()));
        }
        self.parse_one(texts.last().map_or("", |text| text.as_str()))
    }

    fn parse_one(&self, text: &str) -> Result<Value, String> {
        match self {
            Self::Integer => text.parse().map(Value::Integer).map_err(|_| format!("a whole number was expected, not {text:?}")),
            Self::Number => text.parse().map(Value::Float).map_err(|_| format!("a number was expected, not {text:?}")),
            Self::Bool => text.parse().map(Value::Boolean).map_err(|_| format!("true or false was expected, not {text:?}")),
            Self::Choice(words) if !words.iter().any(|word| word == text) => {
                Err(format!("one of {} was expected, not {text:?}", words.join(", ")))
            }
            Self::Text | Self::List | Self::Choice(_) => Ok(Value::String(text.to_owned())),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Setting {
    /// Section of the setting, such as `router`.
    pub section: &'static str,
    /// Key within the section, such as `max_body_bytes`.
    pub key: &'static str,
    /// The field's doc comment on one line.
    pub doc: String,
    pub kind: ValueKind,
    /// Value without any source.
    pub default: Json,
}

/// Environment variable of a section's key.
pub(super) fn environment_name(section: &str, key: &str) -> String {
    format!("HOSTLER_{section}_{key}").to_uppercase()
}

impl Setting {
    #[must_use]
    pub fn full_key(&self) -> String {
        format!("{}.{}", self.section, self.key)
    }

    /// Environment variable, such as `HOSTLER_ROUTER_LISTEN`.
    #[must_use]
    pub fn environment(&self) -> String {
        environment_name(self.section, self.key)
    }

    /// Flag without its dashes. The `[log]` section keeps its name in it, as `log-level`.
    #[must_use]
    pub fn flag(&self) -> String {
        let flag = self.key.replace('_', "-");
        if self.section == "log" { format!("log-{flag}") } else { flag }
    }

    /// The first sentence of the meaning, without its full stop.
    #[must_use]
    pub fn summary(&self) -> &str {
        // A full stop within an address or a number has no blank after it.
        let end = self.doc.match_indices(". ").map(|(at, _)| at).find(|at| self.doc[at + 2..].starts_with(char::is_uppercase));
        end.map_or(self.doc.trim_end_matches('.'), |end| &self.doc[..end])
    }

    /// Default as written in the file.
    #[must_use]
    pub fn default_text(&self) -> String {
        self.default.to_string()
    }
}

/// Path of a value that a struct rejects, and why.
pub(super) type Rejection = serde_path_to_error::Error<toml::de::Error>;

#[derive(Debug, Clone)]
pub struct Section {
    /// Name of the table in the file.
    pub name: &'static str,
    /// Fields in the order of the struct.
    pub settings: Vec<Setting>,
    /// Reads a table as the struct, to see what that rejects.
    pub(super) read: fn(Value) -> Result<(), Rejection>,
}

impl Section {
    /// Derives the list of settings from `T`: keys, doc comments and kinds from its schema, and
    /// defaults from `T::default()`.
    ///
    /// # Panics
    /// When `T` is not a struct of plain fields, which its first test shows.
    #[must_use]
    pub fn of<T: JsonSchema + Serialize + Default + DeserializeOwned>(name: &'static str) -> Self {
        let mut settings = SchemaSettings::draft2020_12();
        settings.inline_subschemas = true;
        let schema = Json::from(settings.into_generator().into_root_schema_for::<T>());
        let defaults = serde_json::to_value(T::default()).expect("settings are plain fields");
        let defaults = defaults.as_object().expect("settings are a struct");
        let settings = defaults.iter().map(|(key, default)| {
            let field = &schema["properties"][key];
            Setting {
                section: name,
                // Settings are declared once per process and live as long as it does.
                key: Box::leak(key.clone().into_boxed_str()),
                doc: field["description"].as_str().unwrap_or_default().replace('\n', " "),
                kind: kind_of(field),
                default: default.clone(),
            }
        });
        Self { name, settings: settings.collect(), read: |table| serde_path_to_error::deserialize::<_, T>(table).map(drop) }
    }
}

fn kind_of(field: &Json) -> ValueKind {
    let words =
        |list: &Json| list.as_array().map(|words| words.iter().filter_map(|word| word.as_str().map(str::to_owned)).collect::<Vec<_>>());
    if let Some(choices) = field["oneOf"].as_array() {
        let choices = choices.iter().flat_map(|choice| match choice["const"].as_str() {
            Some(word) => vec![word.to_owned()],
            None => words(&choice["enum"]).unwrap_or_default(),
        });
        return ValueKind::Choice(choices.collect());
    }
    if let Some(choices) = words(&field["enum"]) {
        return ValueKind::Choice(choices);
    }
    match field["type"].as_str() {
        Some("integer") => ValueKind::Integer,
        Some("number") => ValueKind::Number,
        Some("boolean") => ValueKind::Bool,
        Some("array") => ValueKind::List,
        _ => ValueKind::Text,
    }
}

/// A longer name is no typo of a known one, and the comparison takes the product of both lengths.
const MAX_TYPO: usize = 80;

/// The known name closest to `name`, if it is close enough to be a typo: one letter in three, and
/// always one, may be wrong, missing, too many or swapped with its neighbour.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let letters = name.chars().count();
    if letters > MAX_TYPO {
        return None;
    }
    let most = (letters / 3).max(1);
    let distances = known.map(|candidate| (strsim::osa_distance(name, candidate), candidate));
    distances.filter(|(distance, _)| *distance <= most).min_by_key(|(distance, _)| *distance).map(|(_, candidate)| candidate)
}
