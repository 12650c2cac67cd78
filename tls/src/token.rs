//! Text of a join token: `ID.SECRET#FINGERPRINT`.
//!
//! Its holder may become a node of the fleet, so it is never shown by accident.

use sha2::{Digest, Sha256};

use crate::{Fingerprint, TlsError, hex, parse_hex, provider};

#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// Name of the token in lists and logs.
    pub id: String,
    secret: [u8; 32],
    /// Fingerprint of the fleet's authority.
    pub fleet: Fingerprint,
}

impl JoinToken {
    /// Creates a token for the fleet of this authority.
    ///
    /// # Errors
    /// When the system gives no random numbers.
    pub fn generate(fleet: Fingerprint) -> Result<Self, TlsError> {
        let mut random = [0; 40];
        provider().secure_random.fill(&mut random).map_err(|_| TlsError::Crypto("the system has no randomness for a token".into()))?;
        let mut secret = [0; 32];
        secret.copy_from_slice(&random[8..]);
        Ok(Self { id: hex(&random[..8]), secret, fleet })
    }

    /// Parses a token's text, without white space around it.
    ///
    /// # Errors
    /// When the text is invalid.
    pub fn parse(text: &str) -> Result<Self, TlsError> {
        let parts = || {
            let (id, rest) = text.trim().split_once('.')?;
            let (secret, fleet) = rest.split_once('#')?;
            is_id(id).then_some(())?;
            Some(Self { id: id.to_owned(), secret: parse_hex(secret)?, fleet: Fingerprint(parse_hex(fleet)?) })
        };
        parts().ok_or(TlsError::NotAToken)
    }

    /// The whole token as text, to be shown once.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{}.{}#{}", self.id, hex(&self.secret), self.fleet)
    }

    /// Secret that proves to a router that the sender has the token.
    #[must_use]
    pub fn secret(&self) -> [u8; 32] {
        self.secret
    }
}

impl std::fmt::Debug for JoinToken {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Token").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Whether this may be a token's id, which is part of a file's name.
pub(crate) fn is_id(id: &str) -> bool {
    parse_hex::<8>(id).is_some()
}

/// Hash of a secret, which is stored.
pub(crate) fn hash(secret: &[u8]) -> [u8; 32] {
    Sha256::digest(secret).into()
}
