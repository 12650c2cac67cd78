//! The route `/v1/completions`.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::Write;

use bytes::Bytes;
use http::StatusCode;

use super::Api;
use super::answer::{Answer, Collected, answer_id, collect, token_list};
use super::errors::{ApiError, json_string};
use super::fields::Fields;
use super::logprobs::{prompt_logprobs, push_text_logprobs};
use super::options::{Options, PromptEcho, TokenLimit};
use super::prompt::{is_prompt_list, prompts};
use super::rust_events::RustEvents;
use crate::engine::Prompt;
use crate::mailbox::{Delta, Finish};
use crate::reply::{Reply, events, json, rust_events};
use crate::sse::{DONE, EventStream, WriteEvents};
use crate::tokens::{Detokenizer, decode, push_escaped};

pub(crate) async fn completions(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    let fields = Fields::parse(body, &api.args)?;
    let options = Options::read(&fields, api, TokenLimit::Completions)?;
    if let Some(list) = fields.prompt.filter(|prompt| api.args.sim_rust_front_end && is_prompt_list(prompt)) {
        let words = "data did not match any variant of untagged enum Prompt";
        return Err(fields.unreadable_part("prompt", list, list.get().len(), words));
    }
    let prompts = prompts("prompt", fields.prompt)?;
    let prompts = prompts.into_iter().map(|tokens| {
        let limit = options.limit(&api.args, tokens.len())?;
        Ok(Prompt { tokens, limit })
    });
    let prompts = prompts.collect::<Result<Vec<_>, ApiError>>()?;
    let id = answer_id("cmpl", request_id);
    let (answer, generation) = Answer::start(&api.core, &api.args, id, options, prompts).await?;
    if answer.options.stream {
        let choices = generation.choices;
        return Ok(match api.args.sim_rust_front_end {
            true => rust_events(EventStream::new(generation, RustEvents::completion(answer, choices))),
            false => events(EventStream::new(generation, CompletionEvents::new(answer, choices))),
        });
    }
    let choices = collect(&generation).await?;
    Ok(json(StatusCode::OK, whole(&answer, &choices, generation.mailbox.cached_tokens())))
}

fn whole(answer: &Answer, choices: &[Collected], cached: usize) -> Vec<u8> {
    let mut json = Vec::with_capacity(1024);
    let Answer { id, created, model, fingerprint, .. } = answer;
    let (id, model) = (json_string(id), json_string(model));
    let _ = write!(json, r#"{{"id":{id},"object":"text_completion","created":{created},"model":{model},"choices":["#);
    for (index, choice) in choices.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        let _ = write!(json, r#"{{"index":{index},"text":""#);
        let echoed = echoed(answer, index);
        let shown = shown(answer, echoed, &choice.tokens);
        push_escaped(&shown, &mut json);
        json.extend_from_slice(br#"","logprobs":"#);
        push_text_logprobs(&shown, answer.options.logprobs, (0, echoed.is_some()), &mut json);
        let of_prompt = echoed.zip(answer.options.logprobs).map(|(prompt, alternatives)| prompt_logprobs(prompt, alternatives));
        let _ = write!(
            json,
            r#","finish_reason":"{}","stop_reason":null,"token_ids":{},"prompt_logprobs":{},"prompt_token_ids":{},"routed_experts":null}}"#,
            choice.finish.unwrap_or(Finish::Stop).as_str(),
            token_ids(answer, &choice.tokens),
            of_prompt.unwrap_or_default(),
            answer.prompt_ids(index),
        );
    }
    let _ = write!(json, r#"],"service_tier":null,"system_fingerprint":"{fingerprint}","usage":"#);
    let generated = choices.iter().map(|choice| choice.tokens.len()).sum();
    answer.usage(generated, cached).push_whole(&mut json);
    json.extend_from_slice(br#","kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#);
    json
}

/// The prompt before a choice. vLLM leaves it out where tokens are asked for.
fn echoed(answer: &Answer, choice: usize) -> Option<&[u32]> {
    answer.echoed(choice).filter(|_| !answer.options.return_token_ids)
}

/// The tokens that a text shows: those of the prompt, if they are to stand before it, and its own.
fn shown<'a>(answer: &Answer, echoed: Option<&[u32]>, tokens: &'a [u32]) -> Cow<'a, [u32]> {
    match (echoed, answer.options.echo) {
        (None, PromptEcho::None | PromptEcho::Before) => tokens.into(),
        (echoed, PromptEcho::Alone) => echoed.unwrap_or_default().to_vec().into(),
        (Some(prompt), _) => [prompt, tokens].concat().into(),
    }
}

fn token_ids(answer: &Answer, tokens: &[u32]) -> String {
    if answer.options.return_token_ids { token_list(tokens) } else { "null".to_owned() }
}

#[derive(Debug)]
struct CompletionEvents {
    answer: Answer,
    /// Common beginning of all events, up to the choices.
    head: Vec<u8>,
    choices: Vec<Progress>,
}

/// Progress of a choice.
#[derive(Clone, Debug, Default)]
struct Progress {
    tokens: usize,
    text: Detokenizer,
    /// Length of the text in characters; kept only for log probabilities.
    characters: usize,
}

impl CompletionEvents {
    fn new(answer: Answer, choices: usize) -> Self {
        let Answer { id, created, model, .. } = &answer;
        let (id, model) = (json_string(id), json_string(model));
        let head = format!(r#"data: {{"id":{id},"object":"text_completion","created":{created},"model":{model},"choices":["#);
        Self { answer, head: head.into_bytes(), choices: vec![Progress::default(); choices] }
    }
}

impl WriteEvents for CompletionEvents {
    fn write(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        let options = &self.answer.options;
        let progress = &mut self.choices[delta.choice];
        let echoed = echoed(&self.answer, delta.choice).filter(|_| progress.tokens == 0);
        let shown = shown(&self.answer, echoed, &delta.tokens);
        let mut event = Vec::with_capacity(self.head.len() + 8 * shown.len() + 192);
        event.extend_from_slice(&self.head);
        let _ = write!(event, r#"{{"index":{},"text":""#, delta.choice);
        progress.text.push_escaped(&shown, &mut event);
        event.extend_from_slice(br#"","logprobs":"#);
        push_text_logprobs(&shown, options.logprobs, (progress.characters, echoed.is_some()), &mut event);
        match delta.finish {
            None => event.extend_from_slice(br#","finish_reason":null"#),
            Some(finish) => {
                let _ = write!(event, r#","finish_reason":"{}""#, finish.as_str());
            }
        }
        event.extend_from_slice(br#","stop_reason":null,"prompt_token_ids":"#);
        if options.return_token_ids {
            let first = progress.tokens == 0;
            let prompt = if first { self.answer.prompt_ids(delta.choice) } else { "null".to_owned() };
            let _ = write!(event, r#"{prompt},"token_ids":{}}}]"#, token_list(&delta.tokens));
        } else {
            let prompt = echoed.map_or("null".to_owned(), token_list);
            let _ = write!(event, r#"{prompt},"token_ids":null}}]"#);
        }
        progress.tokens += delta.tokens.len();
        if options.logprobs.is_some() {
            progress.characters += decode(&shown).chars().count();
        }
        if options.continuous_usage {
            event.extend_from_slice(br#","usage":"#);
            self.answer.usage(progress.tokens, cached).push_continuous(&mut event);
        }
        if delta.finish.is_some() && !options.include_usage {
            let _ = write!(event, r#","system_fingerprint":"{}""#, self.answer.fingerprint);
        }
        event.extend_from_slice(b"}\n\n");
        events.push_back(event.into());
    }

    fn end(&mut self, cached: usize, events: &mut VecDeque<Bytes>) {
        if self.answer.options.include_usage {
            let mut event = self.head.clone();
            event.extend_from_slice(br#"],"usage":"#);
            let generated = self.choices.iter().map(|choice| choice.tokens).sum();
            self.answer.usage(generated, cached).push_last(&mut event);
            let _ = write!(event, ",\"system_fingerprint\":\"{}\"}}\n\n", self.answer.fingerprint);
            events.push_back(event.into());
        }
        events.push_back(Bytes::from_static(DONE));
    }
}
