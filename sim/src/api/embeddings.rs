//! The route `/v1/embeddings`: unit vectors that depend only on the text.
//!
//! A prompt costs its prefill, like a pooling model's.

use std::io::Write;

use http::StatusCode;

use super::Api;
use super::answer::{Answer, answer_id, collect};
use super::errors::{ApiError, json_string};
use super::fields::{Fields, integer, text};
use super::options::{Options, TokenLimit};
use super::prompt::prompts;
use crate::engine::Prompt;
use crate::mailbox::Finish;
use crate::reply::{Reply, json};
use crate::scheduler::Limit;
use crate::tokens::mix;

/// Length of a vector if the request does not set it.
const DIMENSIONS: usize = 64;
/// Longest vector that is made.
const MOST_DIMENSIONS: usize = 8192;

pub(crate) async fn embeddings(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    let fields = Fields::parse(body, &api.args)?;
    let options = Options::read(&fields, api, TokenLimit::Responses)?;
    let base64 = text("encoding_format", fields.encoding_format)?.as_deref() == Some("base64");
    let dimensions = integer("dimensions", fields.dimensions)?.and_then(|count| usize::try_from(count).ok());
    let dimensions = dimensions.map_or(DIMENSIONS, |count| count.clamp(1, MOST_DIMENSIONS));
    let mut vectors = Vec::new();
    let mut work = Vec::new();
    for tokens in prompts("input", fields.input)? {
        options.limit(&api.args, tokens.len())?;
        vectors.push(vector(&tokens, dimensions));
        work.push(Prompt { tokens, limit: Limit { tokens: 1, finish: Finish::Stop } });
    }
    let id = answer_id("embd", request_id);
    let (answer, generation) = Answer::start(&api.core, &api.args, id, options, work).await?;
    collect(&generation).await?;
    Ok(json(StatusCode::OK, whole(&answer, &vectors, base64)))
}

fn whole(answer: &Answer, vectors: &[Vec<f32>], base64: bool) -> Vec<u8> {
    let mut json = Vec::with_capacity(1024);
    let Answer { id, created, model, prompt_tokens, .. } = answer;
    let (id, model) = (json_string(id), json_string(model));
    let _ = write!(json, r#"{{"id":{id},"object":"list","created":{created},"model":{model},"data":["#);
    for (index, vector) in vectors.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        let embedding = if base64 { json_string(&encode_base64(vector)) } else { format!("{vector:?}") };
        let _ = write!(json, r#"{{"index":{index},"object":"embedding","embedding":{embedding}}}"#);
    }
    let _ = write!(
        json,
        r#"],"usage":{{"prompt_tokens":{prompt_tokens},"total_tokens":{prompt_tokens},"completion_tokens":0,"prompt_tokens_details":null,"completion_tokens_details":null}}}}"#
    );
    json
}

/// A vector of length 1.
fn vector(tokens: &[u32], dimensions: usize) -> Vec<f32> {
    let mut hash = tokens.iter().fold(1, |hash, token| mix(hash, u64::from(*token)));
    let mut values: Vec<f32> = Vec::with_capacity(dimensions);
    for position in 0..dimensions {
        hash = mix(hash, position as u64);
        let [a, b, ..] = hash.to_be_bytes();
        values.push(f32::from(i16::from_be_bytes([a, b])) + 0.5);
    }
    let length = values.iter().map(|value| value * value).sum::<f32>().sqrt();
    values.iter().map(|value| value / length).collect()
}

/// Encodes the values as little-endian bytes in base64, which the OpenAI SDKs ask for.
fn encode_base64(vector: &[f32]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let [a, b, c] = [0, 1, 2].map(|index| group.get(index).copied().unwrap_or(0));
        let digits = [a >> 2, (a & 3) << 4 | b >> 4, (b & 15) << 2 | c >> 6, c & 63];
        for (index, digit) in digits.into_iter().enumerate() {
            let used = index <= group.len();
            text.push(if used { char::from(DIGITS[usize::from(digit)]) } else { '=' });
        }
    }
    text
}
