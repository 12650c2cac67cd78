//! Counts each tenant's requests and tokens for the metrics page. Only callers with a key are
//! counted, and the number of names is bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::account::LimitKind;
use super::{ActualUsage, Admission, OutputTokens};
use crate::keys::Caller;

/// Most tenants with separate figures. Each has ten lines on the metrics page.
pub(super) const MAX_TENANTS: usize = 64;

/// The name for tenants beyond that bound.
const OTHERS: &str = "other";

/// The counts of one tenant, or of a key without one, since the router began.
#[derive(Debug, Default)]
pub(crate) struct TenantCounts {
    admitted: AtomicU64,
    in_flight: AtomicU64,
    prompt_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    refused: [AtomicU64; LimitKind::OF_CALLERS.len()],
}

/// The counts by name, as far as each tenant has its own.
#[derive(Debug, Default)]
pub(super) struct CountsByTenant(Mutex<FxHashMap<Arc<str>, Arc<TenantCounts>>>);

/// A request that was admitted, counted until it is dropped.
#[derive(Debug)]
pub(super) struct CountedRequest {
    counts: Arc<TenantCounts>,
    expected_prompt_tokens: u64,
    /// Prompt tokens and generated tokens, once something is known of them.
    used: Option<(u64, u64)>,
}

impl TenantCounts {
    pub(crate) fn admitted(&self) -> u64 {
        self.admitted.load(Ordering::Relaxed)
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens.load(Ordering::Relaxed)
    }

    pub(crate) fn generation_tokens(&self) -> u64 {
        self.generation_tokens.load(Ordering::Relaxed)
    }

    /// Requests that a limit refused, by the limit's name.
    pub(crate) fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> {
        LimitKind::OF_CALLERS.iter().zip(&self.refused).map(|(limit, count)| (limit.as_str(), count.load(Ordering::Relaxed)))
    }

    pub(super) fn count_refusal(&self, limit: LimitKind) {
        if let Some(at) = LimitKind::OF_CALLERS.iter().position(|known| *known == limit) {
            self.refused[at].fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl CountsByTenant {
    /// `None` for a caller without a key.
    pub(super) fn of_caller(&self, caller: &Caller) -> Option<Arc<TenantCounts>> {
        let name = caller.owner();
        if name.is_empty() {
            return None;
        }
        let mut counts = self.0.lock();
        if let Some(known) = counts.get(name) {
            return Some(known.clone());
        }
        let name = if counts.len() < MAX_TENANTS { name.clone() } else { OTHERS.into() };
        Some(counts.entry(name).or_default().clone())
    }
}

impl CountedRequest {
    pub(super) fn begin(counts: Arc<TenantCounts>, expected_prompt_tokens: u64) -> Self {
        counts.admitted.fetch_add(1, Ordering::Relaxed);
        counts.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { counts, expected_prompt_tokens, used: None }
    }

    /// Records the request's usage, which replaces earlier records. A prompt that nobody counted
    /// has as many tokens as expected.
    pub(super) fn record(&mut self, used: ActualUsage) {
        let (OutputTokens::Exact(output) | OutputTokens::AtLeast(output)) = used.output_tokens;
        let known = used.prompt_tokens.or(self.used.map(|(prompt, _)| prompt));
        self.used = Some((known.unwrap_or(self.expected_prompt_tokens), output));
    }
}

impl Drop for CountedRequest {
    fn drop(&mut self) {
        self.counts.in_flight.fetch_sub(1, Ordering::Relaxed);
        let (prompt, generation) = self.used.unwrap_or_default();
        self.counts.prompt_tokens.fetch_add(prompt, Ordering::Relaxed);
        self.counts.generation_tokens.fetch_add(generation, Ordering::Relaxed);
    }
}

impl Admission {
    /// The counts of each tenant that has sent something, by name.
    #[must_use]
    pub(crate) fn tenant_counts(&self) -> Vec<(Arc<str>, Arc<TenantCounts>)> {
        let mut counts: Vec<_> = self.0.tenants.0.lock().iter().map(|(name, counts)| (name.clone(), counts.clone())).collect();
        counts.sort_by(|one, other| one.0.cmp(&other.0));
        counts
    }
}

#[cfg(test)]
mod tests;
