//! Tokens and sessions of the page's viewers. `hostler page` fetches tokens, each of which is
//! traded once for a session. An admin key can be traded for a session too. All are kept only as
//! SHA-256 and in memory, so they end with the router.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hostler_tls::hex;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::{Keys, Role, Secret, Unauthenticated};
use crate::random::random;

/// Life of a token from `hostler page` to the browser that it opened. The address is in a terminal
/// until then.
pub(crate) const TOKEN_LIFE: Duration = Duration::from_secs(60);

/// Life of a session: a working day. Nobody should have to sign in again while something burns.
const SESSION_LIFE: Duration = Duration::from_secs(12 * 3600);

/// Most unused tokens, and most sessions. If there are more, those that end first are dropped.
const MAX_TOKENS: usize = 32;
const MAX_SESSIONS: usize = 256;

/// The rights of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PageRights {
    Watch,
    /// May also drain, restart and the like.
    Operate,
}

/// A token or a session as the browser shows it: 256 random bits. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PageTicket(String);

impl PageTicket {
    fn random() -> io::Result<Self> {
        Ok(Self(hex(&random::<32>()?)))
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for PageTicket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("PageTicket(..)")
    }
}

/// SHA-256 of a ticket. Finding one by its hash reveals nothing of the ticket, however long that
/// takes.
type TicketHash = [u8; 32];

fn hash(ticket: &str) -> TicketHash {
    Sha256::digest(ticket.as_bytes()).into()
}

#[derive(Debug)]
struct Grant {
    rights: PageRights,
    ends_at: Instant,
    /// The key that the grant was given for. The grant ends with the key.
    key: Option<Secret>,
}

#[derive(Debug, Default)]
struct Grants {
    tokens: FxHashMap<TicketHash, Grant>,
    sessions: FxHashMap<TicketHash, Grant>,
}

/// Clones share the sessions.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageSessions {
    pub(super) keys: Keys,
    grants: Arc<Mutex<Grants>>,
}

/// Why a browser gets no session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoSession {
    #[error("this address has been used, or is older than {} s: run `hostler page` again", TOKEN_LIFE.as_secs())]
    Token,
    #[error("{0}: the page wants a key with the role admin")]
    Key(#[from] Unauthenticated),
    #[error("the key {0} is for sending requests; the page wants one with the role admin: `hostler keys create --role admin`")]
    Role(Arc<str>),
    #[error("this router has no keys: run `hostler page` on its host, as its user")]
    NoKeys,
    #[error("the system gives no random numbers: {0}")]
    Random(#[from] io::Error),
}

impl PageSessions {
    pub(crate) fn new(keys: Keys) -> Self {
        Self { keys, grants: Arc::default() }
    }

    /// Whether there is a key file that has changed and cannot be read.
    pub(crate) fn is_key_file_unusable(&self) -> bool {
        self.keys.is_file_usable() == Some(false)
    }

    /// Issues a token that one browser can trade for a session within `TOKEN_LIFE`. Both end with
    /// the key that the caller has `shown`.
    pub(crate) fn issue_token(&self, rights: PageRights, shown: Option<&str>) -> io::Result<PageTicket> {
        let token = PageTicket::random()?;
        // Callers on the socket show no key, and the process's own key is in no file.
        let key = shown.filter(|key| self.keys.find_caller(key).is_ok()).and_then(|key| key.parse().ok());
        let grant = Grant { rights, ends_at: Instant::now() + TOKEN_LIFE, key };
        keep(&mut self.grants.lock().tokens, &token, grant, MAX_TOKENS);
        Ok(token)
    }

    /// Trades a token for a session.
    ///
    /// # Errors
    /// If nobody issued the token, it was used before, or its time is over.
    pub(crate) fn redeem_token(&self, token: &str) -> Result<(PageTicket, PageRights), NoSession> {
        let redeemed = self.grants.lock().tokens.remove(&hash(token)).filter(|grant| Instant::now() < grant.ends_at);
        let Grant { rights, key, .. } = redeemed.filter(|grant| self.is_still_good(grant.key.as_ref())).ok_or(NoSession::Token)?;
        self.begin(rights, key)
    }

    /// Trades an admin key for a session.
    ///
    /// # Errors
    /// If the key is no admin key of this router.
    pub(crate) fn redeem_key(&self, key: &str) -> Result<(PageTicket, PageRights), NoSession> {
        if !self.keys.are_required() {
            return Err(NoSession::NoKeys);
        }
        let caller = self.keys.find_caller(key)?;
        if caller.role != Role::Admin {
            return Err(NoSession::Role(caller.key));
        }
        self.begin(PageRights::Operate, key.parse().ok())
    }

    fn begin(&self, rights: PageRights, key: Option<Secret>) -> Result<(PageTicket, PageRights), NoSession> {
        let session = PageTicket::random()?;
        let grant = Grant { rights, ends_at: Instant::now() + SESSION_LIFE, key };
        keep(&mut self.grants.lock().sessions, &session, grant, MAX_SESSIONS);
        Ok((session, rights))
    }

    /// The rights of a session, if it lives and its key, if it has one, is still valid.
    pub(crate) fn rights(&self, session: &str) -> Option<PageRights> {
        let (rights, key) = {
            let grants = self.grants.lock();
            let grant = grants.sessions.get(&hash(session)).filter(|grant| Instant::now() < grant.ends_at)?;
            (grant.rights, grant.key.clone())
        };
        self.is_still_good(key.as_ref()).then_some(rights)
    }

    /// The key with which a session began, if it had one.
    pub(crate) fn key(&self, session: &str) -> Option<Secret> {
        self.rights(session)?;
        self.grants.lock().sessions.get(&hash(session))?.key.clone()
    }

    /// Whether a grant's key, if it has one, is a valid admin key.
    fn is_still_good(&self, key: Option<&Secret>) -> bool {
        key.is_none_or(|key| self.keys.find_caller(key.reveal()).is_ok_and(|caller| caller.role == Role::Admin))
    }
}

/// Adds a grant after removing expired ones and, if there are too many, the one that ends first.
fn keep(grants: &mut FxHashMap<TicketHash, Grant>, ticket: &PageTicket, grant: Grant, most: usize) {
    let now = Instant::now();
    grants.retain(|_, grant| now < grant.ends_at);
    if grants.len() >= most
        && let Some(first) = grants.iter().min_by_key(|(_, grant)| grant.ends_at).map(|(hash, _)| *hash)
    {
        grants.remove(&first);
    }
    grants.insert(hash(ticket.reveal()), grant);
}

#[cfg(test)]
mod tests;
