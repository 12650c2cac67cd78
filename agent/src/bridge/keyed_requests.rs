//! A connection of the agent to an engine that wants a key: each request's head gets a line with it.
//!
//! The agent's own client writes these requests, whose bodies have an announced length
//! (`engine_client/outgoing.rs`). Answers pass as they are.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, copy, copy_buf, split};

use super::EngineKey;

/// Longest head, in bytes. The router takes up to 64 KiB of a client.
const MAX_HEAD_BYTES: u64 = 1 << 20;

/// Passes requests and answers on, until both ends have closed or one breaks.
pub(super) async fn exchange(
    client: impl AsyncRead + AsyncWrite + Unpin,
    engine: impl AsyncRead + AsyncWrite + Unpin,
    key: &EngineKey,
) -> io::Result<()> {
    let (requests, mut answers) = split(client);
    let (mut from_engine, mut to_engine) = split(engine);
    let mut requests = BufReader::new(requests);
    let send = async {
        while send_request(&mut requests, &mut to_engine, key).await? {}
        to_engine.shutdown().await
    };
    let answer = async {
        copy(&mut from_engine, &mut answers).await?;
        answers.shutdown().await
    };
    tokio::try_join!(send, answer).map(|_| ())
}

/// Passes one request on; `false` at the end of them.
async fn send_request(
    requests: &mut (impl AsyncBufRead + Unpin),
    engine: &mut (impl AsyncWrite + Unpin),
    key: &EngineKey,
) -> io::Result<bool> {
    let (mut head, mut body_bytes) = (Vec::new(), 0);
    loop {
        let start = head.len();
        let room = MAX_HEAD_BYTES.saturating_sub(start as u64);
        (&mut *requests).take(room).read_until(b'\n', &mut head).await?;
        let line = &head[start..];
        match line {
            [] if start == 0 => return Ok(false),
            [.., b'\n'] => {}
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        if line == b"\r\n" {
            break;
        }
        if start == 0 {
            head.extend_from_slice(key.header_line().as_bytes());
        } else if let Some(length) = content_length(line) {
            body_bytes = length;
        }
    }
    engine.write_all(&head).await?;
    let copied = copy_buf(&mut requests.take(body_bytes), engine).await?;
    if copied < body_bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(true) }
}

fn content_length(line: &[u8]) -> Option<u64> {
    let (name, value) = std::str::from_utf8(line).ok()?.split_once(':')?;
    name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use tokio::io::duplex;

    use super::*;

    fn key() -> EngineKey {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(&path, "sk").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        EngineKey::read(&path).unwrap()
    }

    /// What the engine gets of these bytes, which come in pieces of `piece`.
    async fn sent(bytes: &str, piece: usize) -> String {
        let ((mut client, agent_end), (engine_end, mut engine)) = (duplex(piece), duplex(1 << 20));
        let key = key();
        let write = async {
            client.write_all(bytes.as_bytes()).await.unwrap();
            client.shutdown().await.unwrap();
        };
        let mut got = String::new();
        let read = async {
            engine.read_to_string(&mut got).await.unwrap();
            engine.shutdown().await.unwrap();
        };
        let ((), (), _) = tokio::join!(write, read, exchange(agent_end, engine_end, &key));
        got
    }

    #[tokio::test]
    async fn each_request_gets_the_key_and_no_body_is_touched() {
        let body = "GET / HTTP/1.1\r\n\r\ncontent-length: 9\r\n\r\n";
        let post = |more: &str| format!("POST /v1/x HTTP/1.1\r\n{more}host: engine\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let get = |more: &str| format!("GET /health HTTP/1.1\r\n{more}host: engine\r\n\r\n");
        let line = "authorization: Bearer sk\r\n";
        for piece in [1, 7, 4096] {
            let asked = format!("{}{}{}", get(""), post(""), get(""));
            assert_eq!(sent(&asked, piece).await, format!("{}{}{}", get(line), post(line), get(line)), "{piece}");
        }
    }

    #[tokio::test]
    async fn a_request_that_breaks_off_is_not_completed() {
        assert_eq!(sent("GET / HTTP/1.1\r\nhost: e", 64).await, "");
        let cut = "POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\nab";
        assert_eq!(sent(cut, 64).await, "POST / HTTP/1.1\r\nauthorization: Bearer sk\r\ncontent-length: 5\r\n\r\nab");
        let endless = format!("GET / HTTP/1.1\r\nx: {}", "x".repeat(1 << 21));
        assert_eq!(sent(&endless, 1 << 22).await, "", "a head has a bound");
    }
}
