//! The load generator: a fixed number of clients, each sending its next request when
//! the last one has been answered, over a connection of its own that is kept open. It
//! measures a server; it does not check the text of answers.

mod client;
mod events;
mod histogram;
mod report;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

use client::Client;
use report::Tally;
pub use report::{Errors, LoadReport, Quantiles};

use crate::error::Error;

/// How long a client whose connection failed waits before it tries again.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// How long a load runs when neither a number nor a duration is given.
const DEFAULT_DURATION: Duration = Duration::from_secs(10);

/// Arguments of one load.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadArgs {
    /// Where to send requests: `http://HOST:PORT` or `unix:PATH`.
    #[arg(long)]
    pub target: Target,
    /// Requests in flight at any time.
    #[arg(long, default_value_t = 16)]
    pub streams: usize,
    /// Requests in all; default: as many as the duration allows.
    #[arg(long)]
    pub requests: Option<u64>,
    /// Time in which new requests begin, such as `30s`; default: 10 s unless
    /// `--requests` is given.
    #[arg(long, value_parser = humantime::parse_duration)]
    pub duration: Option<Duration>,
    /// Most time for one request; longer ones count as errors.
    #[arg(long, default_value = "120s", value_parser = humantime::parse_duration)]
    pub request_timeout: Duration,
    /// Path of the requests; one that contains `chat` is sent messages.
    #[arg(long, default_value = "/v1/completions")]
    pub path: String,
    /// Model to ask for; default: none, which vLLM takes as its own.
    #[arg(long)]
    pub model: Option<String>,
    /// Tokens to ask for.
    #[arg(long, default_value_t = 64)]
    pub max_tokens: u32,
    /// Ask for at least these tokens and at most `--max-tokens`, evenly spread over the prompts, as people's answers are of many lengths;
    /// default: all ask for `--max-tokens`.
    #[arg(long)]
    pub least_tokens: Option<u32>,
    /// Ask for all of the tokens, whatever the model says; vLLM's own field.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Ask for whole answers instead of streams.
    #[arg(long, overrides_with = "stream")]
    pub no_stream: bool,
    /// Ask for streams, the default.
    #[arg(long, overrides_with = "no_stream")]
    pub stream: bool,
    /// Size of each prompt in bytes; all prompts differ from their first bytes on.
    #[arg(long, default_value_t = 64)]
    pub prompt_bytes: usize,
    /// Number of the first prompt. Loads that follow each other and are to find nothing of each other in a cache begin far apart.
    #[arg(long, default_value_t = 0)]
    pub first_prompt: u64,
}

/// The server to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `HOST:PORT`.
    Tcp(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let address = text.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        match address {
            Some(address) if address.contains(':') && !address.contains('/') => Ok(Self::Tcp(address.to_owned())),
            _ => Err("expected http://HOST:PORT or unix:PATH".to_owned()),
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => write!(formatter, "http://{address}"),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

/// What the clients of one load share.
struct Load {
    args: LoadArgs,
    begun: AtomicU64,
    last_begin: Instant,
    tally: Mutex<Tally>,
}

/// Loads the target as told and reports what happened. Failing requests are counted
/// in the report.
///
/// # Errors
///
/// When the target cannot be reached at all.
pub async fn run_load(args: LoadArgs) -> Result<LoadReport, Error> {
    let mut first = Client::new(args.target.clone());
    first.connect().await.map_err(|error| Error::Unreachable { target: args.target.to_string(), reason: error.to_string() })?;
    let duration = match (args.duration, args.requests) {
        (Some(duration), _) => duration,
        (None, None) => DEFAULT_DURATION,
        // The number of requests bounds the load; a year stands for "no bound".
        (None, Some(_)) => Duration::from_secs(365 * 86_400),
    };
    let start = Instant::now();
    let streams = args.streams;
    let load = Arc::new(Load { args, begun: AtomicU64::new(0), last_begin: start + duration, tally: Mutex::default() });
    let mut clients = JoinSet::new();
    let mut first = Some(first);
    for _ in 0..streams {
        let client = first.take().unwrap_or_else(|| Client::new(load.args.target.clone()));
        clients.spawn(run_client(load.clone(), client));
    }
    clients.join_all().await;
    let report = load.tally.lock().report(start.elapsed());
    Ok(report)
}

async fn run_client(load: Arc<Load>, mut client: Client) {
    while Instant::now() < load.last_begin {
        let number = load.begun.fetch_add(1, Ordering::Relaxed);
        if load.args.requests.is_some_and(|most| number >= most) {
            return;
        }
        let body = request_body(&load.args, load.args.first_prompt.wrapping_add(number));
        let sending = client.send(&load.args, body, &load.tally);
        let outcome = tokio::time::timeout(load.args.request_timeout, sending).await;
        let failed_to_connect = load.tally.lock().record(outcome.ok());
        if failed_to_connect {
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

/// A request whose prompt begins with its number, so that no two share a prefix.
fn request_body(args: &LoadArgs, number: u64) -> String {
    let mut prompt = format!("{number:08x} ");
    let words = ["tell ", "us ", "about ", "the ", "water "];
    let mut words = words.iter().cycle();
    while prompt.len() < args.prompt_bytes {
        prompt.push_str(words.next().expect("a cycle has no end"));
    }
    prompt.truncate(args.prompt_bytes.max(9));
    let model = args.model.as_ref().map(|model| format!("\"model\":{},", serde_json::Value::from(model.as_str())));
    let (model, stream, most) = (model.unwrap_or_default(), !args.no_stream, tokens_to_ask_for(args, number));
    let input = if args.path.contains("chat") {
        format!(r#""messages":[{{"role":"user","content":"{prompt}"}}]"#)
    } else {
        format!(r#""prompt":"{prompt}""#)
    };
    let all = if args.ignore_eos { ",\"ignore_eos\":true" } else { "" };
    format!(r#"{{{model}{input},"max_tokens":{most},"stream":{stream}{all}}}"#)
}

/// The same for a prompt in every load, so that loads can be compared.
fn tokens_to_ask_for(args: &LoadArgs, number: u64) -> u32 {
    match args.least_tokens {
        Some(least) if least < args.max_tokens => fastrand::Rng::with_seed(number).u32(least..=args.max_tokens),
        _ => args.max_tokens,
    }
}
