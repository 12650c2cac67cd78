//! Who sends a request: its key, and what the key allows.

use std::sync::Arc;

use http::HeaderMap;

/// What a key is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Sending requests.
    Use,
    /// That, and the operators' pages.
    Admin,
}

/// How much a key may use; what is absent is unbounded.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Limits {
    /// Requests in flight at once.
    pub in_flight: Option<u32>,
    /// Requests begun in a minute.
    pub requests_per_minute: Option<u64>,
    /// Prompt tokens in a minute.
    pub input_per_minute: Option<u64>,
    /// Prompt tokens in a day.
    pub input_per_day: Option<u64>,
    /// Generated tokens in a minute.
    pub output_per_minute: Option<u64>,
    /// Generated tokens in a day.
    pub output_per_day: Option<u64>,
    /// Its tenant's share beside others', when the fleet is full; absent means 1.
    pub weight: Option<f64>,
}

/// Who sends a request. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The public name of its key, which may be logged; empty where there are no keys.
    pub key: Arc<str>,
    /// Whom it shares limits and its turn with; empty where nobody said.
    pub tenant: Arc<str>,
    /// What it may do.
    pub role: Role,
    /// How much it may use.
    pub limits: Arc<Limits>,
    /// The models that it may ask for; absent means all.
    pub models: Option<Arc<[String]>>,
}

impl Caller {
    /// Whoever sends a request where there are no keys.
    #[must_use]
    pub fn anyone(tenant: Arc<str>) -> Self {
        Self { key: "".into(), tenant, role: Role::Admin, limits: Arc::default(), models: None }
    }

    /// Whether it may ask for this model.
    #[must_use]
    pub fn may_use(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.iter().any(|allowed| allowed == model))
    }
}

/// Why a request has no caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unauthenticated {
    /// It shows no key.
    #[error("this router wants a key: send it as `Authorization: Bearer KEY`; `hostler keys create` makes one")]
    Missing,
    /// Its key is none of ours, was revoked or has expired.
    #[error("the key is not known here, was revoked or has expired")]
    Unknown,
}

/// The keys that are valid now.
#[derive(Debug, Default)]
pub struct Keys {}

impl Keys {
    /// Who shows the key that is in these headers.
    ///
    /// # Errors
    /// When keys are wanted and none that is valid is there.
    pub fn authenticate(&self, _headers: &HeaderMap) -> Result<Caller, Unauthenticated> {
        Ok(Caller::anyone("".into()))
    }
}
