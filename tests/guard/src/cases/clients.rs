//! Clients on separate sockets that send and read exactly as many bytes as are due.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use hostler_scale::MODEL;
use memchr::memmem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// An event of a stream, as vLLM writes it.
pub(crate) const EVENT: &str = concat!(
    r#"data: {"id":"chatcmpl-8f14e45fceea167a5a36dedd4bea2543","object":"chat.completion.chunk","created":1700000000,"model":"light","#,
    r#""choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
    "\n\n"
);

/// Beginning and events of a stream whose engine is asked for tokens.
pub(crate) const FIRST_WITH_TOKENS: &str = concat!(
    r#"data: {"id":"chatcmpl-8f14e45fceea167a5a36dedd4bea2543","object":"chat.completion.chunk","created":1700000000,"model":"light","#,
    r#""choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":[151644,872,198],"prompt_text":null}"#,
    "\n\n"
);
pub(crate) const EVENT_WITH_TOKEN: &str = concat!(
    r#"data: {"id":"chatcmpl-8f14e45fceea167a5a36dedd4bea2543","object":"chat.completion.chunk","created":1700000000,"model":"light","#,
    r#""choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":[3950]}]}"#,
    "\n\n"
);

/// A plain answer, as vLLM writes it.
pub(crate) const ANSWER: &str = concat!(
    r#"{"id":"chatcmpl-8f14e45fceea167a5a36dedd4bea2543","object":"chat.completion","created":1700000000,"model":"light","choices":[{"index":0,"#,
    r#""message":{"role":"assistant","content":"Hello.","refusal":null,"tool_calls":[]},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"#,
    r#""usage":{"prompt_tokens":12,"total_tokens":14,"completion_tokens":2,"prompt_tokens_details":null}}"#
);

/// A chat with additional fields.
pub(crate) fn chat(content: &str, fields: &str) -> Vec<u8> {
    let body = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"{content}"}}],"max_tokens":16,{fields}}}"#);
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: guard.test\r\nUser-Agent: guard\r\nAccept: */*\r\n";
    format!("{head}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// A chunk of an answer whose length is not known in advance.
pub(crate) fn chunk(piece: &str) -> String {
    format!("{:X}\r\n{piece}\r\n", piece.len())
}

#[derive(Debug)]
pub(crate) struct Client(TcpStream);

impl Client {
    pub(crate) async fn connect(edge: SocketAddr, count: u32) -> anyhow::Result<Vec<Self>> {
        let mut clients = Vec::new();
        for _ in 0..count {
            let stream = TcpStream::connect(edge).await?;
            stream.set_nodelay(true)?;
            clients.push(Self(stream));
        }
        Ok(clients)
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.0.write_all(bytes).await.context("a request cannot be sent")
    }

    /// Reads the head of an answer, which must be a good one.
    pub(crate) async fn head(&mut self) -> anyhow::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await.context("an answer's head is not whole")?);
        }
        ensure!(head.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&head));
        Ok(())
    }

    /// Reads these bytes, which must come now.
    pub(crate) async fn expect(&mut self, bytes: &str) -> anyhow::Result<()> {
        let mut read = vec![0; bytes.len()];
        self.0.read_exact(&mut read).await.context("an answer is not whole")?;
        ensure!(read == bytes.as_bytes(), "not as it was sent: {}", String::from_utf8_lossy(&read));
        Ok(())
    }

    /// Reads a head and the body that must follow it.
    pub(crate) async fn answer(&mut self, body: &str) -> anyhow::Result<()> {
        let mut read = Vec::with_capacity(4096);
        let begin = loop {
            ensure!(self.0.read_buf(&mut read).await? > 0, "the answer ended early: {}", String::from_utf8_lossy(&read));
            if let Some(end) = memmem::find(&read, b"\r\n\r\n") {
                break end + 4;
            }
        };
        while read.len() < begin + body.len() {
            ensure!(self.0.read_buf(&mut read).await? > 0, "the answer ended early: {}", String::from_utf8_lossy(&read));
        }
        let good = read.starts_with(b"HTTP/1.1 200 ") && &read[begin..] == body.as_bytes();
        ensure!(good, "not as it was sent: {}", String::from_utf8_lossy(&read));
        Ok(())
    }
}
