//! The routes `/tokenize` and `/detokenize`.

use http::StatusCode;

use super::Api;
use super::answer::token_list;
use super::errors::{ApiError, json_string};
use super::fields::{Fields, text, typed};
use super::options::check_model;
use super::prompt::chat_prompt;
use crate::reply::{Reply, json};
use crate::tokens::{decode, encode};

/// Tokens of a prompt or of chat messages.
///
/// `add_special_tokens` changes nothing, because the tokenizer never adds any.
pub(crate) fn tokenize(api: &Api, body: &[u8]) -> Result<Reply, ApiError> {
    let fields = Fields::parse(body, &api.args)?;
    check_model(&fields, api)?;
    let tokens = if fields.messages.is_some() {
        chat_prompt(&fields)?
    } else {
        let prompt = text("prompt", fields.prompt)?;
        encode(&prompt.ok_or_else(|| ApiError::missing("prompt"))?)
    };
    let (count, longest) = (tokens.len(), api.args.context_length());
    let body = format!(r#"{{"count":{count},"max_model_len":{longest},"tokens":{},"token_strs":null}}"#, token_list(&tokens));
    Ok(json(StatusCode::OK, body))
}

/// Text of tokens.
pub(crate) fn detokenize(api: &Api, body: &[u8]) -> Result<Reply, ApiError> {
    let fields = Fields::parse(body, &api.args)?;
    check_model(&fields, api)?;
    let tokens: Option<Vec<u32>> = typed("tokens", fields.tokens, "list_type", "Input should be a valid list")?;
    let tokens = tokens.ok_or_else(|| ApiError::missing("tokens"))?;
    Ok(json(StatusCode::OK, format!(r#"{{"prompt":{}}}"#, json_string(&decode(&tokens)))))
}
