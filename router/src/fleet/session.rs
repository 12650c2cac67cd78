//! One session per agent: the router's side of `Attach`. Wire types end here.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::Stream;
use hostler_proto::PROTOCOL;
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::attach_request::Message as FromAgent;
use hostler_proto::agent::v1::attach_response::Message as ToAgent;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::caches::{CacheReport, CacheUpdate, Caches};
use super::directives::Directives;
use super::view::{Load, Model, Phase, State};
use super::writer::{Change, Fleet, Update};
use crate::background::BackgroundTasks;
use crate::lanes::{Lanes, Tickets};
use crate::dispatch::{CrashSuspects, MAX_REQUESTS_PER_DEATH, ReportedDeath};
use crate::join::{Attached, Member};
use crate::prompt::{FilesHash, FilesPiece, Prompts};

/// How long an agent may take for its hello, and for its first snapshot.
const HELLO_DEADLINE: Duration = Duration::from_secs(10);

/// More requests are in flight on no replica, all routers together.
const MOST_REQUESTS: u32 = 1 << 20;

/// No replica has more tokens in its memory, or has more to compute: the largest hosts of today have room for some 100 million.
const MOST_TOKENS: u64 = 1 << 28;

/// A cache that was asked for and does not come is asked for again after this: a large one takes a second or two.
const ASKED_AGAIN: Duration = Duration::from_secs(5);

/// What every session needs.
#[derive(Debug)]
pub struct Sessions {
    /// Where sessions and lanes run.
    pub tasks: BackgroundTasks,
    /// Where updates go.
    pub fleet: Fleet,
    /// Where the deaths of engines go.
    pub poison: Arc<CrashSuspects>,
    /// Where reports of cached blocks go.
    pub caches: Caches,
    /// Where the files of models go.
    pub prompts: Prompts,
    /// Where the attachment's lanes will be looked for.
    pub tickets: Arc<Tickets>,
    /// Random number of this life of the router.
    pub router_life: u64,
    /// Numbers the attachments.
    pub attachments: AtomicU64,
}

/// The stream of messages to the agent.
pub(crate) type ToAgentStream = Pin<Box<dyn Stream<Item = Result<wire::AttachResponse, Status>> + Send>>;

/// Serves one `Attach` call: welcomes the agent, then follows its reports until its stream ends. `member` is whose certificate came with the
/// connection, where agents need one.
///
/// # Errors
/// When the hello is missing, late, of another version, or of a node that the certificate does not name.
pub(crate) async fn attach(
    sessions: Arc<Sessions>,
    mut requests: Streaming<wire::AttachRequest>,
    member: Option<Arc<Member>>,
) -> Result<ToAgentStream, Status> {
    let hello = match next(&mut requests).await? {
        FromAgent::Hello(hello) => hello,
        _ => return Err(Status::invalid_argument("the first message of Attach must be Hello")),
    };
    check(&hello)?;
    let attached = member.map(|member| member.attach(&hello.node)).transpose()?;
    if sessions.fleet.view().is_taken(&hello.node, hello.life) {
        let message = format!("another agent is attached as node `{}`: give each agent a name of its own with --node", hello.node);
        return Err(Status::failed_precondition(message));
    }
    let lanes = Arc::new(Lanes::default());
    let ticket = sessions.tickets.issue(&lanes).map_err(|error| Status::unavailable(format!("no randomness for a ticket: {error}")))?;
    let welcome = wire::Welcome {
        protocol: PROTOCOL,
        router_version: env!("CARGO_PKG_VERSION").into(),
        router_life: sessions.router_life,
        ticket: ticket.secret().clone(),
        lease_ms: u32::try_from(sessions.fleet.lease().as_millis()).unwrap_or(u32::MAX),
    };
    let (directives, messages) = Directives::connect();
    directives.send(ToAgent::Welcome(welcome)).await?;
    let tasks = sessions.tasks.clone();
    tasks.spawn(async move {
        let attachment = sessions.attachments.fetch_add(1, Ordering::Relaxed);
        let node = hello.node.clone();
        let session = Session {
            sessions: sessions.clone(),
            node: node.clone(),
            attachment,
            directives: directives.clone(),
            lanes,
            next: 0,
            behind: BTreeSet::new(),
            asked: Instant::now(),
        };
        let ended = tokio::select! {
            ended = session.follow(hello, requests) => ended,
            ended = expired(attached.as_ref()) => {
                // It learns why where its queue has room; its stream ends in either case.
                directives.refuse(ended.clone());
                ended
            }
        };
        tracing::debug!(node, %ended, "attachment ended");
        directives.abandon();
        sessions.fleet.update(Update::Detached { attachment }).await;
        sessions.caches.update(CacheUpdate::Gone { attachment }).await;
        drop(ticket);
    });
    Ok(Box::pin(ReceiverStream::new(messages)))
}

/// Resolves when the node's certificate has expired; never where it has none.
async fn expired(attached: Option<&Attached>) -> Status {
    match attached {
        Some(attached) => attached.expired().await,
        None => std::future::pending().await,
    }
}

fn check(hello: &wire::Hello) -> Result<(), Status> {
    if hello.protocol != PROTOCOL {
        return Err(Status::failed_precondition(format!(
            "agent {} speaks protocol {}, router {} speaks protocol {PROTOCOL}: install the same version of hostler on both",
            hello.agent_version,
            hello.protocol,
            env!("CARGO_PKG_VERSION"),
        )));
    }
    if hello.node.is_empty() || hello.node.contains('/') {
        return Err(Status::invalid_argument(format!("{:?} is not a node name: it must not be empty or contain `/`", hello.node)));
    }
    Ok(())
}

async fn next(requests: &mut Streaming<wire::AttachRequest>) -> Result<FromAgent, Status> {
    let message = timeout(HELLO_DEADLINE, requests.message()).await.map_err(|_| Status::deadline_exceeded("no message within 10 s"))??;
    message
        .and_then(|message| message.message)
        .ok_or_else(|| Status::invalid_argument("the stream ended before the agent had introduced itself"))
}

#[derive(Debug)]
struct Session {
    sessions: Arc<Sessions>,
    node: String,
    attachment: u64,
    directives: Directives,
    lanes: Arc<Lanes>,
    /// Sequence of the report that must come next.
    next: u64,
    /// Replicas whose cache reports found no place: nothing is passed on of them until they tell their caches anew.
    behind: BTreeSet<u32>,
    /// When they were last asked to.
    asked: Instant,
}

impl Session {
    /// Follows the agent until its stream ends; gives back why it did. The agent joins the fleet with its first snapshot,
    /// so that one that finds it is attached already, by another address, can leave before that.
    async fn follow(mut self, hello: wire::Hello, mut requests: Streaming<wire::AttachRequest>) -> Status {
        match next(&mut requests).await {
            Ok(FromAgent::Report(report)) if report.snapshot => {
                let attached = Update::Attached {
                    attachment: self.attachment,
                    node: hello.node.into(),
                    agent_version: hello.agent_version,
                    life: hello.life,
                    lanes: self.lanes.clone(),
                    directives: self.directives.clone(),
                };
                self.sessions.fleet.update(attached).await;
                self.report(report).await;
            }
            Ok(_) => return Status::invalid_argument("the agent's second message must be a snapshot"),
            Err(status) => return status,
        }
        loop {
            match requests.message().await {
                Ok(Some(wire::AttachRequest { message: Some(FromAgent::Report(report)) })) => self.report(report).await,
                Ok(Some(wire::AttachRequest { message: Some(FromAgent::Answer(answer)) })) => self.directives.answered(answer),
                Ok(Some(wire::AttachRequest { message: Some(FromAgent::Cache(report)) })) => {
                    self.cache(cache_report(report));
                }
                Ok(Some(wire::AttachRequest { message: Some(FromAgent::File(part)) })) => self.file_part(part),
                Ok(Some(_)) => tracing::debug!("an unexpected message of an agent is ignored"),
                Ok(None) => return Status::ok("the agent left"),
                Err(status) => return status,
            }
        }
    }

    async fn report(&mut self, report: wire::Report) {
        self.catch_up();
        if report.snapshot {
            self.next = report.sequence;
        } else if report.sequence != self.next {
            tracing::warn!(expected = self.next, got = report.sequence, "a report is missing: asking for a snapshot");
            // Should the order be lost, the next report shows again that it is needed.
            self.directives.resync();
            return;
        }
        self.next = self.next.wrapping_add(1);
        report.replicas.iter().filter_map(|replica| replica.state.as_ref()?.prompt_files.as_ref()).for_each(|files| self.offer(files));
        // Before the fleet learns of it: what came back from a dead engine is then known to be suspect when it is tried again.
        for replica in report.replicas.iter().filter(|replica| !replica.deaths.is_empty()) {
            let id = format!("{}/{}", self.node, replica.index);
            replica.deaths.iter().map(reported_death).for_each(|death| self.sessions.poison.record_reported_death(&id, &death));
        }
        let replicas = report.replicas.into_iter().map(change).collect();
        self.sessions.fleet.update(Update::Reported { attachment: self.attachment, snapshot: report.snapshot, replicas }).await;
    }
}

impl Session {
    /// Passes a cache report on, never waiting: load, phase and lease come by the same stream and must not be late. Where the writer of
    /// the index is behind, the report is dropped and the whole cache asked for later.
    fn cache(&mut self, report: CacheReport) {
        let index = report.index;
        if report.snapshot {
            self.behind.remove(&index);
        }
        let (attachment, directives) = (self.attachment, self.directives.clone());
        if self.behind.contains(&index) || !self.sessions.caches.offer(CacheUpdate::Reported { attachment, directives, report }) {
            self.behind.insert(index);
        }
    }

    /// Asks for the caches of which reports were dropped, once the writer has caught up.
    fn catch_up(&mut self) {
        if !self.behind.is_empty() && self.asked.elapsed() > ASKED_AGAIN && self.sessions.caches.has_room() {
            self.asked = Instant::now();
            let indices = self.behind.iter().copied().collect();
            self.directives.resync_cache(indices);
        }
    }

    fn file_part(&self, part: wire::FilePart) {
        let Ok(hash) = FilesHash::try_from(&part.hash[..]) else {
            tracing::warn!(bytes = part.hash.len(), "a piece of a model's files is ignored: its hash is not a SHA-256");
            return;
        };
        let content = if part.error.is_empty() { Ok(part.data) } else { Err(part.error) };
        self.sessions.prompts.part(&hash, FilesPiece { offset: part.offset, content });
    }

    /// A replica has files that may not be here yet.
    fn offer(&self, files: &wire::PromptFiles) {
        let Some(hash) = files_hash(files) else { return };
        let fetch = || {
            self.directives.fetch_files(&hash);
        };
        self.sessions.prompts.offered(hash, files.bytes, &fetch);
    }
}

fn files_hash(files: &wire::PromptFiles) -> Option<FilesHash> {
    files.hash[..].try_into().ok()
}

fn cache_report(report: wire::CacheReport) -> CacheReport {
    let wire::CacheReport { index, epoch, snapshot, partial, stored, removed, count, digest } = report;
    CacheReport { index, epoch, snapshot, partial, stored, removed, count, digest }
}

fn reported_death(death: &wire::Death) -> ReportedDeath {
    let requests = death.requests.iter().take(MAX_REQUESTS_PER_DEATH).copied().map(u128::from).collect();
    ReportedDeath { epoch: death.epoch, age: Duration::from_millis(death.age_ms), requests }
}

fn change(report: wire::ReplicaReport) -> Change {
    let gpus = report.gpus.map(|gpus| gpus.readings.into());
    Change { index: report.index, epoch: report.epoch, state: report.state.map(state), load: report.load.map(load), gpus }
}

fn state(wire: wire::ReplicaState) -> State {
    let phase = match wire.phase() {
        wire::Phase::Unspecified | wire::Phase::Starting => Phase::Starting,
        wire::Phase::Loading => Phase::Loading,
        wire::Phase::Ready => Phase::Ready,
        wire::Phase::Draining => Phase::Draining,
        wire::Phase::Stopped => Phase::Stopped,
        wire::Phase::Failed => Phase::Failed,
        wire::Phase::Quarantined => Phase::Quarantined,
        wire::Phase::Sleeping => Phase::Sleeping,
    };
    let models = wire.models.iter().map(|model| Model::new(model.id.clone(), model.card.clone())).collect();
    let files = wire.prompt_files.as_ref().and_then(files_hash);
    State { phase, models, files, wire }
}

/// What an agent says of load, within what any replica can have: placement adds and multiplies it.
fn load(mut wire: wire::Load) -> Load {
    wire.in_flight = wire.in_flight.min(MOST_REQUESTS);
    wire.pending_tokens = wire.pending_tokens.min(MOST_TOKENS);
    wire.context_tokens = wire.context_tokens.min(MOST_TOKENS);
    if let Some(engine) = &mut wire.engine {
        engine.kv_blocks = engine.kv_blocks.min(MOST_TOKENS / u64::from(engine.block_size.max(1)));
        engine.kv_use = if engine.kv_use.is_nan() { 0.0 } else { engine.kv_use.clamp(0.0, 1.0) };
    }
    let engine = wire.engine.as_ref().map_or(0, |engine| engine.running.saturating_add(engine.waiting).min(MOST_REQUESTS));
    Load { others: wire.in_flight.saturating_sub(wire.in_flight_yours), engine, wire }
}

#[cfg(test)]
mod tests;
