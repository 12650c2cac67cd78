//! Orders to engines that obey, refuse and hang by a script, and the meaning of their answers.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::super::tests::{Fixture, start_with};
use super::routes::{NO_ADAPTER_ROUTE, NO_SLEEP_ROUTE, check_reply};
use super::*;
use crate::engine::ModelCard;
use crate::engine_client::ApiReply;
use crate::engine_client::api_client::tests::Scripted;
use crate::traffic::RouterKey;
use http::StatusCode;

const MODELS: &str = r#"{"data":[{"id":"tiny","parent":null},{"id":"poet","parent":"tiny","root":"/poet"}]}"#;

fn reply(status: u16, body: &'static str) -> ApiReply {
    ApiReply { status: StatusCode::from_u16(status).unwrap(), body: body.into(), is_from_router: false }
}

fn card(raw: &'static str) -> ModelCard {
    ModelCard { id: "poet".to_owned(), raw: raw.into() }
}

/// A ready engine whose control routes answer by a script.
async fn engine(mut script: impl FnMut(&str) -> Option<(u16, &'static str)> + Send + 'static) -> (Fixture, Scripted) {
    let mut fixture = start_with("exec sleep 600", |spec| {
        spec.drain_timeout = Duration::from_millis(300);
        spec.command.set.push(("VLLM_SERVER_DEV_MODE", "1".into()));
    });
    fixture.until(|status| status.pid.is_some()).await;
    let served = Scripted::at(
        fixture.engine.socket(),
        Box::new(move |path| match path {
            "/health" => Some((200, String::new())),
            "/v1/models" => Some((200, MODELS.to_owned())),
            path if path.starts_with("/metrics") => Some((200, "vllm:num_requests_running 0\n".to_owned())),
            path => script(path).map(|(status, body)| (status, body.to_owned())),
        }),
    );
    fixture.until(|status| matches!(status.phase, Phase::Ready | Phase::Sleeping)).await;
    (fixture, served)
}

#[test]
fn a_missing_route_differs_from_a_refusal() {
    assert!(check_reply(&reply(200, ""), NO_SLEEP_ROUTE).is_ok());
    let missing = check_reply(&reply(404, r#"{"detail":"Not Found"}"#), NO_ADAPTER_ROUTE).unwrap_err();
    assert_eq!(missing.to_string(), NO_ADAPTER_ROUTE);
    let refused = check_reply(&reply(404, r#"{"error":{"message":"No adapter found for /x"}}"#), NO_ADAPTER_ROUTE).unwrap_err();
    assert_eq!(refused.to_string(), "the engine refused: No adapter found for /x");
    let broken = check_reply(&reply(500, "Internal Server Error"), NO_SLEEP_ROUTE).unwrap_err();
    assert_eq!(broken.to_string(), "the engine refused: status 500: Internal Server Error");
}

#[test]
fn only_a_model_card_with_a_parent_is_an_adapter() {
    assert_eq!(parse_adapter(&card(r#"{"id":"poet","parent":null,"root":"/m"}"#)), None);
    assert_eq!(parse_adapter(&card(r#"{"id":"poet"}"#)), None);
    let poet = LoraAdapter { name: "poet".to_owned(), path: "/poet".to_owned() };
    assert_eq!(parse_adapter(&card(r#"{"id":"poet","parent":"tiny","root":"/poet"}"#)), Some(poet));
}

#[test]
fn an_adapter_being_unloaded_is_not_listed() {
    let desired = DesiredAdapters { unloading: Some("poet".to_owned()), ..DesiredAdapters::default() };
    assert_eq!(desired.visible_models(vec![card("{}")]), []);
    assert_eq!(DesiredAdapters::default().visible_models(vec![card("{}")]).len(), 1);
}

#[tokio::test]
async fn an_engine_that_fails_to_sleep_keeps_serving() {
    let (mut fixture, served) = engine(|path| match path {
        "/is_sleeping" => Some((200, r#"{"is_sleeping":false}"#)),
        _ => Some((500, "out of host memory")),
    })
    .await;
    let refused = fixture.engine.execute(ControlRequest::Sleep { level: 1 }).await.unwrap_err();
    assert_eq!(refused.to_string(), "the engine refused: status 500: out of host memory");
    fixture.phase(Phase::Ready).await;
    assert!(served.requests.lock().iter().any(|path| path == "/sleep?level=1"));
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_without_sleep_routes_stays_in_service() {
    let (fixture, served) = engine(|_| Some((404, r#"{"detail":"Not Found"}"#))).await;
    let refused = fixture.engine.execute(ControlRequest::Sleep { level: 1 }).await.unwrap_err();
    assert!(refused.to_string().contains("--enable-sleep-mode"), "{refused}");
    assert_eq!(fixture.engine.status().borrow().phase, Phase::Ready);
    assert!(served.requests.lock().iter().all(|path| !path.starts_with("/sleep")));
    let refused =
        fixture.engine.execute(ControlRequest::Load(LoraAdapter { name: "new".to_owned(), path: "/new".to_owned() })).await.unwrap_err();
    assert!(refused.to_string().contains("--enable-lora"), "{refused}");
    fixture.engine.stop().await;
}

#[tokio::test]
async fn a_sleep_cuts_requests_short_after_the_drain_timeout() {
    let asleep = Arc::new(AtomicBool::new(false));
    let sleeps = Arc::clone(&asleep);
    let (mut fixture, _served) = engine(move |path| match path {
        "/is_sleeping" if sleeps.load(Ordering::Relaxed) => Some((200, r#"{"is_sleeping":true}"#)),
        "/is_sleeping" => Some((200, r#"{"is_sleeping":false}"#)),
        "/sleep?level=1" => {
            sleeps.store(true, Ordering::Relaxed);
            Some((200, "{}"))
        }
        _ => Some((404, "{}")),
    })
    .await;
    let _running = fixture.engine.traffic().enter(RouterKey(1));
    fixture.engine.execute(ControlRequest::Sleep { level: 1 }).await.unwrap();
    assert!(asleep.load(Ordering::Relaxed));
    fixture.phase(Phase::Sleeping).await;
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_found_asleep_reloads_its_weights_when_it_wakes() {
    let waking = Arc::new(AtomicU32::new(0));
    let steps = Arc::clone(&waking);
    let (mut fixture, served) = engine(move |path| match path {
        "/is_sleeping" if steps.load(Ordering::Relaxed) < 3 => Some((200, r#"{"is_sleeping":true}"#)),
        "/is_sleeping" => Some((200, r#"{"is_sleeping":false}"#)),
        _ => {
            steps.fetch_add(1, Ordering::Relaxed);
            Some((200, "{}"))
        }
    })
    .await;
    assert_eq!(fixture.engine.status().borrow().phase, Phase::Sleeping, "it was never told as ready");
    fixture.engine.execute(ControlRequest::Wake).await.unwrap();
    fixture.phase(Phase::Ready).await;
    let requests: Vec<String> =
        served.requests.lock().iter().filter(|path| path.contains("wake") || path.contains("rpc")).cloned().collect();
    assert_eq!(requests, ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_order_ends_with_its_engines_life() {
    // Only the questions are answered.
    let (mut fixture, _served) = engine(|path| (path == "/is_sleeping").then_some((200, r#"{"is_sleeping":false}"#))).await;
    let ordering = {
        let engine = fixture.engine.clone();
        tokio::spawn(async move { engine.execute(ControlRequest::Sleep { level: 1 }).await })
    };
    fixture.phase(Phase::Sleeping).await;
    fixture.engine.fail("a test says so".to_owned());
    assert!(matches!(ordering.await.unwrap(), Err(ControlError::Ended)));
    fixture.engine.stop().await;
}

#[tokio::test]
async fn sleep_level_two_is_refused_while_an_adapter_is_loaded() {
    let (fixture, _served) = engine(|_| Some((200, r#"{"is_sleeping":false}"#))).await;
    let refused = fixture.engine.execute(ControlRequest::Sleep { level: 2 }).await.unwrap_err();
    assert!(refused.to_string().contains("LoRA adapter poet"), "{refused}");
    let refused = fixture.engine.execute(ControlRequest::Wake).await.unwrap_err();
    assert_eq!(refused.to_string(), "the engine is ready, and only a sleeping one can do this");
    let refused = fixture.engine.execute(ControlRequest::Unload("tiny".to_owned())).await.unwrap_err();
    assert!(refused.to_string().contains("the model itself"), "{refused}");
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_engine_without_sleep_mode_is_not_put_to_sleep() {
    // The agent's environment unlocks the routes, but the engine was not started with memory that
    // it can give back.
    let mut fixture = start_with("exec sleep 600", |_| {});
    fixture.until(|status| status.pid.is_some()).await;
    let served = Scripted::at(
        fixture.engine.socket(),
        Box::new(|path| match path {
            "/v1/models" => Some((200, MODELS.to_owned())),
            path if path.starts_with("/metrics") => Some((200, "vllm:num_requests_running 0\n".to_owned())),
            _ => Some((200, r#"{"is_sleeping":false}"#.to_owned())),
        }),
    );
    fixture.phase(Phase::Ready).await;
    let refused = fixture.engine.execute(ControlRequest::Sleep { level: 1 }).await.unwrap_err();
    assert_eq!(refused.to_string(), NO_SLEEP_ROUTE);
    assert!(served.requests.lock().iter().all(|path| !path.contains("sleep")), "{:?}", served.requests.lock());
    fixture.engine.stop().await;
}

#[tokio::test]
async fn an_adapter_lost_in_a_restart_is_reported_until_forgotten() {
    let lost = Arc::new(AtomicBool::new(false));
    let is_lost = Arc::clone(&lost);
    let mut fixture = start_with("exec sleep 600", |_| {});
    let script = move |lost: Arc<AtomicBool>| {
        Box::new(move |path: &str| {
            let gone = lost.load(Ordering::Relaxed);
            Some(match path {
                "/v1/models" if gone => (200, r#"{"data":[{"id":"tiny","parent":null}]}"#.to_owned()),
                "/v1/models" => (200, MODELS.to_owned()),
                "/v1/load_lora_adapter" if gone => (404, r#"{"error":{"message":"No adapter found for /poet"}}"#.to_owned()),
                _ => (200, String::new()),
            })
        })
    };
    fixture.until(|status| status.pid.is_some()).await;
    let first = Scripted::at(fixture.engine.socket(), script(Arc::clone(&is_lost)));
    let epoch = fixture.phase(Phase::Ready).await.epoch;
    assert_eq!(fixture.engine.missing_adapters(), []);
    // Another task remembers the adapter.
    while fixture.engine.shared.desired_adapters.borrow().adapters.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    lost.store(true, Ordering::Relaxed);
    drop(first);
    fixture.engine.restart();
    fixture.until(|status| status.epoch > epoch && status.pid.is_some()).await;
    let _second = Scripted::at(fixture.engine.socket(), script(is_lost));
    fixture.until(|status| status.epoch > epoch && status.phase == Phase::Ready).await;
    let names: Vec<String> = fixture.engine.missing_adapters().into_iter().map(|adapter| adapter.name).collect();
    assert_eq!(names, ["poet"]);
    fixture.engine.execute(ControlRequest::Unload("poet".to_owned())).await.unwrap();
    assert_eq!(fixture.engine.missing_adapters(), []);
    fixture.engine.stop().await;
}

#[tokio::test]
async fn adapters_that_an_engine_already_has_are_not_loaded_twice() {
    let engine = Scripted::start(Box::new(|_| Some((200, String::new()))));
    let adapters = ["poet", "lost"].map(|name| LoraAdapter { name: name.to_owned(), path: format!("/{name}") });
    let desired = DesiredAdapters { adapters: adapters.into(), unloading: None };
    desired.restore(&engine.socket, &[card("{}")]).await;
    assert_eq!(*engine.requests.lock(), ["/v1/load_lora_adapter"]);
}
