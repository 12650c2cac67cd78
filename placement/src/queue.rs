//! Requests that no replica has room for, and their order.
//!
//! Late binding keeps every replica open to a request that waits here. This is a plain queue; the
//! router's dispatch pushes, pops and gives up waiting.

mod released_tokens;
mod slot_quota;
mod tenant_queue;

use std::cmp::Ordering;

use rustc_hash::FxHashMap;

use released_tokens::ReleasedTokens;
pub use slot_quota::{QueueFull, SlotQuota, has_fair_share};
use tenant_queue::{Entry, TenantQueue};

/// Share of released tokens that goes to lower-priority bands while they wait.
const LOW_PRIORITY_SHARE: f64 = 0.1;

/// Most tokens of that share that lower-priority bands may be owed.
///
/// A longer request is released for this much.
const MAX_OWED_TOKENS: f64 = 65_536.0;

#[derive(Debug, Clone)]
pub struct TurnFactors {
    /// Priority band: a lower number goes first.
    pub priority: i32,
    /// Hash by which requests share turns.
    pub tenant: u64,
    /// Share of the tenant against others.
    pub weight: f64,
    /// Prompt tokens to compute on the replica that holds most of the prompt.
    pub uncached_tokens: u32,
    /// Expected tokens of the answer.
    pub output_tokens: u32,
    /// When the request was queued, in seconds.
    pub queued_at: f64,
}

impl TurnFactors {
    /// Tokens charged to the tenant.
    ///
    /// At least one prompt token counts, so that tenants with fully cached prompts take turns, too.
    /// A token of the answer counts like one of the prompt, because both add about as much to their
    /// steps.
    fn tokens(&self) -> f64 {
        f64::from(self.uncached_tokens.max(1)) + f64::from(self.output_tokens)
    }
}

/// A position in the queue, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueueKey {
    tenant_queue: (i32, u64),
    number: u64,
}

/// Queue with a value for each request.
///
/// The lowest band goes first. While others wait behind it, a tenth of the released tokens is
/// theirs, all of them taken as one. Within a band, the tenant with the fewest recently released
/// tokens for its weight goes first. Among its requests, the one with the greatest `(1 + (wait/4
/// s)²)/uncached` goes first. Short requests come first, but a long one that has waited goes before
/// later arrivals. Equal ones leave in order of arrival.
///
/// One kind of request starves, on purpose: long requests of a tenant that sends more short ones
/// than are ever released, which then wait as long themselves. The caller bounds every wait.
#[derive(Debug)]
pub struct Queue<T> {
    capacity: usize,
    next_number: u64,
    len: usize,
    /// Queues by band and tenant; none is empty.
    tenant_queues: FxHashMap<(i32, u64), TenantQueue<T>>,
    released: ReleasedTokens,
    /// Tokens that lower-priority bands are still owed.
    owed_tokens: f64,
    /// Order of the tenants' queues, computed for each release.
    order: Vec<TenantRank>,
}

/// Rank of one tenant's queue.
#[derive(Debug, Clone, Copy)]
struct TenantRank {
    tenant_queue: (i32, u64),
    /// Tokens recently released for the tenant, divided by its weight.
    released_per_weight: f64,
}

impl<T> Queue<T> {
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            capacity: most,
            next_number: 0,
            len: 0,
            tenant_queues: FxHashMap::default(),
            released: ReleasedTokens::default(),
            owed_tokens: 0.0,
            order: Vec::new(),
        }
    }

    /// Queues a request.
    ///
    /// # Errors
    /// Returns the value if the queue is full.
    pub fn push(&mut self, waiting: TurnFactors, value: T) -> Result<QueueKey, T> {
        if self.len >= self.capacity {
            return Err(value);
        }
        let (number, line, since) = (self.next_number, (waiting.priority, waiting.tenant), waiting.queued_at);
        self.next_number += 1;
        self.len += 1;
        self.tenant_queues.entry(line).or_insert_with(|| TenantQueue::new(since)).push(Entry { number, factors: waiting, value });
        Ok(QueueKey { tenant_queue: line, number })
    }

    /// Removes the request whose turn it is, and charges its tokens to its tenant.
    pub fn pop(&mut self, now: f64) -> Option<(TurnFactors, T)> {
        self.pop_where(now, 1, |_, _| true)
    }

    /// Removes the first request that `may_go`, of at most `looked_at` in the order of their turns,
    /// and charges its tokens to its tenant.
    ///
    /// So a request whose replica is busy keeps its turn without delaying those behind it. While
    /// several tenants wait, each gets at most half of the looks. `may_go` may correct a request's
    /// uncached tokens, since caches change while it waits.
    pub fn pop_where(
        &mut self,
        now: f64,
        looked_at: usize,
        mut may_go: impl FnMut(&mut TurnFactors, &mut T) -> bool,
    ) -> Option<(TurnFactors, T)> {
        self.sort_tenants(now, looked_at);
        let order = std::mem::take(&mut self.order);
        let each = if order.len() > 1 { looked_at.div_ceil(2) } else { looked_at };
        let (mut left, mut popped) = (looked_at, None);
        for rank in &order {
            let Some(line) = self.tenant_queues.get_mut(&rank.tenant_queue) else { continue };
            let (looked, entry) = line.take_first_where(left.min(each), &mut may_go);
            left -= looked;
            if let Some(entry) = entry {
                popped = Some(self.take_out(rank.tenant_queue, entry, now));
            }
            if popped.is_some() || left == 0 {
                break;
            }
        }
        self.order = order;
        popped
    }

    /// Charges a request that did not have to wait.
    pub fn record_unqueued(&mut self, waiting: &TurnFactors, now: f64) {
        self.released.add(waiting.tenant, waiting.tokens(), now);
    }

    /// Removes a request that gave up waiting; `None` if it has left already.
    pub fn remove(&mut self, place: QueueKey) -> Option<T> {
        let entry = self.tenant_queues.get_mut(&place.tenant_queue)?.remove(place.number)?;
        self.remove_if_empty(place.tenant_queue);
        Some(entry.value)
    }

    /// Lowest band with a waiting request, which goes first.
    #[must_use]
    pub fn lowest_priority(&self) -> Option<i32> {
        self.tenant_queues.keys().map(|(priority, _)| *priority).min()
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Prompt tokens that would be released before this request if no other came.
    ///
    /// Its wait follows from them. The request does not count itself if it is queued already. The
    /// count is exact within a tenant. Other tenants count until they are level with this one, and
    /// lower-priority bands do not count.
    #[must_use]
    pub fn uncached_tokens_ahead(&self, waiting: &TurnFactors, now: f64) -> u64 {
        let line = self.tenant_queues.get(&(waiting.priority, waiting.tenant));
        let (own, tokens) = line.map_or((0, 0.0), |line| line.tokens_before(waiting, now));
        let level = (self.released.of_tenant(waiting.tenant, now) + tokens) / clamp_weight(waiting.weight);
        let (mut bands, mut others) = (0, 0.0);
        for ((priority, tenant), line) in &self.tenant_queues {
            match priority.cmp(&waiting.priority) {
                Ordering::Less => bands += line.uncached_tokens,
                Ordering::Equal if *tenant != waiting.tenant => {
                    let share = (level * line.weight - self.released.of_tenant(*tenant, now)) / line.tokens;
                    others += share.clamp(0.0, 1.0) * line.uncached_tokens as f64;
                }
                _ => {}
            }
        }
        bands + own + whole_tokens(others)
    }

    /// Sorts the tenants' queues, as far as that many looks can go.
    fn sort_tenants(&mut self, now: f64, looked_at: usize) {
        self.released.sweep(now);
        self.order.clear();
        let rank = |(line, of): (&(i32, u64), &TenantQueue<T>)| TenantRank {
            tenant_queue: *line,
            released_per_weight: self.released.of_tenant(line.1, now) / of.weight,
        };
        self.order.extend(self.tenant_queues.iter().map(rank));
        let lines = &self.tenant_queues;
        let order = |one: &TenantRank, other: &TenantRank| {
            let order =
                one.tenant_queue.0.cmp(&other.tenant_queue.0).then_with(|| one.released_per_weight.total_cmp(&other.released_per_weight));
            order
                .then_with(|| lines[&one.tenant_queue].cmp_first(&lines[&other.tenant_queue], now))
                .then_with(|| one.tenant_queue.cmp(&other.tenant_queue))
        };
        let urgent = self.order.iter().map(|rank| rank.tenant_queue.0).min().unwrap_or_default();
        let patient = self.order.iter().filter(|rank| rank.tenant_queue.0 != urgent);
        // The band behind the lowest one whose turn it is, whichever it is.
        let patient = patient.copied().min_by(|one, other| {
            let order = one
                .released_per_weight
                .total_cmp(&other.released_per_weight)
                .then_with(|| lines[&one.tenant_queue].cmp_first(&lines[&other.tenant_queue], now));
            order.then_with(|| one.tenant_queue.cmp(&other.tenant_queue))
        });
        if patient.is_none() {
            self.owed_tokens = 0.0;
        }
        if (1..self.order.len()).contains(&looked_at) {
            self.order.select_nth_unstable_by(looked_at - 1, order);
            self.order.truncate(looked_at);
        }
        self.order.sort_unstable_by(order);
        if let Some(patient) = patient
            && let Some(first) = lines[&patient.tenant_queue].first()
            && self.owed_tokens >= first.factors.tokens().min(MAX_OWED_TOKENS)
        {
            self.order.retain(|rank| rank.tenant_queue != patient.tenant_queue);
            self.order.insert(0, patient);
        }
        for rank in &self.order {
            if let Some(line) = self.tenant_queues.get_mut(&rank.tenant_queue) {
                line.resort(now);
            }
        }
    }

    fn take_out(&mut self, line: (i32, u64), Entry { factors: waiting, value, .. }: Entry<T>, now: f64) -> (TurnFactors, T) {
        let tokens = waiting.tokens();
        self.released.add(waiting.tenant, tokens, now);
        let (mut before, mut behind) = (false, false);
        for (priority, _) in self.tenant_queues.keys() {
            before |= *priority < line.0;
            behind |= *priority > line.0;
        }
        if before {
            self.owed_tokens = (self.owed_tokens - tokens).max(0.0);
        } else if behind {
            self.owed_tokens = (self.owed_tokens + tokens * LOW_PRIORITY_SHARE / (1.0 - LOW_PRIORITY_SHARE)).min(MAX_OWED_TOKENS);
        }
        self.remove_if_empty(line);
        (waiting, value)
    }

    fn remove_if_empty(&mut self, line: (i32, u64)) {
        self.len -= 1;
        if self.tenant_queues.get(&line).is_some_and(TenantQueue::is_empty) {
            self.tenant_queues.remove(&line);
        }
    }
}

/// Makes a weight safe to divide by.
fn clamp_weight(weight: f64) -> f64 {
    if weight.is_finite() { weight.clamp(0.01, 100.0) } else { 1.0 }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of token counts is far below 2^53, and `as` saturates")]
fn whole_tokens(tokens: f64) -> u64 {
    tokens as u64
}

#[cfg(test)]
mod tests;
