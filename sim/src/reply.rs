//! HTTP answers: the body type of the server and the few ways to build a response.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;

use crate::sse::EventStream;

pub(crate) type Reply = Response<Payload>;

/// A body that is known completely, or a stream of events.
#[derive(Debug)]
pub(crate) enum Payload {
    Whole(Full<Bytes>),
    Events(Box<EventStream>),
}

impl Body for Payload {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.get_mut() {
            Self::Whole(body) => Pin::new(body).poll_frame(context),
            Self::Events(stream) => stream.poll_event(context).map(|event| event.map(|event| Ok(Frame::data(event)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Events(_) => SizeHint::default(),
        }
    }
}

pub(crate) fn whole(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Payload::Whole(Full::new(body.into())));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    whole(status, "application/json", body)
}

/// An empty 200, as from `/health`.
pub(crate) fn empty() -> Reply {
    Response::new(Payload::Whole(Full::new(Bytes::new())))
}

pub(crate) fn events(stream: EventStream) -> Reply {
    streamed(stream, "text/event-stream; charset=utf-8")
}

/// A stream of vLLM's Rust front-end.
pub(crate) fn rust_events(stream: EventStream) -> Reply {
    let mut reply = streamed(stream, "text/event-stream");
    reply.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    reply
}

fn streamed(stream: EventStream, content_type: &'static str) -> Reply {
    let mut reply = Response::new(Payload::Events(Box::new(stream)));
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}
