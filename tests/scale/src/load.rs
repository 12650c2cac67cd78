//! Clients that keep a router busy; each answer is checked to its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use hostler_scale::MODEL;
use memchr::memmem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time limit of one answer.
const ANSWER: Duration = Duration::from_secs(30);

/// Sends this many requests, `at_once` of them at the same time.
///
/// # Errors
/// When one of them fails.
pub(crate) async fn run(edge: SocketAddr, requests: u64, at_once: u64) -> anyhow::Result<()> {
    let left = Arc::new(AtomicU64::new(requests));
    let mut clients = JoinSet::new();
    for _ in 0..at_once {
        clients.spawn(client(edge, left.clone()));
    }
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    Ok(())
}

/// Sends one request after another on one connection, while there are any left.
async fn client(edge: SocketAddr, left: Arc<AtomicU64>) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(edge).await?;
    stream.set_nodelay(true)?;
    let mut read = Vec::with_capacity(4096);
    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
        // Use a unique prompt, so that each is placed separately.
        let text = format!("Tell me about engine {}.", fastrand::u64(..));
        let body = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"{text}"}}],"max_tokens":2,"stream":true}}"#);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: scale.test\r\nContent-Type: application/json\r\nContent-Length: {}",
            body.len()
        );
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await?;
        read.clear();
        let whole = async {
            while !read.ends_with(b"\r\n0\r\n\r\n") {
                ensure!(stream.read_buf(&mut read).await? > 0, "the connection was closed");
                ensure!(read.starts_with(b"HTTP/1.1 200") || read.len() < 12, "refused");
            }
            ensure!(memmem::find(&read, b"data: [DONE]").is_some() && memmem::find(&read, b"\"error\"").is_none(), "not whole");
            Ok(())
        };
        let ended = timeout(ANSWER, whole).await.context("no answer within 30 s").flatten();
        ended.with_context(|| format!("a request failed: {}", String::from_utf8_lossy(&read)))?;
    }
    Ok(())
}
