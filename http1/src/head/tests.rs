//! Heads of answers, and their consequences.

use super::*;

/// Status, headers and body framing of an answer.
type Head = ((u16, Vec<(String, Vec<u8>)>), BodyFraming);

fn taken_from(read: &mut BytesMut, is_head: bool) -> Result<Option<Head>, HttpError> {
    let header = |header: &Header<'_>| (header.name.to_owned(), header.value.to_vec());
    parse_head(read, is_head, |status, headers| (status, headers.iter().map(header).collect()))
}

fn taken(text: &str) -> Result<Option<Head>, HttpError> {
    taken_from(&mut BytesMut::from(text), false)
}

fn framed(lines: &str) -> (Framing, bool) {
    let (_, body) = taken(&format!("HTTP/1.1 200 OK\r\n{lines}\r\n")).unwrap().unwrap();
    (body.framing, body.keeps_alive)
}

#[test]
fn a_head_is_parsed_whole_wherever_it_is_cut() {
    let text = "HTTP/1.1 200 OK\r\nServer: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    for cut in 0..text.len() {
        assert!(taken(&text[..cut]).unwrap().is_none(), "{cut}");
    }
    let mut read = BytesMut::from(&format!("{text}5\r\n")[..]);
    let ((status, headers), body) = taken_from(&mut read, false).unwrap().unwrap();
    assert_eq!((status, headers.len(), body.framing, &read[..]), (200, 2, Framing::ChunkSize, &b"5\r\n"[..]));
    assert_eq!(headers[0], ("Server".to_owned(), b"x".to_vec()));
}

#[test]
fn a_head_tells_body_framing_and_connection_reuse() {
    for (lines, expected) in [
        ("transfer-encoding: Chunked\r\n", (Framing::ChunkSize, true)),
        ("content-length: 5\r\n", (Framing::Length(5), true)),
        ("content-length: 5\r\nContent-Length: 5\r\n", (Framing::Length(5), true)),
        ("content-length: 0\r\n", (Framing::Complete, true)),
        ("", (Framing::UntilClosed, false)),
        ("content-length: 5\r\nconnection: x, Close\r\n", (Framing::Length(5), false)),
    ] {
        assert_eq!(framed(lines), expected, "{lines}");
    }
    let old = taken("HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n").unwrap().unwrap();
    assert!(!old.1.keeps_alive);
}

#[test]
fn bodyless_statuses_have_no_body_whatever_their_headers_say() {
    for (status, is_head) in [(204, false), (304, false), (200, true)] {
        let text = format!("HTTP/1.1 {status} X\r\ncontent-length: 5\r\n\r\n");
        let (_, body) = taken_from(&mut BytesMut::from(&text[..]), is_head).unwrap().unwrap();
        assert_eq!(body.framing, Framing::Complete, "{status}");
    }
}

#[test]
fn interim_answers_are_passed_over() {
    let ((status, _), _) = taken("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\nlink: a\r\n\r\nHTTP/1.1 429 No\r\n\r\n").unwrap().unwrap();
    assert_eq!(status, 429);
}

#[test]
fn an_ambiguous_head_is_refused() {
    let large = format!("a: {}\r\n", "x".repeat(MAX_HEAD_BYTES));
    let many = "a: b\r\n".repeat(MAX_HEADERS + 1);
    for lines in [
        "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: 5, 5\r\n",
        "content-length: +5\r\n",
        "content-length:\r\n",
        "content-length: 99999999999999999999\r\n",
        "no colon\r\n",
        "a: b\r\n folded\r\n",
        &many,
        &large[..MAX_HEAD_BYTES],
    ] {
        let text = format!("HTTP/1.1 200 OK\r\n{lines}");
        let text = if lines.ends_with('\n') { text + "\r\n" } else { text };
        assert!(matches!(taken(&text), Err(HttpError::Malformed(_))), "{lines:.60}");
    }
    for text in ["HTTP/2.0 200 OK\r\n\r\n", "HTTP/1.1 101 X\r\n\r\n", "HTTP/1.1 099 X\r\n\r\n", "data: {}\n\n"] {
        assert!(matches!(taken(text), Err(HttpError::Malformed(_))), "{text}");
    }
}
