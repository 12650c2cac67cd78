//! Questions and their required answers.
//!
//! An undisturbed engine answers every question once before the run, token by token.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use fastrand::Rng;
use hostler_sim::{Address, EngineArgs};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::client::{Client, Pace};

/// Model of agents that name none.
const MODEL: &str = "simulated";

/// Number of different prompts for each API.
const PROMPTS: usize = 64;

/// Prompts with a common beginning, which they find in the engines' caches.
const ALIKE: usize = 8;

/// Tokens of the longest answer.
const LONGEST: usize = 160;

/// Time limit for one answer of the engine without faults.
const PATIENCE: Duration = Duration::from_secs(20);

/// A prompt, and the answer that every engine must give.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) path: &'static str,
    body: Value,
    /// Text of each token of the answer.
    tokens: Vec<String>,
}

/// A request for a part of an answer.
#[derive(Debug, Clone)]
pub(crate) struct SentRequest {
    pub(crate) path: &'static str,
    pub(crate) body: String,
    pub(crate) stream: bool,
    pub(crate) text: String,
    pub(crate) tokens: usize,
}

impl Question {
    /// Creates a request for an answer of some length.
    ///
    /// `number` makes it unique, because a request with which two engines died is refused.
    pub(crate) fn ask(&self, random: &mut Rng, number: u64) -> SentRequest {
        // Most answers are short, so that there are many; some last longer than most faults.
        let most = if random.u8(..100) < 70 { 40 } else { self.tokens.len() };
        self.ask_for(random.usize(1..=most), random.u8(..100) < 60, random.bool(), number)
    }

    fn ask_for(&self, tokens: usize, stream: bool, usage: bool, number: u64) -> SentRequest {
        let mut body = self.body.clone();
        body["max_tokens"] = tokens.into();
        body["user"] = format!("chaos-{number}").into();
        if stream {
            body["stream"] = true.into();
            if usage {
                body["stream_options"] = json!({"include_usage": true});
            }
        }
        SentRequest { path: self.path, body: body.to_string(), stream, text: self.tokens[..tokens.min(self.tokens.len())].concat(), tokens }
    }
}

pub(crate) async fn learn() -> anyhow::Result<Vec<Question>> {
    let flags = ["simulated", "--port", "0", "--sim-start-ms", "0", "--sim-step-ms", "0", "--sim-prefill-us", "0", "--sim-decode-us", "0"];
    let engine = hostler_sim::Engine::bind(EngineArgs::from_flags(&flags))?;
    let Address::Tcp(address) = *engine.address() else { bail!("the engine that is asked has no port") };
    let end = CancellationToken::new();
    let _end = end.clone().drop_guard();
    let _running = AbortOnDropHandle::new(tokio::spawn(engine.run(end.cancelled_owned())));
    let mut asking: JoinSet<_> = (0..2 * PROMPTS).map(|number| learn_one(address, number)).collect();
    let mut questions = Vec::new();
    while let Some(question) = asking.join_next().await {
        questions.push(question??);
    }
    // Use one order for every run.
    questions.sort_by_key(|(number, _)| *number);
    let questions: Vec<Question> = questions.into_iter().map(|(_, question)| question).collect();
    let mut texts: Vec<String> = questions.iter().map(|question| question.tokens.concat()).collect();
    texts.sort();
    texts.dedup();
    ensure!(texts.len() == questions.len(), "two prompts have the same answer, so that one could pass for the other");
    Ok(questions)
}

/// Learns the answer that every engine must give to one prompt.
async fn learn_one(address: SocketAddr, number: usize) -> anyhow::Result<(usize, Question)> {
    let (path, body) = prompt(number);
    let mut question = Question { path, body, tokens: Vec::new() };
    let sent = question.ask_for(LONGEST, false, false, 0);
    let body = sent.body.replacen('{', if number < PROMPTS { r#"{"logprobs":true,"# } else { r#"{"logprobs":1,"# }, 1);
    let sent = SentRequest { body, ..sent };
    let mut client = Client::new(address, false);
    let begun = Instant::now();
    let mut answer = client.ask(&sent, Pace::default(), PATIENCE).await;
    // The engine may not listen yet.
    while answer.status.is_none() && begun.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(5)).await;
        answer = client.ask(&sent, Pace::default(), PATIENCE).await;
    }
    question.tokens = tokens(&answer.body).with_context(|| format!("the answer to {}", sent.body))?;
    ensure!(question.tokens.len() == LONGEST, "an answer of {} tokens, not {LONGEST}", question.tokens.len());
    Ok((number, question))
}

/// Text of each token of a plain answer with log probabilities.
fn tokens(answer: &[u8]) -> anyhow::Result<Vec<String>> {
    let answer: Value = serde_json::from_slice(answer)?;
    let logprobs = &answer["choices"][0]["logprobs"];
    let tokens = logprobs["content"].as_array().or(logprobs["tokens"].as_array()).context("it tells no tokens")?;
    let text = |token: &Value| token["token"].as_str().or(token.as_str()).map(str::to_owned);
    tokens.iter().map(text).collect::<Option<_>>().context("a token without text")
}

fn prompt(number: usize) -> (&'static str, Value) {
    let beginning = format!("This is book {} of the tales that engines tell at night. ", number % ALIKE).repeat(12);
    let question = format!("Question {number}: what does engine {} say to engine {}?", number * 7 % 31, number * 5 % 17);
    if number < PROMPTS {
        let messages = json!([{"role": "system", "content": beginning}, {"role": "user", "content": question}]);
        ("/v1/chat/completions", json!({"model": MODEL, "messages": messages}))
    } else {
        ("/v1/completions", json!({"model": MODEL, "prompt": beginning + &question}))
    }
}
