//! Files of a model that determine how a request becomes tokens, and the values read from them
//! besides the tokenizer itself.
//!
//! Agents deliver the files; nothing here opens one.

use serde_json::{Map, Value};

/// Files of a model, as an agent delivered them.
#[derive(Debug, Clone, Default)]
pub struct ModelFiles {
    /// Content of `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// Content of `tokenizer_config.json`.
    pub config: Option<Vec<u8>>,
    /// Content of `special_tokens_map.json`.
    pub special_tokens: Option<Vec<u8>>,
    /// Content of `chat_template.jinja`, or the template that the engine was started with.
    ///
    /// It takes precedence over the config's.
    pub template: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("cannot read tokenizer.json: {0}")]
    Tokenizer(String),
    #[error("cannot read {file}: {error}")]
    Json { file: &'static str, error: serde_json::Error },
    #[error("cannot read the chat template: {0}")]
    Template(String),
}

#[derive(Debug, Default)]
pub(crate) struct TokenizerConfig {
    fields: Map<String, Value>,
    /// Texts of `bos_token` and similar tokens, by the name that templates use.
    pub(crate) special_tokens: Map<String, Value>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TemplateSources {
    pub(crate) default: Option<String>,
    /// Template used instead of the default if a request has tools.
    pub(crate) tool_use: Option<String>,
}

/// A token that the config declares in `added_tokens_decoder`.
#[derive(Debug, Clone, serde::Deserialize)]
pub(crate) struct DeclaredToken {
    pub(crate) content: String,
    #[serde(default)]
    pub(crate) single_word: bool,
    #[serde(default)]
    pub(crate) lstrip: bool,
    #[serde(default)]
    pub(crate) rstrip: bool,
    #[serde(default)]
    pub(crate) normalized: bool,
    #[serde(default)]
    pub(crate) special: bool,
}

impl TokenizerConfig {
    pub(crate) fn read(files: &ModelFiles) -> Result<Self, FilesError> {
        let fields = parse_object("tokenizer_config.json", files.config.as_deref())?;
        let others = parse_object("special_tokens_map.json", files.special_tokens.as_deref())?;
        let mut special_tokens = Map::new();
        let named = fields.get("extra_special_tokens").and_then(Value::as_object);
        for (name, value) in fields.iter().chain(named.into_iter().flatten()).chain(&others) {
            if let Some(text) = token_text(value).filter(|_| name.ends_with("_token"))
                && !special_tokens.contains_key(name)
            {
                special_tokens.insert(name.clone(), Value::from(text));
            }
        }
        Ok(Self { fields, special_tokens })
    }

    /// Templates of the config; `chat_template` is a single one, or a list of named ones.
    pub(crate) fn templates(&self) -> TemplateSources {
        match self.fields.get("chat_template") {
            Some(Value::String(template)) => TemplateSources { default: Some(template.clone()), tool_use: None },
            Some(Value::Array(named)) => {
                let find = |name: &str| {
                    let entry = named.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))?;
                    entry.get("template")?.as_str().map(str::to_owned)
                };
                TemplateSources { default: find("default"), tool_use: find("tool_use") }
            }
            _ => TemplateSources::default(),
        }
    }

    /// Value of a switch (`add_bos_token`, `add_eos_token`). If set, it overrides `tokenizer.json`.
    pub(crate) fn flag(&self, name: &str) -> Option<bool> {
        self.fields.get(name).map(|value| value.as_bool().unwrap_or(false))
    }

    pub(crate) fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name)?.as_str()
    }

    /// Tokens that the config declares, by ascending id, without invalid entries.
    pub(crate) fn declared_tokens(&self) -> Vec<DeclaredToken> {
        let Some(Value::Object(declared)) = self.fields.get("added_tokens_decoder") else { return Vec::new() };
        let mut tokens: Vec<(u32, DeclaredToken)> = declared
            .iter()
            .filter_map(|(id, token)| Some((id.parse().ok()?, <DeclaredToken as serde::Deserialize>::deserialize(token).ok()?)))
            .collect();
        tokens.sort_by_key(|(id, _)| *id);
        tokens.into_iter().map(|(_, token)| token).collect()
    }
}

/// Text of a special token, which is a string, or an object whose `content` is one.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

fn parse_object(file: &'static str, bytes: Option<&[u8]>) -> Result<Map<String, Value>, FilesError> {
    let Some(bytes) = bytes else { return Ok(Map::new()) };
    serde_json::from_slice(bytes).map_err(|error| FilesError::Json { file, error })
}

#[cfg(test)]
mod tests;
