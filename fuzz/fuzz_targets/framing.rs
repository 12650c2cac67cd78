//! Fuzzes the watch over requests' framing, which must find the same flaw however the bytes are
//! cut. The last byte of an input chooses the cut.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;

#[path = "../../router/src/edge/connection_clock.rs"]
mod connection_clock;
#[path = "../../router/src/edge/framing.rs"]
mod framing;

use connection_clock::{ConnectionClock, ConnectionTimeouts};
use framing::{FramingFlaw, watch_framing};

const LONG: Duration = Duration::from_secs(3600);

fn flaw(bytes: &[u8], cut: usize) -> Option<FramingFlaw> {
    let (watch, framing) = watch_framing(ConnectionClock::new(ConnectionTimeouts { head: LONG, idle: LONG, stall: LONG }, None));
    bytes.chunks(cut).for_each(watch);
    framing.flaw()
}

fuzz_target!(|input: &[u8]| {
    let [bytes @ .., cut] = input else { return };
    assert_eq!(flaw(bytes, usize::from(*cut).max(1)), flaw(bytes, 65_536));
});
