//! Where vLLM finds the tokenizer of its model, and which of its arguments change that.
//!
//! This module blocks on the disk, so callers use a separate thread.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use hostler_proto::agent::v1::PromptFile;
use serde_json::Value;

use super::{BUNDLE_FILES, MAX_BUNDLE_BYTES, PromptFilesError, TEMPLATE_FILE, TOKENIZER_FILE};
use crate::vllm::arguments::{is_given, value_of};

/// Modes in which vLLM uses the model's Hugging Face tokenizer.
const HF_TOKENIZER_MODES: [&str; 3] = ["auto", "hf", "slow"];

/// Beginnings of architectures whose chats vLLM 0.32 writes in code, without a template of the
/// model's (`config/model.py`, and the harmony format of gpt-oss).
const CODE_TEMPLATES: [&str; 5] = ["GptOss", "DeepseekV32", "DeepseekV4", "KimiK3", "Inkling"];

/// File of Mistral's own tokenizer, which vLLM prefers.
const MISTRAL_TOKENIZER_FILE: &str = "tekken.json";

/// Words that Mistral's own tokenizer writes.
const MISTRAL_TEMPLATE: &str = "tools: [AVAILABLE_TOOLS] [TOOL_CALLS]";

/// A model as the engine's arguments name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TokenizerSpec {
    /// Path or Hugging Face id of the tokenizer.
    tokenizer: String,
    revision: Option<String>,
    /// Path of a chat template, or the template itself.
    template: Option<String>,
    /// Argument that makes the engine use something else than a Hugging Face tokenizer.
    unsupported_argument: Option<String>,
}

impl TokenizerSpec {
    /// Creates the spec from these engine arguments.
    pub(super) fn new(model: &str, arguments: &[String]) -> Self {
        let value = |flag| value_of(arguments, flag);
        let mode = value("--tokenizer-mode").filter(|mode| !HF_TOKENIZER_MODES.contains(mode));
        let skipped = is_given(arguments, "--skip-tokenizer-init").then(|| "--skip-tokenizer-init".to_owned());
        Self {
            tokenizer: value("--tokenizer").unwrap_or(model).to_owned(),
            revision: value("--tokenizer-revision").or(value("--revision")).map(str::to_owned),
            template: value("--chat-template").map(str::to_owned),
            unsupported_argument: mode.map(|mode| format!("--tokenizer-mode {mode}")).or(skipped),
        }
    }

    /// Whether the engine was told to use something else than a Hugging Face tokenizer.
    pub(super) fn has_other_tokenizer(&self) -> bool {
        self.unsupported_argument.is_some()
    }

    /// Whether only an engine of this architecture can read the model's prompts, as far as files
    /// show: its tokenizer is no Hugging Face one, or its chat template is code.
    pub(super) fn is_only_engines(&self, architecture: &str, cache: &Path) -> bool {
        let has = |folder: &Path, name: &str| folder.join(name).is_file();
        self.has_other_tokenizer()
            || CODE_TEMPLATES.iter().any(|begin| architecture.starts_with(begin))
            || self.folder(cache).is_ok_and(|folder| !has(&folder, TOKENIZER_FILE) || has(&folder, MISTRAL_TOKENIZER_FILE))
    }

    /// Reads the files, in the order of a bundle. `cache` is the folder of downloaded models.
    pub(super) fn read(&self, cache: &Path) -> Result<Vec<PromptFile>, PromptFilesError> {
        if let Some(argument) = &self.unsupported_argument {
            return Err(PromptFilesError::OtherTokenizer { argument: argument.clone() });
        }
        // Nobody has named a model.
        if self.tokenizer.is_empty() {
            return Err(PromptFilesError::NoModel);
        }
        let folder = self.folder(cache)?;
        let place = || folder.display().to_string();
        let mut left = MAX_BUNDLE_BYTES;
        let mut files = Vec::new();
        for name in BUNDLE_FILES {
            let content = match &self.template {
                Some(template) if name == TEMPLATE_FILE => Some(read_template(template)?),
                _ => read_file(&folder.join(name))?,
            };
            match content {
                Some(content) => {
                    left = left.checked_sub(content.len() as u64).ok_or_else(|| PromptFilesError::TooLarge { place: place() })?;
                    files.push(PromptFile { name: name.to_owned(), content });
                }
                None if name == TOKENIZER_FILE => return Err(PromptFilesError::NoTokenizer { place: place() }),
                None => {}
            }
        }
        Ok(files)
    }

    /// Text of the model's chat templates, as far as files have them; `None` if there are none.
    pub(super) fn template_text(&self, cache: &Path) -> Option<String> {
        let text = |bytes: Bytes| String::from_utf8_lossy(&bytes).into_owned();
        if let Some(template) = &self.template {
            return read_template(template).ok().map(text);
        }
        let folder = self.folder(cache).ok()?;
        let read = |name: &str| read_file(&folder.join(name)).ok().flatten();
        let in_json = |name| {
            let config: Value = serde_json::from_slice(&read(name)?).ok()?;
            match config.get("chat_template")? {
                Value::String(template) => Some(template.clone()),
                // A model may have several templates, by name.
                Value::Array(named) => Some(named.iter().filter_map(|one| one.get("template")?.as_str()).collect()),
                _ => None,
            }
        };
        let written = read(TEMPLATE_FILE).map(text).or_else(|| in_json("chat_template.json")).or_else(|| in_json("tokenizer_config.json"));
        // The template of Mistral's own tokenizer is code.
        written.or_else(|| folder.join(MISTRAL_TOKENIZER_FILE).is_file().then(|| MISTRAL_TEMPLATE.to_owned()))
    }

    /// Folder of the tokenizer: a path itself, or a snapshot of a downloaded repository.
    fn folder(&self, cache: &Path) -> Result<PathBuf, PromptFilesError> {
        resolve_folder(&self.tokenizer, self.revision.as_deref(), cache)
            .ok_or_else(|| PromptFilesError::NotDownloaded { model: self.tokenizer.clone(), cache: cache.to_owned() })
    }
}

/// Folder of a model or its tokenizer: a path itself, or a snapshot of a downloaded repository.
pub(crate) fn resolve_folder(named: &str, revision: Option<&str>, cache: &Path) -> Option<PathBuf> {
    let itself = PathBuf::from(named);
    if itself.is_dir() {
        return Some(itself);
    }
    let revision = revision.unwrap_or("main");
    let repository = cache.join(format!("models--{}", named.replace('/', "--")));
    // A branch or tag stands for a commit; a commit stands for itself.
    let commit = fs::read_to_string(repository.join("refs").join(revision));
    let snapshot = repository.join("snapshots").join(commit.as_deref().unwrap_or(revision).trim());
    snapshot.is_dir().then_some(snapshot)
}

/// Reads the value of `--chat-template`: a file, or else the template itself, as in vLLM.
fn read_template(template: &str) -> Result<Bytes, PromptFilesError> {
    match read_file(Path::new(template)) {
        Ok(Some(content)) => Ok(content),
        Ok(None) | Err(PromptFilesError::Unreadable { .. }) if template.contains(['{', '}', '\n']) => Ok(template.to_owned().into()),
        Ok(None) => Err(PromptFilesError::Unreadable { path: template.into(), source: ErrorKind::NotFound.into() }),
        Err(error) => Err(error),
    }
}

/// Reads a whole file; `None` if it does not exist.
fn read_file(path: &Path) -> Result<Option<Bytes>, PromptFilesError> {
    let unreadable = |source| PromptFilesError::Unreadable { path: path.to_owned(), source };
    // Check before opening, because opening a pipe waits for its writer.
    match fs::metadata(path) {
        Ok(about) if about.is_file() => {}
        Ok(_) => return Err(unreadable(std::io::Error::other("not a file"))),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    }
    let mut content = Vec::new();
    File::open(path).and_then(|file| file.take(MAX_BUNDLE_BYTES + 1).read_to_end(&mut content)).map_err(unreadable)?;
    Ok(Some(content.into()))
}

/// Cache folder of Hugging Face's own library, by the same variables.
pub(crate) fn hub_cache(variable: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || {
        let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        set("HF_HOME").or_else(|| Some(caches?.join("huggingface"))).unwrap_or_default()
    };
    set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| home().join("hub"))
}
