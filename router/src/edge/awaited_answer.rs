//! Waits for an engine's answer. If that takes long, the client of an event stream gets its head,
//! and signs of life from then on (decision 17).

use std::sync::Arc;

use http::Response;
use http::header::{self, HeaderValue};
use tokio::time::timeout;

use super::held_stream::{AwaitedAnswer, HeldStream};
use super::reply::{self, EdgeBody};
use crate::access_log::AccessEntry;
use crate::dispatch::Answer;
use crate::inbound::{Edge, Prepared, Rejection, headers};
use crate::keys::Caller;
use crate::sse::Dialect;

/// The reply for a client so far.
pub(super) enum Awaited {
    Answered(Result<Answer, Rejection>),
    /// The stream of the future answer, and the number of its request.
    Held(Box<HeldStream>, u64),
}

impl Edge {
    /// Has an engine answer a prepared request. `dialect` is that of the event stream that the
    /// client surely awaits, if any.
    pub(super) async fn await_answer(
        self: &Arc<Self>,
        prepared: Result<Prepared, Rejection>,
        caller: &Caller,
        entry: &AccessEntry,
        dialect: Option<Dialect>,
    ) -> Awaited {
        let period = self.config.stream_keepalive;
        let id = prepared.as_ref().ok().map(|(outgoing, _)| outgoing.id);
        let Some((dialect, id)) = dialect.zip(id).filter(|_| !period.is_zero()) else {
            return Awaited::Answered(self.send(prepared, caller, entry).await);
        };
        let (edge, caller, entry) = (Arc::clone(self), caller.clone(), entry.clone());
        let mut answer: AwaitedAnswer = Box::pin(async move { edge.send(prepared, &caller, &entry).await });
        match timeout(period, answer.as_mut()).await {
            Ok(answered) => Awaited::Answered(answered),
            Err(_) => Awaited::Held(Box::new(HeldStream::new(answer, dialect, period, reply::rejection_words)), id),
        }
    }
}

/// The head of an event stream whose engine has not begun. The head cannot be taken back.
pub(super) fn held_reply(stream: Box<HeldStream>, id: u64) -> Response<EdgeBody> {
    let mut response = Response::new(EdgeBody::Held(stream));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers::disable_buffering(response.headers_mut());
    headers::add_id(response.headers_mut(), id);
    response
}
