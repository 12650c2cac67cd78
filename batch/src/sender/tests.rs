//! Requests to a target that answers each in the same way.

use bytes::Bytes;
use hostler_bench::Target;
use http::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const LONG: Duration = Duration::from_secs(3_600);

/// A target that answers every request with this head and body, and a sender of requests to it.
struct Scene {
    head: &'static str,
    body: &'static str,
    /// Time limit of a request.
    request: Duration,
    was_served: bool,
    shutdown: Shutdown,
    waiting: watch::Sender<Waiting>,
}

impl Scene {
    fn of(head: &'static str) -> Self {
        let (shutdown, waiting) = (Shutdown::new(), watch::Sender::new(Waiting::default()));
        Self { head, body: "{}", request: LONG, was_served: true, shutdown, waiting }
    }

    async fn send(&self) -> Sent {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target: Target = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let answer = format!("HTTP/1.1 {}\r\ncontent-length: {}\r\n\r\n{}", self.head, self.body.len(), self.body);
        let answering = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while stream.read_buf(&mut request).await.unwrap() > 0 {
                if request.ends_with(b"\r\n\r\n{}") {
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    request.clear();
                }
            }
        });
        let limits = TimeLimits { request: self.request, attempt: LONG };
        let served = Arc::new([AtomicBool::new(self.was_served)]);
        let sender = Sender { limits, waiting: self.waiting.clone(), served, shutdown: self.shutdown.clone() };
        let call = Call { method: Method::POST, path: "/v1/x".to_owned(), key: None, headers: Vec::new(), body: Bytes::from_static(b"{}") };
        let sent = sender.send(&mut Client::to(&target), &call, 0).await;
        answering.abort();
        sent
    }

    /// Sends a request, and stops the batch as soon as it waits for another attempt, for this
    /// reason.
    async fn send_until_waiting(&self, reason: &str) -> Sent {
        let mut seen = self.waiting.subscribe();
        let stopping = async {
            seen.wait_for(|waiting| waiting.requests == 1 && waiting.reason.starts_with(reason)).await.unwrap();
            self.shutdown.drain();
        };
        tokio::join!(self.send(), stopping).0
    }
}

#[tokio::test]
async fn an_answer_of_any_status_ends_a_request() {
    for (head, status) in [("200 OK", 200), ("400 Bad Request", 400), ("404 Not Found", 404)] {
        let sent = Scene::of(head).send().await;
        assert!(matches!(&sent, Sent::Ended(Outcome::Answered(answer)) if answer.status == status), "{sent:?}");
    }
}

#[tokio::test]
async fn an_expired_request_fails_with_its_last_reason() {
    let scene = Scene { request: Duration::from_secs(59), ..Scene::of("503 Service Unavailable\r\nretry-after: 60") };
    let sent = scene.send().await;
    let Sent::Ended(Outcome::Failed { code, message }) = sent else { panic!("{sent:?}") };
    assert_eq!(code, "batch_expired");
    assert!(message.contains("within 59s") && message.contains("503 Service Unavailable"), "{message}");
}

#[tokio::test]
async fn a_waiting_request_is_counted_and_stops_with_the_batch() {
    let scene = Scene::of("429 Too Many Requests\r\nretry-after: 600");
    let sent = scene.send_until_waiting("429").await;
    assert!(matches!(sent, Sent::Stopped), "{sent:?}");
    assert_eq!(scene.waiting.borrow().requests, 0);
}

#[tokio::test]
async fn only_a_model_that_answered_before_is_awaited() {
    let body = r#"{"error":{"message":"The model `m` does not exist. Valid aliases: n."}}"#;
    let scene = Scene { body, ..Scene::of("404 Not Found") };
    let sent = scene.send_until_waiting("404").await;
    assert!(matches!(sent, Sent::Stopped), "{sent:?}");
    let sent = Scene { body, was_served: false, ..Scene::of("404 Not Found") }.send().await;
    assert!(matches!(&sent, Sent::Ended(Outcome::Answered(answer)) if answer.status == 404), "{sent:?}");
}

#[tokio::test]
async fn a_refused_key_ends_the_batch_without_failing_requests() {
    let sent = Scene::of("401 Unauthorized").send().await;
    assert!(matches!(sent, Sent::KeyRefused(_)), "{sent:?}");
}
