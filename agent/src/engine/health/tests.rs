//! Readiness and loss of health against an engine that answers by a script.

use super::super::http::tests::Scripted;
use super::*;

const MODELS: &str = r#"{"object":"list","data":[{"id":"a", "max_model_len": 64},{"id":"b"}]}"#;

/// News within a generous time; the clock runs by itself, so a bug cannot hang the test.
async fn next(news: &mut mpsc::Receiver<News>) -> Option<News> {
    tokio::time::timeout(Duration::from_secs(60), news.recv()).await.unwrap()
}

#[test]
fn a_model_card_is_kept_byte_by_byte() {
    let models = parse_models(MODELS.as_bytes()).unwrap();
    assert_eq!(models.len(), 2);
    assert_eq!(models[0].id, "a");
    assert_eq!(models[0].raw, r#"{"id":"a", "max_model_len": 64}"#);
    assert!(parse_models(b"{}").is_err());
    assert!(parse_models(b"[1,2").is_err());
}

#[tokio::test]
async fn ready_means_healthy_and_naming_a_model() {
    let mut left = 2;
    let engine = Scripted::start(Box::new(move |path| match path {
        "/health" if left > 0 => {
            left -= 1;
            Some((503, String::new()))
        }
        "/health" => Some((200, String::new())),
        _ => Some((200, MODELS.to_owned())),
    }));
    let (sender, mut news) = mpsc::channel(8);
    let watching = tokio::spawn(watch(engine.socket.clone(), sender));
    assert_eq!(next(&mut news).await, Some(News::Loading));
    let models = parse_models(MODELS.as_bytes()).unwrap();
    assert_eq!(next(&mut news).await, Some(News::Ready(models)));
    watching.abort();
    let asked = engine.asked.lock().clone();
    assert_eq!(asked, ["/health", "/health", "/health", "/v1/models"]);
}

#[test]
fn only_bad_answers_in_a_row_count() {
    let reply = |status| Ok(Reply { status, body: Bytes::new() });
    let (good, bad) = (reply(StatusCode::OK), reply(StatusCode::SERVICE_UNAVAILABLE));
    let mut tally = Tally::default();
    for answer in [&bad, &bad, &good, &bad, &Err(GetError::Broken("torn".to_owned()))] {
        assert_eq!(tally.add(answer), None);
    }
    let reason = "3 health checks failed in a row: status 503".to_owned();
    assert_eq!(tally.add(&bad), Some(reason));
}

#[tokio::test]
async fn an_engine_that_turns_unhealthy_is_reported_once() {
    let mut health = [200].into_iter();
    let engine = Scripted::start(Box::new(move |path| match path {
        "/health" => Some((health.next().unwrap_or(503), String::new())),
        _ => Some((200, MODELS.to_owned())),
    }));
    let (sender, mut news) = mpsc::channel(8);
    let watching = tokio::spawn(watch(engine.socket.clone(), sender));
    let mut all = Vec::new();
    while let Some(item) = next(&mut news).await {
        all.push(item);
    }
    assert_eq!(all.len(), 3);
    assert!(matches!(&all[2], News::Unhealthy(reason) if reason.contains("503")));
    watching.await.unwrap();
}

#[tokio::test]
async fn watching_ends_when_nobody_listens() {
    let directory = tempfile::tempdir().unwrap();
    let (sender, news) = mpsc::channel(8);
    drop(news);
    let watching = watch(directory.path().join("s"), sender);
    tokio::time::timeout(Duration::from_secs(10), watching).await.unwrap();
}
