//! The token by which the fleet's jobs join, in a file that agents read when they start.
//!
//! All jobs share one token, because a job's id may be known only after the job has started. The
//! token is renewed long before it expires or is used up, because a job may wait for days.

use std::path::Path;
use std::time::Duration;

use hostler_tls::{Authority, JoinToken, TlsError, TokenInfo, TokenScope, TokenStore, UseLimit, read_private, write_private};

/// Lifetime of a token: twice as long as most queues let a job wait.
const LIFETIME: Duration = Duration::from_secs(14 * 24 * 3600);

/// Most uses of a token. Each new node name takes one, so each job does, but not its later runs.
const USES: u32 = 1000;

/// Writes a new token into the file, unless the present one is good for this many nodes and half of
/// its time.
pub(crate) fn renew(authority: &Path, file: &Path, nodes: u32, now: u64) -> Result<(), TlsError> {
    let store = TokenStore::in_folder(authority);
    let known = Authority::load(authority)?;
    if file.exists() {
        // A file without a valid token is replaced.
        let kept = JoinToken::parse(&String::from_utf8_lossy(&read_private(file)?)).ok();
        let kept = kept.filter(|token| token.fleet == known.fingerprint());
        if let Some(token) = kept
            && store.list()?.iter().any(|info| info.id == token.id && is_fresh(info, nodes, now))
        {
            return Ok(());
        }
    }
    let token = store.create(&known, &TokenScope::new(LIFETIME, UseLimit::Count(USES)), now)?;
    tracing::info!(token = token.id, "a new token for the fleet's jobs");
    write_private(file, format!("{}\n", token.text()).as_bytes())
}

fn is_fresh(info: &TokenInfo, nodes: u32, now: u64) -> bool {
    let left = USES.saturating_sub(u32::try_from(info.used_by.len()).unwrap_or(USES));
    !info.revoked && info.expires.saturating_sub(now) >= LIFETIME.as_secs() / 2 && left >= nodes.max(USES / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(expires: u64, used: usize, revoked: bool) -> TokenInfo {
        let used_by = vec!["n".to_owned(); used];
        TokenInfo { id: "a".into(), expires, job: String::new(), node: String::new(), uses: USES, used_by, revoked }
    }

    #[test]
    fn join_tokens_are_renewed_at_half_their_time_or_uses() {
        let week = LIFETIME.as_secs() / 2;
        assert!(is_fresh(&info(week, 500, false), 500, 0));
        assert!(!is_fresh(&info(week, 0, false), 1, 1));
        assert!(!is_fresh(&info(week, 501, false), 1, 0));
        assert!(!is_fresh(&info(week, 100, false), 901, 0));
        assert!(!is_fresh(&info(week, 0, true), 1, 0));
    }

    #[test]
    fn the_token_file_keeps_only_good_tokens_of_its_fleet() {
        let place = tempfile::tempdir().unwrap();
        let (first, second, file) = (place.path().join("a"), place.path().join("b"), place.path().join("join-token"));
        for authority in [&first, &second] {
            Authority::create(authority, "fleet").unwrap();
        }
        let renewed = |authority: &Path| {
            renew(authority, &file, 4, 1000).unwrap();
            JoinToken::parse(&String::from_utf8(read_private(&file).unwrap()).unwrap()).unwrap()
        };
        let token = renewed(&first);
        assert_eq!(renewed(&first), token);
        let other = renewed(&second);
        assert_eq!(other.fleet, Authority::load(&second).unwrap().fingerprint());
        TokenStore::in_folder(&second).revoke(&other.id).unwrap();
        assert_ne!(renewed(&second).id, other.id);
    }
}
