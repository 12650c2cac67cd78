//! Proves an encoder: asks an engine for the tokens of the samples, through the lanes that requests
//! take, and compares them with our own. A sample that the engine itself refuses proves nothing and
//! is skipped. A difference counts only for prompts of that form.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hostler_api::Route;
use hostler_prompt::proof::{Coverage, ProofResult, compare, samples};
use hostler_prompt::{Dialect, Encoder};
use hostler_proto::lane::{Header, RequestHead, StreamFault};
use http::header::{CONTENT_TYPE, HeaderValue};
use serde_json::Value;
use tokio::time::timeout;

use crate::lanes::Lanes;
use crate::thread_pool::ThreadPool;

/// How long an engine may take for one sample. It may be busy, but tokenizing is work only for its
/// front-end.
const SAMPLE_DEADLINE: Duration = Duration::from_secs(30);

/// Most bytes of an answer that are read: a hundred times what the short samples need.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;

pub(super) struct ProofTarget<'a> {
    pub(super) lanes: &'a Lanes,
    pub(super) replica: u32,
    pub(super) model: &'a str,
    pub(super) dialect: Dialect,
}

/// Samples share the pool with tenants' prompts as one more tenant.
const PROOF_TENANT: u64 = 0;

#[derive(Debug)]
pub(super) enum ProofFailure {
    /// The engine has other tokens even for plain texts and chats, or refuses them. The text names
    /// the sample.
    Mismatch(String),
    /// The engine could not be queried; the text says why.
    NoAnswer(String),
}

/// Compares all samples and returns which forms that proves.
pub(super) async fn compare_samples(
    pool: &ThreadPool,
    encoder: &Arc<Encoder>,
    target: &ProofTarget<'_>,
) -> Result<ProofResult, ProofFailure> {
    let dialect = target.dialect;
    let mut coverage = Coverage::default();
    for mut sample in samples() {
        if let Value::Object(fields) = &mut sample {
            fields.insert("model".into(), target.model.into());
        }
        let body = Bytes::from(sample.to_string());
        let (status, answer) = timeout(SAMPLE_DEADLINE, target.tokenize(body.clone()))
            .await
            .map_err(|_| ProofFailure::NoAnswer(format!("no answer to /tokenize within {} s", SAMPLE_DEADLINE.as_secs())))?
            .map_err(|broken| ProofFailure::NoAnswer(broken.message))?;
        let encoder = encoder.clone();
        let compared = pool.run((PROOF_TENANT, body.len()), move || compare(&encoder, dialect, &body, (status, &answer))).await;
        match compared {
            Ok(Err(silence)) if silence.is_no_answer() => return Err(ProofFailure::NoAnswer(silence.to_string())),
            Ok(compared) => coverage.record(&sample, compared),
            Err(refused) => return Err(ProofFailure::NoAnswer(format!("a sample could not be encoded here: {refused}"))),
        }
    }
    coverage.into_result().map_err(ProofFailure::Mismatch)
}

impl ProofTarget<'_> {
    async fn tokenize(&self, body: Bytes) -> Result<(u16, Vec<u8>), StreamFault> {
        let head = RequestHead {
            replica: self.replica,
            method: "POST".into(),
            path: Route::Tokenize.path().into(),
            headers: vec![Header::new(&CONTENT_TYPE, &HeaderValue::from_static("application/json"))],
            body_bytes: body.len() as u64,
            aside: true,
            ..RequestHead::default()
        };
        let exchange = self.lanes.open(head, body)?;
        let head = poll_fn(|context| exchange.poll_head(context)).await?;
        let mut answer = Vec::new();
        while let Some(piece) = poll_fn(|context| exchange.poll_body(context)).await? {
            if answer.len() + piece.len() > MAX_ANSWER_BYTES {
                return Err(StreamFault::protocol("the engine's answer to /tokenize is too long for the sample"));
            }
            answer.extend_from_slice(&piece);
        }
        Ok((head.status, answer))
    }
}

#[cfg(test)]
mod tests;
