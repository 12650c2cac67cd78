//! Whether a request may enter: a bound on how many are in flight in this router, and its caller's limits. Called by the edge once a
//! request has been peeked at.
//!
//! Limits belong to keys. Keys of one tenant that have the same limits share them, so that a key and the one that replaces it have one
//! budget; a key with limits of its own has its own. Limits that are changed begin anew, but for the day's budgets, of which is used what the key
//! and whoever shared its limits had used. All of it is this router's, and of this life of it: several routers allow as many times as much.

mod account;
mod bucket;
mod rates;
#[cfg(test)]
mod tests;
mod window;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use account::Account;
pub use account::Limit;
pub use rates::{Rate, Rates};

use crate::keys::{Caller, Limits};

/// Accounts of callers that have nothing left to be counted are looked for this often, in milliseconds.
const SWEEP_INTERVAL: u64 = 60_000;

/// Counts the requests in flight and what callers use, and keeps both below their bounds. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Admission(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    in_flight: AtomicUsize,
    most: usize,
    /// The accounts' times are milliseconds since then.
    began: Instant,
    accounts: Mutex<Accounts>,
}

/// One for each caller that has limits and has lately used something of them.
#[derive(Debug, Default)]
struct Accounts {
    of: FxHashMap<Whose, Arc<Open>>,
    /// By key, the account that it has used last.
    last: FxHashMap<Arc<str>, Whose>,
    /// When the next look for idle ones is due.
    sweep: u64,
}

/// Who shares an account.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Whose {
    /// Tenant, or key where there is no tenant.
    name: Arc<str>,
    limits: [Option<u64>; 6],
}

/// An account and the limits that it is for.
#[derive(Debug)]
struct Open {
    limits: Arc<Limits>,
    account: Mutex<Account>,
}

/// Proof that a request was admitted; its place is free again when it is dropped. What it was expected to use stays counted unless it is
/// settled.
#[derive(Debug)]
pub struct Permit {
    shared: Arc<Shared>,
    charge: Option<Charge>,
}

/// What a request was expected to use of its caller's limits.
#[derive(Debug)]
struct Charge {
    open: Arc<Open>,
    asked: Estimate,
    then: u64,
}

/// What a request is expected to use.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    /// Prompt tokens, by the length of its text.
    pub input: u64,
    /// Tokens of its answer, as those before it let expect.
    pub output: u64,
    /// Bytes of its body.
    pub bytes: u64,
}

/// What a request has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Prompt tokens, if its engine said how many; else what was expected.
    pub input: Option<u64>,
    /// Tokens of its answer.
    pub output: Generated,
}

/// What is known of the length of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generated {
    /// Its engine said how many tokens it has.
    Told(u64),
    /// Nobody said, but so many were seen: what was expected counts, or these if they are more.
    AtLeast(u64),
}

/// Why a request may not enter now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Limited {
    /// For the client: which limit, and what to do.
    pub message: String,
    /// Seconds after which it may try again.
    pub retry_after: u64,
    /// Which limit.
    pub limit: Limit,
}

impl Admission {
    /// At most `most` requests at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self(Arc::new(Shared { in_flight: AtomicUsize::new(0), most, began: Instant::now(), accounts: Mutex::default() }))
    }

    /// A permit, unless the router is full or the caller has reached a limit.
    ///
    /// # Errors
    /// When one of them is the case.
    pub fn admit(&self, caller: &Caller, asked: Estimate) -> Result<Permit, Limited> {
        let shared = &self.0;
        let place = shared.in_flight.fetch_add(1, Ordering::Relaxed);
        // From here on dropping it gives the place back.
        let mut permit = Permit { shared: shared.clone(), charge: None };
        if place >= shared.most {
            let message = format!("{} requests are in flight here, the most that router.max_in_flight allows", shared.most);
            return Err(Limited { message, retry_after: 1, limit: Limit::Router });
        }
        if let Some(whose) = Whose::of(caller) {
            let then = shared.now();
            let open = shared.accounts.lock().open(whose, caller, then);
            let entered = open.account.lock().enter(&open.limits, &asked, then);
            entered.map_err(|(limit, wait)| Limited::of(caller, limit, wait, &asked))?;
            permit.charge = Some(Charge { open, asked, then });
        }
        Ok(permit)
    }

    /// How a caller stands; `None` when it has no limits.
    #[must_use]
    pub fn rates(&self, caller: &Caller) -> Option<Rates> {
        let whose = Whose::of(caller)?;
        let now = self.0.now();
        let open = self.0.accounts.lock().open(whose, caller, now);
        let rates = open.account.lock().rates(&open.limits, now);
        Some(rates)
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.0.in_flight.load(Ordering::Relaxed)
    }
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Whose {
    /// `None` for a caller without limits.
    fn of(caller: &Caller) -> Option<Self> {
        let Limits { in_flight, requests_per_minute, input_per_minute, input_per_day, output_per_minute, output_per_day, .. } =
            *caller.limits;
        let limits = [in_flight.map(u64::from), requests_per_minute, input_per_minute, input_per_day, output_per_minute, output_per_day];
        let name = if caller.tenant.is_empty() { &caller.key } else { &caller.tenant };
        limits.iter().any(Option::is_some).then(|| Self { name: name.clone(), limits })
    }
}

impl Accounts {
    fn open(&mut self, whose: Whose, caller: &Caller, now: u64) -> Arc<Open> {
        if now >= self.sweep {
            self.sweep = now + SWEEP_INTERVAL;
            // One that somebody holds besides is about to be used, or has a request in flight.
            self.of.retain(|_, open| Arc::strong_count(open) > 1 || !open.account.lock().is_idle(&open.limits, now));
            self.last.retain(|_, whose| self.of.contains_key(whose));
        }
        let before = match self.last.get(&caller.key) {
            Some(last) if *last == whose => None,
            _ => self.last.insert(caller.key.clone(), whose.clone()),
        };
        let name = whose.name.clone();
        let open = || Arc::new(Open { limits: caller.limits.clone(), account: Mutex::default() });
        let open = self.of.entry(whose).or_insert_with(open).clone();
        // A key that has moved to another tenant brings nothing of what its former one has used.
        if let Some(before) = before.filter(|before| before.name == name).and_then(|whose| self.of.get(&whose)) {
            let day = before.account.lock().day();
            open.account.lock().carry_on(day, now);
        }
        open
    }
}

impl Permit {
    /// The request has ended, having used this: what was expected of it is corrected as far as that is known. Where nothing is, it is left out.
    pub fn settle(&mut self, used: Used) {
        if let Some(Charge { open, asked, then }) = &mut self.charge {
            let now = self.shared.now();
            let output = match used.output {
                Generated::Told(tokens) => tokens,
                Generated::AtLeast(tokens) => tokens.max(asked.output),
            };
            let used = (used.input.unwrap_or(asked.input), output);
            open.account.lock().correct(&open.limits, (asked, *then), used, now);
            // Settled again, it would be corrected from here.
            (asked.input, asked.output) = used;
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(Charge { open, .. }) = &self.charge {
            open.account.lock().leave();
        }
    }
}

impl Limited {
    fn of(caller: &Caller, limit: Limit, wait: u64, asked: &Estimate) -> Self {
        let limits = &caller.limits;
        let retry_after = wait.div_ceil(1000).max(1);
        let whose = if caller.tenant.is_empty() { format!("the key `{}`", caller.key) } else { format!("`{}`", caller.tenant) };
        let number = |limit: Option<u64>| limit.unwrap_or_default();
        let what = match limit {
            Limit::Router | Limit::InFlight => format!("{} requests at once", number(limits.in_flight.map(u64::from))),
            Limit::Requests => format!("{} requests per minute", number(limits.requests_per_minute)),
            Limit::Input => format!("{} prompt tokens per minute, and this has about {}", number(limits.input_per_minute), asked.input),
            Limit::Output => {
                format!("{} generated tokens per minute, and this is expected to have {}", number(limits.output_per_minute), asked.output)
            }
            Limit::DailyInput => format!("{} prompt tokens per day, which are used up", number(limits.input_per_day)),
            Limit::DailyOutput => format!("{} generated tokens per day, which are used up", number(limits.output_per_day)),
        };
        Self { message: format!("{whose} may use {what}; try again in {retry_after} s"), retry_after, limit }
    }

    /// Whether a budget for a day is used up, so that trying again soon is of no use.
    #[must_use]
    pub fn is_quota(&self) -> bool {
        matches!(self.limit, Limit::DailyInput | Limit::DailyOutput)
    }
}
