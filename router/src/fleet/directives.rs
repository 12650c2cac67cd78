//! Directives to one agent over its session, and the answers that are awaited.

use std::sync::Arc;
use std::time::Duration;

use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::attach_response::Message as ToAgent;
use hostler_proto::agent::v1::directive::Order;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tonic::Status;

use crate::prompt::FilesHash;

/// Most queued messages to one agent.
const MAX_QUEUED_MESSAGES: usize = 64;

/// How long an agent may take to answer a directive. Carrying it out (a drain, say) may take
/// longer; the answer says that it has begun.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// How long an agent may take for an order that it answers when done.
///
/// Engines finish their requests (the agent's drain timeout), move their memory, read weights or
/// adapters. The agent limits every step itself; this limit is for a stuck agent.
const COMPLETION_DEADLINE: Duration = Duration::from_secs(30 * 60);

#[derive(Debug, Clone)]
pub(crate) enum ReplicaOrder {
    /// Finish the running requests, then stop.
    Drain,
    /// Drain, then start again.
    Restart,
    /// Leave quarantine, or go on serving if draining.
    Release,
    /// Give GPU memory back.
    Sleep {
        /// vLLM's sleep level.
        level: u32,
    },
    /// Take the memory again.
    Wake,
    /// Load an adapter, or unload it if `path` is empty.
    Lora {
        /// The model name that requests use.
        name: String,
        /// The adapter's folder, as the engine sees it.
        path: String,
    },
}

impl std::fmt::Display for ReplicaOrder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Drain => formatter.write_str("drain"),
            Self::Restart => formatter.write_str("restart"),
            Self::Release => formatter.write_str("release"),
            Self::Sleep { .. } => formatter.write_str("sleep"),
            Self::Wake => formatter.write_str("wake"),
            Self::Lora { name, path } if path.is_empty() => write!(formatter, "unload the adapter {name} on"),
            Self::Lora { name, .. } => write!(formatter, "load the adapter {name} on"),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Directives {
    to_agent: mpsc::Sender<Result<wire::AttachResponse, Status>>,
    pending_answers: Arc<Mutex<FxHashMap<u64, oneshot::Sender<wire::Answer>>>>,
}

impl Directives {
    #[cfg(test)]
    pub(super) fn unconnected() -> Self {
        Self { to_agent: mpsc::channel(1).0, pending_answers: Arc::default() }
    }

    pub(crate) fn connect() -> (Self, mpsc::Receiver<Result<wire::AttachResponse, Status>>) {
        let (to_agent, messages) = mpsc::channel(MAX_QUEUED_MESSAGES);
        (Self { to_agent, pending_answers: Arc::default() }, messages)
    }

    pub(crate) async fn order(&self, order: ReplicaOrder, indices: Vec<u32>) -> Result<(), Status> {
        let replicas = wire::Replicas { indices };
        let order = match order {
            ReplicaOrder::Drain => Order::Drain(replicas),
            ReplicaOrder::Restart => Order::Restart(replicas),
            ReplicaOrder::Release => Order::Release(replicas),
            ReplicaOrder::Sleep { level } => Order::Sleep(wire::SleepOrder { replicas: Some(replicas), level }),
            ReplicaOrder::Wake => Order::Wake(replicas),
            ReplicaOrder::Lora { name, path } => Order::Lora(wire::LoraOrder { replicas: Some(replicas), name, path }),
        };
        self.send_and_wait(order).await.map(drop)
    }

    /// The last lines of an engine's log, or of one of its nodes, and how many it has had in all.
    pub(crate) async fn logs(&self, index: u32, lines: u32, member: Option<u32>) -> Result<(Vec<String>, u64), Status> {
        self.send_and_wait(Order::Logs(wire::LogRequest { index, lines, member })).await.map(|answer| (answer.log_lines, answer.log_end))
    }

    /// Asks for a snapshot of all replicas; `false` if the message could not be queued.
    pub(crate) fn resync(&self) -> bool {
        self.try_send(Order::Resync(wire::Resync {}))
    }

    /// Asks for a snapshot of these replicas' caches; `false` if the message could not be queued.
    pub(crate) fn resync_cache(&self, indices: Vec<u32>) -> bool {
        self.try_send(Order::ResyncCache(wire::Replicas { indices }))
    }

    /// Asks for a model's prompt files; `false` if the message could not be queued.
    pub(crate) fn fetch_files(&self, hash: &FilesHash) -> bool {
        self.try_send(Order::FetchFiles(wire::FetchFiles { hash: hash.to_vec().into() }))
    }

    /// Tells the agent to dial again, because another router takes this one's place. `false` if the
    /// message could not be queued.
    pub(super) fn announce_successor(&self) -> bool {
        self.try_send(Order::Successor(wire::Successor {}))
    }

    /// Tells the agent that its turn to read has come, or how many nodes come first (`ahead`).
    /// `false` if the message could not be queued.
    pub(super) fn tell_turn(&self, file_system: &str, ahead: Option<u32>) -> bool {
        let (file_system, granted) = (file_system.to_owned(), ahead.is_none());
        self.try_send(Order::LoadTurn(wire::LoadTurn { file_system, granted, ahead: ahead.unwrap_or(0) }))
    }

    async fn send_and_wait(&self, order: Order) -> Result<wire::Answer, Status> {
        let (answered, answer) = oneshot::channel();
        let waiting = PendingAnswer { id: fastrand::u64(1..), directives: self };
        self.pending_answers.lock().insert(waiting.id, answered);
        let deadline = answer_deadline(&order);
        self.send(ToAgent::Directive(wire::Directive { id: waiting.id, order: Some(order) })).await?;
        match timeout(deadline, answer).await {
            Ok(Ok(answer)) if answer.error.is_empty() => Ok(answer),
            Ok(Ok(answer)) => Err(Status::failed_precondition(answer.error)),
            Ok(Err(_)) => Err(Status::unavailable("the agent left before it answered")),
            Err(_) => Err(Status::deadline_exceeded(format!("the agent did not answer within {} s", deadline.as_secs()))),
        }
    }

    /// Sends an order without an answer other than the agent's reports. `false` if the queue is
    /// full and the order is lost.
    fn try_send(&self, order: Order) -> bool {
        let directive = ToAgent::Directive(wire::Directive { id: 0, order: Some(order) });
        self.to_agent.try_send(Ok(wire::AttachResponse { message: Some(directive) })).is_ok()
    }

    pub(super) async fn send(&self, message: ToAgent) -> Result<(), Status> {
        let message = Ok(wire::AttachResponse { message: Some(message) });
        match timeout(ANSWER_DEADLINE, self.to_agent.send(message)).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Status::unavailable("the agent is not connected")),
        }
    }

    pub(super) fn close_with(&self, status: Status) {
        let _ = self.to_agent.try_send(Err(status));
    }

    pub(super) fn drop_pending_answers(&self) {
        self.pending_answers.lock().clear();
    }

    /// Hands an answer to the task that waits for it.
    pub(super) fn deliver_answer(&self, answer: wire::Answer) {
        if let Some(waiting) = self.pending_answers.lock().remove(&answer.id) {
            // The waiting task may have given up.
            let _ = waiting.send(answer);
        }
    }
}

fn answer_deadline(order: &Order) -> Duration {
    match order {
        Order::Sleep(_) | Order::Wake(_) | Order::Lora(_) => COMPLETION_DEADLINE,
        _ => ANSWER_DEADLINE,
    }
}

/// An answer that is waited for; dropping this stops waiting.
struct PendingAnswer<'a> {
    id: u64,
    directives: &'a Directives,
}

impl Drop for PendingAnswer<'_> {
    fn drop(&mut self) {
        self.directives.pending_answers.lock().remove(&self.id);
    }
}
