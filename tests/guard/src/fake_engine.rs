//! Stand-in for an engine, a separate process as engines are.
//!
//! It takes requests on its Unix socket and answers them on command. A simulated engine would
//! answer at its own times, and the agent's work would differ between runs.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};

use hostler_sim::kv_events::{KvEventsConfig, Publisher};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cases::{ANSWER, EVENT, chunk, removed_blocks, stored_blocks};

/// Order to wait until this many requests wait.
pub(crate) const AWAIT: u32 = 1;

/// Order to answer all waiting requests: a plain one whole, a stream with one event.
pub(crate) const ANSWER_ALL: u32 = 2;

/// Order to report that the blocks of the prompt of this number are cached.
pub(crate) const STORE: u32 = 3;

/// Order to report that the blocks of the prompt of this number are no longer cached.
pub(crate) const REMOVE: u32 = 4;

struct Waiting {
    connection: UnixStream,
    is_stream: bool,
    begun: bool,
}

/// Runs the engine.
///
/// The arguments are those of a simulated engine, and `--steps` names the socket for orders.
pub(crate) fn main(arguments: &[OsString]) -> ExitCode {
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            crate::table::complain(&format!("stand-in: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &[OsString]) -> io::Result<()> {
    let value = |flag: &str| arguments.iter().skip_while(|argument| *argument != flag).nth(1).ok_or(io::ErrorKind::InvalidInput);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let config = KvEventsConfig::parse(value("--kv-events-config").ok().and_then(|json| json.to_str())).map_err(io::Error::other)?;
    let start = async |config| Publisher::start(config, &TaskTracker::new(), &CancellationToken::new()).await;
    let publisher = config.map(|config| runtime.block_on(start(config))).transpose().map_err(io::Error::other)?;
    let (orders, requests) = (UnixListener::bind(value("--steps")?)?, UnixListener::bind(value("--uds")?)?);
    let (waits, waiting) = channel();
    std::thread::spawn(move || {
        let (connection, _) = orders.accept()?;
        obey(connection, &waiting, publisher.as_ref())
    });
    for connection in requests.incoming() {
        let (connection, waits) = (connection?, waits.clone());
        std::thread::spawn(move || take(connection, &waits));
    }
    Ok(())
}

/// Executes orders until there are no more.
fn obey(mut orders: UnixStream, arrivals: &Receiver<Waiting>, publisher: Option<&Publisher>) -> io::Result<()> {
    let publish = |events| publisher.map(|publisher| publisher.publish(events)).ok_or(io::ErrorKind::Unsupported);
    let mut waiting = Vec::new();
    loop {
        let (mut order, mut count) = ([0; 4], [0; 4]);
        orders.read_exact(&mut order)?;
        orders.read_exact(&mut count)?;
        let count = u32::from_be_bytes(count);
        match u32::from_be_bytes(order) {
            AWAIT => {
                while waiting.len() < count as usize {
                    waiting.push(arrivals.recv().map_err(io::Error::other)?);
                }
            }
            ANSWER_ALL => {
                for request in &mut waiting {
                    request.answer()?;
                }
                waiting.retain(|request| request.is_stream);
            }
            STORE => publish(vec![stored_blocks(count)])?,
            REMOVE => publish(removed_blocks(count))?,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        orders.write_all(&[0])?;
    }
}

impl Waiting {
    fn answer(&mut self) -> io::Result<()> {
        if !self.is_stream {
            return reply(&mut self.connection, "200 OK", "application/json", ANSWER);
        }
        if !std::mem::replace(&mut self.begun, true) {
            let head = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
            self.connection.write_all(head.as_bytes())?;
        }
        self.connection.write_all(chunk(EVENT).as_bytes())
    }
}

/// Takes requests from one connection.
fn take(connection: UnixStream, waits: &Sender<Waiting>) -> io::Result<()> {
    let mut answers = connection.try_clone()?;
    let mut reader = BufReader::new(connection);
    loop {
        let (mut line, mut path, mut length) = (String::new(), String::new(), 0);
        while reader.read_line(&mut line)? > 2 {
            let lower = line.to_ascii_lowercase();
            match lower.strip_prefix("content-length:") {
                Some(value) => length = value.trim().parse().map_err(io::Error::other)?,
                None if path.is_empty() => line.split(' ').nth(1).unwrap_or_default().clone_into(&mut path),
                None => {}
            }
            line.clear();
        }
        if path.is_empty() {
            return Ok(());
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        match path.as_str() {
            "/v1/chat/completions" => {
                let is_stream = String::from_utf8_lossy(&body).contains(r#""stream":true"#);
                let waiting = Waiting { connection: answers.try_clone()?, is_stream, begun: false };
                waits.send(waiting).map_err(io::Error::other)?;
            }
            "/v1/models" => {
                reply(&mut answers, "200 OK", "application/json", r#"{"object":"list","data":[{"id":"light","object":"model"}]}"#)?;
            }
            "/health" => reply(&mut answers, "200 OK", "text/plain", "")?,
            _ => reply(&mut answers, "405 Method Not Allowed", "text/plain", "")?,
        }
    }
}

fn reply(to: &mut UnixStream, status: &str, content_type: &str, body: &str) -> io::Result<()> {
    let head = format!("HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n", body.len());
    to.write_all(format!("{head}{body}").as_bytes())
}
