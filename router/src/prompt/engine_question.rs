//! A question of the router's own to one engine, through the lanes that requests take. No agent
//! counts it.

use std::future::poll_fn;

use bytes::Bytes;
use hostler_proto::lane::{Header, RequestHead, StreamFault};
use http::header::{CONTENT_TYPE, HeaderValue};

use crate::lanes::Lanes;

#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineQuestion<'a> {
    pub lanes: &'a Lanes,
    /// Index of the replica on its node.
    pub replica: u32,
}

impl EngineQuestion<'_> {
    /// Status and body of the answer to a POST of this JSON. It has no deadline; dropping it
    /// cancels the question.
    ///
    /// # Errors
    /// If there is no lane, the answer breaks, or it has more than `most` bytes.
    pub(super) async fn ask(&self, path: &str, body: Bytes, most: usize) -> Result<(u16, Vec<u8>), StreamFault> {
        let head = RequestHead {
            replica: self.replica,
            method: "POST".into(),
            path: path.into(),
            headers: vec![Header::new(&CONTENT_TYPE, &HeaderValue::from_static("application/json"))],
            body_bytes: body.len() as u64,
            aside: true,
            ..RequestHead::default()
        };
        let exchange = self.lanes.open(head, body)?;
        let head = poll_fn(|context| exchange.poll_head(context)).await?;
        let mut answer = Vec::new();
        while let Some(piece) = poll_fn(|context| exchange.poll_body(context)).await? {
            if answer.len() + piece.len() > most {
                return Err(StreamFault::protocol(&format!("the engine's answer to {path} is longer than {most} bytes")));
            }
            answer.extend_from_slice(&piece);
        }
        Ok((head.status, answer))
    }
}
