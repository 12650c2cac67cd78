//! The models that a controller beside the router can bring, as it has announced them. Requests wait for them as for engines that load.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::arrival::Arrival;
use super::replica_status::Model;

/// How long an announcement counts unless it is renewed. A controller renews it every few seconds, and a dead one brings nothing.
pub(super) const ANNOUNCEMENT_TTL: Duration = Duration::from_secs(30);

/// A model that can be brought, under one of its names.
#[derive(Debug)]
pub(crate) struct Expectation {
    /// As lists show it until an engine describes it itself.
    pub model: Model,
    /// When a replica takes requests for it, where that can be told.
    pub expected_at: Option<Instant>,
    /// What it waits for, in one line for clients.
    pub reason: Arc<str>,
    /// When a request for it last found no replica. Shared with the announcements before and after.
    last_miss: Arc<Mutex<Option<Instant>>>,
}

/// One announcement, by name.
#[derive(Debug, Default)]
pub(crate) struct Expectations(BTreeMap<String, Expectation>);

impl Expectation {
    #[must_use]
    pub(crate) fn new(name: &str, expected_at: Option<Instant>, reason: Arc<str>) -> Self {
        // No engine has told when it was created.
        let card = serde_json::json!({"id": name, "object": "model", "created": 0, "owned_by": "hostler"});
        Self { model: Model::new(name.to_owned(), card.to_string().into()), expected_at, reason, last_miss: Arc::default() }
    }

    /// One whose time has passed may come at any moment.
    pub(super) fn arrival(&self, now: Instant) -> Arrival {
        self.expected_at.map_or(Arrival::Starting, |at| Arrival::Within(at.saturating_duration_since(now)))
    }

    pub(crate) fn record_miss(&self, now: Instant) {
        *self.last_miss.lock() = Some(now);
    }

    #[must_use]
    pub(crate) fn last_miss(&self) -> Option<Instant> {
        *self.last_miss.lock()
    }
}

impl Expectations {
    /// `false` if the name was announced already.
    pub(crate) fn insert(&mut self, expectation: Expectation) -> bool {
        self.0.insert(expectation.model.id.clone(), expectation).is_none()
    }

    #[must_use]
    pub(crate) fn get(&self, name: &str) -> Option<&Expectation> {
        self.0.get(name)
    }

    pub(super) fn models(&self) -> impl Iterator<Item = &Model> {
        self.0.values().map(|expectation| &expectation.model)
    }

    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes over from `former` which models were missed when.
    pub(super) fn replace(mut self, former: &Self) -> Self {
        for (name, expectation) in &mut self.0 {
            if let Some(before) = former.get(name) {
                expectation.last_miss = before.last_miss.clone();
            }
        }
        self
    }
}

#[cfg(test)]
mod tests;
