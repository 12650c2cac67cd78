//! Requests that no replica has room for, and which of them goes first when one has. Late binding: a request that waits here still has
//! every replica open to it. It is a plain queue; the router's dispatch pushes, pops and gives up waiting.

mod line;
mod places;
mod released;

use std::cmp::Ordering;

use rustc_hash::FxHashMap;

use line::{Entry, Line};
pub use places::{Full, Places, has_share};
use released::Released;

/// Of the tokens released while others wait in less urgent bands, the share that is theirs.
const PATIENT_SHARE: f64 = 0.1;

/// What less urgent bands have not had of their share is remembered up to this many tokens; a request that is longer goes for as much.
const MOST_OWED: f64 = 65_536.0;

/// What decides a request's turn.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// Its band: a lower one goes first.
    pub priority: i32,
    /// Who shares with whom.
    pub tenant: u64,
    /// The tenant's share beside others'.
    pub weight: f64,
    /// Prompt tokens to be computed on the replica that holds most of it.
    pub uncached: u32,
    /// Tokens that its answer is expected to have.
    pub output: u32,
    /// When it began to wait.
    pub since: f64,
}

impl Waiting {
    /// What its tenant is charged. A request without an uncached token counts as one, so that tenants of such requests take turns. A
    /// token of the answer counts as much as one of the prompt: what it adds to the steps it is computed in is about the same.
    fn tokens(&self) -> f64 {
        f64::from(self.uncached.max(1)) + f64::from(self.output)
    }
}

/// A place in the queue, never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    line: (i32, u64),
    number: u64,
}

/// The queue, which holds a value for each request.
///
/// The lowest band goes first; but while less urgent ones wait behind it, a tenth of the tokens released is theirs, all of them taken as
/// one. Within a band, the tenant for whom the fewest tokens were lately released for its weight goes first; of its requests, the one with
/// the greatest `(1 + (wait/4 s)²)/uncached`: short ones first, but a long one has its turn when it has waited long against those that come
/// later. Equal ones leave in the order in which they came. One thing starves, on purpose: long requests of a tenant that sends more short
/// ones than are ever released, which then wait as long themselves. The caller bounds every wait.
#[derive(Debug)]
pub struct Queue<T> {
    most: usize,
    next: u64,
    len: usize,
    /// By band and tenant; none is empty.
    lines: FxHashMap<(i32, u64), Line<T>>,
    released: Released,
    /// Tokens of their share that less urgent bands have not had yet.
    owed: f64,
    /// The order of the lines, made anew with each look.
    order: Vec<Rank>,
}

/// A line's turn among lines.
#[derive(Debug, Clone, Copy)]
struct Rank {
    line: (i32, u64),
    /// Tokens released for the tenant, for its weight.
    level: f64,
}

impl<T> Queue<T> {
    /// A queue for at most this many requests.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, next: 0, len: 0, lines: FxHashMap::default(), released: Released::default(), owed: 0.0, order: Vec::new() }
    }

    /// Lets a request wait.
    ///
    /// # Errors
    /// The value comes back when the queue is full.
    pub fn push(&mut self, waiting: Waiting, value: T) -> Result<Place, T> {
        if self.len >= self.most {
            return Err(value);
        }
        let (number, line, since) = (self.next, (waiting.priority, waiting.tenant), waiting.since);
        self.next += 1;
        self.len += 1;
        self.lines.entry(line).or_insert_with(|| Line::new(since)).push(Entry { number, waiting, value });
        Ok(Place { line, number })
    }

    /// Takes out the request whose turn it is, and counts its tokens as released for its tenant.
    pub fn pop(&mut self, now: f64) -> Option<(Waiting, T)> {
        self.pop_where(now, 1, |_, _| true)
    }

    /// Takes out the first request that `may_go`, of at most `looked_at` in the order of their turns, and counts its tokens as released
    /// for its tenant. So a request whose replica is busy does not hold up those behind it, and keeps its turn; and while several tenants
    /// wait, one of them has no more than half of the looks. `may_go` may correct a request's uncached tokens, since caches change while
    /// it waits.
    pub fn pop_where(&mut self, now: f64, looked_at: usize, mut may_go: impl FnMut(&mut Waiting, &mut T) -> bool) -> Option<(Waiting, T)> {
        self.put_in_order(now, looked_at);
        let order = std::mem::take(&mut self.order);
        let each = if order.len() > 1 { looked_at.div_ceil(2) } else { looked_at };
        let (mut left, mut popped) = (looked_at, None);
        for rank in &order {
            let Some(line) = self.lines.get_mut(&rank.line) else { continue };
            let (looked, entry) = line.take_where(left.min(each), &mut may_go);
            left -= looked;
            if let Some(entry) = entry {
                popped = Some(self.release(rank.line, entry, now));
            }
            if popped.is_some() || left == 0 {
                break;
            }
        }
        self.order = order;
        popped
    }

    /// Counts a request as released that did not have to wait.
    pub fn passed(&mut self, waiting: &Waiting, now: f64) {
        self.released.add(waiting.tenant, waiting.tokens(), now);
    }

    /// Takes out a request that gave up waiting. `None` when it has left already.
    pub fn remove(&mut self, place: Place) -> Option<T> {
        let entry = self.lines.get_mut(&place.line)?.remove(place.number)?;
        self.left(place.line);
        Some(entry.value)
    }

    /// The lowest band in which somebody waits, which goes first.
    #[must_use]
    pub fn band(&self) -> Option<i32> {
        self.lines.keys().map(|(priority, _)| *priority).min()
    }

    /// Requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Prompt tokens that would be released before this request if nobody else came, from which its wait follows. It may be in the queue
    /// already: it does not count itself. Exact within a tenant; of other tenants, as much is counted as brings them level with its own,
    /// and nothing of less urgent bands.
    #[must_use]
    pub fn uncached_ahead(&self, waiting: &Waiting, now: f64) -> u64 {
        let line = self.lines.get(&(waiting.priority, waiting.tenant));
        let (own, tokens) = line.map_or((0, 0.0), |line| line.before(waiting, now));
        let level = (self.released.of(waiting.tenant, now) + tokens) / weight(waiting.weight);
        let (mut bands, mut others) = (0, 0.0);
        for ((priority, tenant), line) in &self.lines {
            match priority.cmp(&waiting.priority) {
                Ordering::Less => bands += line.uncached,
                Ordering::Equal if *tenant != waiting.tenant => {
                    let share = (level * line.weight - self.released.of(*tenant, now)) / line.tokens;
                    others += share.clamp(0.0, 1.0) * line.uncached as f64;
                }
                _ => {}
            }
        }
        bands + own + whole(others)
    }

    /// Finds the order of the lines, as far as that many looks can go.
    fn put_in_order(&mut self, now: f64, looked_at: usize) {
        self.released.sweep(now);
        self.order.clear();
        let rank = |(line, of): (&(i32, u64), &Line<T>)| Rank { line: *line, level: self.released.of(line.1, now) / of.weight };
        self.order.extend(self.lines.iter().map(rank));
        let lines = &self.lines;
        let order = |one: &Rank, other: &Rank| {
            let order = one.line.0.cmp(&other.line.0).then_with(|| one.level.total_cmp(&other.level));
            order.then_with(|| lines[&one.line].compare(&lines[&other.line], now)).then_with(|| one.line.cmp(&other.line))
        };
        let urgent = self.order.iter().map(|rank| rank.line.0).min().unwrap_or_default();
        let patient = self.order.iter().filter(|rank| rank.line.0 != urgent);
        // Whose turn it is among those behind the most urgent band, whatever theirs is.
        let patient = patient.copied().min_by(|one, other| {
            let order = one.level.total_cmp(&other.level).then_with(|| lines[&one.line].compare(&lines[&other.line], now));
            order.then_with(|| one.line.cmp(&other.line))
        });
        if patient.is_none() {
            self.owed = 0.0;
        }
        if (1..self.order.len()).contains(&looked_at) {
            self.order.select_nth_unstable_by(looked_at - 1, order);
            self.order.truncate(looked_at);
        }
        self.order.sort_unstable_by(order);
        if let Some(patient) = patient
            && let Some(first) = lines[&patient.line].first()
            && self.owed >= first.waiting.tokens().min(MOST_OWED)
        {
            self.order.retain(|rank| rank.line != patient.line);
            self.order.insert(0, patient);
        }
        for rank in &self.order {
            if let Some(line) = self.lines.get_mut(&rank.line) {
                line.put_in_order(now);
            }
        }
    }

    fn release(&mut self, line: (i32, u64), Entry { waiting, value, .. }: Entry<T>, now: f64) -> (Waiting, T) {
        let tokens = waiting.tokens();
        self.released.add(waiting.tenant, tokens, now);
        let (mut before, mut behind) = (false, false);
        for (priority, _) in self.lines.keys() {
            before |= *priority < line.0;
            behind |= *priority > line.0;
        }
        if before {
            self.owed = (self.owed - tokens).max(0.0);
        } else if behind {
            self.owed = (self.owed + tokens * PATIENT_SHARE / (1.0 - PATIENT_SHARE)).min(MOST_OWED);
        }
        self.left(line);
        (waiting, value)
    }

    /// One has left this line.
    fn left(&mut self, line: (i32, u64)) {
        self.len -= 1;
        if self.lines.get(&line).is_some_and(Line::is_empty) {
            self.lines.remove(&line);
        }
    }
}

/// A weight that can be divided by.
fn weight(weight: f64) -> f64 {
    if weight.is_finite() { weight.clamp(0.01, 100.0) } else { 1.0 }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of token counts is far below 2^53, and `as` saturates")]
fn whole(tokens: f64) -> u64 {
    tokens as u64
}

#[cfg(test)]
mod tests;
