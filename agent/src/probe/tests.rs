//! The probe against an engine that answers by a script, under a clock that only moves when every
//! task is idle.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio_util::task::AbortOnDropHandle;

use super::*;
use crate::engine_client::api_client::tests::Scripted;
use crate::traffic::RouterKey;

const INTERVAL: Duration = Duration::from_millis(50);

fn page(running: u32) -> String {
    format!("vllm:num_requests_running{{engine=\"0\"}} {running}\n")
}

struct Probed {
    engine: Scripted,
    traffic: Arc<Traffic>,
    samples: watch::Receiver<Option<LoadSample>>,
    _probe: AbortOnDropHandle<()>,
}

fn probe(engine: Scripted) -> Probed {
    let traffic = Traffic::new();
    let (sender, samples) = watch::channel(None);
    let probe = tokio::spawn({
        let (socket, traffic) = (engine.socket.clone(), Arc::clone(&traffic));
        async move { watch(&socket, &traffic, INTERVAL, &sender).await }
    });
    Probed { engine, traffic, samples, _probe: AbortOnDropHandle::new(probe) }
}

impl Probed {
    async fn sample(&mut self, condition: impl Fn(&LoadSample) -> bool) -> LoadSample {
        let waiting = self.samples.wait_for(|sample| sample.as_ref().is_some_and(&condition));
        let found = tokio::time::timeout(Duration::from_secs(60), waiting).await;
        found.unwrap().unwrap().unwrap()
    }

    /// Number of readings from now on, over a span of time.
    async fn readings_in(&mut self, span: Duration) -> usize {
        let before = self.engine.requests.lock().len();
        tokio::time::sleep(span).await;
        self.engine.requests.lock().len() - before
    }
}

#[tokio::test]
async fn an_engine_without_the_filtered_page_is_asked_for_everything() {
    let mut probed = probe(Scripted::start(Box::new(|path| match path {
        "/metrics" => Some((200, page(3))),
        _ => Some((404, String::new())),
    })));
    probed.sample(|sample| sample.metrics.running == 3).await;
    probed.samples.mark_unchanged();
    probed.samples.changed().await.unwrap();
    let requests = probed.engine.requests.lock().clone();
    assert!(requests[0].starts_with("/metrics/?name[]="));
    assert!(requests[1..].iter().all(|path| path == "/metrics"));
}

#[tokio::test]
async fn a_failed_reading_marks_the_last_sample_stale() {
    let failing = Arc::new(AtomicU32::new(0));
    let status = Arc::clone(&failing);
    let mut probed = probe(Scripted::start(Box::new(move |_| match status.load(Ordering::Relaxed) {
        0 => Some((200, page(2))),
        _ => Some((500, String::new())),
    })));
    let fresh = probed.sample(|sample| !sample.is_stale).await;
    assert_eq!(fresh.metrics.running, 2);
    failing.store(1, Ordering::Relaxed);
    let stale = probed.sample(|sample| sample.is_stale).await;
    assert_eq!(stale.metrics, fresh.metrics);
    failing.store(0, Ordering::Relaxed);
    let again = probed.sample(|sample| !sample.is_stale).await;
    assert!(again.at > stale.at);
}

#[tokio::test]
async fn an_idle_engine_is_read_rarely_until_a_request_arrives() {
    let mut probed = probe(Scripted::start(Box::new(|_| Some((200, page(0))))));
    probed.sample(|_| true).await;
    let span = INTERVAL * 22;
    let idle = probed.readings_in(span).await;
    assert!((1..=3).contains(&idle), "{idle} readings while idle");
    let guard = probed.traffic.enter(RouterKey(1));
    let busy = probed.readings_in(span).await;
    assert!(busy > 3 * idle, "{busy} readings while busy");
    drop(guard);
}

#[test]
fn a_cache_size_once_read_is_remembered() {
    let (sender, samples) = watch::channel(None);
    let reported = EngineMetrics { kv_blocks: Some(64), block_size: Some(16), ..EngineMetrics::default() };
    publish(&sender, Some(reported));
    publish(&sender, Some(EngineMetrics::default()));
    assert_eq!(samples.borrow().unwrap().metrics, reported);
}
