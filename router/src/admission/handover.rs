//! Hands callers' usage to the router's successor: all of it at once, then each change. Both
//! routers count in the same milliseconds, so a change has the same effect there.

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::account::Account;
use super::{AccountOwner, Admission, TenantAccount, UsageEstimate};
use crate::keys::KeyLimits;

/// The usage at one moment.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct UsageLedger {
    /// The time of the accounts.
    now: u64,
    accounts: Vec<(AccountOwner, Account)>,
    last_owner: Vec<(String, AccountOwner)>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct UsageChange {
    owner: AccountOwner,
    now: u64,
    event: UsageEvent,
}

/// An event of an account.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum UsageEvent {
    Reserved(UsageEstimate),
    Reconciled {
        estimate: UsageEstimate,
        reserved_at: u64,
        /// Prompt tokens and generated tokens.
        used: (u64, u64),
    },
    Released(UsageEstimate),
}

impl Account {
    fn apply(&mut self, limits: &KeyLimits, event: &UsageEvent, now: u64) {
        match event {
            UsageEvent::Reserved(estimate) => self.add(limits, estimate, now),
            UsageEvent::Reconciled { estimate, reserved_at, used } => self.reconcile(limits, (estimate, *reserved_at), *used, now),
            UsageEvent::Released(estimate) => self.release(estimate),
        }
    }
}

/// An account, and the successor that receives its events.
#[derive(Debug, Default)]
pub(super) struct SharedAccount {
    pub(super) account: Account,
    pub(super) successor: Option<mpsc::UnboundedSender<UsageChange>>,
}

impl TenantAccount {
    /// Applies an event here and sends it to the successor.
    pub(super) fn apply(&self, event: UsageEvent, now: u64) {
        let mut shared = self.account.lock();
        shared.account.apply(&self.limits, &event, now);
        self.tell(&shared, event, now);
    }

    /// Tells the successor about a past event.
    pub(super) fn tell(&self, shared: &SharedAccount, event: UsageEvent, now: u64) {
        let Some(successor) = &shared.successor else { return };
        // The successor may have left.
        let _ = successor.send(UsageChange { owner: self.owner.clone(), now, event });
    }
}

impl Admission {
    /// All usage so far. Later events are sent to `successor`.
    pub(crate) fn export(&self, successor: mpsc::UnboundedSender<UsageChange>) -> UsageLedger {
        let mut accounts = self.0.accounts.lock();
        accounts.successor = Some(successor.clone());
        let exported = accounts.by_owner.iter().map(|(owner, open)| {
            let mut shared = open.account.lock();
            shared.successor = Some(successor.clone());
            (owner.clone(), shared.account.clone())
        });
        UsageLedger {
            now: self.0.now(),
            accounts: exported.collect(),
            last_owner: accounts.last_owner.iter().map(|(key, owner)| (key.to_string(), owner.clone())).collect(),
        }
    }

    /// Takes over another router's accounts, before anything was used here.
    #[must_use]
    pub(crate) fn import(&self, ledger: UsageLedger) -> ForeignRequests {
        self.0.set_clock(ledger.now);
        let mut accounts = self.0.accounts.lock();
        let mut in_flight = FxHashMap::default();
        for (owner, account) in ledger.accounts {
            in_flight.insert(owner.clone(), account.in_flight());
            accounts.open_owner(owner).account.lock().account = account;
        }
        accounts.last_owner = ledger.last_owner.into_iter().map(|(key, owner)| (key.into(), owner)).collect();
        ForeignRequests { admission: self.clone(), in_flight }
    }
}

/// Requests in flight at the predecessor, which count here. If the predecessor ends without a word
/// about them, they have ended with it.
#[derive(Debug)]
pub(crate) struct ForeignRequests {
    admission: Admission,
    in_flight: FxHashMap<AccountOwner, u32>,
}

impl ForeignRequests {
    pub(crate) fn apply(&mut self, change: UsageChange) {
        let UsageChange { owner, now, event } = change;
        let open = self.admission.0.accounts.lock().open_owner(owner.clone());
        let in_flight = self.in_flight.entry(owner).or_default();
        match event {
            UsageEvent::Reserved(_) => *in_flight += 1,
            UsageEvent::Reconciled { .. } => {}
            // An end needs a begin: a lost message must not end others' requests.
            UsageEvent::Released(_) if *in_flight == 0 => return,
            UsageEvent::Released(_) => *in_flight -= 1,
        }
        open.apply(event, now);
    }
}

impl Drop for ForeignRequests {
    fn drop(&mut self) {
        let mut accounts = self.admission.0.accounts.lock();
        let now = self.admission.0.now();
        for (owner, in_flight) in self.in_flight.drain().filter(|(_, in_flight)| *in_flight > 0) {
            let open = accounts.open_owner(owner);
            (0..in_flight).for_each(|_| open.apply(UsageEvent::Released(UsageEstimate::default()), now));
        }
    }
}

/// Serializes shared text as plain text.
pub(super) mod shared_text {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(text)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<str>, D::Error> {
        String::deserialize(deserializer).map(Into::into)
    }
}

#[cfg(test)]
mod tests;
