use std::convert::Infallible;
use std::io::Write;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use futures_util::stream;
use http::header::HeaderValue;
use http_body::Frame;
use http_body_util::{Full, StreamBody};

use super::*;

fn config() -> RouterConfig {
    RouterConfig { max_body_bytes: 4 * 1024 * 1024, decompress_bodies: true, ..RouterConfig::default() }
}

fn encoded(coding: &'static str) -> HeaderMap {
    HeaderMap::from_iter([(header::CONTENT_ENCODING, HeaderValue::from_static(coding))])
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn in_pieces(bytes: &[u8], size: usize) -> impl Body<Data = Bytes, Error = Infallible> + Unpin + use<> {
    let pieces: Vec<_> = bytes.chunks(size).map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece)))).collect();
    StreamBody::new(stream::iter(pieces))
}

fn all() -> BodyReservation {
    of(&BodyMemory::new(usize::MAX))
}

/// Reads a body, and releases its memory afterwards.
async fn read_body<B>(config: &RouterConfig, mut room: BodyReservation, headers: &HeaderMap, body: B) -> Result<Bytes, BodyReadError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    super::read_body(config, &mut room, headers, body).await
}

fn of(reading: &BodyMemory) -> BodyReservation {
    reading.reserve(QueueShare { tenant: 1, weight: 1.0, bytes: 0 }).unwrap()
}

#[tokio::test]
async fn a_body_arrives_unchanged_in_one_piece_or_many() {
    let sent: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    for size in [1000, 65_536, sent.len()] {
        assert_eq!(read_body(&config(), all(), &HeaderMap::new(), in_pieces(&sent, size)).await.unwrap(), sent);
    }
    assert_eq!(read_body(&config(), all(), &HeaderMap::new(), in_pieces(b"", 1)).await.unwrap(), Bytes::new());
}

#[tokio::test]
async fn bodies_are_decompressed_only_where_allowed() {
    let text = br#"{"model":"m","prompt":"a prompt that is a prompt that is a prompt"}"#;
    for (coding, sent) in [("gzip", gzip(text)), ("X-GZip", gzip(text)), ("deflate", zlib(text)), ("identity", text.to_vec())] {
        let read = read_body(&config(), all(), &encoded(coding), in_pieces(&sent, 7)).await;
        assert_eq!(read.unwrap(), &text[..], "{coding}");
    }
    let parts = [gzip(b"two "), gzip(b"parts")].concat();
    assert_eq!(read_body(&config(), all(), &encoded("gzip"), in_pieces(&parts, 3)).await.unwrap(), "two parts");
    let off = RouterConfig { decompress_bodies: false, ..config() };
    let refused = read_body(&off, all(), &encoded("gzip"), in_pieces(&gzip(text), 7)).await.unwrap_err();
    assert_eq!(refused, BodyReadError::CompressionOff("gzip".into()));
    assert_eq!(read_body(&off, all(), &encoded("identity"), in_pieces(text, 7)).await.unwrap(), &text[..]);
    for unknown in ["zstd", "gzip, gzip", "br"] {
        let refused = read_body(&config(), all(), &encoded(unknown), in_pieces(text, 7)).await.unwrap_err();
        assert_eq!(refused, BodyReadError::UnknownCoding(unknown.into()));
    }
}

#[tokio::test]
async fn a_decompression_bomb_differs_from_a_broken_body() {
    let bomb = gzip(&vec![b' '; 64 * 1024 * 1024]);
    for (most, expected) in [(4 << 20, InflateError::Ratio(inflate::MAX_RATIO)), (900_000, InflateError::TooLarge(900_000))] {
        let config = RouterConfig { max_body_bytes: most, ..config() };
        let refused = read_body(&config, all(), &encoded("gzip"), in_pieces(&bomb, 65_536)).await.unwrap_err();
        assert_eq!(refused, BodyReadError::Decompression(expected));
    }
    let mut cut = gzip(b"a text that is cut");
    cut.truncate(cut.len() - 9);
    for broken in [&cut[..], b"no gzip at all"] {
        let refused = read_body(&config(), all(), &encoded("gzip"), in_pieces(broken, 5)).await.unwrap_err();
        assert!(matches!(refused, BodyReadError::Decompression(InflateError::Broken(_))), "{refused}");
    }
}

#[tokio::test]
async fn arriving_bodies_share_one_memory_and_return_it() {
    let reading = BodyMemory::new(10 * PIECE_BYTES);
    let body = vec![b'x'; 6 * PIECE_BYTES];
    let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
    let waiting = StreamBody::new(Box::pin(stream::unfold((0, Some(receiver), body.clone()), |(step, receiver, body)| async move {
        if step == 0 {
            return Some((Ok::<_, Infallible>(Frame::data(Bytes::from(body.clone()))), (1, receiver, body)));
        }
        let _ = receiver?.await;
        None
    })));
    let (config, headers) = (config(), HeaderMap::new());
    let mut first = std::pin::pin!(read_body(&config, of(&reading), &headers, waiting));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let refused = read_body(&config, of(&reading), &headers, Full::new(Bytes::from(body.clone()))).await.unwrap_err();
    assert_eq!(refused, BodyReadError::MemoryFull(BodyMemoryFull));
    let small = read_body(&config, of(&reading), &headers, Full::new(Bytes::from_static(b"small"))).await;
    assert_eq!(small.unwrap(), "small");
    sender.send(()).unwrap();
    assert_eq!(first.await.unwrap().len(), body.len());
    assert_eq!(read_body(&config, of(&reading), &headers, Full::new(Bytes::from(body.clone()))).await.unwrap().len(), body.len());
}

#[tokio::test(start_paused = true)]
async fn overlarge_and_slow_bodies_are_not_waited_for() {
    let config = config();
    let large = vec![b'x'; config.max_body_bytes + 1];
    let announced = HeaderMap::from_iter([(header::CONTENT_LENGTH, HeaderValue::from(large.len()))]);
    let never = || StreamBody::new(stream::pending::<Result<Frame<Bytes>, Infallible>>());
    assert_eq!(read_body(&config, all(), &announced, never()).await, Err(BodyReadError::TooLarge(config.max_body_bytes)));
    let sent = read_body(&config, all(), &HeaderMap::new(), in_pieces(&large, 65_536)).await;
    assert_eq!(sent, Err(BodyReadError::TooLarge(config.max_body_bytes)));
    let slow = read_body(&config, all(), &HeaderMap::new(), never()).await.unwrap_err();
    assert_eq!(slow, BodyReadError::TooSlow(config.body_timeout));
}

#[test]
fn large_bodies_leave_room_for_small_ones() {
    let reading = BodyMemory::new(64 * PIECE_BYTES);
    let room = |tenant, bytes: usize| reading.reserve(QueueShare { tenant, weight: 1.0, bytes: bytes as u64 });
    let held: Vec<BodyReservation> = (0..8).map(|tenant| room(tenant, 6 * PIECE_BYTES).unwrap()).collect();
    assert_eq!(room(8, 6 * PIECE_BYTES).unwrap_err(), BodyMemoryFull, "56 of the 64 pieces are for large ones");
    let small: Vec<BodyReservation> = (8..16).map(|tenant| room(tenant, 100).unwrap()).collect();
    assert_eq!(room(16, 100).unwrap_err(), BodyMemoryFull);
    drop(small);
    drop(held);
    let all: Vec<BodyReservation> = (0..64).map(|tenant| room(tenant, PIECE_BYTES - 1).unwrap()).collect();
    assert_eq!(all.len(), 64);
}

#[test]
fn a_tenant_with_many_bodies_leaves_room_for_another() {
    let reading = BodyMemory::new(80 * PIECE_BYTES);
    let room = |tenant, bytes: usize| reading.reserve(QueueShare { tenant, weight: 1.0, bytes: bytes as u64 });
    let flood: Vec<BodyReservation> = std::iter::from_fn(|| room(1, 6 * PIECE_BYTES).ok()).collect();
    // The flood takes so many of the 70 pieces for large bodies that four times the free memory is
    // no more.
    assert_eq!(flood.len(), 8);
    assert!(room(2, 6 * PIECE_BYTES).is_ok());
    drop(flood);
    let whole = room(1, 69 * PIECE_BYTES).unwrap();
    assert_eq!((whole.0.amount(), reading.0.taken()), (70, 70), "one that is alone may have all that there is");
    drop(whole);
    assert_eq!(reading.0.tenant_count(), 0);
}

#[test]
fn a_bodys_memory_is_taken_until_its_last_part_drops() {
    let reading = BodyMemory::new(64 * PIECE_BYTES);
    let mut body = of(&reading).wrap(Bytes::from(vec![b'x'; PIECE_BYTES]));
    let part = body.split_to(10);
    drop(body);
    assert_eq!(reading.0.taken(), 1);
    drop(part);
    assert_eq!(reading.0.taken(), 0);
}

#[test]
fn a_bodys_memory_is_passed_on_and_counted_once() {
    let reading = BodyMemory::new(10 * PIECE_BYTES);
    let share = |tenant, pieces: usize| QueueShare { tenant, weight: 1.0, bytes: (pieces * PIECE_BYTES - 1) as u64 };
    let taken = || (reading.0.taken(), reading.0.taken_by(1), reading.0.taken_by(2));
    // Twice as much memory would not be there.
    let reservation = reading.reserve(share(1, 6)).unwrap().transfer_to(share(1, 6)).unwrap();
    assert_eq!(taken(), (6, 6, 0));
    let reservation = reservation.transfer_to(share(1, 7)).unwrap().transfer_to(share(2, 7)).unwrap();
    assert_eq!(taken(), (7, 0, 7));
    assert_eq!(reservation.transfer_to(share(2, 20)).unwrap_err(), BodyMemoryFull);
    assert_eq!(taken(), (0, 0, 0), "who is refused gives all back at once");
}

#[test]
fn a_converted_body_takes_over_its_sources_memory() {
    let reading = BodyMemory::new(10 * PIECE_BYTES);
    let share = |pieces: usize| QueueShare { tenant: 1, weight: 1.0, bytes: (pieces * PIECE_BYTES - 1) as u64 };
    let mut of_client = reading.reserve(share(6)).unwrap();
    let moved = of_client.take();
    drop(of_client);
    assert_eq!(reading.0.taken(), 6);
    let smaller = moved.transfer_to(share(2)).unwrap();
    assert_eq!((smaller.0.amount(), reading.0.taken()), (2, 2));
    drop(smaller);
    assert_eq!(reading.0.tenant_count(), 0);
}

#[test]
fn the_largest_body_fits_the_memory_for_large_ones() {
    let fits = |pieces, bytes| BodyMemory::new(pieces * PIECE_BYTES).can_fit(bytes);
    assert!(fits(8, 7 * PIECE_BYTES - 1) && !fits(8, 7 * PIECE_BYTES));
    let usual = RouterConfig::default();
    assert!(BodyMemory::new(usual.max_buffered_body_bytes).can_fit(usual.max_body_bytes));
}
