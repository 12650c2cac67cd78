//! Decides whether a request may enter: bounds the requests in flight in this router, and applies
//! the caller's limits. The edge asks once it has peeked at a request.
//!
//! Limits belong to keys. Keys of one tenant with the same limits share them, so a key and its
//! replacement have one budget; a key with its own limits has its own budget. Changed limits start
//! anew, except for daily budgets, which keep the use of the key and of its former sharers. All
//! counts belong to this router and its present life, so several routers allow a multiple of each
//! limit.

mod account;
mod bucket;
mod daily_window;
mod handover;
mod limits_in_use;
mod rate_limits;
mod tenant_counts;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::Instant;

use account::Account;
use account::LimitHit;
pub(crate) use account::LimitKind;
use handover::{SharedAccount, UsageEvent};
pub(crate) use handover::{UsageChange, UsageLedger};
pub(crate) use rate_limits::RateLimits;
pub(crate) use tenant_counts::TenantCounts;
use tenant_counts::{CountedRequest, CountsByTenant};

use crate::keys::{Caller, KeyLimits};
use crate::tenant_pool::{PoolShare, TenantPool};

/// How often idle accounts are removed, in milliseconds.
const SWEEP_INTERVAL_MS: u64 = 60_000;

/// Counts the requests in flight and callers' usage, and keeps both within their bounds. Cheap to
/// clone.
#[derive(Debug, Clone)]
pub(crate) struct Admission(Arc<AdmissionState>);

#[derive(Debug)]
struct AdmissionState {
    in_flight: AtomicUsize,
    /// The requests in flight of callers with keys, limited by the bound on all requests.
    places: Arc<TenantPool>,
    /// The origin of the accounts' times, which are milliseconds and include those of earlier
    /// routers whose place was taken.
    started_at: Instant,
    inherited_ms: AtomicU64,
    accounts: Mutex<TenantAccounts>,
    tenants: CountsByTenant,
}

/// The accounts of callers that have limits and have lately used some of them.
#[derive(Debug, Default)]
struct TenantAccounts {
    by_owner: FxHashMap<AccountOwner, Arc<TenantAccount>>,
    /// The account that each key has used last.
    last_owner: FxHashMap<Arc<str>, AccountOwner>,
    next_sweep: u64,
    /// Receives changes once another router takes this one's place.
    successor: Option<mpsc::UnboundedSender<UsageChange>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct AccountOwner {
    /// The tenant, or the key without a tenant.
    #[serde(with = "handover::shared_text")]
    name: Arc<str>,
    limits: [Option<u64>; 6],
}

#[derive(Debug)]
struct TenantAccount {
    owner: AccountOwner,
    limits: KeyLimits,
    account: Mutex<SharedAccount>,
}

/// Proof that a request was admitted, whose place is free again when this is dropped. The expected
/// usage stays counted unless it is reconciled.
#[derive(Debug)]
pub(crate) struct Permit {
    shared: Arc<AdmissionState>,
    reservation: Option<Reservation>,
    counted: Option<CountedRequest>,
    /// The place among those of the tenant, if there are keys.
    _place: Option<PoolShare>,
}

#[derive(Debug)]
struct Reservation {
    account: Arc<TenantAccount>,
    estimate: UsageEstimate,
    reserved_at: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct UsageEstimate {
    /// Estimated from the length of the prompt's text.
    pub prompt_tokens: u64,
    /// Estimated from earlier answers.
    pub output_tokens: u64,
    /// Most tokens of the answer, if the body says so. This many are reserved of a daily budget.
    pub max_output_tokens: Option<u64>,
    pub body_bytes: u64,
}

impl UsageEstimate {
    fn most_output_tokens(&self) -> u64 {
        self.max_output_tokens.unwrap_or_default().max(self.output_tokens)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ActualUsage {
    /// `None` if the engine did not report them: the estimate then counts.
    pub prompt_tokens: Option<u64>,
    pub output_tokens: OutputTokens,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputTokens {
    /// The engine's report.
    Exact(u64),
    /// The engine reported nothing: the estimate counts, or the tokens seen if there are more.
    AtLeast(u64),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct LimitExceeded {
    /// The limit and what to do about it, for the client.
    pub message: String,
    /// Seconds after which the client may retry; `None` if waiting does not help.
    pub retry_after: Option<u64>,
    pub limit: LimitKind,
    /// Whether too little of a daily budget is left, so retrying soon is useless.
    pub is_quota: bool,
}

impl Admission {
    #[must_use]
    pub(crate) fn new(max_in_flight: usize) -> Self {
        Self(Arc::new(AdmissionState {
            in_flight: AtomicUsize::new(0),
            places: TenantPool::new(max_in_flight),
            started_at: Instant::now(),
            inherited_ms: AtomicU64::new(0),
            accounts: Mutex::default(),
            tenants: CountsByTenant::default(),
        }))
    }

    /// Whether a request of this caller would find room now, however little it uses. Ask before
    /// doing costly work for the request.
    pub(crate) fn check_room(&self, caller: &Caller) -> Result<(), LimitExceeded> {
        drop(self.take_place(caller)?);
        let Some(whose) = AccountOwner::for_caller(caller) else { return Ok(()) };
        let (now, least) = (self.0.now(), UsageEstimate::default());
        let open = self.0.accounts.lock().open(whose, caller, now);
        let mut copy = open.account.lock().account.clone();
        copy.reserve(&open.limits, &least, now).map_err(|hit| LimitExceeded::for_hit(caller, &hit, &least))
    }

    pub(crate) fn admit(&self, caller: &Caller, estimate: UsageEstimate) -> Result<Permit, LimitExceeded> {
        let mut permit = self.take_place(caller)?;
        let shared = &self.0;
        let counts = shared.tenants.of_caller(caller);
        if let Some(whose) = AccountOwner::for_caller(caller) {
            let reserved_at = shared.now();
            let account = shared.accounts.lock().open(whose, caller, reserved_at);
            account.reserve(&estimate, reserved_at).map_err(|hit| {
                if let Some(counts) = &counts {
                    counts.count_refusal(hit.limit);
                }
                LimitExceeded::for_hit(caller, &hit, &estimate)
            })?;
            permit.reservation = Some(Reservation { account, estimate, reserved_at });
        }
        permit.counted = counts.map(|counts| CountedRequest::begin(counts, estimate.prompt_tokens));
        Ok(permit)
    }

    /// Takes a place among the requests in flight, with nothing reserved.
    fn take_place(&self, caller: &Caller) -> Result<Permit, LimitExceeded> {
        let shared = &self.0;
        let place = shared.in_flight.fetch_add(1, Ordering::Relaxed);
        // From here on, dropping the permit returns the place.
        let mut permit = Permit { shared: shared.clone(), reservation: None, counted: None, _place: None };
        let most = shared.places.capacity();
        if place >= most {
            let message = format!("{most} requests are in flight here, the most that router.max_in_flight allows");
            return Err(LimitExceeded::of_router(message));
        }
        if let Some(tenant) = caller.tenant_hash() {
            let mut own = shared.places.share(tenant, caller.weight());
            if !own.grow_to(1, most) {
                let message = format!(
                    "the requests in flight of `{}` are its share of the {most} that router.max_in_flight allows; others have the rest",
                    caller.owner()
                );
                return Err(LimitExceeded::of_router(message));
            }
            permit._place = Some(own);
        }
        Ok(permit)
    }

    /// `None` if the caller has no limits.
    #[must_use]
    pub(crate) fn rate_limits(&self, caller: &Caller) -> Option<RateLimits> {
        let whose = AccountOwner::for_caller(caller)?;
        let now = self.0.now();
        let open = self.0.accounts.lock().open(whose, caller, now);
        let rates = open.account.lock().account.rate_limits(&open.limits, now);
        Some(rates)
    }

    #[must_use]
    pub(crate) fn in_flight(&self) -> usize {
        self.0.in_flight.load(Ordering::Relaxed)
    }
}

impl AdmissionState {
    fn now(&self) -> u64 {
        self.uptime_ms().saturating_add(self.inherited_ms.load(Ordering::Relaxed))
    }

    /// Continues another router's time.
    fn set_clock(&self, now: u64) {
        self.inherited_ms.store(now.saturating_sub(self.uptime_ms()), Ordering::Relaxed);
    }

    fn uptime_ms(&self) -> u64 {
        u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl AccountOwner {
    /// `None` for a caller without limits.
    fn for_caller(caller: &Caller) -> Option<Self> {
        let KeyLimits { in_flight, requests_per_minute, input_per_minute, input_per_day, output_per_minute, output_per_day, .. } =
            *caller.limits;
        let limits = [in_flight.map(u64::from), requests_per_minute, input_per_minute, input_per_day, output_per_minute, output_per_day];
        limits.iter().any(Option::is_some).then(|| Self { name: caller.owner().clone(), limits })
    }

    fn limits(&self) -> KeyLimits {
        let [in_flight, requests_per_minute, input_per_minute, input_per_day, output_per_minute, output_per_day] = self.limits;
        let in_flight = in_flight.map(|most| u32::try_from(most).unwrap_or(u32::MAX));
        KeyLimits { in_flight, requests_per_minute, input_per_minute, input_per_day, output_per_minute, output_per_day, weight: None }
    }
}

impl TenantAccounts {
    fn open(&mut self, whose: AccountOwner, caller: &Caller, now: u64) -> Arc<TenantAccount> {
        if now >= self.next_sweep {
            self.next_sweep = now + SWEEP_INTERVAL_MS;
            // Keep an account that somebody else holds: it is about to be used, or has a request in
            // flight.
            self.by_owner.retain(|_, open| Arc::strong_count(open) > 1 || !open.account.lock().account.is_idle(&open.limits, now));
            self.last_owner.retain(|_, whose| self.by_owner.contains_key(whose));
        }
        let before = match self.last_owner.get(&caller.key) {
            Some(last) if *last == whose => None,
            _ => self.last_owner.insert(caller.key.clone(), whose.clone()),
        };
        let name = whose.name.clone();
        let open = self.open_owner(whose);
        // A key that has moved to another tenant brings nothing of its former tenant's use.
        if let Some(before) = before.filter(|before| before.name == name).and_then(|whose| self.by_owner.get(&whose)) {
            let day = before.account.lock().account.daily_usage();
            open.account.lock().account.carry_over(day, now);
        }
        open
    }
}

impl TenantAccounts {
    fn open_owner(&mut self, owner: AccountOwner) -> Arc<TenantAccount> {
        let successor = &self.successor;
        let open = |owner: &AccountOwner| Arc::new(TenantAccount::new(owner.clone(), successor.clone()));
        self.by_owner.entry(owner).or_insert_with_key(open).clone()
    }
}

impl TenantAccount {
    fn new(owner: AccountOwner, successor: Option<mpsc::UnboundedSender<UsageChange>>) -> Self {
        let limits = owner.limits();
        Self { owner, limits, account: Mutex::new(SharedAccount { account: Account::default(), successor }) }
    }

    fn reserve(&self, estimate: &UsageEstimate, now: u64) -> Result<(), LimitHit> {
        let mut shared = self.account.lock();
        shared.account.reserve(&self.limits, estimate, now)?;
        self.tell(&shared, UsageEvent::Reserved(*estimate), now);
        Ok(())
    }
}

impl Permit {
    /// Whether somebody pays for the request's usage.
    #[must_use]
    pub(crate) fn is_charged(&self) -> bool {
        self.reservation.is_some() || self.counted.is_some()
    }

    /// Replaces the reservation by the ended request's actual usage, as far as known.
    pub(crate) fn reconcile_usage(&mut self, used: ActualUsage) {
        if let Some(counted) = &mut self.counted {
            counted.record(used);
        }
        self.reconcile_reservation(used);
    }

    fn reconcile_reservation(&mut self, used: ActualUsage) {
        if let Some(Reservation { account, estimate, reserved_at }) = &mut self.reservation {
            let now = self.shared.now();
            let output = match used.output_tokens {
                OutputTokens::Exact(tokens) => tokens,
                OutputTokens::AtLeast(tokens) => tokens.max(estimate.output_tokens),
            };
            let used = (used.prompt_tokens.unwrap_or(estimate.prompt_tokens), output);
            account.apply(UsageEvent::Reconciled { estimate: *estimate, reserved_at: *reserved_at, used }, now);
            // A second reconciliation would correct these values.
            (estimate.prompt_tokens, estimate.output_tokens, estimate.max_output_tokens) = (used.0, used.1, None);
        }
    }
}

#[cfg(test)]
impl Permit {
    /// Keeps the place taken for ever.
    pub(crate) fn keep(&self) {
        self.shared.in_flight.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        // Usage that nobody reported counts as expected, not as the most that was possible.
        self.reconcile_reservation(ActualUsage { prompt_tokens: None, output_tokens: OutputTokens::AtLeast(0) });
        if let Some(Reservation { account, estimate, .. }) = &self.reservation {
            account.apply(UsageEvent::Released(*estimate), self.shared.now());
        }
    }
}

impl LimitExceeded {
    /// The error of a full router.
    pub(crate) fn of_router(message: String) -> Self {
        Self { message, retry_after: Some(1), limit: LimitKind::Router, is_quota: false }
    }

    fn for_hit(caller: &Caller, hit: &LimitHit, estimated: &UsageEstimate) -> Self {
        let (limits, limit) = (&caller.limits, hit.limit);
        let retry_after = hit.wait_ms.map(|wait| wait.div_ceil(1000).max(1));
        let amount = if limit == LimitKind::DailyOutput { estimated.most_output_tokens() } else { estimated.prompt_tokens };
        let reserved = if hit.reserved > 0 { format!(" and {} are reserved by requests in flight", hit.reserved) } else { String::new() };
        let is_used_up = hit.left == 0 && hit.reserved == 0;
        let whose = if caller.tenant.is_empty() { format!("the key `{}`", caller.key) } else { format!("`{}`", caller.tenant) };
        let number = |limit: Option<u64>| limit.unwrap_or_default();
        let what = match limit {
            LimitKind::Router | LimitKind::InFlight => format!("{} requests at once", number(limits.in_flight.map(u64::from))),
            LimitKind::Requests => format!("{} requests per minute", number(limits.requests_per_minute)),
            LimitKind::Input => {
                format!("{} prompt tokens per minute, and this has about {}", number(limits.input_per_minute), estimated.prompt_tokens)
            }
            LimitKind::Output => {
                format!(
                    "{} generated tokens per minute, and this is expected to have {}",
                    number(limits.output_per_minute),
                    estimated.output_tokens
                )
            }
            LimitKind::DailyInput if is_used_up => format!("{} prompt tokens per day, which are used up", number(limits.input_per_day)),
            LimitKind::DailyOutput if is_used_up => {
                format!("{} generated tokens per day, which are used up", number(limits.output_per_day))
            }
            LimitKind::DailyInput => {
                let limit = number(limits.input_per_day);
                format!("{limit} prompt tokens per day, of which {} are left{reserved}, and this has about {amount}", hit.left)
            }
            LimitKind::DailyOutput => {
                let limit = number(limits.output_per_day);
                let smaller = if hit.left > 0 { "; a smaller `max_tokens` would do" } else { "" };
                format!("{limit} generated tokens per day, of which {} are left{reserved}, and this reserves {amount}{smaller}", hit.left)
            }
        };
        let again = retry_after.map(|seconds| format!("; try again in {seconds} s")).unwrap_or_default();
        Self { message: format!("{whose} may use {what}{again}"), retry_after, limit, is_quota: hit.is_quota(amount) }
    }
}
