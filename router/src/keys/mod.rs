//! Identifies a request's caller by its key, and the key's permissions. `hostler keys` writes the
//! file that this is read from.

mod file;
mod guard;
mod page_sessions;
mod reload;
mod ring;
mod secret;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use hostler_api::Route;
use http::Method;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

pub use file::{KeyEntry, KeyFileError, KeyStatus, Timestamp, change, list, read_private};
pub(crate) use guard::{AdminGuard, guard_pages, page_session};
pub(crate) use page_sessions::{NoSession, PageRights, PageSessions, TOKEN_LIFE};
pub(crate) use reload::watch_file;
use ring::KeyRing;
pub use secret::{Digest, InvalidKey, Secret, find_key_id};

/// The header in which Anthropic's SDKs send the key.
pub(crate) const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// May send requests.
    Use,
    /// May send requests and use the operators' pages.
    Admin,
}

/// The limits of a key. Absent ones are unlimited.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyLimits {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u64>,
    /// Prompt tokens in a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_per_minute: Option<u64>,
    /// Prompt tokens in a day.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_per_day: Option<u64>,
    /// Generated tokens in a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_per_minute: Option<u64>,
    /// Generated tokens in a day.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_per_day: Option<u64>,
    /// The tenant's share against others' when the fleet is full; absent means 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
}

impl KeyLimits {
    /// Whether more than the rate of requests is limited: tokens, or requests in flight.
    #[must_use]
    pub fn has_usage_limits(&self) -> bool {
        let Self { in_flight, input_per_minute, input_per_day, output_per_minute, output_per_day, requests_per_minute: _, weight: _ } =
            self;
        let tokens = [input_per_minute, input_per_day, output_per_minute, output_per_day];
        in_flight.is_some() || tokens.into_iter().any(Option::is_some)
    }

    /// Whether nothing is limited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Explains limits that nobody can have meant.
    fn fault(&self) -> Option<String> {
        let counts = [
            ("requests_per_minute", self.requests_per_minute),
            ("input_per_minute", self.input_per_minute),
            ("input_per_day", self.input_per_day),
            ("output_per_minute", self.output_per_minute),
            ("output_per_day", self.output_per_day),
            ("in_flight", self.in_flight.map(u64::from)),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == Some(0)) {
            return Some(format!("{name} = 0 would let nothing through: revoke the key instead"));
        }
        let is_share = |weight: f64| weight.is_finite() && weight > 0.0;
        self.weight.filter(|weight| !is_share(*weight)).map(|weight| format!("weight = {weight} is no share: it must be above 0"))
    }
}

/// The caller of a request. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The public id of the caller's key, which may be logged; empty without keys.
    pub key: Arc<str>,
    /// The tenant with which the caller shares limits and turns; empty if there is none.
    pub tenant: Arc<str>,
    pub role: Role,
    pub limits: Arc<KeyLimits>,
    /// The models that the caller may use; absent means all.
    pub models: Option<Arc<[String]>>,
    /// Whether the caller may learn how much of a prompt is cached. True for an admin, or if there
    /// is no other tenant whose prompt that could be.
    pub sees_caches: bool,
}

impl Caller {
    /// The caller of every request without keys.
    #[must_use]
    pub fn anonymous(tenant: Arc<str>) -> Self {
        // Shared, because every request of a router without keys needs it.
        static UNLIMITED: LazyLock<Arc<KeyLimits>> = LazyLock::new(Arc::default);
        Self { key: Arc::default(), tenant, role: Role::Admin, limits: UNLIMITED.clone(), models: None, sees_caches: true }
    }

    /// The owner of the caller's limits, turns, memory and stored responses: its tenant, or its key
    /// without one; empty without keys.
    #[must_use]
    pub(crate) fn owner(&self) -> &Arc<str> {
        if self.tenant.is_empty() { &self.key } else { &self.tenant }
    }

    /// The owner's name as a number; `None` without keys.
    #[must_use]
    pub(crate) fn tenant_hash(&self) -> Option<u64> {
        (!self.owner().is_empty()).then(|| xxh3_64(self.owner().as_bytes()))
    }

    /// The owner's weight among those who share something.
    #[must_use]
    pub(crate) fn weight(&self) -> f64 {
        self.limits.weight.unwrap_or(1.0)
    }

    #[must_use]
    pub fn may_use(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.iter().any(|allowed| allowed == model))
    }

    /// Checks that the caller may send this request for this model.
    ///
    /// A request without a model gets an engine's default, which may be any model. So a caller that
    /// may not use all models must name one, unless nothing is computed.
    ///
    /// # Errors
    /// If it may not; the sentence is for the client.
    pub fn check_permission(&self, method: &Method, path: &str, model: Option<&str>) -> Result<(), String> {
        let Some(models) = &self.models else { return Ok(()) };
        let is_cancel = Route::of(path) == Route::StoredResponse && path.ends_with("/cancel");
        match model {
            Some(model) if self.may_use(model) => Ok(()),
            Some(model) => Err(format!("the key {} may not use the model `{model}`; it may use {}", self.key, models.join(", "))),
            None if *method != Method::POST || is_cancel => Ok(()),
            None => Err(format!("the key {} is for some models only: say which with `model`; it may use {}", self.key, models.join(", "))),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unauthenticated {
    #[error("this router wants a key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`; whoever runs the router makes them")]
    Missing,
    #[error("this request shows two different keys, in `authorization` and `x-api-key` or twice in one of them: send one")]
    Conflicting,
    #[error("this key is not known here")]
    Unknown,
    #[error("the key {0} has expired")]
    Expired(Arc<str>),
    #[error("the key {0} was revoked")]
    Revoked(Arc<str>),
}

/// The keys that are valid now, shared by all clones. By default there are none, and anybody may
/// send requests.
#[derive(Debug, Clone, Default)]
pub struct Keys(Option<Arc<KeyStore>>);

#[derive(Debug)]
struct KeyStore {
    path: PathBuf,
    initial_version: Option<file::FileVersion>,
    ring: ArcSwap<KeyRing>,
    /// Whether the file could be read when it had last changed.
    is_file_usable: AtomicBool,
}

impl Keys {
    /// Reads the key file at `path`; an empty path means no keys.
    ///
    /// # Errors
    /// If the file cannot be read, others may read it, or it is no key file.
    pub fn open(path: &Path) -> Result<Self, KeyFileError> {
        if path.as_os_str().is_empty() {
            return Ok(Self::default());
        }
        let (entries, stamp) = file::read(path)?;
        Ok(Self::with_entries(path, Some(stamp), entries))
    }

    fn with_entries(path: &Path, first: Option<file::FileVersion>, entries: Vec<KeyEntry>) -> Self {
        Self(Some(Arc::new(KeyStore {
            path: path.to_owned(),
            initial_version: first,
            ring: ArcSwap::from_pointee(KeyRing::new(entries)),
            is_file_usable: AtomicBool::new(true),
        })))
    }

    #[must_use]
    pub fn are_required(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the key file could be read when it had last changed; `None` without a file.
    #[must_use]
    pub(crate) fn is_file_usable(&self) -> Option<bool> {
        Some(self.0.as_ref()?.is_file_usable.load(Ordering::Relaxed))
    }

    /// Finds the caller by the key in these headers.
    ///
    /// # Errors
    /// If keys are required and the headers have no valid one.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, Unauthenticated> {
        if !self.are_required() {
            return Ok(Caller::anonymous(Arc::default()));
        }
        self.find_caller(presented_key(headers)?)
    }

    /// Finds the caller with the key of this id, for work that it has left with the router. Without
    /// keys everybody is that caller.
    ///
    /// # Errors
    /// If the key is valid no more.
    pub(crate) fn find_by_id(&self, id: &str) -> Result<Caller, Unauthenticated> {
        match &self.0 {
            None => Ok(Caller::anonymous(Arc::default())),
            Some(kept) => kept.ring.load().find_by_id(id, SystemTime::now()).cloned(),
        }
    }

    /// Finds the caller with this key; none without keys.
    fn find_caller(&self, key: &str) -> Result<Caller, Unauthenticated> {
        let kept = self.0.as_ref().ok_or(Unauthenticated::Unknown)?;
        kept.ring.load().find(key, SystemTime::now()).cloned()
    }
}

/// The key of a request, from OpenAI's or Anthropic's header. Two keys must be the same, because
/// nobody could tell which counts.
pub(crate) fn presented_key(headers: &HeaderMap) -> Result<&str, Unauthenticated> {
    let bearers = headers.get_all(AUTHORIZATION).iter().filter_map(bearer);
    let others = headers.get_all(X_API_KEY).iter().filter_map(|value| Some(value.to_str().ok()?.trim()));
    let mut keys = bearers.chain(others).filter(|key| !key.is_empty());
    let first = keys.next().ok_or(Unauthenticated::Missing)?;
    if keys.all(|key| key == first) { Ok(first) } else { Err(Unauthenticated::Conflicting) }
}

/// The token of `Bearer TOKEN`. The scheme is case-insensitive (RFC 9110).
fn bearer(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = value.to_str().ok()?.trim().split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Whether a header has the caller's credentials, which engines need not know.
pub(crate) fn is_credential(name: &HeaderName) -> bool {
    *name == AUTHORIZATION || *name == X_API_KEY
}

/// Keeps keys out of any output of these headers.
pub(crate) fn mark_sensitive(headers: &mut HeaderMap) {
    for (name, value) in headers.iter_mut() {
        if is_credential(name) {
            value.set_sensitive(true);
        }
    }
}

#[cfg(test)]
mod tests;
