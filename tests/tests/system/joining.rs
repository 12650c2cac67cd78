//! Nodes that join a fleet over TLS, stay in it, are turned away, or pretend to be others.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hostler_proto::agent::v1::agent_link_client::AgentLinkClient;
use hostler_proto::agent::v1::attach_request::Message;
use hostler_proto::agent::v1::{AttachRequest, FrameBatch, Hello};
use hostler_proto::join::v1::join_client::JoinClient;
use hostler_proto::join::v1::{EnrollRequest, RenewRequest};
use hostler_proto::{PROTOCOL, TICKET_KEY};
use hostler_tls::{
    Authority, CertificateInfo, ClientConfig, EnrollmentVerifier, JoinRequest, JoinToken, NodeKey, TokenScope, TokenStore, UseLimit,
    member_config,
};
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::harness::{CHAT, Endpoint, Fleet, Program, RunningRouter, Setup, Workplace, attach, channel, chat_stream, soon, until};

/// Folder of a fleet, and those of the nodes.
struct Gate {
    folder: TempDir,
    authority: Authority,
    tokens: TokenStore,
}

impl Gate {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("fleet"), "f").unwrap();
        Self { tokens: TokenStore::in_folder(&folder.path().join("fleet")), folder, authority }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn token(&self, expires_in: Duration, job: &str, uses: UseLimit) -> JoinToken {
        self.tokens
            .create(&self.authority, &TokenScope { job: job.into(), ..TokenScope::new(expires_in, uses) }, hostler_tls::now())
            .unwrap()
    }

    fn good_token(&self, nodes: u32) -> JoinToken {
        self.token(Duration::from_secs(600), "", UseLimit::Count(nodes))
    }

    /// A router of this fleet, and agents that have this token.
    fn setup(&self, agents: usize, token: &JoinToken) -> Setup {
        let file = self.path("token");
        hostler_tls::write_private(&file, token.text().as_bytes()).unwrap();
        let setup = Setup::agents(agents).router(|router| router.tls_dir = self.path("fleet"));
        setup.agent(|agent| (agent.join_token_file, agent.identity_dir) = (file, self.path("nodes")))
    }

    fn key(&self, node: &str) -> NodeKey {
        NodeKey::load_or_create(&self.path("nodes").join(node).join("node.key")).unwrap()
    }

    fn certificate(&self, node: &str) -> Vec<u8> {
        std::fs::read(self.path("nodes").join(node).join("node.der")).unwrap()
    }

    /// Settings of a thief who has copied a node's folder.
    fn stolen(&self, node: &str) -> Arc<ClientConfig> {
        let authority = std::fs::read(self.path("nodes").join(node).join("ca.der")).unwrap();
        member_config(&authority, &self.certificate(node), &self.key(node), &self.path("nodes")).unwrap()
    }

    async fn enroll(&self, fleet: &Fleet, token: &JoinToken, node: &str, job: &str) -> Result<CertificateInfo, Status> {
        self.call(fleet, EnrollRequest { job: job.into(), ..self.request(token, node, &format!("{node}-of-a-test")) }).await
    }

    /// Request of a node with this key.
    fn request(&self, token: &JoinToken, node: &str, key: &str) -> EnrollRequest {
        EnrollRequest {
            protocol: PROTOCOL,
            token_id: token.id.clone(),
            token_secret: token.secret().to_vec().into(),
            node: node.into(),
            job: String::new(),
            signing_request: self.key(key).request().unwrap().into(),
        }
    }

    async fn call(&self, fleet: &Fleet, request: EnrollRequest) -> Result<CertificateInfo, Status> {
        let channel = dial(fleet, EnrollmentVerifier::config_for(self.authority.fingerprint()).unwrap()).await;
        let answer = soon("an answer to Enroll", JoinClient::new(channel).enroll(request)).await?;
        Ok(CertificateInfo::parse(&answer.into_inner().certificate).unwrap())
    }
}

async fn dial(fleet: &Fleet, config: Arc<ClientConfig>) -> Channel {
    let stream = TcpStream::connect(fleet.routers[0].agents).await.unwrap();
    let stream = soon("a handshake", hostler_tls::connect(stream, config)).await.unwrap();
    channel(stream).await
}

/// First answer to an attachment under this name.
async fn attach_as(channel: Channel, node: &str) -> Result<(), Status> {
    let hello = Hello { protocol: PROTOCOL, agent_version: "1".into(), node: node.into(), life: 7, job: None };
    let first = tokio_stream::once(AttachRequest { message: Some(Message::Hello(hello)) });
    soon("an answer to Attach", AgentLinkClient::new(channel).attach(first)).await.map(drop)
}

#[tokio::test(start_paused = true)]
async fn an_agent_follows_its_fleets_file_to_another_router() {
    let gate = Gate::new();
    let file = gate.path("endpoint.json");
    let mut fleet = Fleet::launch(gate.setup(1, &gate.good_token(1)).agent(|agent| agent.router_file.clone_from(&file))).await;
    let serves = async |fleet: &Fleet| {
        hostler_tls::write_private(&file, format!(r#"{{"agents": "{}"}}"#, fleet.routers[0].agents).as_bytes()).unwrap();
        fleet.until_ready().await;
        fleet.edge().open(CHAT, &chat_stream(20)).await.finish().await.assert_whole_stream();
    };
    serves(&fleet).await;
    // Both live for a moment, so their ports differ.
    let next = RunningRouter::start(fleet.router_config()).await;
    let gone = std::mem::replace(&mut fleet.routers[0], next);
    gone.shutdown.stop();
    soon("the router's end", gone.task).await.unwrap();
    serves(&fleet).await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_the_former_router_outlast_a_change_of_the_file() {
    let gate = Gate::new();
    let file = gate.path("endpoint.json");
    let setup = gate.setup(1, &gate.good_token(1)).engine("--sim-step-ms 10").agent(|agent| agent.router_file.clone_from(&file));
    let mut fleet = Fleet::launch(setup).await;
    let name = |fleet: &Fleet| {
        hostler_tls::write_private(&file, format!(r#"{{"agents": "{}"}}"#, fleet.routers[0].agents).as_bytes()).unwrap();
    };
    name(&fleet);
    fleet.until_ready().await;
    // The stream lasts longer than the agent takes to read the file again.
    let mut stream = fleet.edge().open(CHAT, &chat_stream(3_000)).await;
    stream.events(2).await;
    let next = RunningRouter::start(fleet.router_config()).await;
    let former = std::mem::replace(&mut fleet.routers[0], next);
    name(&fleet);
    fleet.until_ready().await;
    stream.finish().await.assert_whole_stream();
    former.shutdown.drain();
    soon("the former router's end", former.task).await.unwrap();
    fleet.edge().open(CHAT, &chat_stream(20)).await.finish().await.assert_whole_stream();
}

#[tokio::test(start_paused = true)]
async fn agents_with_a_token_join_and_serve_over_tls() {
    let gate = Gate::new();
    let fleet = Fleet::start(gate.setup(2, &gate.good_token(2))).await;
    fleet.edge().open(CHAT, &chat_stream(20)).await.finish().await.assert_whole_stream();
    for node in ["n0", "n1"] {
        let certified = CertificateInfo::parse(&gate.certificate(node)).unwrap();
        assert_eq!((certified.node.as_str(), certified.key), (node, gate.key(node).fingerprint()));
        assert!(certified.expires_at - hostler_tls::now() > 23 * 3600, "a day: {certified:?}");
        let mode = std::fs::metadata(gate.path("nodes").join(node).join("node.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    assert_eq!(gate.tokens.list().unwrap()[0].used_by.len(), 2);
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    let expiry = |of: &str| {
        let line = page.lines().find(|line| line.starts_with(&format!("hostler_{of}}} "))).unwrap_or_else(|| panic!("no {of}: {page}"));
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let certified = CertificateInfo::parse(&gate.certificate("n1")).unwrap();
    assert_eq!(expiry("node_certificate_expiry_timestamp_seconds{node=\"n1\""), certified.expires_at);
    assert_eq!(Some(expiry("certificate_expiry_timestamp_seconds{certificate=\"authority\"")), gate.authority.expires_at());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_is_renewed_under_a_running_stream() {
    let gate = Gate::new();
    let setup = gate.setup(1, &gate.good_token(1)).router(|router| router.certificate_lifetime = Duration::from_secs(8));
    let fleet = Fleet::start(setup).await;
    let first = CertificateInfo::parse(&gate.certificate("n0")).unwrap();
    let mut stream = fleet.edge().open(CHAT, &chat_stream(2400)).await;
    stream.events(2).await;
    until("the first certificate's end", async || {
        assert!(fleet.admin().nodes().await.unwrap().iter().all(|node| node.attached), "it leaves at no time");
        if hostler_tls::now() > first.expires_at { Ok(()) } else { Err("it holds still".into()) }
    })
    .await;
    stream.finish().await.assert_whole_stream();
    let renewed = CertificateInfo::parse(&gate.certificate("n0")).unwrap();
    assert!(renewed.expires_at > first.expires_at && renewed.key == first.key, "{first:?} {renewed:?}");
    assert!(fleet.admin().nodes().await.unwrap()[0].attached);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_with_an_expired_certificate_rejoins_by_its_token() {
    let gate = Gate::new();
    let token = gate.good_token(1);
    let key = gate.key("n0");
    let applicant = JoinRequest { node: "n0".into(), job: String::new(), key: key.fingerprint() };
    gate.tokens.redeem(&token.id, &token.secret(), &applicant, hostler_tls::now()).unwrap();
    let old = gate.authority.issue("n0", &token.id, &key.request().unwrap(), Duration::from_secs(1)).unwrap();
    hostler_tls::write_private(&gate.path("nodes/n0/node.der"), &old.certificate).unwrap();
    hostler_tls::write_private(&gate.path("nodes/n0/ca.der"), gate.authority.certificate()).unwrap();
    until("the certificate's end", async || if hostler_tls::now() > old.info.expires_at { Ok(()) } else { Err("it holds".into()) }).await;
    let fleet = Fleet::start(gate.setup(1, &token)).await;
    fleet.edge().open(CHAT, &chat_stream(5)).await.finish().await.assert_whole_stream();
    assert!(CertificateInfo::parse(&gate.certificate("n0")).unwrap().expires_at > old.info.expires_at);
}

#[tokio::test(start_paused = true)]
async fn an_invalid_token_is_refused_with_the_reason() {
    let gate = Gate::new();
    let used = gate.good_token(1);
    let fleet = Fleet::launch(gate.setup(0, &used)).await;
    assert_eq!(gate.enroll(&fleet, &used, "a", "").await.unwrap().node, "a");
    assert_eq!(gate.enroll(&fleet, &used, "a", "").await.unwrap().node, "a", "its first answer may have been lost");
    let expired = gate.token(Duration::ZERO, "", UseLimit::Count(1));
    let revoked = gate.good_token(1);
    gate.tokens.revoke(&revoked.id).unwrap();
    let of_job = gate.token(Duration::from_secs(600), "12.host", UseLimit::EveryNodeOfItsJob);
    assert_eq!(gate.enroll(&fleet, &of_job, "b", "12.host").await.unwrap().token, of_job.id);
    let unknown = JoinToken::generate(gate.authority.fingerprint()).unwrap();
    let cases = [
        (&used, "c", "", "has been used already, by a"),
        (&expired, "c", "", "expired at"),
        (&revoked, "c", "", "was revoked"),
        (&of_job, "c", "13.host", "is for nodes of job 12.host"),
        (&unknown, "c", "", "has no token"),
    ];
    for (token, node, job, sentence) in cases {
        let refused = gate.enroll(&fleet, token, node, job).await.unwrap_err();
        assert!(refused.code() == Code::PermissionDenied && refused.message().contains(sentence), "{sentence}: {refused}");
    }
    let refused = gate.enroll(&fleet, &gate.good_token(1), "no/name", "").await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
}

#[tokio::test(start_paused = true)]
async fn a_stolen_certificate_cannot_displace_its_node_nor_be_renewed() {
    let gate = Gate::new();
    let fleet = Fleet::start(gate.setup(1, &gate.good_token(1))).await;
    let stolen = gate.stolen("n0");
    let taken = attach_as(dial(&fleet, stolen.clone()).await, "n0").await.unwrap_err();
    assert!(taken.code() == Code::FailedPrecondition && taken.message().contains("another agent is attached"), "{taken}");
    let other = attach_as(dial(&fleet, stolen.clone()).await, "n1").await.unwrap_err();
    assert!(other.code() == Code::PermissionDenied && other.message().contains("its certificate is node `n0`'s"), "{other}");
    let signing_request = gate.key("n0").request().unwrap().into();
    let renewed = JoinClient::new(dial(&fleet, stolen.clone()).await).renew(RenewRequest { signing_request }).await.unwrap_err();
    assert_eq!(renewed.code(), Code::PermissionDenied, "{renewed}");
    let mut lane = Request::new(tokio_stream::pending::<FrameBatch>());
    lane.metadata_mut().insert_bin(TICKET_KEY, MetadataValue::from_bytes(b"a guess"));
    let lane = AgentLinkClient::new(dial(&fleet, stolen).await).carry(lane).await.map(drop).unwrap_err();
    assert_eq!(lane.code(), Code::Unauthenticated, "{lane}");
    let by_token = gate.enroll(&fleet, &gate.good_token(1), "n0", "").await.unwrap_err();
    assert!(by_token.code() == Code::FailedPrecondition && by_token.message().contains("another agent is attached"), "{by_token}");
    let nobody =
        attach_as(dial(&fleet, EnrollmentVerifier::config_for(gate.authority.fingerprint()).unwrap()).await, "n0").await.unwrap_err();
    assert!(nobody.code() == Code::Unauthenticated && nobody.message().contains("agent.join_token_file"), "{nobody}");
    fleet.edge().open(CHAT, &chat_stream(5)).await.finish().await.assert_whole_stream();
    assert_eq!(fleet.admin().nodes().await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_with_a_revoked_token_leaves_with_its_certificate() {
    let gate = Gate::new();
    let token = gate.good_token(1);
    let fleet = Fleet::start(gate.setup(1, &token).router(|router| router.certificate_lifetime = Duration::from_secs(3))).await;
    gate.tokens.revoke(&token.id).unwrap();
    until("the node to leave", async || {
        let nodes = fleet.admin().nodes().await.unwrap();
        if nodes.iter().all(|node| !node.attached) { Ok(()) } else { Err(format!("{nodes:?}")) }
    })
    .await;
    assert!(CertificateInfo::parse(&gate.certificate("n0")).unwrap().expires_at <= hostler_tls::now());
}

#[tokio::test(start_paused = true)]
async fn plain_text_at_the_agents_port_gets_nothing() {
    let gate = Gate::new();
    let fleet = Fleet::launch(gate.setup(0, &gate.good_token(1))).await;
    let address = fleet.routers[0].agents;
    let hello = Message::Hello(Hello { protocol: PROTOCOL, agent_version: "1".into(), node: "n".into(), life: 7, job: None });
    let refused = tokio::spawn(async move { attach(address, [hello]).await.map(drop) }).await;
    assert!(!matches!(refused, Ok(Ok(()))), "{refused:?}");
    assert_eq!(fleet.admin().nodes().await.unwrap().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn unauthenticated_connections_are_bounded_and_hurt_no_member() {
    const MOST: usize = 64;
    let gate = Gate::new();
    let fleet = Fleet::start(gate.setup(1, &gate.good_token(1))).await;
    let (mut unauthenticated, mut closed) = (Vec::new(), Vec::new());
    for number in 0..MOST + 20 {
        let stream = TcpStream::connect(fleet.routers[0].agents).await.unwrap();
        let shaken = hostler_tls::connect(stream, EnrollmentVerifier::config_for(gate.authority.fingerprint()).unwrap());
        // A refused node learns it near the end of the handshake.
        let shaken = soon("a handshake", shaken).await;
        let Ok(mut stream) = shaken else {
            closed.push(number);
            continue;
        };
        unauthenticated.push(tokio::spawn(async move { while matches!(stream.read(&mut [0; 256]).await, Ok(1..)) {} }));
    }
    until("all beyond the bound closed", async || {
        let open = unauthenticated.iter().filter(|peer| !peer.is_finished()).count();
        if open <= MOST { Ok(()) } else { Err(format!("{open} are open")) }
    })
    .await;
    assert_eq!(unauthenticated.iter().filter(|peer| !peer.is_finished()).count(), MOST, "{} refused at once", closed.len());
    let member = attach_as(dial(&fleet, gate.stolen("n0")).await, "n0").await.unwrap_err();
    assert!(member.message().contains("another agent is attached"), "it was heard: {member}");
    fleet.edge().open(CHAT, &chat_stream(5)).await.finish().await.assert_whole_stream();
    unauthenticated.iter().for_each(tokio::task::JoinHandle::abort);
    until("a place for who comes next", async || {
        let stream = TcpStream::connect(fleet.routers[0].agents).await.unwrap();
        let shaken = hostler_tls::connect(stream, EnrollmentVerifier::config_for(gate.authority.fingerprint()).unwrap()).await;
        let mut stream = shaken.map_err(|error| error.to_string())?;
        // These are the router's first bytes, if it continues.
        match stream.read(&mut [0; 9]).await {
            Ok(1..) => Ok(()),
            ended => Err(format!("{ended:?}")),
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_node_keeps_its_admitted_name_while_away() {
    let gate = Gate::new();
    let token = gate.good_token(5);
    let fleet = Fleet::launch(gate.setup(0, &token)).await;
    let owner = gate.enroll(&fleet, &token, "n", "").await.unwrap();
    let of_another = gate.request(&token, "n", "another");
    let refused = gate.call(&fleet, of_another.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    assert!(refused.message().contains("hostler token create --node n"), "it says what to do: {refused}");
    assert_eq!(gate.tokens.list().unwrap()[0].used_by, ["n"], "whoever is refused uses nothing up");
    assert_eq!(gate.enroll(&fleet, &token, "n", "").await.unwrap().key, owner.key, "the owner comes back");
    let scope = TokenScope { node: "n".into(), ..TokenScope::new(Duration::from_secs(600), UseLimit::Count(1)) };
    let word = gate.tokens.create(&gate.authority, &scope, hostler_tls::now()).unwrap();
    assert!(gate.call(&fleet, gate.request(&word, "m", "another")).await.unwrap_err().message().contains("is for node n"));
    let admitted =
        gate.call(&fleet, EnrollRequest { token_id: word.id.clone(), token_secret: word.secret().to_vec().into(), ..of_another });
    assert_ne!(admitted.await.unwrap().key, owner.key, "an operator's word hands the name over");
    assert_eq!(gate.enroll(&fleet, &token, "n", "").await.unwrap_err().code(), Code::PermissionDenied, "the former key has lost it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_use_token_refuses_a_second_node_with_reason() {
    let (workplace, folder) = (Workplace::new(), tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (fleet, token, other) = (path("fleet"), path("token"), path("other-token"));
    let made = workplace.run(&["init", "--dir", &fleet, "--name", "f", "--out", &token]).await;
    assert!(made.success, "{}", made.stderr);
    let again = workplace.run(&["init", "--dir", &fleet]).await;
    assert!(!again.success && again.stderr.contains("has the authority of a fleet already"), "{}", again.stderr);
    let any = ["--listen", "127.0.0.1:0", "--agents-listen", "0.0.0.0:0", "--admin-listen", "127.0.0.1:0"];
    let router = workplace.start("router", &[&["router", "--tls-dir", &fleet], &any[..]].concat());
    let port = router.address("agents").await.port();
    let address = format!("127.0.0.1:{port}");
    let agent = |name: &'static str, token: &str| {
        let engine = ["--engine", "simulated", "--replicas", "1", "--node", name, "--", "--sim-start-ms", "50"];
        workplace.start(name, &[&["agent", "--router", &address, "--join-token-file", token], &engine[..]].concat())
    };
    let says = async |program: &Program, sentence: &str| {
        until(sentence, async || if program.stderr().contains(sentence) { Ok(()) } else { Err(program.stderr()) }).await;
    };
    let first = agent("a", &token);
    says(&first, "attached").await;
    let second = agent("b", &token);
    says(&second, "has been used already, by a").await;
    says(&router, "a node may not join").await;
    let foreign = path("foreign");
    assert!(workplace.run(&["init", "--dir", &foreign, "--out", &other]).await.success);
    let foreign = agent("c", &other);
    says(&foreign, "the router's certificate is not of this agent's fleet").await;
    says(&router, "does not take this router's certificate").await;
    let listed = workplace.run(&["token", "list", "--dir", &fleet]).await.stdout;
    assert!(listed.contains("used up") && listed.contains(" a\n"), "{listed}");
    let printed = workplace.run(&["token", "create", "--dir", &fleet, "--expires", "1h"]).await;
    let printed = JoinToken::parse(&printed.stdout).unwrap();
    assert!(workplace.run(&["token", "revoke", "--dir", &fleet, &printed.id]).await.success);
    let secret = std::fs::read_to_string(&token).unwrap().trim().split_once('.').unwrap().1.to_owned();
    for program in [&router, &first, &second] {
        assert!(!program.stderr().contains(&secret[..64]) && !program.stdout().contains(&secret[..64]), "the token is in no log");
    }
}
