use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http_body_util::Empty;
use hyper::body::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop::poll_proceed;
use tokio::time::timeout;

use super::*;

/// An HTTP/2 client without requests that always has another frame of an unknown kind to send.
struct Flood {
    /// The bytes that it sends next.
    bytes: Box<dyn Iterator<Item = u8> + Send>,
}

impl Flood {
    fn new() -> Self {
        let beginning = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
        let unknown_frame = b"\x00\x00\x07\xff\x00\x00\x00\x00\x00nothing";
        Self { bytes: Box::new(beginning.iter().chain(unknown_frame.iter().cycle()).copied()) }
    }
}

impl AsyncRead for Flood {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        // A socket does this too.
        ready!(poll_proceed(context)).made_progress();
        while buffer.remaining() > 0 {
            buffer.put_slice(&[self.bytes.next().expect("it has no end")]);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Flood {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn a_client_that_keeps_sending_is_overdue_too() {
    let limit = Duration::from_millis(40);
    let clock = ConnectionClock::new(ConnectionTimeouts { head: limit, idle: limit, stall: limit }, None);
    let service = service_fn(|_: Request<Incoming>| async { Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())) });
    let builder = auto_builder(&clock);
    let connection = pin!(builder.serve_connection(TokioIo::new(Flood::new()), service));
    let shutdown = Shutdown::new();
    let served = serve_connection(connection, &clock, &shutdown, std::future::pending());
    timeout(Duration::from_secs(10), served).await.expect("it is closed when the time of a head is over");
    assert_eq!(clock.find_overdue(), Some(Overdue::Head));
}

#[test]
fn clients_leave_files_for_engines_and_operators() {
    assert_eq!(connections_within(16_384, Some(1_024)), 256);
    assert_eq!(connections_within(16_384, Some(1_048_576)), 16_384);
    assert_eq!((connections_within(100, None), connections_within(16_384, Some(64))), (100, 1));
}
