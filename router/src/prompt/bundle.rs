//! Reads a model's files as one bundle: their hash, their names, their encoder. This is blocking
//! work, but reads no file of this machine.

use std::fmt;

use hostler_prompt::{Encoder, FilesError, ModelFiles};
use hostler_proto::agent::v1::PromptBundle;
use prost::Message;
use sha2::{Digest, Sha256};

use super::FilesHash;

/// Largest bundle that is accepted. Tokenizers of 260,000 pieces have about 35 MiB.
pub(super) const MAX_BUNDLE_BYTES: usize = 64 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub(super) enum BundleError {
    #[error("the bundle cannot be decoded: {0}")]
    Encoding(#[from] prost::DecodeError),
    #[error("there is no tokenizer.json among the files")]
    NoTokenizer,
    #[error("chat_template.jinja is not UTF-8")]
    Template,
    #[error(transparent)]
    Files(#[from] FilesError),
}

pub(super) fn bundle_hash(bundle: &[u8]) -> FilesHash {
    Sha256::digest(bundle).into()
}

pub(super) fn build_encoder(bundle: &[u8], segments_bytes: usize) -> Result<Encoder, BundleError> {
    let mut files = ModelFiles::default();
    let mut has_tokenizer = false;
    for file in PromptBundle::decode(bundle)?.files {
        let content = Vec::from(file.content);
        match file.name.as_str() {
            "tokenizer.json" => (files.tokenizer, has_tokenizer) = (content, true),
            "tokenizer_config.json" => files.config = Some(content),
            "special_tokens_map.json" => files.special_tokens = Some(content),
            "chat_template.jinja" => files.template = Some(String::from_utf8(content).map_err(|_| BundleError::Template)?),
            // A newer agent may send files that this router does not need.
            _ => {}
        }
    }
    if !has_tokenizer {
        return Err(BundleError::NoTokenizer);
    }
    Ok(Encoder::new(&files, segments_bytes)?)
}

/// The beginning of a hash in hexadecimal digits, for log lines.
pub(super) struct ShortHash<'a>(pub(super) &'a FilesHash);

impl fmt::Display for ShortHash<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&hostler_tls::hex(&self.0[..6]))
    }
}

#[cfg(test)]
mod tests;
