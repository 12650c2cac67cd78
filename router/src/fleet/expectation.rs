//! The models that a controller beside the router has announced. Requests wait for them as for
//! engines that load.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::arrival::Arrival;
use super::replica_status::Model;

/// How long an announcement counts unless it is renewed. A controller renews it every few seconds,
/// and a dead one brings nothing.
pub(super) const ANNOUNCEMENT_TTL: Duration = Duration::from_secs(30);

/// An announced model, under one of its names.
#[derive(Debug)]
pub(crate) struct Expectation {
    /// The model's entry in lists, until an engine describes it itself.
    pub model: Model,
    /// When a replica takes requests for the model, if that is known.
    pub expected_at: Option<Instant>,
    /// Reason for the wait, in one line for clients.
    pub reason: Arc<str>,
    /// Whether no replica will come.
    pub is_over: bool,
    /// When a request for the model last found no replica. Earlier and later announcements share
    /// this.
    last_miss: Arc<Mutex<Option<Instant>>>,
}

/// Use of the nodes of a fleet's entry.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EntryUse {
    pub name: String,
    /// Since the entry's first job, by what the nodes did.
    pub node_seconds: BTreeMap<String, f64>,
    /// What is left of the entry's budget, in words.
    pub budget: String,
    /// When the budget ends if the nodes of now run on.
    pub budget_ends_at: Option<Instant>,
}

/// The models of one announcement, by name.
#[derive(Debug, Default)]
pub(crate) struct Expectations {
    named: BTreeMap<String, Expectation>,
    pub(crate) entries: Vec<EntryUse>,
    /// Aliases of several of the models.
    shared_aliases: BTreeSet<String>,
}

impl Expectation {
    #[must_use]
    pub(crate) fn new(name: &str, expected_at: Option<Instant>, reason: Arc<str>) -> Self {
        let card = hostler_api::announced_card(name);
        Self { model: Model::new(name.to_owned(), card.into()), expected_at, reason, is_over: false, last_miss: Arc::default() }
    }

    /// A model whose time has passed may come at any moment.
    pub(super) fn arrival(&self, now: Instant) -> Arrival {
        if self.is_over {
            return Arrival::Unknown;
        }
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
        self.named.insert(expectation.model.id.clone(), expectation).is_none()
    }

    /// Adds a model under the last part of its path. A name that another model has is left to it.
    pub(crate) fn insert_alias(&mut self, mut expectation: Expectation, path: &str) {
        expectation.model.alias_of = Some(path.to_owned());
        let alias = expectation.model.id.clone();
        match self.named.get(&alias).map(|known| known.model.alias_of.as_deref()) {
            None => _ = self.named.insert(alias, expectation),
            Some(Some(other)) if other != path => _ = self.shared_aliases.insert(alias),
            Some(_) => {}
        }
    }

    /// The aliases of several of the models.
    pub(super) fn shared_aliases(&self) -> &BTreeSet<String> {
        &self.shared_aliases
    }

    #[must_use]
    pub(crate) fn get(&self, name: &str) -> Option<&Expectation> {
        self.named.get(name)
    }

    pub(super) fn models(&self) -> impl Iterator<Item = &Model> {
        self.named.values().map(|expectation| &expectation.model)
    }

    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.named.is_empty() && self.entries.is_empty()
    }

    /// Takes over the times of misses from `former`.
    pub(super) fn replace(mut self, former: &Self) -> Self {
        for (name, expectation) in &mut self.named {
            if let Some(before) = former.get(name) {
                expectation.last_miss = before.last_miss.clone();
            }
        }
        self
    }
}

#[cfg(test)]
mod tests;
