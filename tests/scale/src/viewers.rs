//! Viewers of a router's page: each has a session and reads the picture that comes each second.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use memchr::memmem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::COMING;
use crate::router::Router;

/// Viewers that read until they are dropped.
#[derive(Debug)]
pub(crate) struct Viewers(JoinSet<anyhow::Result<()>>);

impl Viewers {
    /// Opens the page this many times, and waits until each has its first picture.
    ///
    /// # Errors
    /// When a viewer gets no session, or no picture.
    pub(crate) async fn open(router: &Router, count: usize) -> anyhow::Result<Self> {
        let mut reading = JoinSet::new();
        for _ in 0..count {
            let token = router.page_token().await?;
            let mut events = watch(router.addresses.admin, &token).await?;
            reading.spawn(async move {
                let mut piece = vec![0; 1 << 16];
                while events.read(&mut piece).await? > 0 {}
                Ok(())
            });
        }
        Ok(Self(reading))
    }

    /// Checks that all viewers are still there.
    ///
    /// # Errors
    /// When a viewer has lost its connection.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        ensure!(self.0.try_join_next().is_none(), "a viewer has lost its connection");
        Ok(())
    }
}

/// Connection over which a viewer with this token gets pictures, once the first has come.
async fn watch(admin: SocketAddr, token: &str) -> anyhow::Result<TcpStream> {
    let body = format!(r#"{{"token":"{token}"}}"#);
    let head = format!("POST /page/session HTTP/1.1\r\nHost: {admin}\r\nContent-Type: application/json\r\nContent-Length: {}", body.len());
    let mut stream = TcpStream::connect(admin).await?;
    let answer = ask(&mut stream, &format!("{head}\r\n\r\n{body}"), b"}").await?;
    let session = answer.split_once(r#""session":""#).and_then(|(_, rest)| rest.split_once('"')).context("no session")?.0;
    let mut stream = TcpStream::connect(admin).await?;
    let request = format!("GET /page/events HTTP/1.1\r\nHost: {admin}\r\nAuthorization: Bearer {session}\r\n\r\n");
    ask(&mut stream, &request, b"data: ").await?;
    Ok(stream)
}

/// Sends a request and reads its answer until these bytes have come.
async fn ask(stream: &mut TcpStream, request: &str, until: &[u8]) -> anyhow::Result<String> {
    stream.write_all(request.as_bytes()).await?;
    let mut read = Vec::new();
    let answered = timeout(COMING, async {
        while memmem::find(&read, until).is_none() {
            ensure!(stream.read_buf(&mut read).await? > 0, "the connection was closed");
        }
        ensure!(read.starts_with(b"HTTP/1.1 200"), "refused");
        Ok(())
    });
    let answered = answered.await.context("no answer").flatten();
    let page = String::from_utf8_lossy(&read).into_owned();
    answered.with_context(|| format!("the page: {page}"))?;
    Ok(page)
}
