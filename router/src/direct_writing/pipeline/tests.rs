use std::future::poll_fn;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::resumption::samples::{content, role};
use crate::resumption::{RecordMemory, StreamApi};
use crate::sse::Dialect;

/// An event stream whose client is the other side of a connection.
async fn stream() -> (Arc<AnswerPipeline>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (client, accepted) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    let server = accepted.unwrap().0;
    server.writable().await.unwrap();
    let (_, direct_writer) = DirectWriter::split(server);
    poll_fn(|context| direct_writer.poll_flush(context)).await.unwrap();
    let flow = AnswerPipeline::new(Some(SseScanner::new(Dialect::OpenAi)), None, None);
    flow.lock().direct_writer = Some(direct_writer);
    (flow, client.unwrap())
}

fn take(flow: &AnswerPipeline, piece: &'static str) -> ConsumeOutcome {
    flow.consume(Bytes::from_static(piece.as_bytes()))
}

#[tokio::test]
async fn whole_events_are_written_at_once_and_halves_wait() {
    let (flow, mut client) = stream().await;
    assert!(matches!(take(&flow, "data: {\"a\":1}\n\ndata: {"), ConsumeOutcome::Consumed));
    assert!(matches!(take(&flow, "}\n\n"), ConsumeOutcome::Consumed));
    let mut received = [0; 35];
    client.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, b"F\r\ndata: {\"a\":1}\n\n\r\nA\r\ndata: {}\n\n\r\n");
    let flow = flow.lock();
    assert_eq!((flow.sent_bytes, flow.scanner.as_ref().unwrap().event_count()), (25, 2));
}

#[tokio::test]
async fn no_bytes_are_written_after_a_failure() {
    for failure in ["data: {\"error\":{}}\n\n", "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n"] {
        let (flow, mut client) = stream().await;
        assert!(matches!(take(&flow, failure), ConsumeOutcome::ConsumedAndWake));
        assert!(matches!(take(&flow, "data: [DONE]\n\n"), ConsumeOutcome::Declined(_)), "{failure}");
        assert!(flow.lock().failure.is_some());
        drop(flow);
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        assert!(received.is_empty(), "the relay sends what the client gets of a failure");
    }
}

#[tokio::test]
async fn unrequested_tokens_are_removed_from_direct_writes() {
    let (flow, mut client) = stream().await;
    flow.lock().token_record = Some(Box::new(TokenRecord::new(StreamApi::Chat, &RecordMemory::default())));
    let with_ids = [role("[1,2]"), content("Hey", "[7]"), content("lo", "[8,9]")];
    let plain = [role("null"), content("Hey", "null"), content("lo", "null")];
    let mut expected = String::new();
    for (event, plain) in with_ids.iter().zip(&plain) {
        // An event may come in two pieces.
        let (one, other) = event.split_at(if event.contains("lo\"") { 100 } else { 0 });
        assert!(matches!(flow.consume(one.to_owned().into()), ConsumeOutcome::Consumed));
        assert!(matches!(flow.consume(other.to_owned().into()), ConsumeOutcome::Consumed));
        expected.push_str(&format!("{:X}\r\n{plain}\r\n", plain.len()));
    }
    let mut received = vec![0; expected.len()];
    client.read_exact(&mut received).await.unwrap();
    assert_eq!(String::from_utf8(received).unwrap(), expected);
    let mut flow = flow.lock();
    assert_eq!((flow.sent_bytes, flow.scanner.as_ref().unwrap().event_count()), (plain.concat().len() as u64, 3));
    let known = flow.token_record.as_mut().unwrap().rewind().unwrap();
    assert_eq!(known.total(), 5);
}

#[tokio::test(start_paused = true)]
async fn the_longest_gap_of_a_stream_is_known_with_its_end() {
    let flow = AnswerPipeline::new(Some(SseScanner::new(Dialect::OpenAi)), None, None);
    let began = Instant::now();
    for millis in [20, 900, 30] {
        tokio::time::advance(Duration::from_millis(millis)).await;
        flow.lock().record_progress();
    }
    assert_eq!(flow.lock().take_gap(), (Duration::from_millis(900), began + Duration::from_millis(920)));
    assert_eq!(flow.lock().take_gap().0, Duration::ZERO, "another engine's part has gaps of its own");
}
