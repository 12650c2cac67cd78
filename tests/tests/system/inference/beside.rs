//! Neighbours of the service on its port: health, reflection, and the other APIs.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Response, StatusCode};
use http_body_util::{Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio_util::task::AbortOnDropHandle;
use tonic::Code;
use tonic::transport::Endpoint as TonicEndpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::raw::Raw;
use super::text;
use crate::harness::{CHAT, Endpoint, Fleet, Setup, chat, soon, until};

#[tokio::test(start_paused = true)]
async fn health_follows_the_fleet() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let endpoint = TonicEndpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap();
    let mut health = HealthClient::new(endpoint.connect().await.unwrap());
    let service = |service: &str| HealthCheckRequest { service: service.into() };
    for name in ["", "hostler.inference.v1.Inference"] {
        assert_eq!(health.check(service(name)).await.unwrap().into_inner().status(), ServingStatus::Serving, "{name:?}");
    }
    assert_eq!(health.check(service("somebody")).await.unwrap_err().code(), Code::NotFound);
    let mut watch = health.watch(service("")).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    fleet.admin().drain("n0/0").await.unwrap();
    assert_eq!(soon("the change", watch.message()).await.unwrap().unwrap().status(), ServingStatus::NotServing);
    assert_eq!(health.check(service("")).await.unwrap().into_inner().status(), ServingStatus::NotServing);
    fleet.routers[0].shutdown.drain();
    assert!(soon("the end of the watch", watch.message()).await.unwrap().is_none(), "a watch keeps no router from leaving");
}

/// Calls a health check whose message is announced with `length` bytes, of which only `sent` come.
fn slow_check(fleet: &Fleet, length: u32, sent: usize) -> AbortOnDropHandle<Response<Incoming>> {
    let edge = fleet.routers[0].edge;
    AbortOnDropHandle::new(tokio::spawn(async move {
        let stream = tokio::net::TcpStream::connect(edge).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let first = [&[0][..], &length.to_be_bytes(), &vec![b'x'; sent]].concat();
        let pieces = stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from(first)))]).chain(stream::pending());
        let request = http::Request::post("http://test/grpc.health.v1.Health/Check").header("content-type", "application/grpc");
        let answer = sender.send_request(request.header("te", "trailers").body(StreamBody::new(pieces)).unwrap());
        tokio::select! {
            answer = answer => answer.unwrap(),
            _ = connection => panic!("the connection ended without an answer"),
        }
    }))
}

#[tokio::test(start_paused = true)]
async fn slow_health_checks_use_no_request_memory_and_time_out() {
    let limit = Duration::from_secs(2);
    let fleet = Fleet::start(Setup::agents(1).router(|router| {
        (router.max_buffered_body_bytes, router.max_body_bytes, router.header_timeout) = (1 << 20, 900_000, limit);
    }))
    .await;
    let checks = [slow_check(&fleet, 10 << 20, 500_000), slow_check(&fleet, 10 << 20, 500_000), slow_check(&fleet, 20, 3)];
    let code = |answer: Response<Incoming>| Code::from_bytes(answer.headers()["grpc-status"].as_bytes());
    let mut large = chat(1);
    large["padding"] = "x".repeat(200_000).into();
    let begun = std::time::Instant::now();
    while begun.elapsed() < limit / 2 {
        let answer = fleet.edge().post(CHAT, &large).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }
    let [first, second, slow] = checks;
    for check in [first, second] {
        assert_eq!(code(soon("a refusal", check).await.unwrap()), Code::OutOfRange, "it is larger than any check");
    }
    assert_eq!(code(soon("an end", slow).await.unwrap()), Code::DeadlineExceeded);
}

#[tokio::test(start_paused = true)]
async fn health_watches_are_bounded_and_leave_checks_alone() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let endpoint = TonicEndpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap();
    let mut watches = Vec::new();
    let mut health = HealthClient::new(endpoint.connect().await.unwrap());
    let refused = loop {
        match soon("a watch", health.watch(HealthCheckRequest::default())).await {
            Ok(watch) => watches.push(watch),
            Err(refused) => break refused,
        }
        if watches.len() % 128 == 0 {
            health = HealthClient::new(endpoint.connect().await.unwrap());
        }
    };
    assert!((512..1024).contains(&watches.len()), "{}", watches.len());
    assert!(refused.code() == Code::ResourceExhausted && refused.message().contains("call Check"), "{refused}");
    assert_eq!(health.check(HealthCheckRequest::default()).await.unwrap().into_inner().status(), ServingStatus::Serving);
    drop(watches);
    until("a place", async || health.clone().watch(HealthCheckRequest::default()).await.map(drop).map_err(|status| status.to_string()))
        .await;
}

#[tokio::test(start_paused = true)]
async fn reflection_tells_the_contract_in_both_versions() {
    use tonic_reflection::pb::{v1, v1alpha};
    let fleet = Fleet::start(Setup::agents(1)).await;
    let endpoint = TonicEndpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let services = [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "hostler.inference.v1.Inference",
    ];

    let ask = |request| tokio_stream::once(v1::ServerReflectionRequest { host: String::new(), message_request: Some(request) });
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(channel.clone());
    let list = v1::server_reflection_request::MessageRequest::ListServices(String::new());
    let answer = client.server_reflection_info(ask(list)).await.unwrap().into_inner().message().await.unwrap().unwrap();
    let Some(v1::server_reflection_response::MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{answer:?}")
    };
    let mut listed: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
    listed.sort();
    assert_eq!(listed, services);
    let symbol = v1::server_reflection_request::MessageRequest::FileContainingSymbol("hostler.inference.v1.Inference.Place".into());
    let answer = client.server_reflection_info(ask(symbol)).await.unwrap().into_inner().message().await.unwrap().unwrap();
    let Some(v1::server_reflection_response::MessageResponse::FileDescriptorResponse(files)) = answer.message_response else {
        panic!("{answer:?}")
    };
    let file = <prost_types::FileDescriptorProto as prost::Message>::decode(&files.file_descriptor_proto[0][..]).unwrap();
    assert_eq!(file.package(), "hostler.inference.v1");

    let list = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let ask = tokio_stream::once(v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(list) });
    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let answer = client.server_reflection_info(ask).await.unwrap().into_inner().message().await.unwrap().unwrap();
    let Some(v1alpha::server_reflection_response::MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{answer:?}")
    };
    assert_eq!(list.service.len(), services.len());
}

#[tokio::test(start_paused = true)]
async fn http_2_requests_that_are_no_grpc_are_refused() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let raw = Raw::connect(&fleet).await;
    let unknown = raw.call("/hostler.inference.v1.Inference/Nothing", &text("x", 1), &[]).await;
    assert_eq!(unknown.code(), Code::Unimplemented);
    let elsewhere = raw.call("/somebody.Else/Nothing", &text("x", 1), &[]).await;
    assert_eq!(elsewhere.code(), Code::Unimplemented);
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    assert!(page.contains("hostler_refused_total{reason=\"no_route\"} 2\n"), "{page}");
    let json = raw.call("/hostler.inference.v1.Inference/Generate", &text("x", 1), &[("content-type", "application/grpc+json")]).await;
    assert_eq!(json.status, 415);
    let compressed = raw.call("/hostler.inference.v1.Inference/Generate", &text("x", 1), &[("grpc-encoding", "gzip")]).await;
    assert_eq!(compressed.code(), Code::Unimplemented);
    // The other APIs are in their old place.
    assert_eq!(fleet.edge().post(CHAT, &chat(2)).await.status, 200);
    let old = http::Request::post("/hostler.inference.v1.Inference/Generate").header("content-type", "application/grpc");
    let old = fleet.edge().request(old.body(Full::default()).unwrap()).await;
    assert_eq!(old.status, 415, "{}", old.text());
}
