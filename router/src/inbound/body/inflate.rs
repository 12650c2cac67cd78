//! Decompresses a request's body within bounds on the output and on its ratio to the input.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::{MultiGzDecoder, ZlibDecoder};

/// Bytes that are decompressed at once. Deflate makes at most 1032 bytes of one, so the result is a
/// megabyte or two.
pub(super) const STEP_BYTES: usize = 2048;

/// How many times larger a body may become. Text and token ids grow at most tenfold. A document of
/// one repeated sentence grows more, which is why small bodies are exempt.
pub(super) const MAX_RATIO: usize = 200;

/// Up to this size the ratio does not matter.
const RATIO_EXEMPT_BYTES: usize = 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentCoding {
    /// RFC 1952, perhaps with several members.
    Gzip,
    /// RFC 1950 (zlib), which HTTP calls deflate.
    Deflate,
}

impl ContentCoding {
    /// Finds a coding by its name in `Content-Encoding`.
    pub(super) fn parse(name: &str) -> Option<Self> {
        match name {
            "gzip" | "x-gzip" => Some(Self::Gzip),
            "deflate" => Some(Self::Deflate),
            _ => None,
        }
    }
}

#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum InflateError {
    #[error("it becomes larger than the {0} bytes that router.max_body_bytes allows")]
    TooLarge(usize),
    #[error("it becomes more than {0} times as large")]
    Ratio(usize),
    #[error("{0}")]
    Broken(String),
}

/// Decompressed bytes, up to a bound.
#[derive(Debug)]
struct BoundedOutput {
    bytes: Vec<u8>,
    max_bytes: usize,
}

impl Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max_bytes {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
enum Decoder {
    Gzip(MultiGzDecoder<BoundedOutput>),
    Deflate(ZlibDecoder<BoundedOutput>),
}

#[derive(Debug)]
pub(super) struct Inflater {
    decoder: Decoder,
    max_bytes: usize,
    input_bytes: usize,
}

impl Inflater {
    /// Creates an inflater with an output of at most `most` bytes.
    pub(super) fn new(coding: ContentCoding, most: usize) -> Self {
        let plain = BoundedOutput { bytes: Vec::new(), max_bytes: most };
        let decoder = match coding {
            ContentCoding::Gzip => Decoder::Gzip(MultiGzDecoder::new(plain)),
            ContentCoding::Deflate => Decoder::Deflate(ZlibDecoder::new(plain)),
        };
        Self { decoder, max_bytes: most, input_bytes: 0 }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), InflateError> {
        self.input_bytes += bytes.len();
        let written = match &mut self.decoder {
            Decoder::Gzip(decoder) => decoder.write_all(bytes),
            Decoder::Deflate(decoder) => decoder.write_all(bytes),
        };
        written.map_err(|error| self.inflate_error(&error))?;
        let limit = self.input_bytes.saturating_mul(MAX_RATIO).max(RATIO_EXEMPT_BYTES);
        if self.output_bytes() > limit { Err(InflateError::Ratio(MAX_RATIO)) } else { Ok(()) }
    }

    pub(super) fn output_bytes(&self) -> usize {
        match &self.decoder {
            Decoder::Gzip(decoder) => decoder.get_ref().bytes.len(),
            Decoder::Deflate(decoder) => decoder.get_ref().bytes.len(),
        }
    }

    pub(super) fn finish(self) -> Result<Bytes, InflateError> {
        let most = self.max_bytes;
        let plain = match self.decoder {
            Decoder::Gzip(decoder) => decoder.finish(),
            Decoder::Deflate(decoder) => decoder.finish(),
        };
        plain.map(|plain| plain.bytes.into()).map_err(|error| why(most, &error))
    }

    fn inflate_error(&self, error: &io::Error) -> InflateError {
        why(self.max_bytes, error)
    }
}

fn why(most: usize, error: &io::Error) -> InflateError {
    if error.kind() == io::ErrorKind::FileTooLarge { InflateError::TooLarge(most) } else { InflateError::Broken(error.to_string()) }
}
