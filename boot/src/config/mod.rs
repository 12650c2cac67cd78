//! Settings from file, environment and flags.
//!
//! A struct field is the setting, its doc comment the manual, and its `Default` the default. The
//! sources are merged as TOML (file < environment < flags) and deserialized once. The list of
//! settings comes from the structs' JSON schema, so flags, environment names and `docs/config.md`
//! need no second list.

mod document;
mod file;
mod schema;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};
use serde::de::DeserializeOwned;
use toml::{Table, Value};

pub use document::{example_file, json_schema, markdown};
use file::{FileKey, FileSection};
use schema::Rejection;
pub use schema::{Section, Setting, ValueKind, nearest};

/// Most mistakes of a file that are put into words.
const MAX_MISTAKES: usize = 20;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration file {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not valid TOML: {message}")]
    Syntax { path: PathBuf, message: String },
    #[error("{origin}: unknown key `{key}`{}", nearest.as_ref().map(|name| format!("; did you mean `{name}`?")).unwrap_or_default())]
    Unknown { origin: String, key: String, nearest: Option<String> },
    #[error("{origin}: {key}: {message}")]
    Value { origin: String, key: String, message: String },
}

#[derive(Debug, Default)]
pub struct SettingSources<'a> {
    pub file: Option<&'a Path>,
    /// Environment variables, usually `std::env::vars()`.
    pub environment: Vec<(String, String)>,
    /// Flags of a command built with `Settings::flags`.
    pub flags: Option<&'a ArgMatches>,
}

/// Merged settings, and where each came from.
#[derive(Debug)]
pub struct Settings {
    values: Table,
    origins: BTreeMap<String, String>,
    /// The lines of settings that the file gives.
    lines: BTreeMap<String, usize>,
}

impl Settings {
    /// Merges the sources for the given sections: file < environment < flags.
    ///
    /// # Errors
    /// Unknown keys of the file, and values that are not of the setting's kind.
    pub fn load(sections: &[Section], sources: &SettingSources<'_>) -> Result<Self, ConfigError> {
        let mut settings = Self { values: Table::new(), origins: BTreeMap::new(), lines: BTreeMap::new() };
        if let Some(path) = sources.file {
            let first = settings.read_file(path, sections)?.into_iter().next();
            first.map_or(Ok(()), |mistake| Err(mistake.explain(sections)))?;
        }
        let environment: BTreeMap<&str, &str> = sources.environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        for setting in sections.iter().flat_map(|section| &section.settings) {
            // Other variables with the prefix are ignored: Kubernetes sets HOSTLER_ROUTER_PORT for
            // a service of that name.
            let name = setting.environment();
            if let Some(text) = environment.get(name.as_str()) {
                settings.insert(setting, setting.kind.parse_list(text), format!("environment variable {name}"))?;
            }
            let Some(matches) = sources.flags else { continue };
            let given = matches.try_contains_id(setting.key).unwrap_or(false)
                && matches.value_source(setting.key) == Some(ValueSource::CommandLine);
            if given {
                let texts: Vec<&String> = matches.get_many::<String>(setting.key).into_iter().flatten().collect();
                settings.insert(setting, setting.kind.parse(&texts), format!("flag --{}", setting.flag()))?;
            }
        }
        Ok(settings)
    }

    /// The mistakes of a file, as far as each can be seen alone, by line. Nothing is first if it is
    /// sound.
    ///
    /// # Errors
    /// When the file cannot be read, or is not TOML.
    pub fn mistakes(sections: &[Section], file: &Path) -> Result<Mistakes, ConfigError> {
        let mut settings = Self { values: Table::new(), origins: BTreeMap::new(), lines: BTreeMap::new() };
        let mut mistakes = settings.read_file(file, sections)?;
        for section in sections {
            let given = settings.values.get(section.name).and_then(Value::as_table).into_iter().flatten();
            // A struct reports its first mistake alone, so each value is read without the others.
            let rejected = given.filter_map(|(key, value)| {
                let alone = Table::from_iter([(key.clone(), value.clone())]);
                let error = (section.read)(Value::Table(alone)).err()?;
                let line = settings.lines.get(&format!("{}.{key}", section.name)).copied().unwrap_or_default();
                Some(Mistake { line, origin: String::new(), what: MistakeKind::Value(settings.explain(section.name, &error)) })
            });
            mistakes.extend(rejected);
        }
        mistakes.sort_by_key(|mistake| mistake.line);
        let more = mistakes.len().saturating_sub(MAX_MISTAKES);
        mistakes.truncate(MAX_MISTAKES);
        Ok(Mistakes { first: mistakes.into_iter().map(|mistake| mistake.explain(sections)).collect(), more })
    }

    /// A section as its struct.
    ///
    /// # Errors
    /// A value that the struct rejects, with its source and the expected form.
    pub fn section<T: DeserializeOwned>(&self, name: &str) -> Result<T, ConfigError> {
        let table = self.values.get(name).cloned().unwrap_or_else(|| Value::Table(Table::new()));
        serde_path_to_error::deserialize(table).map_err(|error| self.explain(name, &error))
    }

    fn explain(&self, section: &str, error: &Rejection) -> ConfigError {
        let key = format!("{section}.{}", error.path());
        let setting = key.split('[').next().unwrap_or(&key);
        ConfigError::Value {
            origin: self.origins.get(setting).cloned().unwrap_or_else(|| "default".into()),
            message: words::of_type_error(error.inner().message()),
            key,
        }
    }

    /// Sets one value as if by a flag, for settings that a subcommand derives itself.
    pub fn set(&mut self, section: &str, key: &str, value: Value) {
        self.origins.insert(format!("{section}.{key}"), "command line".into());
        let table = self.values.entry(section).or_insert_with(|| Value::Table(Table::new()));
        if let Value::Table(table) = table {
            table.insert(key.to_owned(), value);
        }
    }

    /// Settings given by any source: each as `section.key`, its value and its source.
    pub fn given(&self) -> impl Iterator<Item = (String, &Value, &str)> {
        let tables = self.values.iter().filter_map(|(section, table)| Some((section, table.as_table()?)));
        let settings = tables.flat_map(|(section, table)| table.iter().map(move |(key, value)| (format!("{section}.{key}"), value)));
        settings.map(|(name, value)| {
            let origin = self.origins.get(&name).map_or("", String::as_str);
            (name, value, origin)
        })
    }

    /// The line of the file that gives `section.key`.
    #[must_use]
    pub fn line(&self, name: &str) -> Option<usize> {
        self.lines.get(name).copied()
    }

    /// Whether any source gave this setting.
    #[must_use]
    pub fn is_set(&self, section: &str, key: &str) -> bool {
        self.origins.contains_key(&format!("{section}.{key}"))
    }

    /// Flags for all settings, under a heading for each section. Short help has the first sentence of
    /// a setting's meaning. If two sections have the same key, they share the flag, which then sets
    /// both.
    #[must_use]
    pub fn flags(sections: &[Section]) -> Vec<Arg> {
        let mut flags: Vec<Arg> = Vec::new();
        for setting in sections.iter().flat_map(|section| &section.settings) {
            if flags.iter().any(|flag| flag.get_id() == setting.key) {
                continue;
            }
            let action = if setting.kind.is_list() { ArgAction::Append } else { ArgAction::Set };
            let flag = Arg::new(setting.key)
                .long(setting.flag())
                .help_heading(format!("Settings of [{}]", setting.section))
                .help(setting.summary().to_owned())
                .long_help(format!("{} [default: {}] [env: {}]", setting.doc, setting.default_text(), setting.environment()))
                .value_name(setting.kind.placeholder())
                .action(action);
            flags.push(if setting.kind == ValueKind::Bool { flag.num_args(0..=1).default_missing_value("true") } else { flag });
        }
        flags
    }

    fn insert(&mut self, setting: &Setting, value: Result<Value, String>, origin: String) -> Result<(), ConfigError> {
        let key = setting.full_key();
        let value = value.map_err(|message| ConfigError::Value { origin: origin.clone(), key: key.clone(), message })?;
        self.set(setting.section, setting.key, value);
        self.origins.insert(key, origin);
        Ok(())
    }

    /// Takes what a file gives, and returns the keys and tables that it may not have, by line.
    fn read_file(&mut self, path: &Path, sections: &[Section]) -> Result<Vec<Mistake>, ConfigError> {
        let mut mistakes = Vec::new();
        for FileSection { key: FileKey { name, line }, entries } in file::read(path)? {
            let place = |line: usize| format!("{}:{line}", path.display());
            let Some(section) = sections.iter().find(|section| section.name == name) else {
                mistakes.push(Mistake { line, origin: place(line), what: MistakeKind::Section(name) });
                continue;
            };
            let Some(entries) = entries else {
                mistakes.push(Mistake { line, origin: place(line), what: MistakeKind::NoTable(name) });
                continue;
            };
            for (FileKey { name: key, line }, value) in entries {
                if !section.settings.iter().any(|setting| setting.key == key) {
                    mistakes.push(Mistake { line, origin: place(line), what: MistakeKind::Key(section.name, key) });
                    continue;
                }
                self.set(section.name, &key, value);
                self.origins.insert(format!("{name}.{key}"), place(line));
                self.lines.insert(format!("{name}.{key}"), line);
            }
        }
        mistakes.sort_by_key(|mistake| mistake.line);
        Ok(mistakes)
    }
}

/// What is wrong in a file, before it is put into words: only the first mistakes are.
#[derive(Debug)]
struct Mistake {
    line: usize,
    origin: String,
    what: MistakeKind,
}

#[derive(Debug)]
enum MistakeKind {
    /// An unknown section.
    Section(String),
    /// A value where a section belongs.
    NoTable(String),
    /// An unknown key of a section.
    Key(&'static str, String),
    Value(ConfigError),
}

impl Mistake {
    fn explain(self, sections: &[Section]) -> ConfigError {
        let Self { origin, what, .. } = self;
        match what {
            MistakeKind::Section(name) => {
                let nearest = nearest(&name, sections.iter().map(|section| section.name)).map(str::to_owned);
                ConfigError::Unknown { origin, key: cut(&name), nearest }
            }
            MistakeKind::NoTable(name) => {
                let message = format!("a section was expected: write [{name}] on a line of its own");
                ConfigError::Value { origin, key: name, message }
            }
            MistakeKind::Key(section, key) => {
                let known = sections.iter().filter(|known| known.name == section).flat_map(|known| &known.settings);
                let nearest = nearest(&key, known.map(|setting| setting.key)).map(|name| format!("{section}.{name}"));
                ConfigError::Unknown { origin, key: format!("{section}.{}", cut(&key)), nearest }
            }
            MistakeKind::Value(error) => error,
        }
    }
}

/// All mistakes of a file: the first ones, and how many more there are.
#[derive(Debug, Default)]
pub struct Mistakes {
    pub first: Vec<ConfigError>,
    pub more: usize,
}

/// Most characters of a name that are repeated in a message.
const MAX_NAME: usize = 80;

fn cut(name: &str) -> String {
    let mut cut: String = name.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(MAX_NAME).collect();
    if cut.len() < name.len() {
        cut.push('…');
    }
    cut
}

#[cfg(test)]
mod tests;
