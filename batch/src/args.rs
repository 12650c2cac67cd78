//! Flags of `hostler batch`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

/// Send the requests of a file and write their answers to another.
#[derive(Debug, Clone, Args)]
pub struct BatchArgs {
    /// Requests in OpenAI's batch format, one JSON object a line: custom_id, method POST, url
    /// /v1/…, body
    #[arg(value_name = "IN.jsonl")]
    pub input: PathBuf,
    /// Where the answers go, in the order of the requests, once all are there; until then they are
    /// in OUT.jsonl.partial
    #[arg(value_name = "OUT.jsonl")]
    pub output: PathBuf,
    /// File with the API key and nothing else, mode 0600; OPENAI_API_KEY can hold the key itself
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Requests at once; about 256 for each replica keep a fleet busy
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub concurrency: u32,
    /// Most time for a request with all its attempts, from the first one; then it counts as failed
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration)]
    pub deadline: Duration,
    /// Most time for one attempt; a longer one is given up and made again
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    pub request_timeout: Duration,
    /// How long answers on their way are awaited after Ctrl-C or SIGTERM; a second Ctrl-C stops at
    /// once
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    pub grace: Duration,
    /// Show no progress
    #[arg(long)]
    pub quiet: bool,
}

fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if !time.is_zero() => Ok(time),
        Ok(_) => Err("expected more than no time".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
