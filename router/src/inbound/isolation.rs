//! Keeps one tenant's cached prompts from being noticed by another tenant.
//!
//! Every prompt gets a `cache_salt` that only its tenant's prompts have, made of the tenant's name
//! and a secret of the routers. The router's own index uses the same salt.

use std::ops::Range;
use std::path::Path;

use bytes::{Bytes, BytesMut};
use hmac::{Hmac, KeyInit, Mac};
use hostler_api::Route;
use hostler_tls::{hex, write_new};
use sha2::Sha256;

use super::body_format::BodyFormat;
use super::peek::Peek;
use crate::keys::{KeyFileError, read_private};
use crate::random::random;

const SECRET_BYTES: usize = 32;

pub(crate) struct Isolation {
    secret: Vec<u8>,
}

/// Hides the secret.
impl std::fmt::Debug for Isolation {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Isolation")
    }
}

impl Isolation {
    /// Reads the secret, which is created first if there is none.
    ///
    /// # Errors
    /// If the secret cannot be read or written, or others may read it.
    pub(crate) fn open(path: &Path) -> Result<Self, KeyFileError> {
        let wrong = |message: &str| KeyFileError::Invalid { path: path.to_owned(), message: message.into() };
        if path.as_os_str().is_empty() {
            return Err(wrong("there is no home folder to keep the secret in: say where with router.secret_file"));
        }
        if !path.exists() {
            create_secret(path).map_err(|source| KeyFileError::Io { verb: "write", path: path.to_owned(), source })?;
        }
        let secret = read_private(path)?.trim().as_bytes().to_vec();
        if secret.len() < SECRET_BYTES {
            return Err(wrong("a secret has at least 32 characters: remove the file, and a new one is made"));
        }
        Ok(Self { secret })
    }

    /// The salt of a tenant's prompts. The client's `own` salt separates them further.
    fn salt(&self, tenant: &str, own: &str) -> String {
        // With the length of the first part, no two pairs give the same text.
        let length = (tenant.len() as u64).to_le_bytes();
        let salt = hmac(&self.secret, &[&length, tenant.as_bytes(), own.as_bytes()]);
        hex(&salt)
    }

    /// The request's body with its tenant's salt; `None` if there is no prompt that needs one.
    ///
    /// # Errors
    /// If the request cannot be kept apart; the message is for the client.
    pub(super) fn add_salt(&self, request: &UnsaltedRequest<'_>) -> Result<Option<SaltedBody>, String> {
        let UnsaltedRequest { tenant, route, content, body, peek } = request;
        if body.is_empty() {
            return Ok(None);
        }
        if let Some(substitute) = route.salted_substitute() {
            let (route, substitute) = (route.path(), substitute.path());
            return Err(format!("tenants' caches are kept apart here, which engines cannot do for {route}: use {substitute}"));
        }
        match content {
            BodyFormat::Json => {}
            // Audio comes in forms and has no salt: a client that can ask for the same answer
            // already has the same audio. Text beside it could be guessed.
            BodyFormat::Form(_) => {
                let refused = |field| {
                    format!("tenants' caches are kept apart here, which engines cannot do for the field `{field}` of a form: leave it out")
                };
                return peek.prompt_field.as_ref().map_or(Ok(None), |field| Err(refused(field)));
            }
            BodyFormat::Other => {
                return Err("tenants' caches are kept apart here, for which a request has the content type application/json".into());
            }
        }
        // Engines accept no other prompts.
        if !body.trim_ascii_start().starts_with(b"{") {
            return Ok(None);
        }
        let own = match (peek.raw_salts.last().map(|salt| &body[salt.clone()]), peek.salt.as_deref()) {
            (None | Some(b"null"), _) => "",
            (Some(_), Some(own)) if !own.is_empty() => own,
            _ => return Err("cache_salt is a string that is not empty".into()),
        };
        Ok(Some(SaltedBody::new(body, &peek.raw_salts, self.salt(tenant, own))))
    }
}

#[derive(Debug)]
pub(super) struct UnsaltedRequest<'a> {
    pub(super) tenant: &'a str,
    pub(super) route: Route,
    pub(super) content: BodyFormat<'a>,
    pub(super) body: &'a Bytes,
    pub(super) peek: &'a Peek,
}

/// Creates the secret, unless another router just did.
fn create_secret(path: &Path) -> std::io::Result<()> {
    let random: [u8; SECRET_BYTES] = random()?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    match write_new(path, format!("{}\n", hex(&random)).as_bytes()) {
        Err(error) if !error.is_already_there() => Err(std::io::Error::other(error)),
        _ => Ok(()),
    }
}

/// HMAC-SHA256 of the parts in sequence.
fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

#[derive(Debug)]
pub(super) struct SaltedBody {
    pub(super) body: Bytes,
    pub(super) salt: String,
    /// The values that were replaced, in the order of the old body.
    replaced: Vec<ReplacedValue>,
}

#[derive(Debug)]
struct ReplacedValue {
    /// Where the value began in the old body.
    old_offset: usize,
    /// Bytes that this value and all earlier ones had in the old body.
    removed_bytes: usize,
}

impl SaltedBody {
    /// Replaces each of the client's salts `own` in `body`, a JSON object, with `salt`.
    ///
    /// Engines differ in how they treat a repeated name (some take the last, some refuse), so a
    /// salt is added only if there is none.
    fn new(body: &Bytes, own: &[Range<usize>], salt: String) -> Self {
        let value = format!("\"{salt}\"");
        let mut salted = BytesMut::with_capacity(body.len() + value.len() + 32);
        let mut replaced = Vec::with_capacity(own.len());
        let (mut copied, mut removed_bytes) = (0, 0);
        for own in own {
            salted.extend_from_slice(&body[copied..own.start]);
            salted.extend_from_slice(value.as_bytes());
            copied = own.end;
            removed_bytes += own.len();
            replaced.push(ReplacedValue { old_offset: own.start, removed_bytes });
        }
        let end = body.trim_ascii_end().len().saturating_sub(1);
        if own.is_empty() {
            let within = body[..end].trim_ascii_end();
            // Add the salt at the end, so that everything else keeps its place.
            salted.extend_from_slice(within);
            let comma = if within.ends_with(b"{") { "" } else { "," };
            salted.extend_from_slice(format!("{comma}\"cache_salt\":{value}}}").as_bytes());
        } else {
            salted.extend_from_slice(&body[copied..]);
        }
        Self { body: salted.freeze(), salt, replaced }
    }

    /// The new place of a value at `part` of the old body.
    pub(super) fn relocate(&self, part: &Range<usize>) -> Range<usize> {
        let at = part.start;
        let count = self.replaced.partition_point(|value| value.old_offset < at);
        let removed = self.replaced[..count].last().map_or(0, |last| last.removed_bytes);
        let at = at + count * (self.salt.len() + 2) - removed;
        at..at + part.len()
    }
}

#[cfg(test)]
mod tests;
