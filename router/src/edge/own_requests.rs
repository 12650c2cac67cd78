//! Requests that the router itself makes for a caller, by the rules of those that the caller sends:
//! permissions, limits, isolation, placement and the access log.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, Response};
use http_body_util::BodyExt;

use super::reply;
use crate::inbound::{Edge, headers};
use crate::keys::Caller;

/// Longest answer: as long as `hostler batch` takes one.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Why there is no whole answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoAnswer {
    #[error("the answer broke: {0}")]
    Broken(String),
    #[error("the answer has more than {} MiB", MAX_ANSWER_BYTES >> 20)]
    TooLong,
}

impl Edge {
    /// Has a JSON request answered, as if `caller` had posted it with these headers.
    ///
    /// # Errors
    /// If the answer is not whole. A refusal is an answer.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        path: &PathAndQuery,
        mut headers: HeaderMap,
        body: Bytes,
        caller: &Caller,
    ) -> Result<Response<Bytes>, NoAnswer> {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let entry = self.access_log.start_entry(&Method::POST, Some(path), &headers, None);
        entry.set_caller(caller);
        let mut response = match self.own_request(path, headers, body, (caller, &entry)) {
            Ok(inbound) => self.answer_inbound(inbound, caller, &entry).await,
            Err(full) => reply::unread_body(&full),
        };
        if let Some(id) = entry.request_id() {
            headers::add_id(response.headers_mut(), id);
        }
        entry.set_status(response.status().as_u16(), None);
        let (head, mut body) = response.into_parts();
        let mut whole = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|fault| NoAnswer::Broken(fault.message))?;
            let Ok(data) = frame.into_data() else { continue };
            if whole.len() + data.len() > MAX_ANSWER_BYTES {
                return Err(NoAnswer::TooLong);
            }
            whole.extend_from_slice(&data);
        }
        Ok(Response::from_parts(head, whole.freeze()))
    }
}
