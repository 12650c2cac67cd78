//! Requests that no replica has room for, and which of them goes first when one has. Late binding: a request that waits here still has
//! every replica open to it. It is a plain queue; the router's dispatch pushes, pops and gives up waiting.

use std::cmp::Ordering;

use rustc_hash::FxHashMap;

/// After this many seconds a request counts as much as two that just came; from there its weight grows with the square of its wait.
const PATIENCE_SECONDS: f64 = 4.0;

/// The time in which work released for a tenant loses all but 1/e of its weight.
const FAIRNESS_SECONDS: f64 = 30.0;

/// What decides a request's turn.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// Its band: a lower one goes first, whatever else.
    pub priority: i32,
    /// Who shares with whom.
    pub tenant: u64,
    /// Prompt tokens to be computed on the replica that holds most of it.
    pub uncached: u32,
    /// When it began to wait.
    pub since: f64,
}

/// A place in the queue, never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place(u64);

/// The queue, which holds a value for each request.
///
/// Of the lowest band, the tenant for whom the fewest prompt tokens were lately released goes first; of its requests, the one with the
/// greatest `(1 + (wait/4 s)²)/uncached`: short ones first, but a long one has its turn when it has waited long against those that come
/// later. Equal ones leave in the order in which they came. Two things starve, on purpose: a higher band while a lower one always has
/// somebody waiting, and long requests while more short ones come than are ever released, which then wait as long themselves. The caller
/// bounds every wait.
#[derive(Debug)]
pub struct Queue<T> {
    most: usize,
    next: u64,
    /// In the order of their places.
    entries: Vec<Entry<T>>,
    released: Released,
}

#[derive(Debug)]
struct Entry<T> {
    place: Place,
    waiting: Waiting,
    value: T,
}

impl<T> Queue<T> {
    /// A queue for at most this many requests.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, next: 0, entries: Vec::new(), released: Released::default() }
    }

    /// Lets a request wait.
    ///
    /// # Errors
    /// The value comes back when the queue is full.
    pub fn push(&mut self, waiting: Waiting, value: T) -> Result<Place, T> {
        if self.entries.len() >= self.most {
            return Err(value);
        }
        let place = Place(self.next);
        self.next += 1;
        self.entries.push(Entry { place, waiting, value });
        Ok(place)
    }

    /// Takes out the request whose turn it is, and counts its tokens as released for its tenant. It looks at every request once.
    pub fn pop(&mut self, now: f64) -> Option<(Waiting, T)> {
        self.released.decay(now);
        let turns = self.entries.iter().map(|entry| Turn::of(&entry.waiting, &self.released, now));
        let (first, _) = turns.enumerate().reduce(|best, next| if next.1.before(&best.1) { next } else { best })?;
        let Entry { waiting, value, .. } = self.entries.remove(first);
        self.released.add(&waiting);
        Some((waiting, value))
    }

    /// Takes out the first request that `may_go`, of at most `looked_at` in the order of their turns, and counts its tokens as released
    /// for its tenant. So a request whose replica is busy does not hold up those behind it, and keeps its turn. `may_go` may correct what
    /// decides a request's turn, since caches change while it waits.
    pub fn pop_where(&mut self, now: f64, looked_at: usize, mut may_go: impl FnMut(&mut Waiting, &mut T) -> bool) -> Option<(Waiting, T)> {
        self.released.decay(now);
        let mut turns: Vec<(usize, Turn)> =
            self.entries.iter().enumerate().map(|(index, entry)| (index, Turn::of(&entry.waiting, &self.released, now))).collect();
        let order = |one: &(usize, Turn), other: &(usize, Turn)| one.1.order(&other.1).then(one.0.cmp(&other.0));
        if (1..turns.len()).contains(&looked_at) {
            turns.select_nth_unstable_by(looked_at - 1, order);
        }
        turns.truncate(looked_at);
        turns.sort_unstable_by(order);
        let (first, _) = turns.into_iter().find(|(index, _)| {
            let entry = &mut self.entries[*index];
            may_go(&mut entry.waiting, &mut entry.value)
        })?;
        let Entry { waiting, value, .. } = self.entries.remove(first);
        self.released.add(&waiting);
        Some((waiting, value))
    }

    /// Takes out a request that gave up waiting. `None` when it has left already.
    pub fn remove(&mut self, place: Place) -> Option<T> {
        let index = self.entries.binary_search_by_key(&place.0, |entry| entry.place.0).ok()?;
        Some(self.entries.remove(index).value)
    }

    /// The lowest band in which somebody waits, which goes first.
    #[must_use]
    pub fn band(&self) -> Option<i32> {
        self.entries.iter().map(|entry| entry.waiting.priority).min()
    }

    /// Requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Prompt tokens that would be released before this request if nobody else came, from which its wait follows. It may be in the queue
    /// already: it does not count itself. Exact within a tenant; of other tenants, as much is counted as brings them level with its own.
    #[must_use]
    pub fn uncached_ahead(&self, waiting: &Waiting, now: f64) -> u64 {
        let own = Turn::of(waiting, &self.released, now);
        let (mut bands, mut tenant) = (0, 0);
        let mut others: FxHashMap<u64, u64> = FxHashMap::default();
        for entry in self.entries.iter().map(|entry| &entry.waiting).filter(|entry| entry.priority <= waiting.priority) {
            let tokens = u64::from(entry.uncached);
            if entry.priority < waiting.priority {
                bands += tokens;
            } else if entry.tenant != waiting.tenant {
                *others.entry(entry.tenant).or_default() += tokens;
            } else if Turn::of(entry, &self.released, now).before(&own) {
                tenant += tokens;
            }
        }
        let decay = self.released.decay_until(now);
        let level = own.released * decay + tenant as f64;
        let others: f64 = others.iter().map(|(other, &tokens)| (level - self.released.of(*other) * decay).clamp(0.0, tokens as f64)).sum();
        bands + tenant + whole(others)
    }
}

/// What two requests are compared by.
struct Turn {
    priority: i32,
    released: f64,
    urgency: f64,
    since: f64,
}

impl Turn {
    fn of(waiting: &Waiting, released: &Released, now: f64) -> Self {
        let wait = (now - waiting.since).max(0.0) / PATIENCE_SECONDS;
        let urgency = (1.0 + wait * wait) / f64::from(waiting.uncached.max(1));
        Self { priority: waiting.priority, released: released.of(waiting.tenant), urgency, since: waiting.since }
    }

    fn before(&self, other: &Self) -> bool {
        self.order(other).is_lt()
    }

    fn order(&self, other: &Self) -> Ordering {
        let order = self.priority.cmp(&other.priority).then_with(|| self.released.total_cmp(&other.released));
        order.then_with(|| other.urgency.total_cmp(&self.urgency)).then_with(|| self.since.total_cmp(&other.since))
    }
}

/// Prompt tokens lately released for each tenant, all as of one moment. A tenant is forgotten when less than a token is left, so it
/// holds those of the last few minutes.
#[derive(Debug, Default)]
struct Released {
    at: f64,
    tokens: FxHashMap<u64, f64>,
}

impl Released {
    fn of(&self, tenant: u64) -> f64 {
        self.tokens.get(&tenant).copied().unwrap_or(0.0)
    }

    fn decay_until(&self, now: f64) -> f64 {
        (-(now - self.at).max(0.0) / FAIRNESS_SECONDS).exp()
    }

    fn decay(&mut self, now: f64) {
        let factor = self.decay_until(now);
        self.at = self.at.max(now);
        self.tokens.retain(|_, tokens| {
            *tokens *= factor;
            *tokens >= 1.0
        });
    }

    /// Also a request without an uncached token counts as one, so that tenants of such requests take turns.
    fn add(&mut self, waiting: &Waiting) {
        *self.tokens.entry(waiting.tenant).or_default() += f64::from(waiting.uncached.max(1));
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of token counts is far below 2^53, and `as` saturates")]
fn whole(tokens: f64) -> u64 {
    tokens as u64
}

#[cfg(test)]
mod tests;
