//! The gRPC service for operators: list, expect, drain, restart, logs, explain, and a way into the
//! page. The operators' socket needs no key; calls on the admin listener require an admin key.

mod announcement;
mod demand;
mod first_tokens;
mod fleet_facts;
mod socket;
mod watch;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hostler_boot::reachable_here;
use hostler_placement::cost;
use hostler_proto::fleet::v1::{
    Cache, Decision, ExpectRequest, ExpectResponse, ExplainRequest, ExplainResponse, GoneJob, ListRequest, ListResponse, LogsRequest,
    LogsResponse, LoraRequest, Node, OpenPageRequest, OpenPageResponse, PastRequest, PastResponse, Rates, Replica, RequestCounts, Scored,
    SleepRequest, TargetRequest, TargetResponse, TenantUse, Terms, fleet_server,
};
use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};

use crate::access_log::{RefusalLog, RefusedRequest};
use crate::admission::Admission;
use crate::client_text::cut;
use crate::findings;
use crate::fleet::{Fleet, FleetView, ReplicaOrder, job_message};
use crate::history::History;
use crate::keys::{PageRights, PageSessions, TOKEN_LIFE, presented_key};
use crate::outcome::{EndCounts, Verdict};
use crate::placement::{PlacementDecision, Placer, RequestQueue};
use crate::prompt::EncoderStatus;
use first_tokens::FirstTokenTimes;
pub(crate) use socket::OperatorsSocket;
pub use socket::find_operators_sockets;

/// Most log lines that an agent keeps.
const MAX_LOG_LINES: u32 = 200;

#[derive(Debug, Clone)]
pub(crate) struct Operators {
    pub(crate) fleet: Fleet,
    pub(crate) placer: Arc<Placer>,
    pub(crate) queue: RequestQueue,
    pub(crate) admission: Admission,
    /// The last hour, as `watch_fleet` has read it.
    pub(crate) history: History,
    pub(crate) page_sessions: PageSessions,
    /// The latest requests that no replica got.
    pub(crate) refusals: RefusalLog,
    /// The address of the page.
    pub(crate) admin_address: SocketAddr,
}

/// How many of the latest decisions an answer looks at. The router remembers more.
pub(crate) const MAX_DECISIONS: usize = 1000;

const MAX_TENANTS: usize = 64;

/// Most replicas that the answer to an unknown name lists.
const MAX_NAMED: usize = 20;

#[tonic::async_trait]
impl fleet_server::Fleet for Operators {
    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        Ok(Response::new(self.list_fleet()))
    }

    async fn expect(&self, request: Request<ExpectRequest>) -> Result<Response<ExpectResponse>, Status> {
        let announced = announcement::parse_announcement(&request.into_inner(), Instant::now());
        let expectations = announced.map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.fleet.expect(expectations).await;
        Ok(Response::new(ExpectResponse {}))
    }

    async fn drain(&self, request: Request<TargetRequest>) -> Result<Response<TargetResponse>, Status> {
        self.send_order(&request.into_inner().target, ReplicaOrder::Drain).await
    }

    async fn restart(&self, request: Request<TargetRequest>) -> Result<Response<TargetResponse>, Status> {
        self.send_order(&request.into_inner().target, ReplicaOrder::Restart).await
    }

    async fn release(&self, request: Request<TargetRequest>) -> Result<Response<TargetResponse>, Status> {
        self.send_order(&request.into_inner().target, ReplicaOrder::Release).await
    }

    async fn sleep(&self, request: Request<SleepRequest>) -> Result<Response<TargetResponse>, Status> {
        let SleepRequest { target, level } = request.into_inner();
        self.send_order(&target, ReplicaOrder::Sleep { level: level.max(1) }).await
    }

    async fn wake(&self, request: Request<TargetRequest>) -> Result<Response<TargetResponse>, Status> {
        self.send_order(&request.into_inner().target, ReplicaOrder::Wake).await
    }

    async fn lora(&self, request: Request<LoraRequest>) -> Result<Response<TargetResponse>, Status> {
        let LoraRequest { target, name, path } = request.into_inner();
        if name.is_empty() {
            return Err(Status::invalid_argument("an adapter has a name: the one that requests use as their model"));
        }
        if path.is_empty() {
            let view = self.fleet.view();
            let known: Vec<&str> = view.models().into_iter().filter(|model| model.is_adapter).map(|model| model.id.as_str()).collect();
            // An adapter that no engine could load again is still known, as a finding says.
            let lost = view.replicas.iter().flat_map(|replica| &replica.report.state).flat_map(|state| &state.findings);
            let is_lost = lost.filter(|finding| finding.kind == "adapter").any(|finding| finding.evidence.contains(&name));
            if !is_lost && !known.contains(&name.as_str()) {
                let known = if known.is_empty() { "there are none".to_owned() } else { known.join(", ") };
                return Err(Status::not_found(format!("no replica has an adapter called {name:?}; adapters: {known}")));
            }
        }
        self.send_order(&target, ReplicaOrder::Lora { name, path }).await
    }

    async fn logs(&self, request: Request<LogsRequest>) -> Result<Response<LogsResponse>, Status> {
        let LogsRequest { replica, lines, member } = request.into_inner();
        Ok(Response::new(self.engine_log(&replica, lines, member).await?))
    }

    async fn past(&self, request: Request<PastRequest>) -> Result<Response<PastResponse>, Status> {
        let PastRequest { after_event, most } = request.into_inner();
        let events = self.fleet.events();
        let last_event = events.last_number();
        let most = if most == 0 { usize::MAX } else { most as usize };
        Ok(Response::new(PastResponse { events: events.after(after_event, most), last_event }))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let ExplainRequest { id, most } = request.into_inner();
        let most = if most == 0 { 10 } else { most as usize }.min(MAX_DECISIONS);
        let (records, refused) = if id.is_empty() {
            let latest = self.placer.decisions.latest(most);
            let since = latest.first().map_or(UNIX_EPOCH, |record| record.decided_at);
            (latest, self.refusals.after(since, most))
        } else {
            (self.placer.decisions.find(&id), self.refusals.find(&id))
        };
        if records.is_empty() && refused.is_empty() && !id.is_empty() {
            let message = format!(
                "no decision about a request {id:?} is remembered here: name the x-hostler-id of its answer, or the x-request-id that the client sent; \
                 each router remembers its own last decisions"
            );
            return Err(Status::not_found(message));
        }
        let decisions = records.iter().take(most).map(|record| decision_message(record)).collect();
        let refused = refused.iter().map(RefusedRequest::message).collect();
        Ok(Response::new(ExplainResponse { decisions, refused }))
    }

    async fn open_page(&self, request: Request<OpenPageRequest>) -> Result<Response<OpenPageResponse>, Status> {
        let rights = if request.get_ref().watch_only { PageRights::Watch } else { PageRights::Operate };
        let token = self.page_sessions.issue_token(rights, presented_key(request.metadata().as_ref()).ok());
        let token = token.map_err(|error| Status::internal(format!("the system gives no random numbers: {error}")))?;
        let address = reachable_here(self.admin_address).to_string();
        Ok(Response::new(OpenPageResponse { token: token.reveal().to_owned(), address, valid_ms: millis(TOKEN_LIFE) }))
    }
}

impl Operators {
    /// The operators' calls as routes. tonic answers a gRPC call to an unknown path, and the server
    /// that these routes are merged into answers any other.
    pub(crate) fn routes(self) -> axum::Router {
        tonic::service::Routes::new(fleet_server::FleetServer::new(self)).prepare().into_axum_router()
    }

    pub(crate) fn list_fleet(&self) -> ListResponse {
        let (view, now) = (self.fleet.view(), Instant::now());
        let first_tokens = FirstTokenTimes::gather(&self.placer.decisions.latest(MAX_DECISIONS), SystemTime::now());
        let nodes = view.nodes.iter().map(|node| Node {
            name: node.name.to_string(),
            agent_version: node.agent_version.clone(),
            attached: node.is_attached,
            replicas: view
                .replicas
                .iter()
                .filter(|replica| replica.node == node.name)
                .map(|of| replica(of, &self.placer, &first_tokens))
                .collect(),
            job: node.job.as_deref().map(|job| job_message(job, now)),
        });
        let gone_jobs = view.gone_jobs.iter().map(|gone| GoneJob {
            node: gone.node.to_string(),
            job: Some(job_message(&gone.job, gone.gone_at)),
            gone_ms_ago: millis(now.saturating_duration_since(gone.gone_at)),
            reason: gone.reason.to_string(),
            drained: gone.has_drained,
        });
        let (nodes, gone_jobs) = (nodes.collect(), gone_jobs.collect());
        let demand = demand::list_demand(&view, &self.queue, now);
        let (first_tokens, queued) = (first_tokens.of_all(), self.queue.waiting_count());
        let counts = self.placer.metrics.end_counts();
        ListResponse {
            router_version: env!("CARGO_PKG_VERSION").into(),
            nodes,
            gone_jobs,
            demand,
            first_tokens,
            in_flight: count(self.admission.in_flight()),
            queued: count(queued),
            tenants: self.tenants(),
            findings: findings::list(&self.facts(first_tokens)),
            requests: Some(request_counts(&counts)),
        }
    }

    fn tenants(&self) -> Vec<TenantUse> {
        let limits = self.admission.limits_in_use();
        let mut tenants: Vec<TenantUse> = limits
            .into_iter()
            .map(|used| TenantUse { name: used.name.to_string(), in_flight: used.in_flight, left: used.share_left })
            .collect();
        tenants.sort_by(|one, other| other.in_flight.cmp(&one.in_flight).then_with(|| one.name.cmp(&other.name)));
        tenants.truncate(MAX_TENANTS);
        tenants
    }

    /// The last lines of a replica's log, or of one of its nodes.
    pub(crate) async fn engine_log(&self, replica: &str, lines: u32, member: Option<u32>) -> Result<LogsResponse, Status> {
        let view = self.fleet.view().clone();
        let (directives, indices, _) = find_target(&view, replica)?;
        let [index] = indices[..] else {
            return Err(Status::invalid_argument(format!("{replica} is a node; name one of its replicas, such as {replica}/0")));
        };
        let (lines, end) = directives.logs(index, lines.clamp(1, MAX_LOG_LINES), member).await?;
        Ok(LogsResponse { lines, end })
    }

    /// Sends an order to the node of a target, or to all nodes at once if there is no name.
    pub(crate) async fn send_order(&self, name: &str, order: ReplicaOrder) -> Result<Response<TargetResponse>, Status> {
        let view = self.fleet.view().clone();
        if !name.is_empty() {
            let (directives, indices, replicas) = find_target(&view, name)?;
            self.fleet.events().record("order_given", name, &format!("an operator orders: {order} {name}"), false);
            directives.order(order, indices).await?;
            return Ok(Response::new(TargetResponse { replicas }));
        }
        let named = view.nodes.iter().filter(|node| view.replicas.iter().any(|replica| replica.node == node.name));
        let targets = named.map(|node| Ok((node.name.clone(), find_target(&view, &node.name)?))).collect::<Result<Vec<_>, Status>>()?;
        if targets.is_empty() {
            return Err(Status::not_found("there are no replicas yet"));
        }
        self.fleet.events().record("order_given", "", &format!("an operator orders: {order} all replicas"), false);
        let ordered = targets.into_iter().map(|(node, (directives, indices, replicas))| {
            let order = order.clone();
            async move { NodeAnswer { node, answer: directives.order(order, indices).await, replicas } }
        });
        merge_answers(futures_util::future::join_all(ordered).await).map(|replicas| Response::new(TargetResponse { replicas }))
    }
}

struct NodeAnswer {
    node: Arc<str>,
    answer: Result<(), Status>,
    replicas: Vec<String>,
}

/// Merges the answers of all nodes: the replicas concerned, or the failures by node.
fn merge_answers(answers: Vec<NodeAnswer>) -> Result<Vec<String>, Status> {
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    for NodeAnswer { node, answer, mut replicas } in answers {
        match answer {
            Ok(()) => done.append(&mut replicas),
            // The message of such a status already names the replicas.
            Err(status) if status.code() == Code::FailedPrecondition => failed.push(status.message().to_owned()),
            Err(status) => failed.push(format!("node {node}: {}", status.message())),
        }
    }
    match (&failed[..], &done[..]) {
        ([], _) => Ok(done),
        (_, []) => Err(Status::failed_precondition(failed.join("; "))),
        _ => Err(Status::failed_precondition(format!("{}; done on {}", failed.join("; "), done.join(", ")))),
    }
}

/// Finds a target's node and replicas.
fn find_target(view: &FleetView, name: &str) -> Result<(crate::fleet::Directives, Vec<u32>, Vec<String>), Status> {
    let replicas = view.replicas_of_target(name);
    let node = replicas.first().and_then(|replica| view.nodes.iter().find(|node| node.name == replica.node));
    let Some(node) = node else {
        let known: Vec<&str> = view.replicas.iter().take(MAX_NAMED).map(|replica| &*replica.id).collect();
        let more = view.replicas.len() - known.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let known = if known.is_empty() { "there are none yet".into() } else { known.join(", ") };
        return Err(Status::not_found(format!("no node or replica is called {:?}; replicas: {known}{more}", cut(name))));
    };
    let indices = replicas.iter().map(|replica| replica.index).collect();
    Ok((node.directives.clone(), indices, replicas.iter().map(|replica| replica.id.to_string()).collect()))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn replica(replica: &crate::fleet::Replica, placer: &Placer, first_tokens: &FirstTokenTimes) -> Replica {
    Replica {
        id: replica.id.to_string(),
        suspect: replica.lease_lapsed,
        epoch: replica.epoch,
        local_in_flight: replica.local_load.in_flight(),
        state: replica.report.state_for_operators(replica.is_alias_contested),
        load: replica.report.load,
        cache: Some(cache(replica, placer)),
        rates: Some(rates(&replica.local_load.learned().rates)),
        streams_moved: replica.local_load.stream_moves.moved(),
        first_tokens: first_tokens.of_replica(&replica.id),
    }
}

fn request_counts(counts: &EndCounts) -> RequestCounts {
    let by_verdict = counts.by_verdict();
    let of = |verdict: Verdict| by_verdict[verdict as usize];
    RequestCounts {
        answered: of(Verdict::Answered),
        client_fault: of(Verdict::ClientFault),
        full: of(Verdict::Full),
        error: of(Verdict::Error),
        client_left: of(Verdict::ClientLeft),
    }
}

/// The word for a replica whose engine says the tokens of prompts.
const RENDERING: &str = "engine";

fn cache(replica: &crate::fleet::Replica, placer: &Placer) -> Cache {
    let standing = replica.state.encoder_key().map_or(EncoderStatus::Missing, |reader| placer.prompts.status(&reader));
    let is_rendering = replica.local_load.rendering.is_offered(replica.epoch);
    let figures = &replica.cache.stats;
    let reported = replica.report.state.as_deref();
    let watch_reason = reported.and_then(|state| state.cache.as_ref()).map(|watch| watch.reason.clone());
    let files_reason = reported.and_then(|state| state.prompt_files.as_ref()).filter(|_| !is_rendering).map(|files| files.error.clone());
    let reason = [watch_reason, files_reason].into_iter().flatten().find(|reason| !reason.is_empty());
    Cache {
        exact: replica.cache.slot.is_some() && replica.state.exact_cache.is_some() && (standing.is_proved() || is_rendering),
        blocks: figures.blocks.load(Ordering::Relaxed),
        host_blocks: replica.host_cache.usable_blocks(),
        file_blocks: replica.file_cache.usable_blocks(),
        matches: figures.matches.load(Ordering::Relaxed),
        resyncs: figures.resyncs.load(Ordering::Relaxed),
        distrusted: figures.distrusted.load(Ordering::Relaxed),
        tokenizer: if is_rendering && !standing.is_proved() { RENDERING } else { standing.as_str() }.to_owned(),
        reason: reason.or_else(|| (!is_rendering).then(|| standing.reason())).unwrap_or_default(),
    }
}

fn rates(rates: &hostler_placement::rates::Rates) -> Rates {
    let hostler_placement::rates::Rates { step, prefill, attention, decode, context, slowness } = *rates;
    Rates { step, prefill, attention, decode, context, slowness }
}

/// A decision in the words of operators.
pub(crate) fn decision_message(record: &PlacementDecision) -> Decision {
    let outcome = *record.outcome.lock();
    let scored = record.decision.scored.iter().zip(&record.replica_names).zip(&record.report_ages);
    Decision {
        id: format!("{:016x}", record.id),
        client_id: record.client_id.as_deref().unwrap_or_default().to_owned(),
        path: record.path.to_string(),
        model: record.model.as_deref().unwrap_or_default().to_owned(),
        at_ms: record.decided_at.duration_since(UNIX_EPOCH).map_or(0, millis),
        attempt: record.attempt,
        queue_seconds: record.queued_seconds.into(),
        level: record.level.as_str().to_owned(),
        fallback: record.fallback_reason.to_owned(),
        tokens: record.prompt_tokens,
        output: record.expected_output_tokens,
        long_output: record.long_output_tokens,
        why: record.reason().to_owned(),
        tied: count(record.decision.tied),
        utilisation: record.decision.utilisation,
        nominal: Some(rates(&record.decision.nominal)),
        chosen: count(record.decision.chosen),
        scored: scored.map(|((scored, name), age)| self::scored(scored, name, *age)).collect(),
        candidates: count(record.decision.candidates),
        first_token: outcome.first_token_seconds,
        cached: outcome.cached_tokens,
        told_tokens: outcome.told_prompt_tokens,
        resume: record.resume.to_string(),
        status: outcome.status.map(u32::from),
        end: outcome.end.unwrap_or_default().to_owned(),
        between_tokens: outcome.between_tokens_seconds,
        total: outcome.total_seconds,
        answer_tokens: outcome.answer_tokens,
        longest_gap: outcome.longest_gap_seconds.map(|(gap, _)| gap),
        longest_gap_at: outcome.longest_gap_seconds.map(|(_, began)| began),
    }
}

fn scored(scored: &cost::Scored, name: &str, age: f32) -> Scored {
    let cost::Terms { queue, prefill, load, steps, memory, congestion, decode } = scored.terms;
    let candidate = &scored.candidate;
    Scored {
        replica: name.to_owned(),
        matched: candidate.matched,
        uncached: scored.uncached,
        loaded: candidate.loaded,
        read: candidate.read,
        load_seconds: candidate.load_seconds,
        in_flight: candidate.in_flight,
        pending: candidate.pending,
        context: candidate.context,
        capacity: candidate.capacity,
        kv_use: candidate.kv_use,
        budget: candidate.budget,
        overdue: candidate.overdue,
        doubtful: candidate.doubtful,
        age: age.into(),
        rates: Some(rates(&candidate.rates)),
        terms: Some(Terms { queue, prefill, load, steps, memory, congestion, decode }),
        time_left: Some(candidate.time_left).filter(|left| left.is_finite()),
        finish: scored.finish,
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
