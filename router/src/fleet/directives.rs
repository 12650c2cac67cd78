//! Directives to one agent over its session, and the answers that are waited for.

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

/// Messages to one agent that may wait.
const MAX_QUEUED_MESSAGES: usize = 64;

/// How long an agent may take to answer a directive. Carrying it out (a drain, say) may take longer; the answer says that it has begun.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// How long an agent may take to answer an order that it answers when it is done: engines finish their requests (the agent's drain timeout), move
/// their memory, read weights or adapters. Every step has a deadline at the agent; this one is for an agent that is stuck.
const COMPLETION_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// What operators have replicas do.
#[derive(Debug, Clone)]
pub enum ReplicaOrder {
    /// Finish what runs, then stop.
    Drain,
    /// Drain, then start again.
    Restart,
    /// Leave quarantine, or go on serving where it drains.
    Release,
    /// Give memory back.
    Sleep {
        /// vLLM's.
        level: u32,
    },
    /// Take memory again.
    Wake,
    /// Load an adapter, or unload it where `path` is empty.
    Lora {
        /// What requests use as their model.
        name: String,
        /// Where the engine finds it.
        path: String,
    },
}

/// Directives to one agent, and the answers that are waited for.
#[derive(Debug, Clone)]
pub struct Directives {
    to_agent: mpsc::Sender<Result<wire::AttachResponse, Status>>,
    pending_answers: Arc<Mutex<FxHashMap<u64, oneshot::Sender<wire::Answer>>>>,
}

impl Directives {
    /// Directives to nobody.
    #[cfg(test)]
    pub(super) fn unconnected() -> Self {
        Self { to_agent: mpsc::channel(1).0, pending_answers: Arc::default() }
    }

    /// Directives, and the messages that go to the agent.
    pub(crate) fn connect() -> (Self, mpsc::Receiver<Result<wire::AttachResponse, Status>>) {
        let (to_agent, messages) = mpsc::channel(MAX_QUEUED_MESSAGES);
        (Self { to_agent, pending_answers: Arc::default() }, messages)
    }

    /// Gives an order to replicas, by their index on the node, and waits for the agent's answer.
    ///
    /// # Errors
    /// When the agent is gone, does not answer in time, or refuses.
    pub async fn order(&self, order: ReplicaOrder, indices: Vec<u32>) -> Result<(), Status> {
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

    /// The last `lines` of an engine's log.
    ///
    /// # Errors
    /// As with [`Directives::order`].
    pub async fn logs(&self, index: u32, lines: u32) -> Result<Vec<String>, Status> {
        self.send_and_wait(Order::Logs(wire::LogRequest { index, lines })).await.map(|answer| answer.log_lines)
    }

    /// Asks for a snapshot of all replicas.
    pub fn resync(&self) -> bool {
        self.try_send(Order::Resync(wire::Resync {}))
    }

    /// Asks for all that these replicas have cached.
    pub fn resync_cache(&self, indices: Vec<u32>) -> bool {
        self.try_send(Order::ResyncCache(wire::Replicas { indices }))
    }

    /// Asks for a model's files.
    pub fn fetch_files(&self, hash: &FilesHash) -> bool {
        self.try_send(Order::FetchFiles(wire::FetchFiles { hash: hash.to_vec().into() }))
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

    /// Sends an order that is answered, if at all, by what the agent reports; `false` where its queue is full and the order lost.
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

    /// Ends the stream to the agent with this status, where it still reads.
    pub(super) fn close_with(&self, status: Status) {
        let _ = self.to_agent.try_send(Err(status));
    }

    /// No answer comes any more: whoever waits for one is told.
    pub(super) fn drop_pending_answers(&self) {
        self.pending_answers.lock().clear();
    }

    /// Hands an answer to whoever waits for it.
    pub(super) fn deliver_answer(&self, answer: wire::Answer) {
        if let Some(waiting) = self.pending_answers.lock().remove(&answer.id) {
            // Whoever asked may have given up.
            let _ = waiting.send(answer);
        }
    }
}

/// How long the answer to an order may take.
fn answer_deadline(order: &Order) -> Duration {
    match order {
        Order::Sleep(_) | Order::Wake(_) | Order::Lora(_) => COMPLETION_DEADLINE,
        _ => ANSWER_DEADLINE,
    }
}

/// An answer that is waited for, until its caller has it or has gone.
struct PendingAnswer<'a> {
    id: u64,
    directives: &'a Directives,
}

impl Drop for PendingAnswer<'_> {
    fn drop(&mut self) {
        self.directives.pending_answers.lock().remove(&self.id);
    }
}
