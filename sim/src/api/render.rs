//! The routes that render: what a chat or a completion becomes, without computing it.

use std::io::Write;

use http::StatusCode;

use super::Api;
use super::answer::{answer_id, token_list};
use super::errors::{ApiError, json_string};
use super::fields::Fields;
use super::options::{Options, TokenLimit};
use super::prompt::{chat_prompt, prompts};
use crate::reply::{Reply, json};

/// Limit that vLLM leaves out, because its sampling parameters have it by default.
const DEFAULT_MAX_TOKENS: usize = 16;

pub(crate) fn render_chat(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    check_enabled(api)?;
    let fields = Fields::parse(body, &api.args)?;
    let options = Options::read(&fields, api, TokenLimit::Chat)?;
    let tokens = chat_prompt(&fields)?;
    options.limit(&api.args, tokens.len())?;
    let mut rendered = Vec::new();
    push_rendered(&mut rendered, api, &options, (&answer_id("chatcmpl", request_id), &tokens));
    Ok(json(StatusCode::OK, rendered))
}

pub(crate) fn render_completion(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    check_enabled(api)?;
    let fields = Fields::parse(body, &api.args)?;
    let options = Options::read(&fields, api, TokenLimit::Completions)?;
    let (id, prompts) = (answer_id("cmpl", request_id), prompts("prompt", fields.prompt)?);
    let mut rendered = b"[".to_vec();
    for (index, tokens) in prompts.iter().enumerate() {
        options.limit(&api.args, tokens.len())?;
        if index > 0 {
            rendered.push(b',');
        }
        let id = if prompts.len() == 1 { id.clone() } else { format!("{id}-{index}") };
        push_rendered(&mut rendered, api, &options, (&id, tokens));
    }
    rendered.push(b']');
    Ok(json(StatusCode::OK, rendered))
}

fn check_enabled(api: &Api) -> Result<(), ApiError> {
    if api.args.enable_scale_out { Ok(()) } else { Err(ApiError::no_scale_out()) }
}

/// Writes a rendered prompt. The sampling parameters are vLLM's defaults, with the limit of the
/// answer.
fn push_rendered(json: &mut Vec<u8>, api: &Api, options: &Options, (id, tokens): (&str, &[u32])) {
    let most = options.max_tokens.unwrap_or_else(|| api.args.context_length().saturating_sub(tokens.len()));
    let limit = if most == DEFAULT_MAX_TOKENS { String::new() } else { format!(r#""max_tokens":{most},"#) };
    let _ = write!(
        json,
        concat!(
            r#"{{"request_id":{},"token_ids":{},"token_offsets":null,"features":null,"content_parts":null,"sampling_params":{{"#,
            r#""presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"temperature":1.0,"top_p":1.0,"min_p":0.0,"#,
            r#""stop":[],"stop_token_ids":[],{}"output_kind":{},"skip_clone":true,"bad_words":[],"#,
            r#""skip_reading_prefix_cache":false}},"model":{},"reasoning_ended":null,"reasoning_parser_kwargs":null,"#,
            r#""return_token_ids":null,"output_mode":"tokens","stream":{},"stream_options":null,"cache_salt":{},"priority":0,"#,
            r#""kv_transfer_params":null,"ec_transfer_params":null}}"#,
        ),
        json_string(id),
        token_list(tokens),
        limit,
        if options.stream { 1 } else { 2 },
        json_string(options.adapter.as_deref().unwrap_or_else(|| api.args.served_name())),
        options.stream,
        options.salt.as_deref().map_or_else(|| "null".to_owned(), json_string),
    );
}
