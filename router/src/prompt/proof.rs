//! Proves an encoder: asks an engine for the tokens of the samples, through the lanes that requests
//! take, and compares them with our own. A sample that the engine itself refuses proves nothing and
//! is skipped. A difference counts only for prompts of that form.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hostler_api::Route;
use hostler_prompt::proof::{Coverage, ProofResult, compare, samples};
use hostler_prompt::{Dialect, Encoder};
use serde_json::Value;
use tokio::time::timeout;

use super::engine_question::EngineQuestion;
use crate::thread_pool::ThreadPool;

/// How long an engine may take for one sample. It may be busy, but tokenizing is work only for its
/// front-end.
const SAMPLE_DEADLINE: Duration = Duration::from_secs(30);

/// Most bytes of an answer that are read: a hundred times what the short samples need.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;

pub(super) struct ProofTarget<'a> {
    pub(super) engine: EngineQuestion<'a>,
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
        let (status, answer) = timeout(SAMPLE_DEADLINE, target.engine.ask(Route::Tokenize.path(), body.clone(), MAX_ANSWER_BYTES))
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

#[cfg(test)]
pub(super) mod tests;
