use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use futures_util::stream::{Stream, StreamExt};
use hostler_boot::Shutdown;
use hostler_placement::affinity::CacheIndex;
use http::Request;
use serde_json::Value;
use tokio::time::{advance, sleep, timeout};
use tower::ServiceExt;

use super::*;
use crate::access_log::RefusalLog;
use crate::admission::Admission;
use crate::fleet::tests::{attach_node, fleet, ready};
use crate::history::History;
use crate::keys::PageRights;
use crate::placement::{Placer, PrefillWindows, QueueLimits, RequestQueue};
use crate::prompt::Prompts;

type Events = Pin<Box<dyn Stream<Item = Value>>>;

/// The page of a router with nodes `a` and `b`, of one replica each.
async fn started(tasks: &BackgroundTasks) -> Arc<Page> {
    let fleet = fleet();
    for (attachment, node) in [(1, "a"), (2, "b")] {
        attach_node(&fleet, attachment, node, vec![ready(0)]).await;
    }
    let (prompts, windows) = (Prompts::new(PathBuf::new(), 1), PrefillWindows::from_now(Duration::ZERO));
    let placer = Arc::new(Placer::new(fleet.clone(), Arc::new(CacheIndex::new()), prompts, Arc::default(), windows));
    let limits = QueueLimits { max_requests: 100, max_bytes: 1 << 20, max_wait: Duration::from_secs(60) };
    let calls = Operators {
        queue: RequestQueue::start(placer.clone(), limits, tasks, Shutdown::new()),
        fleet,
        placer,
        admission: Admission::new(10),
        history: History::default(),
        page_sessions: PageSessions::default(),
        refusals: RefusalLog::default(),
        admin_address: SocketAddr::from(([127, 0, 0, 1], 1)),
    };
    calls.watch_fleet(tasks);
    Page::start(calls, PathBuf::new(), tasks, CancellationToken::new())
}

fn sign_in(page: &Page) -> String {
    let token = page.sessions.issue_token(PageRights::Watch, None).unwrap();
    page.sessions.redeem_token(token.reveal()).unwrap().0.reveal().to_owned()
}

fn watch(page: &Page, session: &str) -> Events {
    let events = page.live.watch(page.sessions.clone(), session.to_owned(), page.end.clone()).unwrap();
    Box::pin(events.map(|event| {
        let event = event.unwrap();
        serde_json::from_slice(event.strip_prefix(b"data: ").unwrap()).unwrap()
    }))
}

#[tokio::test(start_paused = true)]
async fn what_the_page_does_not_have_is_not_found_in_few_words() {
    let tasks = BackgroundTasks::default();
    let routes = page_routes(started(&tasks).await);
    let long = format!("/page/logs/{}", "x".repeat(20_000));
    for path in ["/page/events/..", "/page/events/x/y", "/page/none.js", &long] {
        let answer = routes.clone().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
        let status = answer.status();
        let words = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        assert!(status == 404 && (1..400).contains(&words.len()), "{status} {}", String::from_utf8_lossy(&words));
    }
}

#[tokio::test(start_paused = true)]
async fn an_unwatched_page_gathers_nothing() {
    let tasks = BackgroundTasks::default();
    let page = started(&tasks).await;
    let session = sign_in(&page);
    sleep(Duration::from_secs(100)).await;
    let mut events = watch(&page, &session);
    let first = events.next().await.unwrap();
    assert_eq!(first["number"], 1, "the first picture of all, though a hundred seconds have passed");
    assert_eq!(first["history"].as_array().unwrap().len(), 10, "what was before is known all the same");
    assert_eq!(page.calls.history.of_replica("a/0").len(), 10);
    assert_eq!(events.next().await.unwrap()["number"], 2);
    drop(events);
    sleep(Duration::from_secs(100)).await;
    let number = watch(&page, &session).next().await.unwrap()["number"].as_u64().unwrap();
    assert!((3..=4).contains(&number), "one more may have begun before it was known that nobody looks: {number}");
}

#[tokio::test(start_paused = true)]
async fn a_viewer_gets_everything_first_and_then_changes() {
    let tasks = BackgroundTasks::default();
    let page = started(&tasks).await;
    let mut events = watch(&page, &sign_in(&page));
    let names = |event: &Value| event["nodes"].as_array().unwrap().iter().map(|node| node["name"].clone()).collect::<Vec<_>>();
    let first = events.next().await.unwrap();
    assert_eq!((&first["whole"], names(&first)), (&Value::Bool(true), vec!["a".into(), "b".into()]));
    let same = events.next().await.unwrap();
    assert_eq!((&same["whole"], names(&same), same.get("history")), (&Value::Bool(false), vec![], None));
    attach_node(&page.calls.fleet, 3, "c", vec![ready(0)]).await;
    let more = events.next().await.unwrap();
    assert_eq!((names(&more), &more["node_names"]), (vec!["c".into()], &serde_json::json!(["a", "b", "c"])));
}

#[tokio::test(start_paused = true)]
async fn a_viewer_gets_the_past_once_and_then_what_happens() {
    let tasks = BackgroundTasks::default();
    let page = started(&tasks).await;
    let mut events = watch(&page, &sign_in(&page));
    let words = |event: &Value| {
        let events = event["events"].as_array().map_or(&[][..], |events| events);
        events.iter().map(|event| event["words"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let past = ["node a has come: 1 of its 1 replicas ready", "node b has come: 1 of its 1 replicas ready"];
    assert_eq!(words(&events.next().await.unwrap()), past);
    assert_eq!(events.next().await.unwrap().get("events"), None);
    attach_node(&page.calls.fleet, 3, "c", vec![ready(0)]).await;
    let new = "node c has come: 1 of its 1 replicas ready";
    assert_eq!(words(&events.next().await.unwrap()), [new]);
    let mut other = watch(&page, &sign_in(&page));
    assert_eq!(words(&other.next().await.unwrap()), [past[0], past[1], new], "another viewer");
}

#[tokio::test(start_paused = true)]
async fn a_viewer_of_a_long_past_gets_only_its_latest_steps_again() {
    let tasks = BackgroundTasks::default();
    let page = started(&tasks).await;
    sleep(Duration::from_secs(2 * 3600)).await;
    let mut events = watch(&page, &sign_in(&page));
    let steps = |event: &Value| event.get("history").map(|steps| steps.as_array().unwrap().len());
    assert_eq!(steps(&events.next().await.unwrap()), Some(360));
    let mut later = Vec::new();
    for _ in 0..30 {
        later.push(steps(&events.next().await.unwrap()));
    }
    assert_eq!(later.iter().flatten().collect::<Vec<_>>(), [&6, &6, &6], "every ten seconds, those that may still change");
}

#[tokio::test(start_paused = true)]
async fn a_slow_viewer_gets_the_latest_picture_whole() {
    let tasks = BackgroundTasks::default();
    let page = started(&tasks).await;
    let session = sign_in(&page);
    let (mut slow, mut quick) = (watch(&page, &session), watch(&page, &session));
    slow.next().await.unwrap();
    let mut last = Value::Null;
    for _ in 0..5 {
        last = quick.next().await.unwrap();
    }
    let next = slow.next().await.unwrap();
    assert_eq!((&next["whole"], &next["number"], &last["whole"]), (&Value::Bool(true), &last["number"], &Value::Bool(false)));
}

#[tokio::test(start_paused = true)]
async fn page_events_end_with_their_session_or_router() {
    let tasks = BackgroundTasks::default();
    let page = started(&tasks).await;
    let mut events = watch(&page, &sign_in(&page));
    events.next().await.unwrap();
    advance(Duration::from_secs(12 * 3600)).await;
    let ended = timeout(Duration::from_secs(5), async { while events.next().await.is_some() {} }).await;
    assert!(ended.is_ok(), "the session has lasted twelve hours");
    let mut events = watch(&page, &sign_in(&page));
    events.next().await.unwrap();
    page.end.cancel();
    assert!(timeout(Duration::ZERO, events.next()).await.is_ok_and(|event| event.is_none()));
}
