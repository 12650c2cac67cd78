//! `hostler batch`: a file of requests, answered. The sending is a crate of its own; here it meets the terminal, the key and signals.

use std::path::Path;
use std::str::FromStr;

use anyhow::Context;
use clap::Args;
use hostler_batch::progress::ProgressWriter;
use hostler_batch::{Batch, BatchArgs, BatchError, Summary};
use hostler_bench::Target;
use hostler_boot::Shutdown;
use hostler_boot::shutdown::SignalSource;
use hostler_controller::FleetFolder;
use hostler_router::keys::read_private;
use http::HeaderValue;
use tokio_util::task::AbortOnDropHandle;

use crate::cluster::{DownArgs, down};
use crate::fleet_relay::FleetRelay;
use crate::output::say;
use crate::settings::cluster_config;

/// The key itself. It is not clap's variable for a flag, because clap would print its value.
const KEY_VARIABLE: &str = "OPENAI_API_KEY";

#[derive(Debug, Args)]
pub(crate) struct BatchCommandArgs {
    #[command(flatten)]
    batch: BatchArgs,
    /// OpenAI endpoint: `http://HOST:PORT[/v1]`, `unix:PATH`, or the https address of your fleet whose controller is in a batch job
    #[arg(long, env = "OPENAI_BASE_URL", value_name = "URL", default_value = "http://localhost:8000/v1")]
    target: BatchTarget,
    /// When the output is complete, end this model as `hostler down` does, which gives its jobs back; may be repeated.
    #[arg(long, value_name = "NAME")]
    down: Vec<String>,
}

/// Where the requests go.
#[derive(Debug, Clone)]
enum BatchTarget {
    Plain(Target),
    /// A base URL with TLS.
    Secured(String),
}

impl FromStr for BatchTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("https://") { Ok(Self::Secured(text.trim_end_matches('/').to_owned())) } else { text.parse().map(Self::Plain) }
    }
}

impl BatchTarget {
    /// The target as the sending knows it, and what leads there meanwhile.
    fn resolve(&self, file: Option<&Path>) -> anyhow::Result<(Target, Option<FleetRelay>)> {
        let url = match self {
            Self::Plain(target) => return Ok((target.clone(), None)),
            Self::Secured(url) => url,
        };
        let relay = FleetRelay::open(FleetFolder::open(&cluster_config(file)?)?, url)?;
        let target = format!("unix:{}", relay.path().display()).parse().map_err(anyhow::Error::msg)?;
        Ok((target, Some(relay)))
    }
}

/// Has all requests answered, ends the jobs that nobody needs any more, and says how it went.
pub(crate) async fn batch(args: &BatchCommandArgs, file: Option<&Path>) -> anyhow::Result<()> {
    let BatchCommandArgs { batch: args, target, down: ended } = args;
    hostler_boot::raise_file_limit();
    let key = key(args)?;
    let (target, relay) = target.resolve(file)?;
    let _relaying = relay.map(|relay| AbortOnDropHandle::new(tokio::spawn(relay.run())));
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

/// The whole value of `authorization`.
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
