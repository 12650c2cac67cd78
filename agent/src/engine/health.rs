//! Whether one life of an engine is ready, stays healthy, and which models it serves: what its socket says, told to the driver as news.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::http::{Client, GetError, Reply};

/// How often an engine that starts is asked. A refused connection costs microseconds.
const STARTING_INTERVAL: Duration = Duration::from_millis(100);

/// How often a ready engine is asked for its health.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// How long a health answer may take. vLLM's front-end tokenizes where it answers: 1.1 s were seen for a prompt of 20 MB.
const HEALTH_DEADLINE: Duration = Duration::from_secs(30);

/// Bad answers in a row that end an engine's life.
const PATIENCE: u32 = 3;

/// How often the models are read again: adapters come and go at run time.
const MODELS_INTERVAL: Duration = Duration::from_secs(10);

/// How long the list of models may take.
const MODELS_DEADLINE: Duration = Duration::from_secs(30);

/// One model as the engine describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelCard {
    /// The name that requests use.
    pub id: String,
    /// The engine's own JSON object, unchanged.
    pub raw: Bytes,
}

/// What was learnt about the engine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Its model is being loaded.
    Loading,
    /// It serves these models.
    Ready(Vec<ModelCard>),
    /// Its list of models has been read again.
    Models(Vec<ModelCard>),
    /// It does not serve any more.
    Unhealthy(String),
}

/// Watches one life until it turns unhealthy or nobody listens to the news. The start-up has no deadline here; the driver has one.
pub(crate) async fn watch(socket: PathBuf, news: mpsc::Sender<News>) {
    let mut client = Client::new(&socket);
    let Some(models) = await_ready(&mut client, &socket, &news).await else {
        return;
    };
    if news.send(News::Ready(models)).await.is_ok() {
        await_unhealthy(&mut client, &news).await;
    }
}

/// Asks until the engine is healthy and names its models; `None` when nobody listens any more.
async fn await_ready(client: &mut Client, socket: &Path, news: &mpsc::Sender<News>) -> Option<Vec<ModelCard>> {
    let mut bound = false;
    let mut complained = String::new();
    loop {
        // vLLM binds its socket when its imports are done and listens when all is loaded.
        if !bound && socket.exists() {
            bound = true;
            news.send(News::Loading).await.ok()?;
        }
        if news.is_closed() {
            return None;
        }
        match client.get("/health", HEALTH_DEADLINE).await {
            Ok(reply) if reply.status == StatusCode::OK => match read_models(client).await {
                Ok(models) => return Some(models),
                // An engine that is healthy but names no model will not become ready by waiting: say why, once.
                Err(reason) if reason != complained => {
                    tracing::warn!(socket = %socket.display(), %reason, "engine is healthy but not ready");
                    complained = reason;
                }
                Err(_) => {}
            },
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(STARTING_INTERVAL).await;
    }
}

async fn await_unhealthy(client: &mut Client, news: &mpsc::Sender<News>) {
    let mut tally = Tally::default();
    let mut models_at = Instant::now() + MODELS_INTERVAL;
    while !news.is_closed() {
        tokio::time::sleep(HEALTH_INTERVAL).await;
        if let Some(reason) = tally.add(&client.get("/health", HEALTH_DEADLINE).await) {
            // The driver may have seen the exit first.
            let _ = news.send(News::Unhealthy(reason)).await;
            return;
        }
        if tally.is_clean() && Instant::now() >= models_at {
            models_at = Instant::now() + MODELS_INTERVAL;
            if let Ok(models) = read_models(client).await {
                // A closed channel ends the loop above.
                let _ = news.send(News::Models(models)).await;
            }
        }
    }
}

/// Bad health answers in a row.
#[derive(Debug, Default)]
struct Tally(u32);

impl Tally {
    /// Takes an answer into account; says why the engine is to be given up when there have been too many bad ones.
    fn add(&mut self, answer: &Result<Reply, GetError>) -> Option<String> {
        let Some(reason) = complaint(answer) else {
            self.0 = 0;
            return None;
        };
        self.0 += 1;
        (self.0 >= PATIENCE).then(|| format!("{PATIENCE} health checks failed in a row: {reason}"))
    }

    fn is_clean(&self) -> bool {
        self.0 == 0
    }
}

/// What is wrong with a health answer, if anything.
fn complaint(answer: &Result<Reply, GetError>) -> Option<String> {
    match answer {
        Ok(reply) if reply.status == StatusCode::OK => None,
        Ok(reply) => Some(format!("status {}", reply.status.as_u16())),
        Err(error) => Some(error.to_string()),
    }
}

async fn read_models(client: &mut Client) -> Result<Vec<ModelCard>, String> {
    let reply = client.get("/v1/models", MODELS_DEADLINE).await.map_err(|error| format!("cannot read /v1/models: {error}"))?;
    if reply.status != StatusCode::OK {
        return Err(format!("/v1/models has status {}", reply.status.as_u16()));
    }
    match parse_models(&reply.body) {
        Ok(models) if models.is_empty() => Err("/v1/models names no model".to_owned()),
        Ok(models) => Ok(models),
        Err(error) => Err(format!("/v1/models is not as expected: {error}")),
    }
}

fn parse_models(body: &[u8]) -> serde_json::Result<Vec<ModelCard>> {
    #[derive(Deserialize)]
    struct List<'a> {
        #[serde(borrow)]
        data: Vec<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Card {
        id: String,
    }
    let list: List<'_> = serde_json::from_slice(body)?;
    list.data
        .into_iter()
        .map(|raw| {
            let card: Card = serde_json::from_str(raw.get())?;
            Ok(ModelCard { id: card.id, raw: Bytes::copy_from_slice(raw.get().as_bytes()) })
        })
        .collect()
}

#[cfg(test)]
mod tests;
