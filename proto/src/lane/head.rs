//! Heads of a request and its answer, as both ends of a lane handle them.
//!
//! The reader of a lane converts them from the contract's messages, and the writer converts them
//! back.

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};

use crate::agent::v1 as wire;

/// The `server` header of answers that a router makes itself. Those of engines keep their own.
pub const ROUTER_SERVER: &str = "hostler";

/// A header that has not been checked yet; see [`Header::parse`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Name in the case in which it was sent.
    pub name: Bytes,
    /// Value without the white space around it.
    pub value: Bytes,
}

impl Header {
    #[must_use]
    pub fn new(name: &HeaderName, value: &HeaderValue) -> Self {
        Self { name: name.as_str().as_bytes().to_vec().into(), value: value.as_bytes().to_vec().into() }
    }

    /// Parses a received header; `None` if HTTP does not allow it.
    #[must_use]
    pub fn parse(self) -> Option<(HeaderName, HeaderValue)> {
        Some((HeaderName::from_bytes(&self.name).ok()?, HeaderValue::from_maybe_shared(self.value).ok()?))
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestHead {
    /// Index of the replica on its node.
    pub replica: u32,
    pub method: String,
    /// Path with the query, if there is one.
    pub path: String,
    /// Headers without `Content-Length`.
    pub headers: Vec<Header>,
    pub body_bytes: u64,
    /// Prompt tokens, or an estimate.
    pub prompt_tokens: u32,
    /// Prompt tokens that the engine has to compute, or an estimate.
    pub uncached_tokens: u32,
    /// When the prompt counts as computed, in milliseconds from now; 0 if the answer's first byte
    /// shows it.
    pub prefill_estimate_ms: u32,
    /// Whether this is Hostler's own request, which is not counted.
    pub aside: bool,
    /// Fingerprint that identifies the request if the engine dies with it.
    pub fingerprint: Option<u128>,
    /// The answer is bound to a grammar, which the engine core compiles.
    pub guided: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseHead {
    /// HTTP status; 65,535 if the wire's number is out of range.
    pub status: u16,
    /// Headers as the engine sent them.
    pub headers: Vec<Header>,
}

impl ResponseHead {
    /// Whether the answer's content type begins like this.
    #[must_use]
    pub fn has_content_type(&self, kind: &[u8]) -> bool {
        let has = |header: &Header| header.name.eq_ignore_ascii_case(b"content-type") && header.value.starts_with(kind);
        self.headers.iter().any(has)
    }
}

/// Reasons why an answer will never be complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The engine takes no requests now and has seen nothing of this one.
    NotReady,
    /// The engine died, or closed its connection.
    EngineLost,
    /// The other side broke the lane's contract.
    Protocol,
    EngineStopped,
    LaneLost,
}

impl Fault {
    /// Fault in an end frame; `None` for a complete body.
    pub(super) fn from_wire(fault: wire::Fault) -> Option<Self> {
        match fault {
            wire::Fault::None => None,
            wire::Fault::NotReady => Some(Self::NotReady),
            wire::Fault::EngineLost => Some(Self::EngineLost),
            wire::Fault::Protocol => Some(Self::Protocol),
            wire::Fault::EngineStopped => Some(Self::EngineStopped),
            wire::Fault::LaneLost => Some(Self::LaneLost),
        }
    }

    pub(super) fn to_wire(self) -> wire::Fault {
        match self {
            Self::NotReady => wire::Fault::NotReady,
            Self::EngineLost => wire::Fault::EngineLost,
            Self::Protocol => wire::Fault::Protocol,
            Self::EngineStopped => wire::Fault::EngineStopped,
            Self::LaneLost => wire::Fault::LaneLost,
        }
    }
}

// A list of headers keeps its memory, because both types of header have the same size.

impl From<wire::RequestHead> for RequestHead {
    fn from(head: wire::RequestHead) -> Self {
        Self {
            replica: head.replica,
            method: head.method,
            path: head.path,
            headers: head.headers.into_iter().map(|wire::Header { name, value }| Header { name, value }).collect(),
            body_bytes: head.body_bytes,
            prompt_tokens: head.prompt_tokens,
            uncached_tokens: head.uncached_tokens,
            prefill_estimate_ms: head.prefill_estimate_ms,
            aside: head.aside,
            fingerprint: head.fingerprint.map(u128::from),
            guided: head.guided,
        }
    }
}

impl From<RequestHead> for wire::RequestHead {
    fn from(head: RequestHead) -> Self {
        Self {
            replica: head.replica,
            method: head.method,
            path: head.path,
            headers: head.headers.into_iter().map(|Header { name, value }| wire::Header { name, value }).collect(),
            body_bytes: head.body_bytes,
            prompt_tokens: head.prompt_tokens,
            uncached_tokens: head.uncached_tokens,
            prefill_estimate_ms: head.prefill_estimate_ms,
            aside: head.aside,
            fingerprint: head.fingerprint.map(wire::Fingerprint::from),
            guided: head.guided,
        }
    }
}

impl From<wire::ResponseHead> for ResponseHead {
    fn from(head: wire::ResponseHead) -> Self {
        let headers = head.headers.into_iter().map(|wire::Header { name, value }| Header { name, value }).collect();
        Self { status: u16::try_from(head.status).unwrap_or(u16::MAX), headers }
    }
}

impl From<ResponseHead> for wire::ResponseHead {
    fn from(head: ResponseHead) -> Self {
        let headers = head.headers.into_iter().map(|Header { name, value }| wire::Header { name, value }).collect();
        Self { status: head.status.into(), headers }
    }
}
