//! Settings from file, environment and flags.
//!
//! A struct field is the setting, its doc comment the manual, and its `Default` the default. The
//! sources are merged as TOML (file < environment < flags) and deserialized once. The list of
//! settings comes from the structs' JSON schema, so flags, environment names and `docs/config.md`
//! need no second list.

mod document;
mod schema;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};
use serde::de::DeserializeOwned;
use toml::{Table, Value};

pub use document::{example_file, json_schema, markdown};
use schema::Rejection;
pub use schema::{Section, Setting, ValueKind, nearest};

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
}

impl Settings {
    /// Merges the sources for the given sections: file < environment < flags.
    ///
    /// # Errors
    /// Unknown keys of the file, and values that are not of the setting's kind.
    pub fn load(sections: &[Section], sources: &SettingSources<'_>) -> Result<Self, ConfigError> {
        let mut settings = Self { values: Table::new(), origins: BTreeMap::new() };
        if let Some(path) = sources.file {
            settings.read_file(path, sections)?.into_iter().next().map_or(Ok(()), Err)?;
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

    /// All mistakes of a file, as far as each can be seen alone: keys that no section has first, then
    /// values. Empty if it is sound.
    ///
    /// # Errors
    /// When the file cannot be read, or is not TOML.
    pub fn mistakes(sections: &[Section], file: &Path) -> Result<Vec<ConfigError>, ConfigError> {
        let mut settings = Self { values: Table::new(), origins: BTreeMap::new() };
        let mut mistakes = settings.read_file(file, sections)?;
        for section in sections {
            let given = settings.values.get(section.name).and_then(Value::as_table).into_iter().flatten();
            // A struct reports its first mistake alone, so each value is read without the others.
            let rejected = given.filter_map(|(key, value)| {
                let alone = Table::from_iter([(key.clone(), value.clone())]);
                (section.read)(Value::Table(alone)).err().map(|error| settings.explain(section.name, &error))
            });
            mistakes.extend(rejected);
        }
        Ok(mistakes)
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
            message: error.inner().to_string().trim().replace('\n', " "),
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

    /// Takes what a file gives, and returns the keys and tables that it may not have.
    fn read_file(&mut self, path: &Path, sections: &[Section]) -> Result<Vec<ConfigError>, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let table: Table = text.parse().map_err(|error: toml::de::Error| ConfigError::Syntax {
            path: path.to_owned(),
            message: error.to_string().trim().to_owned(),
        })?;
        let mut mistakes = Vec::new();
        for (section_name, value) in table {
            let place = |key: Option<&str>| {
                let line = schema::line_of(&text, &section_name, key).map(|line| format!(":{line}"));
                format!("{}{}", path.display(), line.unwrap_or_default())
            };
            let Some(section) = sections.iter().find(|section| section.name == section_name) else {
                let nearest = nearest(&section_name, sections.iter().map(|section| section.name)).map(str::to_owned);
                mistakes.push(ConfigError::Unknown { origin: place(None), key: section_name, nearest });
                continue;
            };
            let Value::Table(entries) = value else {
                let message = format!("a section was expected: write [{section_name}] on a line of its own");
                mistakes.push(ConfigError::Value { origin: place(None), key: section_name, message });
                continue;
            };
            for (key, value) in entries {
                let origin = place(Some(&key));
                let full = format!("{section_name}.{key}");
                if !section.settings.iter().any(|setting| setting.key == key) {
                    let nearest = nearest(&key, section.settings.iter().map(|setting| setting.key));
                    let nearest = nearest.map(|name| format!("{section_name}.{name}"));
                    mistakes.push(ConfigError::Unknown { origin, key: full, nearest });
                    continue;
                }
                self.set(&section_name, &key, value);
                self.origins.insert(full, origin);
            }
        }
        Ok(mistakes)
    }
}

#[cfg(test)]
mod tests;
