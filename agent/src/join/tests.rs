//! Sources of the token, leftovers of an earlier life, and the use of plain text.

use std::os::unix::fs::PermissionsExt;

use hostler_tls::{Authority, write_private};
use tempfile::TempDir;

use super::*;

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn authority(&self, name: &str) -> Authority {
        Authority::create(&self.path(name), name).unwrap()
    }

    /// Leaves a certificate of an earlier life of node `n1`.
    fn certify(&self, authority: &Authority, lifetime: Duration) {
        let key = NodeKey::load_or_create(&self.path("nodes/n1/node.key")).unwrap();
        let issued = authority.issue("n1", "0011223344556677", &key.request().unwrap(), lifetime).unwrap();
        Identity::new(authority.certificate(), &issued.certificate, &key, self.0.path()).unwrap().save(&self.path("nodes/n1")).unwrap();
    }

    async fn open(&self) -> Result<Arc<Membership>, String> {
        let config = AgentConfig { join_token_file: self.path("token"), identity_dir: self.path("nodes"), ..AgentConfig::default() };
        match RouterAccess::open(&config, "n1").await {
            Ok(RouterAccess::Fleet(membership)) => Ok(membership),
            Ok(RouterAccess::Plain { .. }) => Err("plain".into()),
            Err(error) => Err(error.to_string()),
        }
    }
}

#[tokio::test]
async fn plain_text_leaves_the_host_only_where_it_is_permitted() {
    let (here, there) = ("127.0.0.1:1".parse().unwrap(), "192.0.2.1:1".parse().unwrap());
    let open =
        async |allow_plain_text| RouterAccess::open(&AgentConfig { allow_plain_text, ..AgentConfig::default() }, "n1").await.unwrap();
    assert!(matches!(open(false).await.identity(here).await, Ok(None)));
    let refused = open(false).await.identity(there).await.unwrap_err().to_string();
    assert!(refused.contains("192.0.2.1:1 is on another host") && refused.contains("agent.join_token_file"), "{refused}");
    assert!(matches!(open(true).await.identity(there).await, Ok(None)));
}

#[tokio::test]
async fn a_node_without_certificate_says_what_its_token_lacks() {
    let place = Place::new();
    assert!(place.open().await.unwrap_err().contains("cannot read"));
    write_private(&place.path("token"), b"not a token").unwrap();
    let wrong = place.open().await.unwrap_err();
    assert!(wrong.contains("/token: this is no join token"), "{wrong}");
    let token = JoinToken::generate(place.authority("f").fingerprint()).unwrap();
    write_private(&place.path("token"), token.text().as_bytes()).unwrap();
    assert!(place.open().await.unwrap().identity.lock().is_none());
    std::fs::set_permissions(place.path("token"), std::fs::Permissions::from_mode(0o644)).unwrap();
    let exposed = place.open().await.unwrap_err();
    assert!(exposed.contains("can be read by others") && exposed.contains("chmod 600"), "{exposed}");
}

#[tokio::test]
async fn a_kept_certificate_is_used_while_valid_for_the_fleet() {
    let place = Place::new();
    let (ours, theirs) = (place.authority("f"), place.authority("g"));
    place.certify(&ours, Duration::from_secs(60));
    let kept = place.open().await.unwrap();
    assert_eq!(kept.identity.lock().as_ref().unwrap().fleet, ours.fingerprint(), "the token may be gone by now");
    let foreign = JoinToken::generate(theirs.fingerprint()).unwrap();
    write_private(&place.path("token"), foreign.text().as_bytes()).unwrap();
    assert!(place.open().await.unwrap().identity.lock().is_none(), "the node moves to the token's fleet");
    let own = JoinToken::generate(ours.fingerprint()).unwrap();
    write_private(&place.path("token"), own.text().as_bytes()).unwrap();
    place.certify(&ours, Duration::ZERO);
    assert!(place.open().await.unwrap().identity.lock().is_none(), "it has expired");
}

#[tokio::test]
async fn a_certificate_refused_by_a_router_is_not_shown_again() {
    let place = Place::new();
    place.certify(&place.authority("f"), Duration::from_secs(60));
    let membership = place.open().await.unwrap();
    let access = RouterAccess::Fleet(membership.clone());
    let shown = access.identity("127.0.0.1:1".parse().unwrap()).await.unwrap().unwrap();
    access.discard(&shown);
    assert!(membership.identity.lock().is_none());
}
