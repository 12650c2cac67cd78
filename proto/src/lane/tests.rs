use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_util::StreamExt;

use super::*;

fn body(id: u64, bytes: usize) -> Frame {
    Frame::new(id, Kind::Body(Bytes::from(vec![0; bytes])))
}

fn context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

#[tokio::test]
async fn an_outbox_batches_all_ready_frames_and_ends_when_closed() {
    let outbox = Arc::new(Outbox::default());
    (0..500).for_each(|id| outbox.push(body(id, 200)));
    let mut batches = outbox.batches();
    assert_eq!(batches.next().await.unwrap().frames.len(), 500);
    outbox.push(body(7, 1));
    assert_eq!(batches.next().await.unwrap().frames[0].id, 7);
    outbox.push(body(8, 1));
    outbox.close();
    outbox.push(body(9, 1));
    assert!(batches.next().await.is_none());
}

#[test]
fn a_batch_is_bounded_in_bytes_and_frames() {
    let outbox = Outbox::default();
    (0..8).for_each(|id| outbox.push(body(id, MAX_BODY_BYTES)));
    assert_eq!(outbox.take_batch().unwrap().frames.len(), 2);
    let outbox = Outbox::default();
    let name = Bytes::from_static(b"x-large");
    let header = crate::agent::v1::Header { name, value: vec![b'x'; 50_000].into() };
    let head = crate::agent::v1::RequestHead { headers: vec![header], ..Default::default() };
    (0..300).for_each(|id| outbox.push(Frame::new(id, Kind::Request(head.clone()))));
    assert_eq!(outbox.take_batch().unwrap().frames.len(), 3, "heads count too");
    let outbox = Outbox::default();
    (0..3000).for_each(|id| outbox.push(body(id, 1)));
    assert_eq!(outbox.take_batch().unwrap().frames.len(), 1024);
}

#[test]
fn an_unread_inbox_holds_one_window_and_breaks_beyond_it() {
    let inbox = Inbox::<()>::default();
    for _ in 0..WINDOW_BYTES / 1024 {
        inbox.push_body(Bytes::from(vec![1; 1024]), 1, &Outbox::default());
    }
    assert!(!inbox.has_ended());
    inbox.push_body(Bytes::from_static(b"x"), 1, &Outbox::default());
    let mut received = 0;
    let broken = loop {
        match inbox.poll_body(&context(), 1, &Outbox::default()) {
            Poll::Ready(Ok(Some(piece))) => received += piece.len(),
            Poll::Ready(Err(broken)) => break broken,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((received, broken.fault), (WINDOW_BYTES, Fault::Protocol));
}

#[test]
fn a_read_piece_is_not_copied_and_the_rest_joined() {
    let inbox = Inbox::<()>::default();
    let sent = Bytes::from_static(b"data: 1\n\n");
    inbox.push_body(sent.clone(), 1, &Outbox::default());
    inbox.push_body(Bytes::from_static(b"data: 2\n\n"), 1, &Outbox::default());
    inbox.push_body(Bytes::from_static(b"data: 3\n\n"), 1, &Outbox::default());
    let Poll::Ready(Ok(Some(first))) = inbox.poll_body(&context(), 1, &Outbox::default()) else { panic!("a piece was there") };
    assert_eq!(first.as_ptr(), sent.as_ptr());
    let Poll::Ready(Ok(Some(rest))) = inbox.poll_body(&context(), 1, &Outbox::default()) else { panic!("the rest was there") };
    assert_eq!(&rest[..], b"data: 2\n\ndata: 3\n\n");
    assert!(inbox.poll_body(&context(), 1, &Outbox::default()).is_pending());
}

#[test]
fn bytes_before_a_break_are_delivered_first() {
    let inbox = Inbox::<u8>::default();
    inbox.set_head(1);
    inbox.push_body(Bytes::from_static(b"half"), 1, &Outbox::default());
    inbox.end(Err(StreamFault::lane_lost()));
    inbox.end(Ok(()));
    inbox.push_body(Bytes::from_static(b"late"), 1, &Outbox::default());
    assert_eq!(inbox.poll_head(&context()), Poll::Ready(Ok(1)));
    assert_eq!(inbox.poll_body(&context(), 1, &Outbox::default()), Poll::Ready(Ok(Some(Bytes::from_static(b"half")))));
    assert_eq!(inbox.poll_body(&context(), 1, &Outbox::default()), Poll::Ready(Err(StreamFault::lane_lost())));
}

#[test]
fn credit_returns_by_half_windows_up_to_one_window() {
    let credit = Credit::default();
    assert_eq!(credit.try_take(WINDOW_BYTES + 5), WINDOW_BYTES);
    assert_eq!((credit.try_take(1), credit.poll_take(&context(), 1)), (0, Poll::Pending));
    credit.grant(10);
    credit.grant(u32::MAX);
    assert_eq!(credit.poll_take(&context(), usize::MAX), Poll::Ready(WINDOW_BYTES));

    let (inbox, outbox) = (Inbox::<()>::default(), Outbox::default());
    let mut granted = Vec::new();
    for _ in 0..4 {
        inbox.push_body(Bytes::from(vec![0; MAX_BODY_BYTES]), 1, &outbox);
        assert!(inbox.poll_body(&context(), 1, &outbox).is_ready());
        granted.push(outbox.take_batch().map_or(0, |batch| batch.frames.len()));
    }
    assert_eq!(granted, [0, 1, 0, 1]);
}

#[test]
fn only_a_piece_of_pure_comments_is_a_keep_alive() {
    assert!(is_keep_alive_comment(b": keep-alive\n\n") && is_keep_alive_comment(b":\r\n\r\n: again\n\n"));
    for piece in ["", "data: x\n\n", ": keep-alive\n\ndata: x\n\n", "{\"a\":1}"] {
        assert!(!is_keep_alive_comment(piece.as_bytes()), "{piece}");
    }
}

/// Consumer that takes pieces until it is told to stop.
#[derive(Debug, Default)]
struct Pieces {
    taken: parking_lot::Mutex<Vec<Bytes>>,
    refuses: std::sync::atomic::AtomicBool,
}

impl InlineConsumer for Pieces {
    fn consume(&self, piece: Bytes) -> ConsumeOutcome {
        if self.refuses.load(std::sync::atomic::Ordering::Relaxed) {
            return ConsumeOutcome::Declined(piece);
        }
        let wakes = piece.starts_with(b"!");
        self.taken.lock().push(piece);
        if wakes { ConsumeOutcome::ConsumedAndWake } else { ConsumeOutcome::Consumed }
    }
}

/// Counter of the reader's wake-ups.
#[derive(Debug, Default)]
struct Wakes(std::sync::atomic::AtomicUsize);

impl std::task::Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

#[test]
fn an_inline_consumer_gets_pieces_only_while_its_reader_waits() {
    let (inbox, outbox, pieces) = (Inbox::<()>::default(), Outbox::default(), Arc::new(Pieces::default()));
    let give = |piece: &'static str| inbox.push_body(Bytes::from_static(piece.as_bytes()), 1, &outbox);
    let read = || match inbox.poll_body(&context(), 1, &outbox) {
        Poll::Ready(Ok(Some(piece))) => String::from_utf8(piece.to_vec()).unwrap(),
        Poll::Ready(Ok(None)) => "end".into(),
        Poll::Ready(Err(broken)) => broken.message,
        Poll::Pending => "waits".into(),
    };
    inbox.attach(pieces.clone());
    give("a");
    assert_eq!(read(), "a", "the reader does not wait yet");
    give("b");
    assert_eq!(read(), "b", "it has only just read");
    assert_eq!(read(), "waits");
    give("c");
    give("!d");
    give("e");
    assert_eq!(*pieces.taken.lock(), ["c", "!d"]);
    assert_eq!((read(), read()), ("e".into(), "waits".into()));
    pieces.refuses.store(true, std::sync::atomic::Ordering::Relaxed);
    give("f");
    pieces.refuses.store(false, std::sync::atomic::Ordering::Relaxed);
    give("g");
    assert_eq!((read(), read()), ("f".into(), "g".into()), "nothing overtakes what the reader must take");
    assert_eq!(read(), "waits");
    inbox.detach();
    give("h");
    inbox.end(Ok(()));
    assert_eq!((read(), read()), ("h".into(), "end".into()));
    assert_eq!(pieces.taken.lock().len(), 2);
}

#[test]
fn pieces_followed_by_more_wake_their_reader_once() {
    let (inbox, outbox, pieces) = (Inbox::<()>::default(), Outbox::default(), Arc::new(Pieces::default()));
    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(wakes.clone());
    let poll = || inbox.poll_body(&Context::from_waker(&waker), 1, &outbox);
    let woken = || wakes.0.swap(0, std::sync::atomic::Ordering::Relaxed);
    inbox.attach(pieces.clone());
    for last in ["event", "", "end"] {
        assert!(poll().is_pending());
        inbox.push_body_before_more(Bytes::from_static(b"one"), 1, &outbox);
        inbox.push_body_before_more(Bytes::from_static(b"two"), 1, &outbox);
        assert_eq!(woken(), 0, "what follows is at hand");
        match last {
            "end" => inbox.end(Ok(())),
            piece => inbox.push_body(Bytes::from_static(piece.as_bytes()), 1, &outbox),
        }
        assert_eq!(woken(), 1, "{last}");
        assert_eq!(poll(), Poll::Ready(Ok(Some(Bytes::from_static(b"one")))));
        let rest = if last == "event" { "twoevent" } else { "two" };
        assert_eq!(poll(), Poll::Ready(Ok(Some(Bytes::from_static(rest.as_bytes())))));
    }
    assert_eq!(poll(), Poll::Ready(Ok(None)));
    assert!(pieces.taken.lock().is_empty());
}

#[test]
fn a_sender_past_its_credit_breaks_even_mid_batch() {
    let (inbox, outbox, wakes) = (Inbox::<()>::default(), Outbox::default(), Arc::new(Wakes::default()));
    assert!(inbox.poll_body(&Context::from_waker(&Waker::from(wakes.clone())), 1, &outbox).is_pending());
    inbox.push_body_before_more(Bytes::from(vec![0; WINDOW_BYTES + 1]), 1, &outbox);
    assert_eq!((wakes.0.load(std::sync::atomic::Ordering::Relaxed), inbox.has_ended()), (1, true));
}

#[test]
fn credit_returns_for_pieces_consumed_inline() {
    let (inbox, outbox) = (Inbox::<()>::default(), Outbox::default());
    inbox.attach(Arc::new(Pieces::default()));
    assert!(inbox.poll_body(&context(), 1, &outbox).is_pending());
    let mut granted = 0;
    for _ in 0..4 * WINDOW_BYTES / MAX_BODY_BYTES {
        inbox.push_body(Bytes::from(vec![0; MAX_BODY_BYTES]), 1, &outbox);
        for frame in outbox.take_batch().map_or_else(Vec::new, |batch| batch.frames) {
            let Some(Kind::Credit(credit)) = frame.kind else { panic!("{frame:?}") };
            granted += credit as usize;
        }
    }
    assert_eq!((granted, inbox.has_ended()), (4 * WINDOW_BYTES, false));
}

#[test]
fn an_unknown_fault_is_a_broken_body() {
    assert_eq!(End::default().outcome(), Ok(()));
    let broken = End { fault: 77, message: "of a later release".into() }.outcome().unwrap_err();
    assert_eq!((broken.fault, broken.message.contains("of a later release")), (Fault::Protocol, true), "{broken}");
}

#[test]
fn a_fault_message_is_cut_to_one_bounded_line() {
    let told = |message: &str| End { fault: wire::Fault::EngineStopped.into(), message: message.to_owned() }.outcome().unwrap_err().message;
    assert_eq!(told("the job is being ended"), "the job is being ended");
    assert_eq!(told("a\r\ndata: {}\n\nb"), "a  data: {}  b");
    assert_eq!(told(&"ü".repeat(10_000)).chars().count(), MAX_FAULT_CHARACTERS);
}
