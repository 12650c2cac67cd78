//! The keys of one reading of the file, by their ids: finds the caller of a key at a given time.
//! Pure, so that any time can be tested.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use super::file::{KeyEntry, KeyStatus};
use super::secret::{Digest, Secret};
use super::{Caller, Role, Unauthenticated};

#[derive(Debug, Default)]
pub(super) struct KeyRing(HashMap<Box<str>, KeyRingEntry>);

#[derive(Debug)]
struct KeyRingEntry {
    digest: Digest,
    caller: Caller,
    entry: KeyEntry,
}

impl KeyRingEntry {
    fn check(&self, now: SystemTime) -> Result<&Caller, Unauthenticated> {
        match self.entry.status(now) {
            KeyStatus::Valid => Ok(&self.caller),
            KeyStatus::Expired => Err(Unauthenticated::Expired(self.caller.key.clone())),
            KeyStatus::Revoked => Err(Unauthenticated::Revoked(self.caller.key.clone())),
        }
    }
}

impl KeyRing {
    pub(super) fn new(entries: Vec<KeyEntry>) -> Self {
        // Caches outlive keys, so ended keys count.
        let has_one_tenant = entries.windows(2).all(|pair| pair[0].owner() == pair[1].owner());
        let known = entries.into_iter().map(|entry| {
            let caller = Caller {
                key: entry.id.as_str().into(),
                tenant: entry.tenant.as_str().into(),
                role: entry.role,
                limits: Arc::new(entry.limits.clone()),
                models: entry.models.as_deref().map(Into::into),
                sees_caches: has_one_tenant || entry.role == Role::Admin,
            };
            (entry.id.as_str().into(), KeyRingEntry { digest: entry.sha256, caller, entry })
        });
        Self(known.collect())
    }

    /// Whether no key was ever there, not even one that has ended.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The caller with the key of this id, for what that caller has begun.
    pub(super) fn find_by_id(&self, id: &str, now: SystemTime) -> Result<&Caller, Unauthenticated> {
        let known = self.0.get(id).ok_or(Unauthenticated::Unknown)?;
        known.check(now)
    }

    /// The caller with this key. Ids are public: the time taken may show whether an id exists, but
    /// not how much of a secret is right.
    pub(super) fn find(&self, text: &str, now: SystemTime) -> Result<&Caller, Unauthenticated> {
        let secret: Secret = text.parse().map_err(|_| Unauthenticated::Unknown)?;
        let known = self.0.get(secret.id()).filter(|known| known.digest.matches(&secret.digest())).ok_or(Unauthenticated::Unknown)?;
        // Only a caller that has the whole key learns its status.
        known.check(now)
    }

    pub(super) fn count_valid(&self, now: SystemTime) -> usize {
        self.0.values().filter(|known| known.entry.status(now) == KeyStatus::Valid).count()
    }
}
