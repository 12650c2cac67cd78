//! The view's calls to the router, each within a deadline, and the words for their failures.

use std::future::Future;
use std::time::Duration;

use hostler_proto::fleet::v1::{ExplainRequest, ListResponse, LogsRequest, PastRequest, PastResponse, TargetRequest};
use tokio::time::timeout;
use tonic::{Code, Response, Status};

use super::events::MAX_EVENTS;
use super::model::ReplicaDetail;
use super::order::{FleetOrder, OrderKind};
use crate::admin::{AdminClient, RouterAddress, list_fleet, status_error};
use crate::output::describe;

/// Time after which the router counts as silent.
const LOOK_DEADLINE: Duration = Duration::from_secs(5);

/// Deadline of details: a silent agent must not hold up the rest.
const DETAIL_DEADLINE: Duration = Duration::from_secs(2);

/// Deadline of an order, which goes through the agent.
const ORDER_DEADLINE: Duration = Duration::from_secs(15);

/// More lines than any screen shows.
const LOG_LINES: u32 = 100;

/// Decisions searched for those of one replica.
const DECISIONS: u32 = 100;

#[derive(Debug)]
pub(super) enum RouterCall {
    Look {
        /// Number of the last event that is known.
        after_event: u64,
        /// Replica whose details are shown.
        detail: Option<String>,
    },
    Order(FleetOrder),
}

#[derive(Debug)]
pub(super) enum RouterAnswer {
    Seen(Box<ListResponse>, PastResponse, Option<ReplicaDetail>),
    /// Why the router has not answered.
    Silent(String),
    Ordered(FleetOrder, Result<Vec<String>, String>),
}

/// Carries out one call with the client of the call before. After a failure it connects anew, and
/// checks again whose socket it is.
pub(super) async fn carry_out(
    router: &RouterAddress,
    client: Option<AdminClient>,
    call: RouterCall,
) -> (Option<AdminClient>, RouterAnswer) {
    match call {
        RouterCall::Look { after_event, detail } => match within(LOOK_DEADLINE, look(router, client, after_event)).await {
            Ok((mut client, listed, past)) => {
                let detail = match detail {
                    Some(replica) => Some(look_closely(&mut client, replica).await),
                    None => None,
                };
                (Some(client), RouterAnswer::Seen(Box::new(listed), past, detail))
            }
            Err(cause) => (None, RouterAnswer::Silent(cause)),
        },
        RouterCall::Order(order) => {
            let done = within(ORDER_DEADLINE, send(router, client.clone(), &order)).await;
            (client, RouterAnswer::Ordered(order, done))
        }
    }
}

async fn look(
    router: &RouterAddress,
    client: Option<AdminClient>,
    after_event: u64,
) -> anyhow::Result<(AdminClient, ListResponse, PastResponse)> {
    let mut client = connected(router, client).await?;
    let listed = list_fleet(&mut client).await?;
    let request = PastRequest { after_event, most: u32::try_from(MAX_EVENTS).unwrap_or(u32::MAX) };
    let past = match client.past(request).await {
        // A router of an earlier version.
        Err(status) if status.code() == Code::Unimplemented => PastResponse::default(),
        answered => answered.map_err(status_error)?.into_inner(),
    };
    Ok((client, listed, past))
}

async fn look_closely(client: &mut AdminClient, replica: String) -> ReplicaDetail {
    let log = LogsRequest { replica: replica.clone(), lines: LOG_LINES, member: None };
    let log = within(DETAIL_DEADLINE, answer(client.logs(log))).await.map(|logs| logs.lines);
    let decisions = ExplainRequest { id: String::new(), most: DECISIONS };
    let decisions = within(DETAIL_DEADLINE, answer(client.explain(decisions))).await.map(|explained| explained.decisions);
    ReplicaDetail { replica, log, decisions }
}

async fn send(router: &RouterAddress, client: Option<AdminClient>, order: &FleetOrder) -> anyhow::Result<Vec<String>> {
    let mut client = connected(router, client).await?;
    let request = TargetRequest { target: order.target.clone() };
    let done = match order.kind {
        OrderKind::Drain => answer(client.drain(request)).await,
        OrderKind::Restart => answer(client.restart(request)).await,
        OrderKind::Release => answer(client.release(request)).await,
    };
    Ok(done?.replicas)
}

async fn connected(router: &RouterAddress, client: Option<AdminClient>) -> anyhow::Result<AdminClient> {
    match client {
        Some(client) => Ok(client),
        None => router.connect().await,
    }
}

async fn answer<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> anyhow::Result<T> {
    Ok(call.await.map_err(status_error)?.into_inner())
}

async fn within<T>(deadline: Duration, call: impl Future<Output = anyhow::Result<T>>) -> Result<T, String> {
    match timeout(deadline, call).await {
        Ok(answered) => answered.map_err(|error| describe(&error)),
        Err(_) => Err(format!("no answer within {} s", deadline.as_secs())),
    }
}
