//! The client against targets that answer, close and break off in every order.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const LONG: Duration = Duration::from_secs(20);

const HEAD: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
const EVENT: &str = "2a\r\ndata: {\"choices\":[{\"text\":\"a\",\"index\":0}]}\r\n2\r\n\n\n\r\n";
const LAST: &str = "39\r\ndata: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"stop\"}]}\n\n\r\n";
const DONE: &str = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

/// A target that sends these answers on its connections, one per request, and closes a connection
/// when `None` follows an answer.
struct Target {
    client: Client,
    /// Everything sent to the target, a text for each connection.
    heard: Arc<Mutex<Vec<String>>>,
}

impl Target {
    async fn saying(connections: Vec<Vec<String>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = Client::new(Place::Tcp(listener.local_addr().unwrap().to_string()));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hears = heard.clone();
        tokio::spawn(async move {
            for answers in connections {
                let (mut stream, _) = listener.accept().await.unwrap();
                hears.lock().push(String::new());
                for answer in answers {
                    let mut request = Vec::new();
                    while !request.ends_with(b"\r\n\r\n{}") {
                        if stream.read_buf(&mut request).await.unwrap() == 0 {
                            return;
                        }
                    }
                    hears.lock().last_mut().unwrap().push_str(&String::from_utf8(request).unwrap());
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            }
        });
        Self { client, heard }
    }

    async fn ask(&mut self) -> Answer {
        let call = Call { method: Method::POST, path: "/v1/x".to_owned(), key: None, headers: Vec::new(), body: Bytes::from_static(b"{}") };
        self.client.ask(call, ReadOptions { stream: true, keep_text: true, timeout: LONG }, |_, _| {}).await
    }

    /// Outcomes of this many requests.
    async fn outcomes(&mut self, requests: usize) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for _ in 0..requests {
            outcomes.push(self.ask().await.outcome);
        }
        outcomes
    }

    fn connections(&self) -> usize {
        self.heard.lock().len()
    }
}

fn whole_answer() -> String {
    [HEAD, EVENT, LAST, DONE].concat()
}

#[tokio::test]
async fn whole_answers_follow_each_other_on_one_connection() {
    let limited = "HTTP/1.1 429 No\r\ncontent-length: 2\r\n\r\nno".to_owned();
    let mut target = Target::saying(vec![vec![whole_answer(), limited, whole_answer()]]).await;
    let answer = target.ask().await;
    assert_eq!((answer.outcome, answer.events, &*answer.text, target.client.gaps.len()), (Outcome::Complete, 2, "ab", 1));
    assert_eq!(target.outcomes(2).await, [Outcome::Status(429), Outcome::Complete]);
    let heard = target.heard.lock().join("");
    let Place::Tcp(host) = &target.client.place else { unreachable!() };
    let request = format!("POST /v1/x HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}");
    assert_eq!((target.connections(), heard), (1, request.repeat(3)));
}

#[tokio::test]
async fn an_interim_answer_is_not_the_answer() {
    let answer = format!("HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n{}", whole_answer());
    let mut target = Target::saying(vec![vec![answer.clone(), answer]]).await;
    assert_eq!(target.outcomes(2).await, [Outcome::Complete; 2]);
    assert_eq!(target.connections(), 1);
}

#[tokio::test]
async fn an_answer_that_breaks_off_spoils_its_connection() {
    for begun in ["HTTP/1.1 2", HEAD, &[HEAD, EVENT].concat(), &whole_answer()[..whole_answer().len() - 2]] {
        let mut target = Target::saying(vec![vec![begun.to_owned()], vec![whole_answer()]]).await;
        assert_eq!(target.outcomes(2).await, [Outcome::Broken, Outcome::Complete], "{begun}");
    }
}

#[tokio::test]
async fn malformed_framing_counts_as_broken() {
    for (head, body) in
        [(HEAD, "x\r\n"), (HEAD, "1\r\nabc\r\n"), ("HTTP/1.1 200 OK\r\ncontent-length: a\r\n\r\n", "{}"), ("data: no HTTP\r\n\r\n", "")]
    {
        let mut target = Target::saying(vec![vec![format!("{head}{body}"), String::new()], vec![whole_answer()]]).await;
        let broken = target.ask().await.outcome;
        assert_eq!(broken, Outcome::Broken, "{head}{body}");
    }
}

#[tokio::test]
async fn after_an_error_event_the_connection_may_break() {
    let error = format!("{HEAD}{EVENT}15\r\ndata: {{\"error\":{{}}}} \n\n\r\n");
    let mut target = Target::saying(vec![vec![error], vec![whole_answer()]]).await;
    assert_eq!(target.outcomes(2).await, [Outcome::ErrorEvent, Outcome::Complete]);
}

#[tokio::test]
async fn a_connection_closed_between_answers_costs_no_request() {
    let closing = whole_answer().replace("OK\r\n", "OK\r\nconnection: close\r\n");
    for first in [vec![whole_answer()], vec![closing], vec![whole_answer(), String::new()]] {
        let mut target = Target::saying(vec![first, vec![whole_answer()]]).await;
        assert_eq!(target.outcomes(2).await, [Outcome::Complete; 2]);
        assert_eq!(target.connections(), 2);
    }
}

#[tokio::test]
async fn a_request_with_a_partial_answer_is_not_sent_again() {
    let interim = "HTTP/1.1 103 Early Hints\r\n\r\n".to_owned();
    let mut target = Target::saying(vec![vec![whole_answer(), interim], vec![whole_answer()]]).await;
    assert_eq!(target.outcomes(2).await, [Outcome::Complete, Outcome::Broken]);
    assert_eq!(target.connections(), 1);
}

#[tokio::test]
async fn unsolicited_bytes_after_an_answer_are_not_the_next() {
    let two = whole_answer() + "HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n";
    let mut target = Target::saying(vec![vec![two, String::new()], vec![whole_answer()]]).await;
    assert_eq!(target.outcomes(1).await, [Outcome::Complete]);
    assert!(target.client.open.as_mut().is_some_and(|open| !open.is_free()));
}

#[tokio::test]
async fn an_answer_without_a_length_ends_with_its_connection() {
    let answer = "HTTP/1.1 200 OK\r\n\r\ndata: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n".to_owned();
    let mut target = Target::saying(vec![vec![answer.clone()], vec![answer]]).await;
    assert_eq!(target.outcomes(2).await, [Outcome::Complete; 2]);
}

#[tokio::test]
async fn a_target_may_refuse_a_request_without_reading_it() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = Client::new(Place::Tcp(listener.local_addr().unwrap().to_string()));
    let target = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 413 Large\r\ncontent-length: 2\r\n\r\nno").await.unwrap();
        stream
    });
    let call = Call { method: Method::POST, path: "/".to_owned(), key: None, headers: Vec::new(), body: vec![b'x'; 32 << 20].into() };
    let answer = client.ask(call, ReadOptions { stream: true, keep_text: false, timeout: LONG }, |_, _| {}).await;
    assert_eq!(answer.outcome, Outcome::Status(413));
    assert!(client.open.is_some_and(|mut open| !open.is_free()), "the target waits for the rest");
    drop(target);
}

#[tokio::test]
async fn requests_and_answers_carry_their_headers() {
    let refused = "HTTP/1.1 429 Full\r\nretry-after: 7\r\nX-Hostler-Id: 0a\r\ncontent-length: 2\r\n\r\nno".to_owned();
    let mut target = Target::saying(vec![vec![refused]]).await;
    let headers = vec![(HeaderName::from_static("x-hostler-priority"), HeaderValue::from(100))];
    let call = Call { method: Method::POST, path: "/v1/x".to_owned(), key: None, headers, body: Bytes::from_static(b"{}") };
    let answer = target.client.fetch(&call, LONG).await.unwrap();
    assert_eq!((answer.status.as_u16(), &answer.body[..]), (429, &b"no"[..]));
    assert_eq!((&answer.headers["retry-after"], &answer.headers["x-hostler-id"]), (&"7".parse().unwrap(), &"0a".parse().unwrap()));
    assert!(target.heard.lock()[0].contains("\r\nx-hostler-priority: 100\r\n"), "{:?}", target.heard.lock());
}
