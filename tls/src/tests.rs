//! Tokens, the authority's folder, and handshakes with an invalid side.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Barrier;
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use super::*;

const NOW: u64 = 1_000_000;

struct Fleet {
    folder: TempDir,
    authority: Arc<Authority>,
    tokens: TokenStore,
}

fn fleet() -> Fleet {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("fleet");
    let authority = Arc::new(Authority::create(&place, "f").unwrap());
    Fleet { tokens: TokenStore::in_folder(&place), folder, authority }
}

impl Fleet {
    fn key(&self, name: &str) -> NodeKey {
        NodeKey::load_or_create(&self.folder.path().join(name).join("node.key")).unwrap()
    }

    fn token(&self, job: &str, uses: UseLimit) -> JoinToken {
        let scope = TokenScope { job: job.into(), ..TokenScope::new(Duration::from_secs(60), uses) };
        self.tokens.create(&self.authority, &scope, NOW).unwrap()
    }

    fn redeem(&self, token: &JoinToken, node: &str, job: &str, now: u64) -> Result<(), String> {
        let applicant = JoinRequest { node: node.into(), job: job.into(), key: self.key(node).fingerprint() };
        self.tokens.redeem(&token.id, &token.secret(), &applicant, now).map_err(|refused| refused.to_string())
    }

    fn member(&self, name: &str, lifetime: Duration) -> Arc<ClientConfig> {
        let key = self.key(name);
        let issued = self.authority.issue(name, "0011223344556677", &key.request().unwrap(), lifetime).unwrap();
        member_config(self.authority.certificate(), &issued.certificate, &key, Path::new("here")).unwrap()
    }

    fn router(&self) -> Handshake {
        AgentsTls::new(self.authority.clone(), Duration::from_secs(60)).unwrap().handshake()
    }
}

#[test]
fn only_regular_files_are_read_as_certificates() {
    let error = crate::files::read(Path::new("/dev/null")).unwrap_err().to_string();
    assert_eq!(error, "/dev/null: not a regular file");
    assert!(read_private(Path::new("/dev/null")).is_ok(), "a shell may pass a token on by a pipe");
}

#[test]
fn a_token_survives_a_round_trip_and_hides_its_secret() {
    let fleet = fleet();
    let token = fleet.token("", UseLimit::Count(1));
    let text = token.text();
    assert_eq!(JoinToken::parse(&format!(" {text}\n")).unwrap(), token);
    for damaged in ["", "x", &text[1..], &text[..text.len() - 1], &text.replace('#', "."), &text.to_uppercase()] {
        assert!(matches!(JoinToken::parse(damaged), Err(TlsError::NotAToken)), "{damaged}");
    }
    let secret = hex(&token.secret());
    assert!(!format!("{token:?}").contains(&secret));
    for entry in std::fs::read_dir(fleet.folder.path().join("fleet/tokens")).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
        assert!(!std::fs::read_to_string(path).unwrap().contains(&secret));
    }
}

#[test]
fn a_token_admits_only_those_that_it_was_made_for() {
    let fleet = fleet();
    let single = fleet.token("", UseLimit::Count(1));
    fleet.redeem(&single, "n1", "", NOW).unwrap();
    fleet.redeem(&single, "n1", "", NOW + 59).unwrap();
    let revoked = fleet.token("", UseLimit::Count(1));
    assert!(fleet.tokens.revoke(&revoked.id).unwrap());
    assert!(!fleet.tokens.revoke("0000000000000000").unwrap());
    let of_job = fleet.token("12.host", UseLimit::EveryNodeOfItsJob);
    let of_array = fleet.token("12[].host", UseLimit::Count(2));
    let stranger = JoinToken::generate(fleet.authority.fingerprint()).unwrap();
    for (node, job) in [("a", "12.host"), ("b", "12.host")] {
        fleet.redeem(&of_job, node, job, NOW).unwrap();
    }
    for (node, job) in [("a", "12[1].host"), ("b", "12[2].host")] {
        fleet.redeem(&of_array, node, job, NOW).unwrap();
    }
    let cases = [
        (&single, "n2", "", NOW, "has been used already, by n1: make one for each node"),
        (
            &single,
            "n1",
            "",
            NOW + 60,
            "expired at 1970-01-12T13:47:40Z, and it is 1970-01-12T13:47:40Z by the router's clock: make another",
        ),
        (&revoked, "n1", "", NOW, "was revoked: ask for another"),
        (&of_job, "c", "13.host", NOW, "is for nodes of job 12.host, and this agent is in job 13.host"),
        (&of_job, "c", "", NOW, "and this agent is in no job"),
        (&of_array, "c", "12[3].host", NOW, "has been used already, by a, b"),
        (&of_array, "c", "13[1].host", NOW, "is for nodes of job 12[].host"),
        (&stranger, "n1", "", NOW, "has no token"),
    ];
    for (token, node, job, now, sentence) in cases {
        let refused = fleet.redeem(token, node, job, now).unwrap_err();
        assert!(refused.contains(sentence), "{sentence}: {refused}");
    }
    let wrong_secret = JoinToken::parse(&format!("{}.{}#{}", single.id, "00".repeat(32), single.fleet)).unwrap();
    assert!(fleet.redeem(&wrong_secret, "n1", "", NOW).unwrap_err().contains("has no token"));
    let applicant = JoinRequest { node: "n".into(), job: String::new(), key: fleet.key("n").fingerprint() };
    assert!(fleet.tokens.redeem("../../ca", b"x", &applicant, NOW).is_err());
    let listed: Vec<_> = fleet.tokens.list().unwrap().into_iter().map(|record| (record.id, record.used_by, record.revoked)).collect();
    assert!(
        listed.contains(&(single.id.clone(), vec!["n1".into()], false)) && listed.contains(&(revoked.id.clone(), vec![], true)),
        "{listed:?}"
    );
}

#[test]
fn a_single_use_token_admits_one_of_many_concurrent_nodes() {
    let fleet = fleet();
    let token = fleet.token("", UseLimit::Count(1));
    let (barrier, fleet) = (Barrier::new(8), &fleet);
    let admitted = std::thread::scope(|scope| {
        let come = |number: usize| {
            let (barrier, token) = (&barrier, &token);
            scope.spawn(move || {
                let key = fleet.key(&format!("n{number}")).fingerprint();
                barrier.wait();
                let applicant = JoinRequest { node: format!("n{number}"), job: String::new(), key };
                fleet.tokens.redeem(&token.id, &token.secret(), &applicant, NOW).is_ok()
            })
        };
        let all: Vec<_> = (0..8).map(come).collect();
        all.into_iter().filter_map(|one| one.join().ok()).filter(|is_in| *is_in).count()
    });
    assert_eq!(admitted, 1);
}

#[test]
fn a_draft_of_another_container_is_left_alone() {
    // Two processes with the same id, each in a different container, share the folder.
    let fleet = fleet();
    let token = fleet.token("", UseLimit::Count(1));
    let use_of = |name: String| fleet.folder.path().join("fleet/tokens").join(name);
    let drafts: Vec<_> = (0..1000).map(|number| use_of(format!("{}.use-1.{}-{number}.new", token.id, std::process::id()))).collect();
    drafts.iter().for_each(|draft| std::fs::write(draft, b"the other's").unwrap());
    fleet.redeem(&token, "n", "", NOW).unwrap();
    let lost = drafts.iter().filter(|draft| !std::fs::read(draft).is_ok_and(|text| text == b"the other's")).count();
    assert_eq!(lost, 0, "the other would have linked what is not its own, and both were admitted");
}

#[test]
fn a_node_name_is_its_first_keys_until_handed_over() {
    let fleet = fleet();
    let redeem = |token: &JoinToken, node: &str, key: &str| {
        let applicant = JoinRequest { node: node.into(), job: String::new(), key: fleet.key(key).fingerprint() };
        fleet.tokens.redeem(&token.id, &token.secret(), &applicant, NOW).map_err(|refused| refused.to_string())
    };
    let for_node = |node: &str, uses| {
        let scope = TokenScope { node: node.into(), ..TokenScope::new(Duration::from_secs(60), uses) };
        fleet.tokens.create(&fleet.authority, &scope, NOW)
    };
    let many = fleet.token("", UseLimit::Count(9));
    redeem(&many, "n", "first").unwrap();
    assert!(redeem(&many, "n", "second").unwrap_err().contains("`hostler token create --node n`"));
    assert!(redeem(&fleet.token("", UseLimit::Count(1)), "n", "second").is_err(), "a token for nobody by name is no operator's word");
    redeem(&many, "n", "first").unwrap();
    let word = for_node("n", UseLimit::Count(1)).unwrap();
    assert!(redeem(&word, "m", "second").unwrap_err().contains("is for node n"));
    redeem(&word, "n", "second").unwrap();
    redeem(&word, "n", "second").unwrap();
    assert!(redeem(&many, "n", "first").is_err(), "it has lost its name");
    assert!(fleet.tokens.claim("n", fleet.key("first").fingerprint(), NOW).is_err());
    redeem(&for_node("n", UseLimit::Count(1)).unwrap(), "n", "third").unwrap();
    assert!(redeem(&word, "n", "second").is_err(), "handed over once");
    assert!(for_node("n", UseLimit::Count(2)).is_err() && for_node("a/b", UseLimit::Count(1)).is_err());
    assert!(fleet.tokens.list().unwrap().iter().any(|record| record.id == word.id && record.node == "n" && record.used_by == ["n"]));
}

#[test]
fn a_later_certificate_claims_a_name_handed_over_elsewhere() {
    let fleet = fleet();
    let [first, second] = ["first", "second"].map(|key| fleet.key(key).fingerprint());
    fleet.tokens.claim("n", first, NOW).unwrap();
    assert!(fleet.tokens.claim("n", second, NOW).is_err(), "it is no later than what is written");
    fleet.tokens.claim("n", second, NOW + 10).unwrap();
    fleet.tokens.claim("n", second, NOW + 10).unwrap();
    assert!(fleet.tokens.claim("n", first, NOW + 5).is_err(), "the certificate that it had before");
}

#[test]
fn an_interrupted_hand_over_is_repeated_by_the_same_key() {
    let fleet = fleet();
    let redeem = |token: &JoinToken, key: &str, now| {
        let applicant = JoinRequest { node: "n".into(), job: String::new(), key: fleet.key(key).fingerprint() };
        fleet.tokens.redeem(&token.id, &token.secret(), &applicant, now).map_err(|refused| refused.to_string())
    };
    redeem(&fleet.token("", UseLimit::Count(1)), "first", NOW).unwrap();
    let scope = TokenScope { node: "n".into(), ..TokenScope::new(Duration::from_secs(60), UseLimit::Count(1)) };
    let word = fleet.tokens.create(&fleet.authority, &scope, NOW).unwrap();
    let note = fleet.folder.path().join("fleet/nodes/n.json");
    let before = std::fs::read(&note).unwrap();
    redeem(&word, "second", NOW + 1).unwrap();
    // Simulate a recorded use without the recorded name.
    std::fs::write(&note, before).unwrap();
    assert!(redeem(&word, "third", NOW + 2).unwrap_err().contains("has been used already"));
    redeem(&word, "second", NOW + 2).unwrap();
    assert!(fleet.tokens.claim("n", fleet.key("first").fingerprint(), NOW).is_err());
}

#[test]
fn an_uncounted_token_admits_though_nothing_can_be_written() {
    let fleet = fleet();
    let token = fleet.token("12", UseLimit::EveryNodeOfItsJob);
    // A folder cannot be created over a dangling link; file modes would not stop root.
    std::os::unix::fs::symlink("nowhere", fleet.folder.path().join("fleet/nodes")).unwrap();
    fleet.redeem(&token, "n", "12", NOW).unwrap();
}

#[test]
fn an_unbounded_token_scope_is_refused() {
    let fleet = fleet();
    for uses in [UseLimit::Count(0), UseLimit::Count(1_000_000), UseLimit::EveryNodeOfItsJob] {
        let scope = TokenScope::new(Duration::from_secs(1), uses);
        assert!(fleet.tokens.create(&fleet.authority, &scope, NOW).is_err(), "{uses:?}");
    }
}

#[test]
fn an_authority_is_created_once_with_a_private_key() {
    let fleet = fleet();
    let place = fleet.folder.path().join("fleet");
    assert!(matches!(Authority::create(&place, "g"), Err(TlsError::Exists(_))));
    let again = Authority::load(&place).unwrap();
    assert_eq!((again.fleet(), again.fingerprint()), ("f", fleet.authority.fingerprint()));
    let key = place.join("ca.key");
    assert_eq!(key.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
    let exposed = Authority::load(&place).unwrap_err().to_string();
    assert!(exposed.contains("mode 640") && exposed.contains("chmod 600"), "{exposed}");
    assert!(Authority::create(&fleet.folder.path().join("x"), "a/b").is_err());
    let nowhere = Authority::load(&fleet.folder.path().join("y")).unwrap_err().to_string();
    assert!(nowhere.contains("hostler init --dir"), "{nowhere}");
}

#[test]
fn a_certificate_names_its_holder_and_damaged_requests_get_none() {
    let fleet = fleet();
    let key = fleet.key("n1");
    let mut request = key.request().unwrap();
    let before = now();
    let certified = fleet.authority.issue("n1", "0011223344556677", &request, Duration::from_secs(3600)).unwrap().info;
    assert_eq!((certified.node.as_str(), certified.token.as_str(), certified.key), ("n1", "0011223344556677", key.fingerprint()));
    assert!(
        (before..before + 10).contains(&certified.issued_at) && (before + 3599..before + 3610).contains(&certified.expires_at),
        "{certified:?}"
    );
    assert_eq!(Authority::requested_key(&request).unwrap(), key.fingerprint());
    assert!(matches!(fleet.authority.issue("a b", "t", &request, Duration::from_secs(1)), Err(TlsError::Name(_))));
    let last = request.len() - 5;
    request[last] ^= 1;
    assert!(matches!(fleet.authority.issue("n1", "t", &request, Duration::from_secs(1)), Err(TlsError::Request(_))));
    assert_eq!(CertificateInfo::parse(fleet.authority.certificate()), None);
}

/// Does a handshake, and returns each side's result.
async fn shake(server: Handshake, client: Arc<ClientConfig>) -> (Result<Option<String>, String>, Result<(), String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let served = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = accept(stream, server, Duration::from_secs(10))
            .await
            .map_err(|error| describe_for_router(&error).unwrap_or_else(|| error.to_string()))?;
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"a first word").await.unwrap();
        let node = stream.certificate().and_then(CertificateInfo::parse).map(|certified| certified.node);
        // Wait until the other side has closed.
        let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut [0; 1]).await;
        Ok(node)
    });
    let dialled = connect(TcpStream::connect(address).await.unwrap(), client).await;
    let dialled = dialled.map(drop).map_err(|error| describe_for_agent(&error).unwrap_or_else(|| error.to_string()));
    (served.await.unwrap(), dialled)
}

#[tokio::test]
async fn nodes_and_routers_of_a_fleet_trust_each_other() {
    let fleet = fleet();
    assert_eq!(shake(fleet.router(), fleet.member("n1", Duration::from_secs(60))).await, (Ok(Some("n1".into())), Ok(())));
    assert_eq!(shake(fleet.router(), EnrollmentVerifier::config_for(fleet.authority.fingerprint()).unwrap()).await, (Ok(None), Ok(())));
}

#[tokio::test]
async fn foreign_or_expired_peers_are_refused_and_told_why() {
    let (ours, theirs) = (fleet(), fleet());
    let with_token = shake(theirs.router(), EnrollmentVerifier::config_for(ours.authority.fingerprint()).unwrap()).await;
    assert!(with_token.1.as_ref().unwrap_err().contains("is not of this agent's fleet"), "{with_token:?}");
    assert!(with_token.0.as_ref().unwrap_err().contains("does not take this router's certificate"), "{with_token:?}");
    let as_member = shake(theirs.router(), ours.member("n1", Duration::from_secs(60))).await;
    assert!(as_member.1.as_ref().unwrap_err().contains("is not of this agent's fleet"), "{as_member:?}");
    let (old_member, old_router) =
        (ours.member("n1", Duration::ZERO), AgentsTls::new(ours.authority.clone(), Duration::ZERO).unwrap().handshake());
    let made = now();
    while now() < made + 2 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let expired = shake(ours.router(), old_member).await;
    assert!(expired.0.as_ref().unwrap_err().contains("the agent's certificate has expired"), "{expired:?}");
    assert!(expired.1.as_ref().unwrap_err().contains("expired by the router's clock: it joins again"), "{expired:?}");
    let old_router = shake(old_router, ours.member("n1", Duration::from_secs(60))).await;
    assert!(old_router.1.as_ref().unwrap_err().contains("has expired by this host's clock: set the clocks"), "{old_router:?}");
    assert!(old_router.0.as_ref().unwrap_err().contains("set the clocks"), "{old_router:?}");
}

#[tokio::test]
async fn a_member_of_another_fleet_is_refused() {
    let (ours, theirs) = (fleet(), fleet());
    let key = theirs.key("n1");
    let foreign = theirs.authority.issue("n1", "0011223344556677", &key.request().unwrap(), Duration::from_secs(60)).unwrap();
    let config = member_config(ours.authority.certificate(), &foreign.certificate, &key, Path::new("here")).unwrap();
    let (router, agent) = shake(ours.router(), config).await;
    assert!(router.as_ref().unwrap_err().contains("is not of this fleet: give it a token"), "{router:?}");
    assert!(agent.as_ref().unwrap_err().contains("does not take this agent's certificate"), "{agent:?}");
}

#[tokio::test]
async fn a_node_cannot_pass_for_a_router() {
    let fleet = fleet();
    let key = fleet.key("n1");
    let issued = fleet.authority.issue("n1", "0011223344556677", &key.request().unwrap(), Duration::from_secs(60)).unwrap();
    let chain = vec![issued.certificate.into(), fleet.authority.certificate().clone()];
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let impostor = Arc::new(builder.with_no_client_auth().with_single_cert(chain, key.secret()).unwrap());
    for client in [EnrollmentVerifier::config_for(fleet.authority.fingerprint()).unwrap(), fleet.member("n2", Duration::from_secs(60))] {
        let (_, agent) = shake(impostor.clone(), client).await;
        assert!(agent.is_err(), "{agent:?}");
    }
}

#[tokio::test]
async fn plain_text_from_either_side_is_reported_as_such() {
    let fleet = fleet();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let plain = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut Vec::new()).await
    });
    let config = EnrollmentVerifier::config_for(fleet.authority.fingerprint()).unwrap();
    let refused = connect(TcpStream::connect(address).await.unwrap(), config).await.unwrap_err();
    assert!(describe_for_agent(&refused).unwrap().contains("does not speak TLS"), "{refused}");
    let _ = plain.await.unwrap();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stream, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let refused = accept(listener.accept().await.unwrap().0, fleet.router(), Duration::from_secs(10)).await.unwrap_err();
    assert!(describe_for_router(&refused).unwrap().contains("spoke plain text"), "{refused}");
}

#[tokio::test]
async fn a_silent_client_is_not_waited_for() {
    let fleet = fleet();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let late = accept(listener.accept().await.unwrap().0, fleet.router(), Duration::from_millis(20)).await.unwrap_err();
    assert_eq!(late.kind(), std::io::ErrorKind::TimedOut);
}

#[tokio::test]
async fn an_in_memory_listener_is_trusted_under_its_names() {
    let (fleet, other) = (fleet(), self::fleet());
    let listener_tls = EdgeTls::issue(&fleet.authority, &["x3001".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let [own_authority, other_authority] = [&fleet, &other].map(|of| of.folder.path().join("fleet/ca.crt"));
    for (name, authority, is_trusted) in [
        ("x3001", &own_authority, true),
        ("127.0.0.1", &own_authority, true),
        ("x3002", &own_authority, false),
        ("x3001", &other_authority, false),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let router = accept(listener.accept().await.unwrap().0, listener_tls.handshake(), Duration::from_secs(10));
        let (_, seen) = tokio::join!(router, connect_to_host(stream, authority, name, b"h2"));
        assert_eq!(seen.is_ok(), is_trusted, "{name}");
    }
}

#[tokio::test]
async fn an_edge_certified_by_the_authority_is_trusted_by_name() {
    let fleet = fleet();
    let made = fleet.authority.issue_edge(&["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let [certificate, key] = ["edge.pem", "edge.key"].map(|name| fleet.folder.path().join(name));
    write_private(&certificate, made.certificate.as_bytes()).unwrap();
    write_private(&key, made.key.as_bytes()).unwrap();
    let edge = EdgeTls::load(EdgeFiles { certificate, key, client_authority: None }).unwrap();
    let in_ten_years = now() + 10 * 365 * 24 * 3600;
    for expires_at in [edge.expires_at(), fleet.authority.expires_at()] {
        assert!(expires_at.is_some_and(|at| at.abs_diff(in_ten_years) < 60), "{expires_at:?}");
    }
    let mut roots = RootCertStore::empty();
    roots.add(fleet.authority.certificate().clone()).unwrap();
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let client = TlsConnector::from(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()));
    for (name, is_trusted) in [("localhost", true), ("127.0.0.1", true), ("login2", false), (ROUTER_NAME, false)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let router = accept(listener.accept().await.unwrap().0, edge.handshake(), Duration::from_secs(10));
        let (_, seen) = tokio::join!(router, client.connect(name.try_into().unwrap(), stream));
        assert_eq!(seen.is_ok(), is_trusted, "{name}");
    }
}

#[test]
fn a_released_name_is_free_for_another_key() {
    let fleet = fleet();
    let (token, node) = (fleet.token("", UseLimit::Count(3)), "x3001.12");
    let join = |key: &str| {
        let applicant = JoinRequest { node: node.into(), job: String::new(), key: fleet.key(key).fingerprint() };
        fleet.tokens.redeem(&token.id, &token.secret(), &applicant, NOW).map_err(|refused| refused.to_string())
    };
    join("first fleet").unwrap();
    assert!(join("second fleet").unwrap_err().contains("has joined before with another key"));
    fleet.tokens.release_name(node).unwrap();
    join("second fleet").unwrap();
    fleet.tokens.release_name("x3002.13").unwrap();
    assert!(fleet.tokens.release_name("../authority").is_err());
}

#[tokio::test]
async fn nodes_of_one_fleet_trust_each_other_and_nobody_else() {
    let (ours, theirs) = (fleet(), fleet());
    let peer = |fleet: &Fleet, name: &str, trusts: &Fleet| {
        let key = fleet.key(name);
        let issued = fleet.authority.issue(name, "0011223344556677", &key.request().unwrap(), Duration::from_secs(60)).unwrap();
        PeerTls::new(trusts.authority.certificate(), &issued.certificate, &key, Path::new("here")).unwrap()
    };
    let meet = async |head: PeerTls, member: PeerTls| {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let served = async { accept(listener.accept().await.unwrap().0, head.handshake(), Duration::from_secs(5)).await };
        let (served, connected) = tokio::join!(served, member.connect(stream));
        let name = |stream: &Stream| CertificateInfo::parse(stream.certificate().unwrap()).unwrap().node;
        (served.map(|stream| name(&stream)).ok(), connected.map(|stream| name(&stream)).ok())
    };
    let both = meet(peer(&ours, "n0", &ours), peer(&ours, "n1", &ours)).await;
    assert_eq!(both, (Some("n1".into()), Some("n0".into())));
    let (served, _) = meet(peer(&ours, "n0", &ours), peer(&theirs, "n2", &ours)).await;
    assert_eq!(served, None, "the member's certificate is of another fleet");
    let (_, connected) = meet(peer(&theirs, "n3", &ours), peer(&ours, "n4", &ours)).await;
    assert_eq!(connected, None, "the head's certificate is of another fleet");
}
