//! Bodies of every framing, cut anywhere, and bytes that are no body.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Takes all pieces out of `wire`, which arrives in parts with these lengths.
fn taken(mut framing: Framing, wire: &[u8], cuts: &[usize]) -> Result<(Vec<BytesMut>, Framing, usize), HttpError> {
    let (mut read, mut pieces, mut rest) = (BytesMut::new(), Vec::new(), wire);
    for cut in cuts.iter().copied().chain([wire.len()]) {
        let (now, later) = rest.split_at(cut.min(rest.len()));
        read.extend_from_slice(now);
        rest = later;
        while let Some(length) = framing.next_piece_bytes(&mut read)? {
            assert!(length > 0);
            pieces.push(read.split_to(length));
        }
    }
    Ok((pieces, framing, read.len()))
}

/// A body in chunks, with an extension here and there.
fn chunked(chunks: &[Vec<u8>], extension: &str, trailers: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for chunk in chunks {
        wire.extend_from_slice(format!("{:x}{extension}\r\n", chunk.len()).as_bytes());
        wire.extend_from_slice(chunk);
        wire.extend_from_slice(b"\r\n");
    }
    wire.extend_from_slice(format!("0\r\n{trailers}\r\n").as_bytes());
    wire
}

proptest! {
    #[test]
    fn chunks_decode_the_same_wherever_they_are_cut(
        chunks in vec(vec(any::<u8>(), 1..5000), 0..6),
        cuts in vec(0..700usize, 0..40),
        extension in prop_oneof![Just(""), Just(";a=b"), Just(" ;c")],
        trailers in prop_oneof![Just(""), Just("x-a: 1\r\nx-b: 2\r\n")],
    ) {
        let wire = chunked(&chunks, extension, trailers);
        let (pieces, framing, left) = taken(Framing::ChunkSize, &wire, &cuts).unwrap();
        prop_assert_eq!(pieces.concat(), chunks.concat());
        prop_assert_eq!((framing, left), (Framing::Complete, 0));
    }

    #[test]
    fn a_body_ends_at_its_content_length(body in vec(any::<u8>(), 1..9000), more in vec(any::<u8>(), 0..9), cuts in vec(0..3000usize, 0..9)) {
        let wire = [&body[..], &more].concat();
        let (pieces, framing, left) = taken(Framing::Length(body.len() as u64), &wire, &cuts).unwrap();
        prop_assert_eq!(pieces.concat(), body);
        prop_assert_eq!((framing, left), (Framing::Complete, more.len()));
    }

    #[test]
    fn a_truncated_answer_is_never_complete(chunks in vec(vec(any::<u8>(), 1..50), 0..4), short in 1..200usize) {
        let wire = chunked(&chunks, "", "");
        let wire = &wire[..wire.len() - short.min(wire.len())];
        let (_, mut framing, _) = taken(Framing::ChunkSize, wire, &[]).unwrap();
        prop_assert!(framing.close().is_err());
    }

    #[test]
    fn no_bytes_make_the_framing_panic(bytes in vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'0'), Just(b'f'), Just(b';'), any::<u8>()], 0..600), cuts in vec(0..50usize, 0..20)) {
        for framing in [Framing::ChunkSize, Framing::Chunk(3), Framing::ChunkEnd, Framing::Trailers, Framing::Length(5), Framing::UntilClosed] {
            let _ = taken(framing, &bytes, &cuts);
        }
    }
}

#[test]
fn each_event_is_a_piece_of_its_own() {
    let wire = chunked(&[b"data: 1\n\n".to_vec(), b"data: 2\n\n".to_vec()], "", "");
    let (pieces, ..) = taken(Framing::ChunkSize, &wire, &[]).unwrap();
    assert_eq!(pieces, ["data: 1\n\n", "data: 2\n\n"]);
}

#[test]
fn ambiguous_framing_is_refused() {
    let long = format!("1;{}\r\n", "x".repeat(MAX_CHUNK_LINE_BYTES));
    let trailers = format!("0\r\n{}", "x-a: 1\r\n".repeat(MAX_TRAILER_BYTES));
    for wire in [
        "\r\n",
        " 3\r\nabc\r\n",
        "+3\r\n",
        "-1\r\n",
        "0x3\r\n",
        "3\nabc\r\n",
        "3\r\nabcd\r\n",
        "3\r\nabc\n",
        "g\r\n",
        &long,
        &trailers,
        "11111111111111111\r\n",
    ] {
        let refused = taken(Framing::ChunkSize, wire.as_bytes(), &[]);
        assert!(matches!(refused, Err(HttpError::Malformed(_))), "{wire:.20} gave {refused:?}");
    }
}

#[test]
fn only_a_body_without_length_may_end_by_close() {
    for mut framing in [Framing::ChunkSize, Framing::Chunk(1), Framing::ChunkEnd, Framing::Trailers, Framing::Length(1)] {
        assert!(matches!(framing.close(), Err(HttpError::Closed)));
    }
    let mut framing = Framing::UntilClosed;
    framing.close().unwrap();
    assert_eq!(framing, Framing::Complete);
}
