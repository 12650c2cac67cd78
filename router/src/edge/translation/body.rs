//! Translated bodies of engines' answers.
//!
//! Like the relay that it reads from, a stream is polled by the client's connection, holds no more
//! than one event, and ends cleanly only if the answer is whole. A broken answer says so, and then
//! breaks.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::lane::{Fault, Header, StreamFault};
use http::header::{self, HeaderMap};
use http_body::{Body, Frame};
use tokio::time::{Sleep, sleep};

use super::stream::{ArrivalTime, StreamTranslation, TranslationError};
use crate::dispatch::Relay;
use crate::inbound::{Explanation, headers};
use crate::placement::PlacementDecision;

/// How long a failed answer may be flushed, as in the relay: HTTP/2 drops queued data when a stream
/// is reset.
const FLUSH_DELAY: Duration = Duration::from_millis(200);

/// The body of a streamed answer.
#[derive(Debug)]
pub(in crate::edge) struct TranslatedBody {
    relay: Box<Relay>,
    translation: StreamTranslation,
    state: TranslatedBodyState,
}

#[derive(Debug)]
enum TranslatedBodyState {
    Streaming,
    /// The client was told that the answer failed. The connection gets a moment to send that, then
    /// breaks.
    Flushing(Pin<Box<Sleep>>, String),
    Ended,
}

impl TranslatedBody {
    pub(in crate::edge) fn new(relay: Box<Relay>, translation: StreamTranslation) -> Self {
        Self { relay, translation, state: TranslatedBodyState::Streaming }
    }

    fn finish_with_error(&mut self, TranslationError(message): TranslationError) -> Vec<u8> {
        let output = self.translation.fail(&message);
        self.state = TranslatedBodyState::Flushing(Box::pin(sleep(FLUSH_DELAY)), message);
        output
    }
}

impl Body for TranslatedBody {
    type Data = Bytes;
    type Error = StreamFault;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamFault>>> {
        let body = self.get_mut();
        loop {
            match &mut body.state {
                TranslatedBodyState::Streaming => {}
                TranslatedBodyState::Flushing(moment, message) => {
                    ready!(moment.as_mut().poll(context));
                    let broken = StreamFault { fault: Fault::EngineLost, message: std::mem::take(message) };
                    body.state = TranslatedBodyState::Ended;
                    return Poll::Ready(Some(Err(broken)));
                }
                TranslatedBodyState::Ended => return Poll::Ready(None),
            }
            let piece = ready!(Pin::new(&mut body.relay).poll_frame(context));
            let now = ArrivalTime::now();
            let translated = match piece {
                Some(Ok(frame)) => body.translation.push(&frame.into_data().unwrap_or_default(), now),
                Some(Err(broken)) => Err(TranslationError(broken.message)),
                None => {
                    body.state = TranslatedBodyState::Ended;
                    body.translation.finish(now)
                }
            };
            let output = translated.unwrap_or_else(|error| body.finish_with_error(error));
            if !output.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(output.into()))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, TranslatedBodyState::Ended)
    }
}

/// The headers of an engine's answer without those about its body, and whether the body is an event
/// stream.
pub(in crate::edge) fn translated_headers(
    engines: Vec<Header>,
    decision: &PlacementDecision,
    explanation: Explanation,
) -> (HeaderMap, bool) {
    let mut headers = headers::headers_for_client(engines);
    headers::add_placement_headers(&mut headers, decision, explanation);
    let is_stream = headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    for name in [header::CONTENT_TYPE, header::CONTENT_LENGTH, header::CONTENT_ENCODING] {
        headers.remove(name);
    }
    (headers, is_stream)
}
