//! Fuzzes the decompression of bodies.
//!
//! The output must stay within its limit, and be the same however the body is cut. The last two
//! bytes of an input choose coding and cut.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../router/src/inbound/body/inflate.rs"]
mod inflate;

use inflate::{ContentCoding, Inflater};

/// Most bytes of output. Up to this size the ratio is irrelevant, which is checked once per part
/// and so depends on the cut.
const MOST: usize = 1024 * 1024;

fn inflated(coding: ContentCoding, body: &[u8], cut: usize) -> Option<Vec<u8>> {
    let mut inflate = Inflater::new(coding, MOST);
    for part in body.chunks(cut) {
        let pushed = inflate.push(part);
        assert!(inflate.output_bytes() <= MOST);
        pushed.ok()?;
    }
    inflate.finish().ok().map(Vec::from)
}

fuzz_target!(|input: &[u8]| {
    let [body @ .., coding, cut] = input else { return };
    let coding = if coding % 2 == 0 { ContentCoding::Gzip } else { ContentCoding::Deflate };
    assert_eq!(inflated(coding, body, usize::from(*cut).max(1)), inflated(coding, body, 2048));
});
