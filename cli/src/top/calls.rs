//! What the view asks of the router, each within a deadline, and in which words it failed.

use std::future::Future;
use std::time::Duration;

use hostler_proto::fleet::v1::{ExplainRequest, ListRequest, ListResponse, LogsRequest, TargetRequest};
use tokio::time::timeout;
use tonic::{Response, Status};

use super::model::ReplicaDetail;
use super::order::{FleetOrder, OrderKind};
use super::picture::FleetPicture;
use crate::admin::{AdminClient, RouterAddress, status_error};
use crate::output::describe;

/// After this time the router counts as silent.
const LOOK_DEADLINE: Duration = Duration::from_secs(5);

/// An agent that is silent does not hold up the rest.
const DETAIL_DEADLINE: Duration = Duration::from_secs(2);

/// An order goes through the agent.
const ORDER_DEADLINE: Duration = Duration::from_secs(15);

/// More than any screen shows.
const LOG_LINES: u32 = 100;

/// Decisions among which those of one replica are looked for.
const DECISIONS: u32 = 100;

#[derive(Debug)]
pub(super) enum RouterCall {
    Look {
        /// A replica that is looked at closely.
        detail: Option<String>,
    },
    Order(FleetOrder),
}

#[derive(Debug)]
pub(super) enum RouterAnswer {
    Seen(Box<FleetPicture>, Option<ReplicaDetail>),
    /// Why it has not answered.
    Silent(String),
    Ordered(FleetOrder, Result<Vec<String>, String>),
}

/// Carries out one call. The client is that of the call before; one that failed is connected anew, with all checks of whose socket it is.
pub(super) async fn carry_out(
    router: &RouterAddress,
    client: Option<AdminClient>,
    call: RouterCall,
) -> (Option<AdminClient>, RouterAnswer) {
    match call {
        RouterCall::Look { detail } => match within(LOOK_DEADLINE, list(router, client)).await {
            Ok((mut client, listed)) => {
                let detail = match detail {
                    Some(replica) => Some(look_closely(&mut client, replica).await),
                    None => None,
                };
                (Some(client), RouterAnswer::Seen(Box::new(listed.into()), detail))
            }
            Err(cause) => (None, RouterAnswer::Silent(cause)),
        },
        RouterCall::Order(order) => {
            let done = within(ORDER_DEADLINE, send(router, client.clone(), &order)).await;
            (client, RouterAnswer::Ordered(order, done))
        }
    }
}

async fn list(router: &RouterAddress, client: Option<AdminClient>) -> anyhow::Result<(AdminClient, ListResponse)> {
    let mut client = connected(router, client).await?;
    let listed = client.list(ListRequest {}).await.map_err(status_error)?.into_inner();
    Ok((client, listed))
}

async fn look_closely(client: &mut AdminClient, replica: String) -> ReplicaDetail {
    let log = LogsRequest { replica: replica.clone(), lines: LOG_LINES };
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
