//! Prompt files: a model's tokenizer and chat template, which turn a request into the tokens that
//! an engine sees.
//!
//! They are read unchanged and packed into one bundle for the routers. Nothing here interprets
//! them.
//!
//! The node's state loads them whenever an engine becomes ready; sessions send them to routers that
//! ask.

mod tokenizer_spec;

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use hostler_proto::agent::v1 as wire;
use http::StatusCode;
use prost::Message;
use sha2::{Digest, Sha256};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use self::tokenizer_spec::TokenizerSpec;
pub(crate) use self::tokenizer_spec::{hub_cache, resolve_folder};
use crate::config::AgentConfig;
use crate::engine_client::ApiClient;
use crate::host::EngineProgram;

/// Files of a bundle, in a fixed order, so that equal files make equal bundles.
const BUNDLE_FILES: [&str; 4] = [TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE];

/// Tokenizer file, without which there is no bundle.
const TOKENIZER_FILE: &str = "tokenizer.json";

/// Chat template, if it is a separate file.
const TEMPLATE_FILE: &str = "chat_template.jinja";

/// Most bytes of a bundle. The largest tokenizers have some 30 MB.
const MAX_BUNDLE_BYTES: u64 = 64 * 1024 * 1024;

/// Time limit for reading. A cold parallel filesystem needs seconds.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, PartialEq, Eq)]
pub struct Bundle {
    /// SHA-256 of the bytes.
    pub hash: Bytes,
    /// Encoded `PromptBundle`.
    pub bytes: Bytes,
}

impl fmt::Debug for Bundle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Bundle({} bytes)", self.bytes.len())
    }
}

impl Bundle {
    fn new(files: Vec<wire::PromptFile>) -> Self {
        let bytes = Bytes::from(wire::PromptBundle { files }.encode_to_vec());
        Self { hash: Bytes::copy_from_slice(&Sha256::digest(&bytes)), bytes }
    }
}

/// Reasons why there is no bundle. The replica serves requests all the same.
#[derive(Debug, thiserror::Error)]
pub enum PromptFilesError {
    /// The model has another kind of tokenizer, or does not exist.
    #[error("no {TOKENIZER_FILE} in {place}")]
    NoTokenizer { place: String },
    #[error("{model} is neither a folder nor downloaded to {}", cache.display())]
    NotDownloaded { model: String, cache: PathBuf },
    #[error("--model does not say which tokenizer an attached engine has")]
    NoModel,
    /// The engine handles text in a way that no file describes.
    #[error("the engine runs with {argument}, and only a Hugging Face tokenizer can be shared with routers")]
    OtherTokenizer { argument: String },
    /// The files are larger than an agent sends or a router keeps.
    #[error("the tokenizer's files in {place} hold more than {} MiB", MAX_BUNDLE_BYTES >> 20)]
    TooLarge { place: String },
    #[error("cannot read {}: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// The simulated engine does not send them.
    #[error("cannot read {path} from the simulated engine: {reason}")]
    EngineUnavailable { path: String, reason: String },
    #[error("the files could not be read within {} s", READ_TIMEOUT.as_secs())]
    Timeout,
}

impl PromptFilesError {
    /// Whether trying again later may help.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Unreadable { .. } | Self::EngineUnavailable { .. } | Self::Timeout)
    }
}

/// Text of the chat templates of a model with these engine arguments. Blocks on the disk.
pub(crate) fn read_template_text(model: &str, arguments: &[String], cache: &Path) -> Option<String> {
    TokenizerSpec::new(model, arguments).template_text(cache)
}

/// Whether routers cannot read the prompts of a model with this architecture and these engine
/// arguments, as far as files show. Blocks on the disk.
pub(crate) fn only_engine_reads_prompts(architecture: &str, model: &str, arguments: &[String], cache: &Path) -> bool {
    TokenizerSpec::new(model, arguments).is_only_engines(architecture, cache)
}

/// Location of an engine's prompt files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptFileSource(SourceKind);

#[derive(Debug, Clone, PartialEq, Eq)]
enum SourceKind {
    /// Files that vLLM itself reads.
    Disk(TokenizerSpec),
    /// Files inside the simulated engine.
    Engine,
}

impl PromptFileSource {
    /// Source for the engines of this configuration.
    #[must_use]
    pub fn new(engine: &EngineProgram, config: &AgentConfig) -> Self {
        let spec = TokenizerSpec::new(&config.model, &config.engine_args);
        match engine {
            EngineProgram::Simulated { .. } if !spec.has_other_tokenizer() => Self(SourceKind::Engine),
            _ => Self(SourceKind::Disk(spec)),
        }
    }

    /// Reads the files for the engine that listens at `socket` and has just become ready.
    ///
    /// Takes a minute at most.
    ///
    /// # Errors
    /// When the model has no tokenizer that can be shared, or it cannot be read.
    pub async fn load(&self, socket: &Path) -> Result<Bundle, PromptFilesError> {
        let loaded = async {
            match &self.0 {
                SourceKind::Engine => fetch_from_engine(socket).await,
                SourceKind::Disk(model) => {
                    let model = model.clone();
                    let read = spawn_blocking(move || model.read(&hub_cache(|name| std::env::var_os(name))).map(Bundle::new));
                    read.await.expect("reading files does not panic")
                }
            }
        };
        timeout(READ_TIMEOUT, loaded).await.unwrap_or(Err(PromptFilesError::Timeout))
    }
}

/// Asks the simulated engine, which has only a tokenizer and a configuration.
async fn fetch_from_engine(socket: &Path) -> Result<Bundle, PromptFilesError> {
    let mut client = ApiClient::new(socket);
    let mut files = Vec::new();
    for name in &BUNDLE_FILES[..2] {
        let path = format!("/sim/model/{name}");
        match client.get(&path, READ_TIMEOUT).await {
            Ok(reply) if reply.status == StatusCode::OK => files.push(wire::PromptFile { name: (*name).to_owned(), content: reply.body }),
            Ok(reply) => return Err(PromptFilesError::EngineUnavailable { path, reason: format!("status {}", reply.status.as_u16()) }),
            Err(error) => return Err(PromptFilesError::EngineUnavailable { path, reason: error.to_string() }),
        }
    }
    Ok(Bundle::new(files))
}

#[cfg(test)]
mod tests;
