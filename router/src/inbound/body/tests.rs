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

fn all() -> Room {
    of(&Reading::new(usize::MAX))
}

fn of(reading: &Reading) -> Room {
    reading.room(QueueShare { tenant: 1, weight: 1.0, bytes: 0 }).unwrap()
}

#[tokio::test]
async fn a_body_is_read_as_it_was_sent_in_one_piece_or_many() {
    let sent: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    for size in [1000, 65_536, sent.len()] {
        assert_eq!(read_body(&config(), all(), &HeaderMap::new(), in_pieces(&sent, size)).await.unwrap(), sent);
    }
    assert_eq!(read_body(&config(), all(), &HeaderMap::new(), in_pieces(b"", 1)).await.unwrap(), Bytes::new());
}

#[tokio::test]
async fn compression_is_undone_only_where_that_is_set() {
    let text = br#"{"model":"m","prompt":"a prompt that is a prompt that is a prompt"}"#;
    for (coding, sent) in [("gzip", gzip(text)), ("X-GZip", gzip(text)), ("deflate", zlib(text)), ("identity", text.to_vec())] {
        let read = read_body(&config(), all(), &encoded(coding), in_pieces(&sent, 7)).await;
        assert_eq!(read.unwrap(), &text[..], "{coding}");
    }
    let parts = [gzip(b"two "), gzip(b"parts")].concat();
    assert_eq!(read_body(&config(), all(), &encoded("gzip"), in_pieces(&parts, 3)).await.unwrap(), "two parts");
    let off = RouterConfig { decompress_bodies: false, ..config() };
    let refused = read_body(&off, all(), &encoded("gzip"), in_pieces(&gzip(text), 7)).await.unwrap_err();
    assert_eq!(refused, Unread::Compressed("gzip".into()));
    assert_eq!(read_body(&off, all(), &encoded("identity"), in_pieces(text, 7)).await.unwrap(), &text[..]);
    for unknown in ["zstd", "gzip, gzip", "br"] {
        let refused = read_body(&config(), all(), &encoded(unknown), in_pieces(text, 7)).await.unwrap_err();
        assert_eq!(refused, Unread::Unknown(unknown.into()));
    }
}

#[tokio::test]
async fn a_bomb_is_left_after_the_bound_and_a_broken_body_is_told_apart() {
    let bomb = gzip(&vec![b' '; 64 * 1024 * 1024]);
    for (most, expected) in [(4 << 20, NotInflated::Ratio(inflate::RATIO)), (900_000, NotInflated::TooLarge(900_000))] {
        let config = RouterConfig { max_body_bytes: most, ..config() };
        let refused = read_body(&config, all(), &encoded("gzip"), in_pieces(&bomb, 65_536)).await.unwrap_err();
        assert_eq!(refused, Unread::Bomb(expected));
    }
    let mut cut = gzip(b"a text that is cut");
    cut.truncate(cut.len() - 9);
    for broken in [&cut[..], b"no gzip at all"] {
        let refused = read_body(&config(), all(), &encoded("gzip"), in_pieces(broken, 5)).await.unwrap_err();
        assert!(matches!(refused, Unread::Bomb(NotInflated::Broken(_))), "{refused}");
    }
}

#[tokio::test]
async fn bodies_that_arrive_share_one_memory_and_give_it_back() {
    let reading = Reading::new(10 * PIECE_BYTES);
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
    assert_eq!(refused, Unread::NoRoom(NoRoom));
    let small = read_body(&config, of(&reading), &headers, Full::new(Bytes::from_static(b"small"))).await;
    assert_eq!(small.unwrap(), "small");
    sender.send(()).unwrap();
    assert_eq!(first.await.unwrap().len(), body.len());
    assert_eq!(read_body(&config, of(&reading), &headers, Full::new(Bytes::from(body.clone()))).await.unwrap().len(), body.len());
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_too_large_or_too_slow_is_not_waited_for() {
    let config = config();
    let large = vec![b'x'; config.max_body_bytes + 1];
    let announced = HeaderMap::from_iter([(header::CONTENT_LENGTH, HeaderValue::from(large.len()))]);
    let never = || StreamBody::new(stream::pending::<Result<Frame<Bytes>, Infallible>>());
    assert_eq!(read_body(&config, all(), &announced, never()).await, Err(Unread::TooLarge(config.max_body_bytes)));
    let sent = read_body(&config, all(), &HeaderMap::new(), in_pieces(&large, 65_536)).await;
    assert_eq!(sent, Err(Unread::TooLarge(config.max_body_bytes)));
    let slow = read_body(&config, all(), &HeaderMap::new(), never()).await.unwrap_err();
    assert_eq!(slow, Unread::TooSlow(config.body_timeout));
}

#[test]
fn large_bodies_leave_room_for_small_ones_and_each_gives_back_what_it_took() {
    let reading = Reading::new(64 * PIECE_BYTES);
    let room = |tenant, bytes: usize| reading.room(QueueShare { tenant, weight: 1.0, bytes: bytes as u64 });
    let held: Vec<Room> = (0..8).map(|tenant| room(tenant, 6 * PIECE_BYTES).unwrap()).collect();
    assert_eq!(room(8, 6 * PIECE_BYTES).unwrap_err(), NoRoom, "56 of the 64 pieces are for large ones");
    let small: Vec<Room> = (8..16).map(|tenant| room(tenant, 100).unwrap()).collect();
    assert_eq!(room(16, 100).unwrap_err(), NoRoom);
    drop(small);
    drop(held);
    let all: Vec<Room> = (0..64).map(|tenant| room(tenant, PIECE_BYTES - 1).unwrap()).collect();
    assert_eq!(all.len(), 64);
}

#[test]
fn a_tenant_whose_bodies_take_most_of_the_memory_leaves_room_for_another() {
    let reading = Reading::new(80 * PIECE_BYTES);
    let room = |tenant, bytes: usize| reading.room(QueueShare { tenant, weight: 1.0, bytes: bytes as u64 });
    let flood: Vec<Room> = std::iter::from_fn(|| room(1, 6 * PIECE_BYTES).ok()).collect();
    // Of 70 pieces for large bodies so many that four times what is free is no more.
    assert_eq!(flood.len(), 8);
    assert!(room(2, 6 * PIECE_BYTES).is_ok());
    drop(flood);
    let whole = room(1, 69 * PIECE_BYTES).unwrap();
    assert_eq!((whole.taken, reading.0.taken.lock().all), (70, 70), "one that is alone may have all that there is");
    drop(whole);
    assert!(reading.0.taken.lock().tenants.is_empty());
}

#[test]
fn the_room_of_a_body_is_taken_for_as_long_as_any_part_of_it_is_held() {
    let reading = Reading::new(64 * PIECE_BYTES);
    let mut body = of(&reading).around(Bytes::from(vec![b'x'; PIECE_BYTES]));
    let part = body.split_to(10);
    drop(body);
    assert_eq!(reading.0.taken.lock().all, 1);
    drop(part);
    assert_eq!(reading.0.taken.lock().all, 0);
}

#[test]
fn a_body_that_is_as_large_as_may_be_finds_room_within_what_is_for_large_ones() {
    let fits = |pieces, bytes| Reading::new(pieces * PIECE_BYTES).has_room_for(bytes);
    assert!(fits(8, 7 * PIECE_BYTES - 1) && !fits(8, 7 * PIECE_BYTES));
    let usual = RouterConfig::default();
    assert!(Reading::new(usual.max_buffered_body_bytes).has_room_for(usual.max_body_bytes));
}
