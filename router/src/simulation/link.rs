//! A connection in memory, and the network under it. Bytes arrive later than they were sent, or not
//! at all for a while, or the connection breaks. Order is kept and nothing is lost, as with TCP.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::transport::server::Connected;

use crate::join::Peer;

/// How long the reader of a mark waits, so that everything read before it has been acted upon.
const MARK_PAUSE: Duration = Duration::from_millis(1);

/// The network between the two ends of a connection. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Link(Arc<Mutex<LinkState>>);

#[derive(Debug)]
struct LinkState {
    /// The ways from each end to the other, indexed by the sending end.
    ways: [Way; 2],
    delay: Duration,
    /// Most bytes on their way or unread.
    capacity: usize,
    /// Whether nothing arrives.
    is_held: bool,
    /// Whether both ends get an error.
    is_cut: bool,
}

#[derive(Debug, Default)]
struct Way {
    sent: VecDeque<Parcel>,
    bytes: usize,
    /// The sender has ended the way.
    is_ended: bool,
    /// The reader is gone.
    is_unread: bool,
    /// The reader has come to the mark, and everything read before it was acted upon.
    is_at_mark: bool,
    is_past_mark: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Debug)]
struct Parcel {
    due: Instant,
    /// `None` for the mark.
    bytes: Option<Bytes>,
}

impl Way {
    fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }

    /// Reads arrived bytes into the buffer. Otherwise returns when to look again, if known.
    fn read(&mut self, buffer: &mut ReadBuf<'_>, now: Instant) -> Result<(), Option<Instant>> {
        let before = buffer.filled().len();
        let waits = loop {
            let Some(Parcel { due, bytes }) = self.sent.front_mut() else { break None };
            if *due > now {
                break Some(*due);
            }
            match bytes {
                Some(bytes) if buffer.remaining() > 0 => {
                    let length = bytes.len().min(buffer.remaining());
                    buffer.put_slice(&bytes.split_to(length));
                    self.bytes -= length;
                    if bytes.is_empty() {
                        self.sent.pop_front();
                    }
                }
                Some(_) => break None,
                None if !self.is_at_mark => {
                    (self.is_at_mark, *due) = (true, now + MARK_PAUSE);
                }
                None => {
                    self.is_past_mark = true;
                    self.sent.pop_front();
                }
            }
        };
        if buffer.filled().len() == before { Err(waits) } else { Ok(()) }
    }
}

impl Link {
    pub(super) fn new(delay: Duration, capacity: usize) -> (Self, LinkEnd, LinkEnd) {
        let state = LinkState { ways: Default::default(), delay, capacity, is_held: false, is_cut: false };
        let link = Self(Arc::new(Mutex::new(state)));
        let end = |side| LinkEnd { link: link.clone(), side, arrival: None };
        (link.clone(), end(0), end(1))
    }

    fn change(&self, change: impl FnOnce(&mut LinkState)) {
        let mut state = self.0.lock();
        change(&mut state);
        state.ways.iter_mut().for_each(Way::wake);
    }

    /// Sets whether bytes stay where they are.
    pub(super) fn hold(&self, is_held: bool) {
        self.change(|state| state.is_held = is_held);
    }

    pub(super) fn set_delay(&self, delay: Duration) {
        self.change(|state| state.delay = delay);
    }

    /// Breaks the connection for both ends, even a held one.
    pub(super) fn cut(&self) {
        self.change(|state| state.is_cut = true);
    }

    /// Marks this moment in the bytes that the first end sends.
    pub(super) fn mark(&self) {
        self.change(|state| state.ways[0].sent.push_back(Parcel { due: Instant::now(), bytes: None }));
    }

    /// Whether the second end has read everything that the first one sent before the mark, and
    /// might have read more.
    pub(super) fn is_past_mark(&self) -> bool {
        self.0.lock().ways[0].is_past_mark
    }
}

/// An end of a link. Dropping it ends its sending.
#[derive(Debug)]
pub(super) struct LinkEnd {
    link: Link,
    side: usize,
    /// When the next bytes arrive.
    arrival: Option<Pin<Box<Sleep>>>,
}

impl Connected for LinkEnd {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer::default()
    }
}

impl LinkEnd {
    /// Wakes the reader at a moment that is still to come.
    fn wake_at(&mut self, context: &mut Context<'_>, due: Instant) {
        let arrival = self.arrival.get_or_insert_with(|| Box::pin(sleep_until(due)));
        arrival.as_mut().reset(due);
        if arrival.as_mut().poll(context).is_ready() {
            context.waker().wake_by_ref();
        }
    }
}

impl AsyncRead for LinkEnd {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let end = self.get_mut();
        let link = end.link.clone();
        let mut state = link.0.lock();
        let LinkState { ways, is_held, is_cut, .. } = &mut *state;
        let way = &mut ways[1 - end.side];
        if *is_cut {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if !*is_held {
            match way.read(buffer, Instant::now()) {
                Ok(()) => {
                    way.writer.take().into_iter().for_each(Waker::wake);
                    return Poll::Ready(Ok(()));
                }
                Err(Some(due)) => end.wake_at(context, due),
                Err(None) if way.is_ended => return Poll::Ready(Ok(())),
                Err(None) => {}
            }
        }
        way.reader = Some(context.waker().clone());
        Poll::Pending
    }
}

impl AsyncWrite for LinkEnd {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let end = self.get_mut();
        let mut state = end.link.0.lock();
        let LinkState { ways, delay, capacity, is_held, is_cut } = &mut *state;
        let way = &mut ways[end.side];
        if *is_cut || (way.is_unread && !*is_held) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let length = bytes.len().min(capacity.saturating_sub(way.bytes));
        if length == 0 && !bytes.is_empty() {
            way.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        let due = way.sent.back().map_or(Instant::now() + *delay, |last| last.due.max(Instant::now() + *delay));
        way.bytes += length;
        way.sent.push_back(Parcel { due, bytes: Some(Bytes::copy_from_slice(&bytes[..length])) });
        way.reader.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(length))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let side = self.side;
        self.link.change(|state| state.ways[side].is_ended = true);
        Poll::Ready(Ok(()))
    }
}

impl Drop for LinkEnd {
    fn drop(&mut self) {
        let side = self.side;
        self.link.change(|state| {
            state.ways[side].is_ended = true;
            state.ways[1 - side].is_unread = true;
        });
    }
}
