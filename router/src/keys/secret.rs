//! The text of a key, which only its owner keeps, and the digest by which it is known here.

use std::fmt;

use hostler_tls::{hex, parse_hex};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;

use crate::random::random;

/// The prefix of every key, which people and scanners for leaked secrets recognize.
const KEY_PREFIX: &str = "hk_";

/// RFC 4648's letters in lower case. None of them needs quoting anywhere, and a double click
/// selects the whole key.
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// Letters of a key's public id: 50 bits. Creating a key checks that its id is new.
const ID_LETTERS: usize = 10;

/// Letters of the secret part: 260 bits, all of them random.
const SECRET_LETTERS: usize = 52;

/// A whole key, `hk_ID_SECRET`. It is shown only to the user who asked for it: not in a log, not by
/// `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this is no key: keys look like {KEY_PREFIX}ID_SECRET, {} letters and digits in all", KEY_PREFIX.len() + ID_LETTERS + 1 + SECRET_LETTERS)]
pub struct InvalidKey;

impl Secret {
    /// A new random key.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn random() -> std::io::Result<Self> {
        let random: [u8; ID_LETTERS + SECRET_LETTERS] = random()?;
        // 256 is a multiple of the number of letters, so all are equally likely.
        let letters: String = random.iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)])).collect();
        let (id, secret) = letters.split_at(ID_LETTERS);
        Ok(Self(format!("{KEY_PREFIX}{id}_{secret}")))
    }

    #[must_use]
    pub fn id(&self) -> &str {
        &self.0[KEY_PREFIX.len()..KEY_PREFIX.len() + ID_LETTERS]
    }

    /// The whole text, for its owner and for the header that carries it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The stored form of the key.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest(Sha256::digest(self.0.as_bytes()).into())
    }
}

impl std::str::FromStr for Secret {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, InvalidKey> {
        let (id, secret) = text.strip_prefix(KEY_PREFIX).and_then(|rest| rest.split_once('_')).ok_or(InvalidKey)?;
        let is_sound = is_id(id) && secret.len() == SECRET_LETTERS && has_only_letters(secret);
        if is_sound { Ok(Self(text.to_owned())) } else { Err(InvalidKey) }
    }
}

/// The id of a text that may be a whole key in the wrong place.
#[must_use]
pub fn find_key_id(text: &str) -> Option<&str> {
    let id = text.strip_prefix(KEY_PREFIX)?.split('_').next()?;
    is_id(id).then_some(id)
}

/// Whether `text` has the form of a key's id.
pub(super) fn is_id(text: &str) -> bool {
    text.len() == ID_LETTERS && has_only_letters(text)
}

fn has_only_letters(text: &str) -> bool {
    text.bytes().all(|letter| ALPHABET.contains(&letter))
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Secret({})", self.id())
    }
}

/// The SHA-256 of a key's text. A key has 256 random bits, so a slow hash would add nothing.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// Compares in a time that does not depend on where the two differ.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl TryFrom<String> for Digest {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        // A file written by hand may have capitals.
        let digest = parse_hex(&text.to_ascii_lowercase());
        digest.map(Self).ok_or("64 hexadecimal digits were expected")
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        hex(&digest.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Digest(..)")
    }
}

#[cfg(test)]
mod tests;
