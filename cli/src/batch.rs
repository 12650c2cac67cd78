//! `hostler batch`: answers a file of requests. A crate of its own sends them; this module connects
//! it to the terminal, the key and signals.

use std::path::Path;

use anyhow::Context;
use clap::Args;
use hostler_batch::progress::ProgressWriter;
use hostler_batch::{Batch, BatchArgs, BatchError, Summary};
use hostler_bench::Target;
use hostler_boot::Shutdown;
use hostler_boot::shutdown::SignalSource;
use hostler_router::keys::read_private;
use http::HeaderValue;

use crate::cluster::{DownArgs, down};
use crate::fleet_relay::FleetRelay;
use crate::output::say;

/// Variable that holds the key itself. It is not clap's variable for a flag, because clap would
/// print its value.
const KEY_VARIABLE: &str = "OPENAI_API_KEY";

#[derive(Debug, Args)]
pub(crate) struct BatchCommandArgs {
    #[command(flatten)]
    batch: BatchArgs,
    /// OpenAI endpoint: `http://HOST:PORT[/v1]`, `unix:PATH`, or the https address of your fleet of
    /// batch jobs
    #[arg(long, env = "OPENAI_BASE_URL", value_name = "URL", default_value = "http://localhost:8000/v1")]
    target: Target,
    /// When the output is complete, end this model as `hostler down` does, which gives its jobs
    /// back; may be repeated.
    #[arg(long, value_name = "NAME")]
    down: Vec<String>,
}

/// Sends all requests, ends the jobs that nobody needs any more, and prints a summary.
pub(crate) async fn batch(args: &BatchCommandArgs, file: Option<&Path>) -> anyhow::Result<()> {
    let BatchCommandArgs { batch: args, target, down: ended } = args;
    hostler_boot::raise_file_limit();
    let key = key(args)?;
    let (target, _relaying) = FleetRelay::lead(target.clone(), file)?;
    let batch = Batch::open(args, target)?;
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(SignalSource::Operators)?;
    let Summary { requests, failed } = batch.run(key, &shutdown, &mut ProgressWriter::new(args.quiet)).await?;
    if !ended.is_empty() {
        down(&DownArgs { names: ended.clone() }, file).await?;
    }
    if failed > 0 {
        return Err(BatchError::SomeFailed { failed, total: requests, output: args.output.clone() }.into());
    }
    say(&format!("{requests} requests answered: {}", args.output.display()));
    Ok(())
}

/// Full value of the `authorization` header.
fn key(args: &BatchArgs) -> anyhow::Result<Option<HeaderValue>> {
    let (key, place) = match (&args.key_file, std::env::var(KEY_VARIABLE)) {
        (Some(file), _) => (read_private(file)?, file.display().to_string()),
        (None, Ok(key)) => (key, KEY_VARIABLE.to_owned()),
        (None, Err(_)) => return Ok(None),
    };
    let key = key.trim();
    if key.is_empty() && args.key_file.is_none() {
        return Ok(None);
    }
    let value = HeaderValue::from_str(&format!("Bearer {key}")).ok().filter(|_| !key.is_empty() && !key.contains(char::is_whitespace));
    let mut value = value.with_context(|| format!("{place} holds no key: it has one line of visible ASCII characters"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}
