use std::task::Waker;

use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::agent::v1::{End, Frame, FrameBatch};
use prometheus_client::metrics::counter::Counter;
use serde_json::{Value, json};

use hostler_proto::lane::Header;

use super::super::FanOutForm;
use super::*;
use crate::lanes::Lane;

/// A request of several answers on one lane, whose ids count from 0.
struct Fixture {
    lane: Arc<Lane>,
    _lanes: Lanes,
    exchange: AnswerExchange,
}

impl Fixture {
    fn new(body: &Value) -> Self {
        let (lane, lanes) = (Lane::new(Counter::default()), Lanes::default());
        lanes.add(&lane);
        let fan_out = FanOut::split(FanOutForm::Completion, &body.to_string().into()).unwrap().unwrap();
        let id = Header { name: "X-Request-Id".into(), value: "mine".into() };
        let head = RequestHead { headers: vec![id], prompt_tokens: 9, ..RequestHead::default() };
        let exchange = AnswerExchange::open(&lanes, head, Bytes::new(), Some(&fan_out)).unwrap();
        Self { lane, _lanes: lanes, exchange }
    }

    fn requests(&self) -> Vec<RequestHead> {
        let frames = std::iter::from_fn(|| self.lane.outbox().take_batch()).flat_map(|batch| batch.frames);
        frames.filter_map(|frame| if let Some(Kind::Request(head)) = frame.kind { Some(RequestHead::from(head)) } else { None }).collect()
    }

    fn receive(&self, id: u64, kind: Kind) {
        self.lane.receive(FrameBatch { frames: vec![Frame::new(id, kind)] });
    }

    fn receive_head(&self, id: u64, status: u16, content_type: &'static str) {
        let header = |name: &'static str, value: &'static str| Header { name: name.into(), value: value.into() };
        let headers = vec![header("content-type", content_type), header("Content-Length", "7")];
        self.receive(id, Kind::Response(ResponseHead { status, headers }.into()));
    }

    fn receive_body(&self, id: u64, body: &str) {
        self.receive(id, Kind::Body(body.to_owned().into()));
    }

    fn end(&self, id: u64) {
        self.receive(id, Kind::End(End::default()));
    }

    fn head(&self) -> Poll<Result<ResponseHead, StreamFault>> {
        self.exchange.poll_head(&context())
    }

    fn body(&self) -> Poll<Result<Option<Bytes>, StreamFault>> {
        self.exchange.poll_body(&context())
    }

    fn text(&self) -> String {
        let Poll::Ready(Ok(Some(bytes))) = self.body() else { panic!("nothing has come") };
        String::from_utf8(bytes.into()).unwrap()
    }
}

fn context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

fn answer(text: &str) -> Value {
    json!({"id": text, "created": 7, "choices": [{"index": 0, "text": text}], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}})
}

#[test]
fn only_the_first_part_has_the_clients_id_and_the_prompts_tokens() {
    let fixture = Fixture::new(&json!({"prompt": ["a", "b"]}));
    let heads = fixture.requests();
    assert_eq!(heads.iter().map(|head| (head.headers.len(), head.prompt_tokens)).collect::<Vec<_>>(), [(1, 9), (0, 0)]);
}

#[test]
fn whole_answers_are_merged_once_all_are_here() {
    let fixture = Fixture::new(&json!({"prompt": ["a", "b"]}));
    fixture.receive_head(1, 200, "application/json");
    fixture.receive_body(1, &answer("b").to_string());
    fixture.end(1);
    assert!(fixture.head().is_pending());
    fixture.receive_head(0, 200, "application/json");
    let Poll::Ready(Ok(head)) = fixture.head() else { panic!("both heads have come") };
    assert_eq!(head.headers.len(), 1, "the length of one part is not that of the answer");
    assert!(fixture.body().is_pending() && !fixture.exchange.is_finished());
    fixture.receive_body(0, &answer("a").to_string());
    fixture.end(0);
    let merged: Value = serde_json::from_str(&fixture.text()).unwrap();
    assert_eq!(merged["choices"], json!([{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]));
    assert_eq!(merged["usage"], json!({"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}));
    assert!(matches!(fixture.body(), Poll::Ready(Ok(None))) && fixture.exchange.is_finished());
}

#[test]
fn streams_are_merged_as_they_come_and_end_together() {
    let fixture = Fixture::new(&json!({"prompt": "a", "n": 2, "stream": true}));
    (0..2).for_each(|id| fixture.receive_head(id, 200, "text/event-stream; charset=utf-8"));
    assert!(fixture.head().is_ready());
    let event = |id: &str| format!("data: {}\n\n", json!({"id": id, "created": 7, "choices": [{"index": 0, "text": "x"}]}));
    let second = event("b");
    fixture.receive_body(1, &second[..20]);
    assert!(fixture.body().is_pending(), "half a line");
    fixture.receive_body(1, &second[20..]);
    assert_eq!(fixture.text(), "data: {\"id\":\"b\",\"created\":7,\"choices\":[{\"index\":1,\"text\":\"x\"}]}\n\n");
    fixture.receive_body(0, &format!(": waits\n\n{}", event("a")));
    assert_eq!(fixture.text(), ": waits\n\ndata: {\"id\":\"b\",\"created\":7,\"choices\":[{\"index\":0,\"text\":\"x\"}]}\n\n");
    let usage = |tokens: u32| {
        let usage = json!({"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens});
        format!("data: {}\n\ndata: [DONE]\n\n", json!({"id": "z", "choices": [], "usage": usage}))
    };
    fixture.receive_body(1, &usage(3));
    fixture.end(1);
    assert!(fixture.body().is_pending(), "the other goes on");
    fixture.receive_body(0, &usage(4));
    fixture.end(0);
    assert_eq!(
        fixture.text(),
        "data: {\"id\":\"b\",\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":7,\"total_tokens\":12}}\n\ndata: [DONE]\n\n"
    );
    assert!(matches!(fixture.body(), Poll::Ready(Ok(None))) && fixture.exchange.is_finished());
}

#[test]
fn a_refused_part_is_the_answer_and_a_lost_one_loses_all() {
    let fixture = Fixture::new(&json!({"prompt": ["a", "b"]}));
    fixture.receive_head(1, 400, "application/json");
    assert!(matches!(fixture.head(), Poll::Ready(Ok(ResponseHead { status: 400, .. }))));
    fixture.receive_body(1, "too long");
    assert_eq!(fixture.text(), "too long");
    drop(fixture.exchange);
    assert_eq!(fixture.lane.open_request_count(), 0, "the other part is cancelled");

    let fixture = Fixture::new(&json!({"prompt": ["a", "b"], "stream": true}));
    (0..2).for_each(|id| fixture.receive_head(id, 200, "text/event-stream"));
    assert!(fixture.head().is_ready());
    fixture.lane.mark_lost(&StreamFault::lane_lost());
    assert!(matches!(fixture.body(), Poll::Ready(Err(_))));
}

#[test]
fn an_error_in_one_stream_ends_all() {
    let fixture = Fixture::new(&json!({"prompt": ["a", "b"], "stream": true}));
    (0..2).for_each(|id| fixture.receive_head(id, 200, "text/event-stream"));
    assert!(fixture.head().is_ready());
    fixture.receive_body(1, "data: {\"error\":{\"message\":\"no\"}}\n\ndata: [DONE]\n\n");
    assert_eq!(fixture.text(), "data: {\"error\":{\"message\":\"no\"}}\n\n");
    assert!(matches!(fixture.body(), Poll::Ready(Ok(None))));
}
