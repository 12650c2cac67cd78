//! The router's side of `Attach`, one session per agent. The session parses the agent's messages
//! into the router's own types, within `bounds`.

mod bounds;
mod jobs;

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::Stream;
use hostler_placement::affinity::ChainGaps;
use hostler_placement::rates::LoadRates;
use hostler_prompt::Dialect;
use hostler_proto::PROTOCOL;
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::attach_request::Message as FromAgent;
use hostler_proto::agent::v1::attach_response::Message as ToAgent;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use self::bounds::{MAX_NAME_BYTES, MAX_SENTENCE_BYTES, bound_load, bound_readings, bound_state, check_index, check_replicas, cut};
pub(crate) use self::jobs::job_message;
use self::jobs::parse_job;
use super::agent_report::AgentReport;
use super::directives::Directives;
use super::fleet_writer::{Fleet, FleetUpdate, ReplicaChange};
use super::index_writer::{CacheReport, CacheReportQueue, CacheUpdate};
use super::load_turns::LoadTurns;
use super::log_lines::LogLines;
use super::replica_cache::CacheTier;
use super::replica_status::{EngineLaunch, EngineLoad, Model, Phase, ReplicaLoad, ReplicaStatus, ResumeChecks};
use super::view::MAX_CONTEXT_TOKENS;
use crate::background::BackgroundTasks;
use crate::crash_suspects::{CrashSuspects, MAX_REQUESTS_PER_CRASH, ReportedCrash};
use crate::lanes::{Lanes, Tickets};
use crate::member::{Member, MemberAttachment};
use crate::prompt::{FilesHash, FilesPiece, Prompts};
use crate::succession::Succession;

/// How long an agent may take for its hello, and for its first snapshot.
const HELLO_DEADLINE: Duration = Duration::from_secs(10);

/// How soon an agent whose queue is full hears again of a successor, which waits 10 s for it.
const ANNOUNCEMENT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// When to ask again for a cache that does not come. A large cache takes a second or two.
const RESYNC_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Most crashes of a replica in one report. An honest agent remembers no more.
const MAX_CRASHES_PER_REPLICA: usize = 32;

#[derive(Debug)]
pub(crate) struct SessionDeps {
    pub tasks: BackgroundTasks,
    pub fleet: Fleet,
    /// Receives the crashes of engines.
    pub crash_suspects: Arc<CrashSuspects>,
    pub cache_reports: CacheReportQueue,
    pub prompts: Prompts,
    pub tickets: Arc<Tickets>,
    pub router_run: u64,
    pub next_attachment: AtomicU64,
    pub succession: Succession,
    pub load_turns: LoadTurns,
    /// Whether agents must belong to the router's own user: in plain text, unless
    /// `allow_plain_text` is set.
    pub only_own_user: bool,
}

pub(crate) type ToAgentStream = Pin<Box<dyn Stream<Item = Result<wire::AttachResponse, Status>> + Send>>;

/// Serves one `Attach` call: welcomes the agent, then follows its reports until its stream ends.
///
/// `member` is the node of the connection's certificate, if agents need one.
///
/// # Errors
/// If the hello is missing, late, of another version, or of a node that the certificate does not
/// name.
pub(crate) async fn attach(
    sessions: Arc<SessionDeps>,
    mut requests: Streaming<wire::AttachRequest>,
    member: Option<Arc<Member>>,
) -> Result<ToAgentStream, Status> {
    let mut hello = match next_message(&mut requests).await? {
        FromAgent::Hello(hello) => hello,
        _ => return Err(Status::invalid_argument("the first message of Attach must be Hello")),
    };
    cut(&mut hello.agent_version, MAX_NAME_BYTES);
    check_hello(&hello)?;
    let attached = member.map(|member| member.attach(&hello.node)).transpose()?;
    check_name(&sessions.fleet, &hello)?;
    let lanes = Arc::new(Lanes::default());
    let ticket = sessions.tickets.issue(&lanes).map_err(|error| Status::unavailable(format!("no randomness for a ticket: {error}")))?;
    let welcome = wire::Welcome {
        protocol: PROTOCOL,
        router_version: env!("CARGO_PKG_VERSION").into(),
        router_life: sessions.router_run,
        ticket: ticket.secret().clone(),
        lease_ms: u32::try_from(sessions.fleet.lease().as_millis()).unwrap_or(u32::MAX),
        max_loads: sessions.load_turns.max_loads(),
        cache_tiers: CacheTier::HIGHEST,
    };
    let (directives, messages) = Directives::connect();
    directives.send(ToAgent::Welcome(welcome)).await?;
    let tasks = sessions.tasks.clone();
    tasks.spawn(async move {
        let attachment = sessions.next_attachment.fetch_add(1, Ordering::Relaxed);
        let node = hello.node.clone();
        let waiting = PendingAnswersGuard(directives.clone());
        let session = Session {
            sessions: sessions.clone(),
            node: node.clone(),
            attachment,
            directives: directives.clone(),
            lanes,
            next_sequence: 0,
            stale_caches: BTreeSet::new(),
            last_resync: Instant::now(),
            log_lines: LogLines::default(),
        };
        let ended = tokio::select! {
            biased;
            ended = wait_for_expiry(attached.as_ref()) => ended,
            ended = session.run(hello, requests) => ended,
        };
        // The agent learns the reason if its queue has room. An agent that has left learns that its
        // last report has come.
        directives.close_with(ended.clone());
        tracing::debug!(node, %ended, "attachment ended");
        drop(waiting);
        sessions.load_turns.leave(attachment);
        sessions.fleet.update(FleetUpdate::Detached { attachment }).await;
        sessions.cache_reports.send(CacheUpdate::Detached { attachment }).await;
        drop(ticket);
    });
    Ok(Box::pin(ReceiverStream::new(messages)))
}

/// Tells operators who wait for an agent's answer at once that none comes, even if the session is
/// dropped because the router ends.
struct PendingAnswersGuard(Directives);

impl Drop for PendingAnswersGuard {
    fn drop(&mut self) {
        self.0.drop_pending_answers();
    }
}

/// Resolves when the node's certificate has expired; never without one.
async fn wait_for_expiry(attached: Option<&MemberAttachment>) -> Status {
    match attached {
        Some(attached) => attached.wait_expired().await,
        None => std::future::pending().await,
    }
}

fn check_hello(hello: &wire::Hello) -> Result<(), Status> {
    if hello.protocol != PROTOCOL {
        return Err(Status::failed_precondition(format!(
            "agent {} speaks protocol {}, router {} speaks protocol {PROTOCOL}: install the same version of hostler on both",
            hello.agent_version,
            hello.protocol,
            env!("CARGO_PKG_VERSION"),
        )));
    }
    if hello.node.len() > MAX_NAME_BYTES {
        let bytes = hello.node.len();
        return Err(Status::invalid_argument(format!("a node's name has at most {MAX_NAME_BYTES} bytes, and this one {bytes}")));
    }
    if hello.node.is_empty() || hello.node.contains('/') {
        return Err(Status::invalid_argument(format!("{:?} is not a node name: it must not be empty or contain `/`", hello.node)));
    }
    Ok(())
}

/// Refuses an agent if another one has its node's name now.
fn check_name(fleet: &Fleet, hello: &wire::Hello) -> Result<(), Status> {
    let job = hello.job.clone().and_then(|job| parse_job(job, Instant::now()));
    let view = fleet.view();
    let holder = view.other_holder(&hello.node, hello.life, job.as_ref());
    holder.map_or(Ok(()), |holder| Err(Status::failed_precondition(holder.name_refusal())))
}

async fn next_message(requests: &mut Streaming<wire::AttachRequest>) -> Result<FromAgent, Status> {
    let message = timeout(HELLO_DEADLINE, requests.message()).await.map_err(|_| Status::deadline_exceeded("no message within 10 s"))??;
    message
        .and_then(|message| message.message)
        .ok_or_else(|| Status::invalid_argument("the stream ended before the agent had introduced itself"))
}

#[derive(Debug)]
struct Session {
    sessions: Arc<SessionDeps>,
    node: String,
    attachment: u64,
    directives: Directives,
    lanes: Arc<Lanes>,
    /// The sequence number that the next report must have.
    next_sequence: u64,
    /// Caches whose reports found no room in the queue, by replica and tier. Their further reports
    /// are dropped until the next snapshot.
    stale_caches: BTreeSet<(u32, CacheTier)>,
    last_resync: Instant,
    log_lines: LogLines,
}

impl Session {
    /// Follows the agent until its stream ends, and returns the reason.
    ///
    /// The agent joins the fleet with its first snapshot. An agent that finds itself already
    /// attached by another address can leave before that.
    async fn run(mut self, hello: wire::Hello, mut requests: Streaming<wire::AttachRequest>) -> Status {
        match next_message(&mut requests).await {
            Ok(FromAgent::Report(report)) if report.snapshot => {
                // Another agent may have got the name since the hello.
                if let Err(refusal) = check_name(&self.sessions.fleet, &hello) {
                    return refusal;
                }
                let attached = FleetUpdate::Attached {
                    attachment: self.attachment,
                    node: hello.node.into(),
                    agent_version: hello.agent_version,
                    agent_run: hello.life,
                    lanes: self.lanes.clone(),
                    directives: self.directives.clone(),
                };
                if let Err(violation) = check_replicas(&report) {
                    return violation;
                }
                self.sessions.fleet.update(attached).await;
                self.apply_report(report).await;
            }
            Ok(_) => return Status::invalid_argument("the agent's second message must be a snapshot"),
            Err(status) => return status,
        }
        let mut port = self.sessions.succession.watch_agents_port();
        let mut is_announcement_due = false;
        loop {
            is_announcement_due = is_announcement_due && !self.directives.announce_successor();
            let message = tokio::select! {
                biased;
                () = port.wait_lent() => {
                    is_announcement_due = true;
                    continue;
                }
                message = requests.message() => message,
                () = sleep(ANNOUNCEMENT_RETRY_INTERVAL), if is_announcement_due => continue,
            };
            match message {
                Ok(Some(message)) => {
                    if let Err(violation) = self.apply(message).await {
                        return violation;
                    }
                }
                Ok(None) => return Status::ok("the agent left"),
                Err(status) => return status,
            }
        }
    }

    /// Applies a message of an agent that has introduced itself.
    ///
    /// # Errors
    /// If no agent says so, which ends the session.
    async fn apply(&mut self, message: wire::AttachRequest) -> Result<(), Status> {
        match message.message {
            Some(FromAgent::Report(report)) => {
                check_replicas(&report)?;
                self.apply_report(report).await;
            }
            Some(FromAgent::Cache(report)) => {
                check_index(report.index)?;
                cache_report(report).into_iter().for_each(|report| self.forward_cache_report(report));
            }
            Some(FromAgent::Answer(answer)) => self.directives.deliver_answer(answer),
            Some(FromAgent::File(part)) => self.file_part(part),
            Some(FromAgent::LoadWish(wish)) => self.note_load_wish(wish),
            Some(FromAgent::Hello(_)) | None => tracing::debug!("an unexpected message of an agent is ignored"),
        }
        Ok(())
    }

    async fn apply_report(&mut self, mut report: wire::Report) {
        self.sessions.load_turns.advance();
        self.resync_stale_caches();
        if report.snapshot {
            self.next_sequence = report.sequence;
        } else if report.sequence != self.next_sequence {
            if self.has_room_for_line() {
                tracing::warn!(expected = self.next_sequence, got = report.sequence, "a report is missing: asking for a snapshot");
            }
            // If the order is lost, the next report shows again that it is needed.
            self.directives.resync();
            return;
        }
        self.next_sequence = self.next_sequence.wrapping_add(1);
        report.replicas.iter_mut().filter_map(|replica| replica.state.as_mut()).for_each(bound_state);
        report
            .replicas
            .iter()
            .filter_map(|replica| replica.state.as_ref()?.prompt_files.as_ref())
            .for_each(|files| self.offer_prompt_files(files));
        // Record crashes before the fleet learns of the report: requests from a crashed engine are
        // then known as suspects when they are retried.
        for replica in report.replicas.iter().filter(|replica| !replica.crashes.is_empty()) {
            let id = format!("{}/{}", self.node, replica.index);
            replica
                .crashes
                .iter()
                .take(MAX_CRASHES_PER_REPLICA)
                .map(reported_crash)
                .for_each(|crash| self.sessions.crash_suspects.record_reported_crash(&id, &crash));
        }
        if let Some(job) = report.job.and_then(|job| parse_job(job, Instant::now())) {
            self.sessions.fleet.update(FleetUpdate::JobReported { attachment: self.attachment, job }).await;
        }
        let replicas = report.replicas.into_iter().map(parse_replica).collect();
        self.sessions.fleet.update(FleetUpdate::Reported { attachment: self.attachment, snapshot: report.snapshot, replicas }).await;
    }
}

impl Session {
    /// Passes a cache report on without waiting.
    ///
    /// Load, phase and lease come by the same stream and must not be late. If the index writer is
    /// behind, the report is dropped and the whole cache is requested later.
    fn forward_cache_report(&mut self, report: CacheReport) {
        let cache = (report.index, report.tier);
        if report.snapshot {
            self.stale_caches.remove(&cache);
        }
        let (attachment, directives) = (self.attachment, self.directives.clone());
        if self.stale_caches.contains(&cache)
            || !self.sessions.cache_reports.try_send(CacheUpdate::Reported { attachment, directives, report })
        {
            self.stale_caches.insert(cache);
        }
    }

    /// Asks for the caches whose reports were dropped, once the index writer has caught up.
    fn resync_stale_caches(&mut self) {
        if !self.stale_caches.is_empty() && self.last_resync.elapsed() > RESYNC_RETRY_INTERVAL && self.sessions.cache_reports.has_room() {
            self.last_resync = Instant::now();
            let indices = self.stale_caches.iter().map(|(index, _)| *index).collect();
            self.directives.resync_cache(indices);
        }
    }

    fn note_load_wish(&self, wish: wire::LoadWish) {
        let wire::LoadWish { mut file_system, holds } = wish;
        cut(&mut file_system, MAX_SENTENCE_BYTES);
        match file_system.as_str() {
            "" => self.sessions.load_turns.leave(self.attachment),
            named => self.sessions.load_turns.ask(self.attachment, &self.directives, named, holds),
        }
    }

    fn file_part(&mut self, mut part: wire::FilePart) {
        let Ok(hash) = FilesHash::try_from(&part.hash[..]) else {
            if self.has_room_for_line() {
                tracing::warn!(bytes = part.hash.len(), "a piece of a model's files is ignored: its hash is not a SHA-256");
            }
            return;
        };
        cut(&mut part.error, MAX_SENTENCE_BYTES);
        let content = if part.error.is_empty() { Ok(part.data) } else { Err(part.error) };
        self.sessions.prompts.receive_part(&hash, FilesPiece { offset: part.offset, content });
    }

    /// Whether the log has room for another line that this agent causes.
    fn has_room_for_line(&mut self) -> bool {
        let now = Instant::now();
        if let Some(count) = self.log_lines.close_window(now) {
            tracing::warn!(node = %self.node, count, "lines about this agent were left out");
        }
        self.log_lines.take(now)
    }

    fn offer_prompt_files(&self, files: &wire::PromptFiles) {
        let Some(hash) = files_hash(files) else { return };
        let fetch = || {
            self.directives.fetch_files(&hash);
        };
        self.sessions.prompts.offer_files(hash, files.bytes, &fetch);
    }
}

fn files_hash(files: &wire::PromptFiles) -> Option<FilesHash> {
    files.hash[..].try_into().ok()
}

/// A report in the router's terms; `None` of a tier that this release does not know, and of files
/// that are said to be one replica's.
fn cache_report(report: wire::CacheReport) -> Option<CacheReport> {
    let wire::CacheReport { index, epoch, snapshot, partial, stored, removed, count, digest, tier } = report;
    let tier = CacheTier::from_number(tier)?;
    let is_valid = tier != CacheTier::Files || (index, epoch) == (0, 0);
    is_valid.then_some(CacheReport { index, tier, epoch, snapshot, partial, stored, removed, count, digest })
}

fn reported_crash(crash: &wire::EngineCrash) -> ReportedCrash {
    let requests = crash.requests.iter().take(MAX_REQUESTS_PER_CRASH).copied().map(u128::from).collect();
    ReportedCrash { epoch: crash.epoch, age: Duration::from_millis(crash.age_ms), requests }
}

fn parse_replica(report: wire::ReplicaReport) -> ReplicaChange {
    let load = report.load.map(bound_load);
    ReplicaChange {
        index: report.index,
        epoch: report.epoch,
        state: report.state.as_ref().map(parse_status),
        load: load.map(parse_load),
        report: AgentReport { state: report.state.map(Arc::new), load, gpus: report.gpus.map(|gpus| bound_readings(gpus.readings).into()) },
    }
}

fn parse_status(state: &wire::ReplicaState) -> ReplicaStatus {
    let (files, watch) = (state.prompt_files.as_ref(), state.cache.as_ref());
    let launch = state.launch.as_ref().map(parse_launch);
    ReplicaStatus {
        sequence_limit: launch.as_ref().map_or(0, EngineLaunch::sequence_limit),
        phase: parse_phase(state.phase()),
        reason: state.reason.clone(),
        start_left: Some(state.progress.as_ref().map_or(state.returns_in_seconds, |progress| progress.seconds_left))
            .filter(|seconds| *seconds > 0)
            .map(|seconds| Duration::from_secs(seconds.into())),
        models: state.models.iter().map(parse_model).collect(),
        files: files.and_then(files_hash),
        files_bytes: files.map_or(0, |files| files.bytes),
        launch,
        engine_socket: state.engine_socket.clone(),
        token_budget: state.token_budget,
        load_rates: state.launch.as_ref().map(|launch| LoadRates::new(launch.kv_token_bytes, launch.tensor_parallel)).unwrap_or_default(),
        block_tokens: watch.map_or(0, |watch| watch.block_size),
        exact_cache: watch.filter(|watch| watch.exact).map(|watch| if watch.has_holes { ChainGaps::Possible } else { ChainGaps::None }),
        restarts: state.restarts,
        hangs: state.hangs,
        is_standby: state.is_standby,
        has_silent_member: state.phase() == wire::Phase::Ready && state.members.iter().any(|member| !member.is_heard),
        findings: state.findings.len(),
    }
}

fn parse_model(model: &wire::Model) -> Model {
    let alias_of = Some(model.alias_of.clone()).filter(|path| !path.is_empty());
    Model { alias_of, ..Model::new(model.id.clone(), model.card.clone()) }
}

fn parse_phase(phase: wire::Phase) -> Phase {
    match phase {
        wire::Phase::Unspecified | wire::Phase::Starting | wire::Phase::Suspect => Phase::Starting,
        wire::Phase::Loading => Phase::Loading,
        wire::Phase::Ready => Phase::Ready,
        wire::Phase::Draining => Phase::Draining,
        wire::Phase::Stopped => Phase::Stopped,
        wire::Phase::Failed => Phase::Failed,
        wire::Phase::Quarantined => Phase::Quarantined,
        wire::Phase::Sleeping => Phase::Sleeping,
    }
}

fn parse_launch(launch: &wire::Launch) -> EngineLaunch {
    let max_context_tokens = Some(launch.max_model_len.min(MAX_CONTEXT_TOKENS)).filter(|tokens| *tokens > 0);
    EngineLaunch {
        dialect: Dialect::from_front_end(&launch.front_end),
        is_attached: launch.front_end == "attached",
        flags: launch.arguments.clone(),
        max_context_tokens,
        missing_routes: launch.missing_routes.clone(),
        resume_checks: ResumeChecks::default(),
    }
}

fn parse_load(load: wire::Load) -> ReplicaLoad {
    let engine = load.engine.unwrap_or_default();
    ReplicaLoad {
        in_flight: load.in_flight,
        in_flight_elsewhere: load.in_flight.saturating_sub(load.in_flight_yours),
        served: load.served,
        pending_tokens_elsewhere: load.pending_tokens.saturating_sub(load.pending_tokens_yours),
        context_tokens_elsewhere: load.context_tokens.saturating_sub(load.context_tokens_yours),
        engine: EngineLoad {
            running: engine.running,
            waiting: engine.waiting,
            kv_use: engine.kv_use,
            kv_blocks: engine.kv_blocks,
            block_tokens: engine.block_size,
        },
    }
}

#[cfg(test)]
mod tests;
