//! The edge over TLS: both HTTP versions, clients' certificates, and a certificate that changes
//! under load.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hostler_proto::inference::v1::generate_event::Event;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_proto::inference::v1::{GenerateRequest, Sampling, Usage};
use hostler_router::{Router, RouterConfig};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::aws_lc_rs::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_stream::StreamExt;

use crate::harness::{CHAT, Fleet, MODEL, Setup, channel, chat, chat_stream, exchange, json_request, soon, until};

/// An operator with an authority, and the files that it gives to a router.
struct Operator {
    folder: TempDir,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Operator {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), certificate.pem()).unwrap();
        Self { folder, certificate: certificate.der().clone(), issuer: Issuer::new(params, key) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Gives the router a new certificate, one file after another, as people do.
    fn renew(&self) -> CertificateDer<'static> {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["edge.test".into()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        replace(&self.path("edge.pem"), &certificate.pem());
        replace(&self.path("edge.key"), &key.serialize_pem());
        certificate.der().clone()
    }

    fn configure(&self, router: &mut RouterConfig) {
        (router.tls_cert, router.tls_key) = (self.path("edge.pem"), self.path("edge.key"));
    }

    /// A client that trusts this operator, with or without a certificate.
    fn client(&self, has_certificate: bool, protocol: &str) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider())).with_safe_default_protocol_versions().unwrap();
        let builder = builder.with_root_certificates(roots);
        let mut config = if has_certificate {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::default();
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            let certificate = params.signed_by(&key, &self.issuer).unwrap();
            builder.with_client_auth_cert(vec![certificate.der().clone()], PrivatePkcs8KeyDer::from(key.serialize_der()).into()).unwrap()
        } else {
            builder.with_no_client_auth()
        };
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        Arc::new(config)
    }
}

fn replace(path: &Path, text: &str) {
    let unfinished = path.with_extension("new");
    std::fs::write(&unfinished, text).unwrap();
    std::fs::rename(unfinished, path).unwrap();
}

async fn connect(fleet: &Fleet, config: &Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(fleet.routers[0].edge).await?;
    soon("a handshake", TlsConnector::from(config.clone()).connect(ServerName::try_from("edge.test").unwrap(), stream)).await
}

#[tokio::test(start_paused = true)]
async fn tls_serves_both_http_versions_and_refuses_plain_text() {
    let operator = Operator::new();
    operator.renew();
    let fleet = Fleet::start(Setup::agents(1).router(|router| operator.configure(router))).await;
    let stream = connect(&fleet, &operator.client(false, "http/1.1")).await.unwrap();
    let answer = exchange(stream, json_request(CHAT, &chat_stream(5))).await.unwrap().finish().await;
    answer.assert_whole_stream();

    let stream = connect(&fleet, &operator.client(false, "h2")).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("https://edge.test/v1/models").body(Full::<bytes::Bytes>::default()).unwrap();
    let answer = soon("an answer over HTTP/2", sender.send_request(request)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(!answer.into_body().collect().await.unwrap().to_bytes().is_empty());
    let plain = fleet.edge().try_send(json_request(CHAT, &chat(1))).await;
    assert!(plain.is_err(), "{plain:?}");
}

#[tokio::test(start_paused = true)]
async fn grpc_is_spoken_over_tls_on_the_same_port() {
    let operator = Operator::new();
    operator.renew();
    let fleet = Fleet::start(Setup::agents(1).router(|router| operator.configure(router))).await;
    let channel = channel(connect(&fleet, &operator.client(false, "h2")).await.unwrap()).await;
    let request = GenerateRequest {
        model: MODEL.into(),
        prompt: Some(Prompt::Text("Tell me about locks.".into())),
        sampling: Some(Sampling { max_tokens: Some(7), ..Sampling::default() }),
        ..GenerateRequest::default()
    };
    let answer = soon("a stream over TLS", InferenceClient::new(channel).generate_stream(request)).await.unwrap();
    let events: Vec<_> = soon("its events", answer.into_inner().collect()).await;
    let last = events.into_iter().next_back().unwrap().unwrap().event;
    assert!(matches!(last, Some(Event::Usage(Usage { completion_tokens: 7, .. }))), "{last:?}");
}

#[tokio::test(start_paused = true)]
async fn a_client_without_the_required_certificate_is_refused() {
    let (operator, other_operator) = (Operator::new(), Operator::new());
    operator.renew();
    let setup = Setup::agents(1).router(|router| {
        operator.configure(router);
        router.tls_client_ca = operator.path("ca.pem");
    });
    let fleet = Fleet::start(setup).await;
    let ask = async |config: Arc<ClientConfig>| match connect(&fleet, &config).await {
        Ok(stream) => exchange(stream, json_request(CHAT, &chat(1))).await.map(|answer| answer.status),
        Err(error) => Err(error.to_string()),
    };
    assert_eq!(ask(operator.client(true, "http/1.1")).await, Ok(StatusCode::OK));
    let refused = ask(operator.client(false, "http/1.1")).await;
    assert!(refused.is_err(), "{refused:?}");
    let foreign = ask(other_operator.client(true, "http/1.1")).await;
    assert!(foreign.is_err(), "{foreign:?}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stalls_its_handshake_loses_its_place() {
    let operator = Operator::new();
    operator.renew();
    let setup = Setup::agents(1).router(|router| {
        operator.configure(router);
        router.max_connections = 1;
        router.header_timeout = Duration::from_millis(300);
    });
    let fleet = Fleet::start(setup).await;
    let mut silent = TcpStream::connect(fleet.routers[0].edge).await.unwrap();
    let stream = connect(&fleet, &operator.client(false, "http/1.1")).await.unwrap();
    let answer = exchange(stream, json_request(CHAT, &chat(1))).await.unwrap().finish().await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(soon("the silent client's end", silent.read(&mut [0; 1])).await.unwrap_or(0), 0);
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_replaced_under_load_without_a_failed_request() {
    let operator = Operator::new();
    operator.renew();
    let fleet = Arc::new(Fleet::start(Setup::agents(1).router(|router| operator.configure(router))).await);
    let config = operator.client(false, "http/1.1");
    let through = connect(&fleet, &config).await.unwrap();
    let through = exchange(through, json_request(CHAT, &chat_stream(1000))).await.unwrap();
    let (done, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let load: Vec<_> = (0..4)
        .map(|_| {
            let (fleet, config, done, sent) = (fleet.clone(), config.clone(), done.clone(), sent.clone());
            tokio::spawn(async move {
                let mut failed = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    let answer = match connect(&fleet, &config).await {
                        Ok(stream) => exchange(stream, json_request(CHAT, &chat(2))).await,
                        Err(error) => Err(error.to_string()),
                    };
                    match answer {
                        Ok(answer) => {
                            let answer = answer.finish().await;
                            if answer.status != StatusCode::OK || answer.ended.is_err() {
                                failed.push(format!("{answer:?}"));
                            }
                        }
                        Err(error) => failed.push(error),
                    }
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                failed
            })
        })
        .collect();
    for _ in 0..2 {
        let new = operator.renew();
        until("the new certificate", async || {
            let stream = connect(&fleet, &config).await.map_err(|error| error.to_string())?;
            let shown = stream.get_ref().1.peer_certificates().and_then(|shown| shown.first().cloned());
            if shown.as_ref() == Some(&new) { Ok(()) } else { Err("the old one is shown".into()) }
        })
        .await;
    }
    // Half of a pair is no certificate: the last good one stays.
    let good = std::fs::read(operator.path("edge.key")).unwrap();
    replace(&operator.path("edge.key"), &KeyPair::generate().unwrap().serialize_pem());
    let seen = sent.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    until("more requests", async || if sent.load(Ordering::Relaxed) > seen { Ok(()) } else { Err("none".into()) }).await;
    std::fs::write(operator.path("edge.key"), good).unwrap();
    done.store(true, Ordering::Relaxed);
    for task in load {
        assert_eq!(task.await.unwrap(), Vec::<String>::new());
    }
    through.finish().await.assert_whole_stream();
}

#[tokio::test]
async fn a_router_without_tls_files_starts_only_on_loopback() {
    let local = || "127.0.0.1:0".to_owned();
    let folder = tempfile::tempdir().unwrap();
    let operators_socket = folder.path().join("o.sock");
    let config =
        RouterConfig { listen: local(), agents_listen: local(), admin_listen: local(), operators_socket, ..RouterConfig::default() };
    let refusal = async |change: &dyn Fn(&mut RouterConfig)| {
        let mut config = config.clone();
        change(&mut config);
        Router::bind(config).await.unwrap_err().to_string()
    };
    let plain = refusal(&|config| config.listen = "0.0.0.0:0".into()).await;
    assert!(plain.contains("router.listen is 0.0.0.0:") && plain.contains("--allow-plain-text"), "{plain}");
    let plain = refusal(&|config| config.agents_listen = "0.0.0.0:0".into()).await;
    assert!(plain.contains("router.agents_listen is 0.0.0.0:") && plain.contains("hostler init"), "{plain}");
    let missing = refusal(&|config| (config.tls_cert, config.tls_key) = ("/no/such.pem".into(), "/no/such.key".into())).await;
    assert!(missing.contains("cannot read /no/such.pem") && missing.contains("router.tls_cert"), "{missing}");
    let permitted = RouterConfig { listen: "0.0.0.0:0".into(), allow_plain_text: true, ..config };
    Router::bind(permitted).await.unwrap();
}
