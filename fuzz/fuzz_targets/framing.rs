//! The watch over requests' framing: finds the same flaw however the bytes are cut. The last byte of an input chooses the cut.
#![no_main]

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncRead, ReadBuf};

#[path = "../../router/src/edge/connection_clock.rs"]
mod connection_clock;
#[path = "../../router/src/edge/framing.rs"]
mod framing;

use connection_clock::{ConnectionClock, ConnectionTimeouts};
use framing::{FramingFlaw, FramingStream};

const LONG: Duration = Duration::from_secs(3600);

fn flaw(bytes: &[u8], cut: usize) -> Option<FramingFlaw> {
    let (mut framed, framing) = FramingStream::new(bytes, ConnectionClock::new(ConnectionTimeouts { head: LONG, idle: LONG, stall: LONG }));
    let mut space = vec![0; cut];
    let mut context = Context::from_waker(Waker::noop());
    loop {
        let mut buffer = ReadBuf::new(&mut space);
        assert!(Pin::new(&mut framed).poll_read(&mut context, &mut buffer).is_ready());
        if buffer.filled().is_empty() {
            return framing.flaw();
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let [bytes @ .., cut] = input else { return };
    assert_eq!(flaw(bytes, usize::from(*cut).max(1)), flaw(bytes, 65_536));
});
