use std::task::Waker;
use std::time::Duration;

use hostler_proto::lane::{ConsumeOutcome, Fault};
use tokio::time::Instant;

use super::*;

fn context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

fn kinds(lane: &Lane) -> Vec<Kind> {
    std::iter::from_fn(|| lane.outbox.take_batch()).flat_map(|batch| batch.frames).filter_map(|frame| frame.kind).collect()
}

fn batch(id: u64, kind: Kind) -> FrameBatch {
    FrameBatch { frames: vec![Frame::new(id, kind)] }
}

#[test]
fn a_large_body_is_framed_and_waits_for_credit() {
    let lane = Lane::new(Counter::default());
    let body = Bytes::from(vec![7; WINDOW_BYTES + 10]);
    let _exchange = lane.open(1, RequestHead::default(), body).unwrap();
    let sizes: Vec<usize> =
        kinds(&lane).iter().filter_map(|kind| if let Kind::Body(body) = kind { Some(body.len()) } else { None }).collect();
    assert_eq!(sizes, [MAX_BODY_BYTES; WINDOW_BYTES / MAX_BODY_BYTES]);
    lane.receive(batch(1, Kind::Credit(10)));
    assert!(matches!(&kinds(&lane)[..], [Kind::Body(rest), Kind::End(_)] if rest.len() == 10));
    lane.receive(batch(1, Kind::Credit(10)));
    assert!(kinds(&lane).is_empty(), "the end is sent once");
}

#[test]
fn only_dropping_an_unfinished_exchange_cancels_it() {
    let lane = Lane::new(Counter::default());
    let unfinished = lane.open(1, RequestHead::default(), Bytes::new()).unwrap();
    let finished = lane.open(2, RequestHead::default(), Bytes::new()).unwrap();
    lane.receive(batch(2, Kind::End(hostler_proto::agent::v1::End::default())));
    kinds(&lane);
    drop(finished);
    assert!(kinds(&lane).is_empty());
    drop(unfinished);
    assert_eq!(kinds(&lane), [Kind::Cancel(Cancel {})]);
    assert_eq!(lane.open_request_count(), 0);
}

#[test]
fn a_dropped_exchange_leaves_no_body_in_the_outbox() {
    let lane = Lane::new(Counter::default());
    let body = Arc::new(vec![7_u8; 10 * WINDOW_BYTES]);
    struct Owner(Arc<Vec<u8>>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let open = |id| lane.open(id, RequestHead::default(), Bytes::from_owner(Owner(body.clone()))).unwrap();
    let unheard = open(1);
    drop(unheard);
    assert!(kinds(&lane).is_empty(), "the agent has never heard of it");
    let heard = open(2);
    assert!(!lane.outbox.take_batch().unwrap().frames.is_empty());
    let other = open(3);
    drop(heard);
    assert_eq!(Arc::strong_count(&body), 2, "only the other's is held");
    assert!(matches!(&kinds(&lane)[..], [Kind::Request(_), Kind::Body(_), .., Kind::Cancel(_)]));
    drop(other);
    assert_eq!(Arc::strong_count(&body), 1);
}

/// A consumer that takes every piece.
#[derive(Debug, Default)]
struct Pieces(Mutex<Vec<Bytes>>);

impl InlineConsumer for Pieces {
    fn consume(&self, piece: Bytes) -> ConsumeOutcome {
        self.0.lock().push(piece);
        ConsumeOutcome::Consumed
    }
}

#[test]
fn a_piece_is_passed_on_unless_its_batch_has_more() {
    let lane = Lane::new(Counter::default());
    let piece = |id, text: &'static str| Frame::new(id, Kind::Body(Bytes::from_static(text.as_bytes())));
    let exchanges = [1, 2].map(|id| lane.open(id, RequestHead::default(), Bytes::new()).unwrap());
    let taken = exchanges.each_ref().map(|exchange| {
        let pieces = Arc::new(Pieces::default());
        exchange.attach(pieces.clone());
        assert!(exchange.poll_body(&context()).is_pending());
        pieces
    });
    let frames = vec![piece(1, "event"), piece(2, "event"), piece(1, "last"), piece(1, "[DONE]"), Frame::end(1, None), piece(2, "next")];
    lane.receive(FrameBatch { frames });
    assert_eq!(*taken[0].0.lock(), ["event"]);
    assert_eq!(*taken[1].0.lock(), ["event", "next"]);
    let mut left = Vec::new();
    while let Poll::Ready(Ok(Some(piece))) = exchanges[0].poll_body(&context()) {
        left.push(piece);
    }
    assert_eq!(left, ["last", "[DONE]"]);
    assert!(exchanges[0].is_finished());
}

#[test]
fn a_frame_for_an_unknown_id_is_dropped_and_counted() {
    let unknown = Counter::default();
    let lane = Lane::new(unknown.clone());
    lane.receive(batch(9, Kind::Body(Bytes::from_static(b"late"))));
    assert_eq!(unknown.get(), 1);
}

#[test]
fn a_lost_lane_breaks_its_requests_and_refuses_new_ones() {
    let lane = Lane::new(Counter::default());
    let exchange = lane.open(1, RequestHead::default(), Bytes::new()).unwrap();
    lane.mark_lost(&StreamFault::lane_lost());
    assert_eq!(exchange.poll_head(&context()), Poll::Ready(Err(StreamFault::lane_lost())));
    assert!(lane.open(2, RequestHead::default(), Bytes::new()).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_loss_after_a_long_silence_says_so() {
    let lanes = Lanes::default();
    assert_eq!(lanes.loss(), StreamFault::lane_lost(), "never heard");
    lanes.mark_heard(Instant::now(), Duration::from_secs(3));
    tokio::time::advance(Duration::from_secs(3)).await;
    assert_eq!(lanes.loss(), StreamFault::lane_lost());
    tokio::time::advance(Duration::from_secs(7)).await;
    let lane = Lane::new(Counter::default());
    lanes.add(&lane);
    let exchange = lanes.open(RequestHead::default(), Bytes::new()).unwrap();
    lanes.mark_lost();
    let Poll::Ready(Err(fault)) = exchange.poll_head(&context()) else { panic!("it goes on") };
    assert_eq!(fault.fault, Fault::LaneLost);
    assert!(fault.message.starts_with("the node's agent was silent for 10 s"), "{}", fault.message);
}

#[test]
fn an_attachment_is_available_while_one_lane_lives() {
    let lanes = Lanes::default();
    let [first, second] = [(); 2].map(|()| Lane::new(Counter::default()));
    assert!(!lanes.is_available());
    lanes.add(&first);
    lanes.add(&second);
    first.mark_lost(&lanes.loss());
    lanes.remove_lost();
    assert!(lanes.is_available() && lanes.open(RequestHead::default(), Bytes::new()).is_ok());
    second.mark_lost(&lanes.loss());
    lanes.remove_lost();
    assert!(!lanes.is_available());
}

#[test]
fn a_ticket_is_valid_while_its_attachment_lives() {
    let tickets = Arc::new(Tickets::default());
    let lanes = Arc::new(Lanes::default());
    let ticket = tickets.issue(&lanes).unwrap();
    let lane = Lane::new(Counter::default());
    tickets.redeem(ticket.secret()).unwrap().add(&lane);
    let secret = ticket.secret().clone();
    assert!(lanes.is_available() && tickets.redeem(b"guess").is_none());
    drop(ticket);
    assert!(lane.is_lost() && !lanes.is_available() && tickets.redeem(&secret).is_none());
}
