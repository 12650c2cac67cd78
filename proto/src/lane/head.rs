//! How a request and its answer begin, as both ends of a lane handle them: made from the messages of the contract where a lane is read, and made into
//! them where it is written.

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};

use crate::agent::v1 as wire;

/// A header that has not been checked yet; see [`Header::parse`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// In the case in which it was sent.
    pub name: Bytes,
    /// Without the white space around it.
    pub value: Bytes,
}

impl Header {
    /// A header on its way out.
    #[must_use]
    pub fn new(name: &HeaderName, value: &HeaderValue) -> Self {
        Self { name: name.as_str().as_bytes().to_vec().into(), value: value.as_bytes().to_vec().into() }
    }

    /// A header that has come; `None` when HTTP does not allow it.
    #[must_use]
    pub fn parse(self) -> Option<(HeaderName, HeaderValue)> {
        Some((HeaderName::from_bytes(&self.name).ok()?, HeaderValue::from_maybe_shared(self.value).ok()?))
    }
}

/// How a request begins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestHead {
    /// Index of the replica on its node.
    pub replica: u32,
    /// Of HTTP.
    pub method: String,
    /// With the query, if there is one.
    pub path: String,
    /// Without the body's length.
    pub headers: Vec<Header>,
    /// Length of the body.
    pub body_bytes: u64,
    /// Tokens of its prompt, or an estimate.
    pub prompt_tokens: u32,
    /// Those among them that the engine has to compute, or an estimate.
    pub uncached_tokens: u32,
    /// When the prompt counts as computed, in milliseconds from now; 0 when the answer's first byte tells.
    pub prefill_estimate_ms: u32,
    /// Hostler's own question: not one of the requests that are counted.
    pub aside: bool,
    /// Names the request if the engine dies over it.
    pub fingerprint: Option<u128>,
    /// Its answer is bound to a grammar, for which the engine's core compiles.
    pub guided: bool,
}

/// How an answer begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseHead {
    /// Of HTTP; 65,535 for a number that is none.
    pub status: u16,
    /// As the engine sent them.
    pub headers: Vec<Header>,
}

/// Whose fault it is that an answer will never be complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The engine takes no requests now; it has seen nothing of this one.
    NotReady,
    /// The engine died, or closed its connection.
    EngineLost,
    /// The other side broke the contract.
    Protocol,
    /// The engine was stopped on purpose.
    EngineStopped,
    /// The connection between agent and router was lost.
    LaneLost,
}

impl Fault {
    /// The fault that an end of the contract carries; `None` for an end without any.
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

// A list of headers keeps its memory: both types of header have the same size.

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
