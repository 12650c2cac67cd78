//! An event stream whose head is sent before any engine has begun its answer.
//!
//! The request waits for a replica or is being computed, and proxies between the router and the
//! client would close a silent connection. docs/decisions/0017 says what the client is told, when
//! and how.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hostler_proto::lane::{Fault, StreamFault};
use http::StatusCode;
use http_body::{Body, Frame};
use tokio::time::{Interval, MissedTickBehavior, Sleep, interval, sleep};

use super::error_forms::{error_text, retell_error};
use super::translation::{StreamTranslation, TranslatedBody};
use crate::direct_writing::DirectWriter;
use crate::dispatch::{Answer, BREAK_DELAY, Relay};
use crate::inbound::Rejection;
use crate::sse::Dialect;

/// Most bytes that are read of an engine's refusal.
const MAX_REFUSAL_BYTES: usize = 64 * 1024;

/// The message for a client that asked for a stream and would get something else.
const NO_STREAM: &str = "the engine has answered with something else than a stream: send the request without `stream`";

/// The answer to a request, once it comes.
pub(super) type AwaitedAnswer = Pin<Box<dyn Future<Output = Result<Answer, Rejection>> + Send>>;

/// The status and body that explain a request without an answer.
pub(super) type RejectionWords = fn(&Rejection) -> (StatusCode, Bytes);

/// The body of such an answer.
pub(super) struct HeldStream {
    state: HeldState,
    dialect: Dialect,
    keep_alive: Interval,
    direct_writer: Option<Arc<DirectWriter>>,
    /// Translates to the client's form, if the engine answers in another one.
    translation: Option<StreamTranslation>,
    rejection_words: RejectionWords,
}

enum HeldState {
    /// No engine has begun to answer.
    Waiting(AwaitedAnswer),
    /// An engine refuses the request with this status and body.
    Refused(StatusCode, Box<Relay>, BytesMut),
    Relaying(Box<Relay>),
    Translating(Box<TranslatedBody>),
    /// The client has been told why there is no answer. The connection gets a moment to send that,
    /// then breaks.
    Failed(Pin<Box<Sleep>>),
}

impl fmt::Debug for HeldStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HeldStream").field("dialect", &self.dialect).finish_non_exhaustive()
    }
}

impl HeldStream {
    /// Holds an answer that has not come within `period`. A keep-alive is sent at once and every
    /// `period` from then on.
    pub(super) fn new(answer: AwaitedAnswer, dialect: Dialect, period: Duration, rejection_words: RejectionWords) -> Self {
        let mut keep_alive = interval(period);
        // A client that reads nothing for a while gets no extra keep-alives for it.
        keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { state: HeldState::Waiting(answer), dialect, keep_alive, direct_writer: None, translation: None, rejection_words }
    }

    /// Translates the engine's events to the client's form.
    pub(super) fn translate(&mut self, translation: StreamTranslation) {
        self.translation = Some(translation);
    }

    /// Once the engine has begun, its events may be written to the client's connection as they
    /// come.
    pub(super) fn enable_direct_writing(&mut self, direct_writer: Arc<DirectWriter>) {
        self.direct_writer = Some(direct_writer);
    }

    /// Handles an answer that has begun, or will not.
    fn begin(&mut self, answered: Result<Answer, Rejection>) -> Option<Bytes> {
        match answered {
            Ok(Answer { mut body, .. }) if body.is_event_stream() => {
                body.send_keep_alives(self.keep_alive.period());
                self.state = match self.translation.take() {
                    Some(translation) => HeldState::Translating(Box::new(TranslatedBody::new(body, translation))),
                    None => {
                        self.direct_writer.take().inspect(|writer| body.enable_direct_writing(writer.clone()));
                        HeldState::Relaying(body)
                    }
                };
                None
            }
            Ok(Answer { head, body, .. }) if head.status >= 400 => {
                let status = StatusCode::from_u16(head.status).unwrap_or(StatusCode::BAD_GATEWAY);
                self.state = HeldState::Refused(status, body, BytesMut::new());
                None
            }
            Ok(_) => {
                let status = StatusCode::BAD_GATEWAY;
                Some(self.fail(status, error_text(status, "InternalServerError", NO_STREAM).as_bytes()))
            }
            Err(rejection) => {
                let (status, words) = (self.rejection_words)(&rejection);
                Some(self.fail(status, &words))
            }
        }
    }

    /// The last event: an error in the API's form.
    fn fail(&mut self, status: StatusCode, error: &[u8]) -> Bytes {
        self.state = HeldState::Failed(Box::pin(sleep(BREAK_DELAY)));
        retell_error(self.dialect, status, error)
    }

    /// The next piece. An engine's error has to be read first.
    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamFault>>> {
        loop {
            let told = match &mut self.state {
                HeldState::Relaying(relay) => return Pin::new(relay).poll_frame(context),
                HeldState::Translating(translated) => return Pin::new(translated).poll_frame(context),
                HeldState::Failed(moment) => {
                    ready!(moment.as_mut().poll(context));
                    return Poll::Ready(Some(Err(StreamFault { fault: Fault::NotReady, message: "the answer has not begun".into() })));
                }
                HeldState::Waiting(answer) => {
                    let answered = ready!(answer.as_mut().poll(context));
                    self.begin(answered)
                }
                HeldState::Refused(status, relay, read) => match ready!(Pin::new(relay).poll_frame(context)) {
                    Some(Ok(frame)) if read.len() < MAX_REFUSAL_BYTES => {
                        read.extend_from_slice(frame.data_ref().map_or(&[], |bytes| bytes));
                        None
                    }
                    _ => {
                        let (status, read) = (*status, read.split());
                        Some(self.fail(status, &read))
                    }
                },
            };
            if let Some(event) = told {
                return Poll::Ready(Some(Ok(Frame::data(event))));
            }
        }
    }
}

impl Body for HeldStream {
    type Data = Bytes;
    type Error = StreamFault;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamFault>>> {
        let held = self.get_mut();
        if let Poll::Ready(piece) = held.poll_piece(context) {
            return Poll::Ready(piece);
        }
        // From then on the relay keeps the connection alive, or nothing does.
        if !matches!(held.state, HeldState::Waiting(_)) {
            return Poll::Pending;
        }
        ready!(held.keep_alive.poll_tick(context));
        Poll::Ready(Some(Ok(Frame::data(held.dialect.keep_alive()))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            HeldState::Relaying(relay) => relay.is_end_stream(),
            HeldState::Translating(translated) => translated.is_end_stream(),
            HeldState::Waiting(_) | HeldState::Refused(..) | HeldState::Failed(_) => false,
        }
    }
}
