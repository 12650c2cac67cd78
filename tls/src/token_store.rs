//! Join tokens of a fleet, as files beside its authority: the promise (`ID.json`), its uses
//! (`ID.use-N`), and its revocation (`ID.revoked`).
//!
//! Files are only ever added, and none replaces another. So several routers and people may share
//! the folder without locks, even on a network file system.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use crate::files::{make_folder, read, write_new};
use crate::node_names::{NameHolder, NodeNames};
use crate::token::{hash, is_id};
use crate::{Authority, Fingerprint, JoinToken, TlsError, check_name, format_time, hex, parse_hex, read_private, write_private};

/// Largest count of uses; the job of a larger fleet has a token without a count.
const MAX_USES: u32 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UseLimit {
    Count(u32),
    EveryNodeOfItsJob,
}

#[derive(Debug, Clone)]
pub struct TokenScope {
    /// Time until the token expires, from now.
    pub expires_in: Duration,
    /// The scheduler's job that nodes must run in; empty for any.
    pub job: String,
    pub uses: UseLimit,
    /// Node name that the token admits; empty for any free name.
    ///
    /// A named one is handed over, whoever had it.
    pub node: String,
}

impl TokenScope {
    /// Scope for nodes of any name and job.
    #[must_use]
    pub fn new(expires_in: Duration, uses: UseLimit) -> Self {
        Self { expires_in, job: String::new(), uses, node: String::new() }
    }
}

#[derive(Debug, Clone)]
pub struct JoinRequest {
    pub node: String,
    /// Job that the node runs in; empty outside of any.
    pub job: String,
    pub key: Fingerprint,
}

/// Why a token is not accepted. The text is for its holder and for the log.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("this router's fleet has no token {0} with this secret: make one with `hostler token create`")]
    Unknown(String),
    #[error("token {0} was revoked: ask for another (`hostler token create`)")]
    Revoked(String),
    #[error("token {id} expired at {}, and it is {} by the router's clock: make another with `hostler token create`", format_time(*.expired), format_time(*.now))]
    Expired { id: String, expired: u64, now: u64 },
    #[error(
        "token {id} has been used already, by {by}: make one for each node with `hostler token create`, or one for several with --uses"
    )]
    Used { id: String, by: String },
    #[error("token {id} is for nodes of job {expected}, and this agent is {}: make one for its job with `hostler token create --job`", in_job(.found))]
    OtherJob { id: String, expected: String, found: String },
    #[error(
        "token {id} is for node {expected}, and this agent calls itself `{found}`: let it join by that name (--node), or with another token"
    )]
    OtherNode { id: String, expected: String, found: String },
    #[error(
        "node `{0}` has joined before with another key, so this agent may not take its name: start it with the node's folder of agent.identity_dir, or \
         choose another name (--node); where the node was set up anew, let an operator make a token for it: `hostler token create --node {0}`"
    )]
    NameTaken(String),
    #[error("the router cannot look at its tokens: {0}")]
    Folder(#[from] TlsError),
}

fn in_job(job: &str) -> String {
    if job.is_empty() { "in no job".into() } else { format!("in job {job}") }
}

/// A token as lists show it.
#[derive(Debug, Clone, Serialize)]
pub struct TokenInfo {
    pub id: String,
    /// Time of expiry: Unix time in seconds.
    pub expires: u64,
    /// Job of the token; empty for any.
    pub job: String,
    /// Node of the token; empty for any.
    pub node: String,
    /// Number of nodes that may use the token; 0 for every node of its job.
    pub uses: u32,
    /// Nodes that have used the token, if uses are counted.
    pub used_by: Vec<String>,
    pub revoked: bool,
}

/// Content of `ID.json`.
#[derive(Debug, Serialize, Deserialize)]
struct StoredToken {
    /// SHA-256 of the secret.
    secret: String,
    expires: u64,
    job: String,
    /// Number of uses; 0 means that uses are not counted.
    uses: u32,
    /// Name of the node; empty for any.
    #[serde(default)]
    node: String,
}

/// Content of `ID.use-N`.
#[derive(Debug, Serialize, Deserialize)]
struct TokenUse {
    node: String,
    /// Key of the node.
    ///
    /// The same key may use the token again, since the first answer may have been lost.
    key: String,
    at: u64,
}

#[derive(Debug, Clone)]
pub struct TokenStore {
    folder: PathBuf,
    names: NodeNames,
}

impl TokenStore {
    /// Token store beside the authority in this folder.
    #[must_use]
    pub fn in_folder(authority: &Path) -> Self {
        Self { folder: authority.join("tokens"), names: NodeNames::in_folder(authority) }
    }

    /// Creates a token.
    ///
    /// # Errors
    /// When the scope makes no sense, or the folder cannot be written.
    pub fn create(&self, authority: &Authority, scope: &TokenScope, now: u64) -> Result<JoinToken, TlsError> {
        let uses = match scope.uses {
            UseLimit::Count(uses) if (1..=MAX_USES).contains(&uses) => uses,
            UseLimit::Count(_) => {
                return Err(TlsError::Crypto(format!("a token is used by 1 to {MAX_USES} nodes, or by every node of a job (--job)")));
            }
            UseLimit::EveryNodeOfItsJob if scope.job.is_empty() => {
                return Err(TlsError::Crypto("a token without a count of uses is for one job: say which with --job".into()));
            }
            UseLimit::EveryNodeOfItsJob => 0,
        };
        if !scope.node.is_empty() {
            check_name(&scope.node)?;
            if uses != 1 {
                return Err(TlsError::Crypto("a token that hands over a node's name is used once: leave out --uses".into()));
            }
        }
        make_folder(&self.folder)?;
        let token = JoinToken::generate(authority.fingerprint())?;
        let expires = now.saturating_add(scope.expires_in.as_secs());
        let promise = StoredToken { secret: hex(&hash(&token.secret())), expires, job: scope.job.clone(), uses, node: scope.node.clone() };
        self.write(&format!("{}.json", token.id), &promise)?;
        Ok(token)
    }

    /// Admits a node by a token, and records the use. The same key may use the token again.
    ///
    /// # Errors
    /// When the token is not accepted, or not for this node.
    pub fn redeem(&self, id: &str, secret: &[u8], applicant: &JoinRequest, now: u64) -> Result<(), TokenError> {
        let unknown = || TokenError::Unknown(id.chars().filter(char::is_ascii_alphanumeric).take(16).collect());
        if !is_id(id) {
            return Err(unknown());
        }
        let promise = self.stored_token(id)?.ok_or_else(unknown)?;
        let kept: [u8; 32] = parse_hex(&promise.secret).ok_or_else(unknown)?;
        if !bool::from(kept.ct_eq(&hash(secret))) {
            return Err(unknown());
        }
        if self.is_revoked(id) {
            return Err(TokenError::Revoked(id.to_owned()));
        }
        if promise.expires <= now {
            return Err(TokenError::Expired { id: id.to_owned(), expired: promise.expires, now });
        }
        if !promise.job.is_empty() && !job_matches(&promise.job, &applicant.job) {
            return Err(TokenError::OtherJob { id: id.to_owned(), expected: promise.job, found: applicant.job.clone() });
        }
        let (node, key) = (&applicant.node, applicant.key);
        if !promise.node.is_empty() && promise.node != *node {
            return Err(TokenError::OtherNode { id: id.to_owned(), expected: promise.node, found: node.clone() });
        }
        // Check the name before the token is used.
        let holder = self.names.holder(node, key)?;
        if matches!(holder, NameHolder::Another(_)) && promise.node.is_empty() {
            return Err(TokenError::NameTaken(node.clone()));
        }
        let earlier = self.record_use(id, &promise, applicant, now)?;
        match (holder, earlier) {
            // A name is handed over only once: a node that got it by this token and has lost it
            // since does not get it back. If another key has had the name since before the use,
            // that use was interrupted.
            (NameHolder::Another(since), Some(used)) if since >= used => Err(TokenError::NameTaken(node.clone())),
            (NameHolder::Another(_), _) => Ok(self.names.hand_over(node, key, now)?),
            _ => match self.names.claim(node, key, now) {
                Ok(NameHolder::Another(_)) => Err(TokenError::NameTaken(node.clone())),
                Ok(_) => Ok(()),
                // A token without a count needs no record, so it admits even if the folder is
                // read-only.
                Err(error @ TlsError::Write { .. }) if promise.uses == 0 => {
                    tracing::warn!(node, %error, "whose the node's name is cannot be written down");
                    Ok(())
                }
                Err(error) => Err(error.into()),
            },
        }
    }

    /// Records that a free name belongs to this node with this key.
    ///
    /// If the record names another key, the key whose certificate was `issued` later gets the name:
    /// a router with a separate folder may have handed it over.
    ///
    /// # Errors
    /// When the name belongs to another key.
    pub fn claim(&self, node: &str, key: Fingerprint, issued: u64) -> Result<(), TokenError> {
        match self.names.claim(node, key, issued)? {
            NameHolder::Another(since) if since >= issued => Err(TokenError::NameTaken(node.to_owned())),
            NameHolder::Another(_) => Ok(self.names.hand_over(node, key, issued)?),
            NameHolder::ThisKey | NameHolder::Nobody => Ok(()),
        }
    }

    /// Makes a node's name free: its job is gone, so no node has it.
    ///
    /// # Errors
    /// When the record of its key cannot be removed.
    pub fn release_name(&self, node: &str) -> Result<(), TlsError> {
        self.names.release(node)
    }

    /// Records the use, and returns the time of this node's earlier use of the token, if any.
    fn record_use(&self, id: &str, promise: &StoredToken, applicant: &JoinRequest, now: u64) -> Result<Option<u64>, TokenError> {
        if promise.uses == 0 {
            return Ok(None);
        }
        let used = TokenUse { node: applicant.node.clone(), key: applicant.key.to_string(), at: now };
        let mut by = Vec::new();
        for number in 1..=promise.uses.min(MAX_USES) {
            let name = format!("{id}.use-{number}");
            match self.write(&name, &used) {
                Ok(()) => return Ok(None),
                Err(error) if error.is_already_there() => {}
                Err(error) => return Err(error.into()),
            }
            let earlier: Option<TokenUse> = self.read(&name)?;
            if let Some(earlier) = earlier.as_ref().filter(|earlier| earlier.node == used.node && earlier.key == used.key) {
                return Ok(Some(earlier.at));
            }
            by.extend(earlier.map(|earlier| earlier.node));
        }
        Err(TokenError::Used { id: id.to_owned(), by: by.join(", ") })
    }

    /// Whether a token was revoked. Certificates of nodes that joined by it are not renewed.
    #[must_use]
    pub fn is_revoked(&self, id: &str) -> bool {
        is_id(id) && self.folder.join(format!("{id}.revoked")).exists()
    }

    /// Revokes a token; `false` if it does not exist.
    ///
    /// # Errors
    /// When the folder cannot be read or written.
    pub fn revoke(&self, id: &str) -> Result<bool, TlsError> {
        if !is_id(id) || self.stored_token(id)?.is_none() {
            return Ok(false);
        }
        write_private(&self.folder.join(format!("{id}.revoked")), b"")?;
        Ok(true)
    }

    /// All tokens, the one that expires last first.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn list(&self) -> Result<Vec<TokenInfo>, TlsError> {
        let failed = |source| TlsError::Read { path: self.folder.clone(), source };
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let name = |entry: std::io::Result<fs::DirEntry>| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
        let names: Result<Vec<String>, TlsError> = entries.map(name).collect();
        let mut records = Vec::new();
        for id in names?.iter().filter_map(|name| name.strip_suffix(".json")).filter(|id| is_id(id)) {
            let Some(promise) = self.stored_token(id)? else { continue };
            let uses =
                (1..=promise.uses.min(MAX_USES)).map_while(|number| self.read::<TokenUse>(&format!("{id}.use-{number}")).ok().flatten());
            let used_by = uses.map(|used| used.node).collect();
            let revoked = self.is_revoked(id);
            let StoredToken { expires, job, uses, node, .. } = promise;
            records.push(TokenInfo { id: id.to_owned(), expires, job, node, uses, used_by, revoked });
        }
        records.sort_by(|one, other| other.expires.cmp(&one.expires).then_with(|| one.id.cmp(&other.id)));
        Ok(records)
    }

    fn stored_token(&self, id: &str) -> Result<Option<StoredToken>, TlsError> {
        let path = self.folder.join(format!("{id}.json"));
        // This file must be private, too. A hash does not let anybody guess the secret, but the
        // expiry must be trustworthy.
        if path.exists() {
            read_private(&path)?;
        }
        self.read(&format!("{id}.json"))
    }

    /// Content of a file; `None` if it does not exist.
    fn read<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>, TlsError> {
        let path = self.folder.join(name);
        match read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|error| TlsError::Content { path, what: format!("it is damaged ({error}); remove it") }),
            Err(TlsError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn write<T: Serialize>(&self, name: &str, content: &T) -> Result<(), TlsError> {
        let text = serde_json::to_vec(content).map_err(|error| TlsError::Crypto(error.to_string()))?;
        write_new(&self.folder.join(name), &text)
    }
}

/// Whether a node in job `found` is in the expected job.
///
/// Schedulers name one part of an array job `1234[7].server`, and the whole `1234[].server`.
fn job_matches(expected: &str, found: &str) -> bool {
    let whole = |job: &str| match (job.find('['), job.find(']')) {
        (Some(open), Some(close)) if open < close => Some(format!("{}[]{}", &job[..open], &job[close + 1..])),
        _ => None,
    };
    expected == found || (expected.contains("[]") && whole(found).as_deref() == Some(expected))
}
