//! Shared pools: one tenant takes all that it can of a pool, and another one's request is answered.
//!
//! docs/pools.md lists the pools. Of those that are not here, the queue is in `admission.rs`,
//! agents' connections are in `joining.rs`, and the rest is in unit tests.

use std::any::Any;
use std::path::Path;
use std::time::SystemTime;

use hostler_proto::inference::v1::PlaceRequest;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_router::RouterConfig;
use hostler_router::keys::{KeyEntry, Secret, change};
use http::Request;
use http_body_util::Full;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, chat, soon};

fn key(file: &Path, tenant: &str) -> String {
    let secret = Secret::random().unwrap();
    let entry = KeyEntry::new(&secret, tenant, SystemTime::now());
    change(file, true, |entries| {
        entries.push(KeyEntry { name: tenant.to_owned(), ..entry });
        Ok(())
    })
    .unwrap();
    secret.reveal().to_owned()
}

async fn ask(fleet: &Fleet, key: &str, body: &Value) -> Answer {
    let request = Request::post(CHAT).header("content-type", "application/json").header("authorization", format!("Bearer {key}"));
    fleet.edge().request(request.body(Full::from(body.to_string())).unwrap()).await
}

/// Resources that a flood holds until it is dropped.
type Held = Vec<Box<dyn Any>>;

/// Opens this many connections, and sends these bytes on each.
async fn hold_connections(fleet: &Fleet, count: usize, bytes: &str) -> Held {
    let mut held: Held = Vec::new();
    for _ in 0..count {
        let mut stream = TcpStream::connect(fleet.routers[0].edge).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        held.push(Box::new(stream));
    }
    held
}

/// Checks that another tenant is answered while one floods a fleet with these settings.
async fn assert_others_are_answered(pool: &str, configure: impl FnOnce(&mut RouterConfig), flood: impl AsyncFnOnce(&Fleet, &str) -> Held) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("keys.toml");
    let [greedy, other] = ["greedy", "other"].map(|tenant| key(&file, tenant));
    let setup = Setup::agents(1).engine("--max-num-seqs 2").router(|router| {
        router.keys_file = file;
        configure(router);
    });
    let fleet = Fleet::start(setup).await;
    let held = soon(pool, flood(&fleet, &greedy)).await;
    let answer = soon(pool, ask(&fleet, &other, &chat(1))).await;
    assert_eq!(answer.status, 200, "{pool}: {}", answer.text());
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn bookings_of_one_tenant_leave_others_places() {
    let configure = |router: &mut RouterConfig| router.max_in_flight = 40;
    assert_others_are_answered("places", configure, async |fleet, key| {
        let channel = Endpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap().connect().await.unwrap();
        let bearer = format!("Bearer {key}").parse().unwrap();
        let mut client = InferenceClient::with_interceptor(channel, move |mut request: tonic::Request<()>| {
            request.metadata_mut().insert("authorization", tonic::metadata::MetadataValue::clone(&bearer));
            Ok(request)
        });
        let generation = super::inference::generation(Prompt::Text("Once".into()), 1);
        let place = || PlaceRequest { request: Some(generation.clone()), hold: None, candidates: false };
        let mut booked = 0;
        while client.place(place()).await.is_ok() {
            booked += 1;
        }
        assert_eq!(booked, 32, "four fifths");
        Vec::new()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn bodies_of_one_tenant_leave_others_memory() {
    let configure = |router: &mut RouterConfig| (router.max_buffered_body_bytes, router.max_body_bytes) = (1 << 20, 200_000);
    assert_others_are_answered("memory of bodies", configure, async |fleet, key| {
        let head = format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: 200000\r\n\r\n");
        let unfinished = format!("{head}{}", " ".repeat(190_000));
        hold_connections(fleet, 8, &unfinished).await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn idle_connections_leave_others_room() {
    let configure = |router: &mut RouterConfig| router.max_connections = 16;
    assert_others_are_answered("connections", configure, async |fleet, key| {
        let request = format!("GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n");
        hold_connections(fleet, 64, &request).await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn long_bodies_of_one_tenant_leave_others_threads() {
    let configure = |router: &mut RouterConfig| router.tokenizer_threads = 1;
    assert_others_are_answered("threads that read", configure, async |fleet, key| {
        let numbers = format!("[{}0]", "0,".repeat(500_000));
        let body = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"x"}}],"tools":{numbers}}}"#);
        let mut held: Held = Vec::new();
        for _ in 0..16 {
            let (edge, request) = (fleet.edge(), Request::post("/api/chat").header("authorization", format!("Bearer {key}")));
            let request = request.header("content-type", "application/json").body(Full::from(body.clone())).unwrap();
            held.push(Box::new(tokio_util::task::AbortOnDropHandle::new(tokio::spawn(async move { edge.request(request).await }))));
        }
        held
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn health_watches_without_keys_leave_tenants_room() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("keys.toml");
    let tenant = key(&file, "tenant");
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.keys_file = file)).await;
    let mut held: Held = Vec::new();
    let mut watch = async |key: Option<&str>| {
        let channel = Endpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap().connect().await.unwrap();
        let mut request = tonic::Request::new(HealthCheckRequest::default());
        if let Some(key) = key {
            request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        }
        let begun = HealthClient::new(channel).watch(request).await;
        begun.map(|stream| held.push(Box::new(stream))).map_err(|status| status.code())
    };
    while soon("watches", watch(None)).await.is_ok() {}
    assert_eq!(soon("the tenant's watch", watch(Some(&tenant))).await, Ok(()));
    assert!(held.len() > 512, "{}", held.len());
}
