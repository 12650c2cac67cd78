//! The gRPC service that operators ask: list, drain, restart, logs. It is served on the admin listener.

use hostler_proto::agent::v1::directive::Order;
use hostler_proto::agent::v1::{LogRequest, Replicas};
use hostler_proto::fleet::v1::fleet_server;
use hostler_proto::fleet::v1::{ListRequest, ListResponse, LogsRequest, LogsResponse, Node, Replica, TargetRequest, TargetResponse};
use tonic::{Request, Response, Status};

use crate::fleet::{Fleet, FleetView};

/// The most log lines that are asked for at once: what an agent keeps.
const LOG_LINES: u32 = 200;

/// See the module.
#[derive(Debug)]
pub(crate) struct Operators {
    /// The fleet that is shown and commanded.
    pub(crate) fleet: Fleet,
}

#[tonic::async_trait]
impl fleet_server::Fleet for Operators {
    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let view = self.fleet.view();
        let nodes = view.nodes.iter().map(|node| Node {
            name: node.name.to_string(),
            agent_version: node.agent_version.clone(),
            attached: node.attached,
            replicas: view.replicas.iter().filter(|replica| replica.node == node.name).map(replica).collect(),
        });
        Ok(Response::new(ListResponse { router_version: env!("CARGO_PKG_VERSION").into(), nodes: nodes.collect() }))
    }

    async fn drain(&self, request: Request<TargetRequest>) -> Result<Response<TargetResponse>, Status> {
        self.order(&request.into_inner().target, Order::Drain).await
    }

    async fn restart(&self, request: Request<TargetRequest>) -> Result<Response<TargetResponse>, Status> {
        self.order(&request.into_inner().target, Order::Restart).await
    }

    async fn logs(&self, request: Request<LogsRequest>) -> Result<Response<LogsResponse>, Status> {
        let LogsRequest { replica, lines } = request.into_inner();
        let view = self.fleet.view().clone();
        let (directives, indices, _) = target(&view, &replica)?;
        let [index] = indices[..] else {
            return Err(Status::invalid_argument(format!("{replica} is a node; name one of its replicas, such as {replica}/0")));
        };
        let logs = LogRequest { index, lines: lines.clamp(1, LOG_LINES) };
        let answer = directives.order(Order::Logs(logs)).await?;
        Ok(Response::new(LogsResponse { lines: answer.log_lines }))
    }
}

impl Operators {
    async fn order(&self, name: &str, order: fn(Replicas) -> Order) -> Result<Response<TargetResponse>, Status> {
        let view = self.fleet.view().clone();
        let (directives, indices, replicas) = target(&view, name)?;
        directives.order(order(Replicas { indices })).await?;
        Ok(Response::new(TargetResponse { replicas }))
    }
}

/// How to reach the node of a target, and which replicas it means.
fn target(view: &FleetView, name: &str) -> Result<(crate::fleet::Directives, Vec<u32>, Vec<String>), Status> {
    let replicas = view.target(name);
    let node = replicas.first().and_then(|replica| view.nodes.iter().find(|node| node.name == replica.node));
    let Some(node) = node else {
        let known: Vec<&str> = view.replicas.iter().map(|replica| &*replica.id).collect();
        let known = if known.is_empty() { "there are none yet".into() } else { known.join(", ") };
        return Err(Status::not_found(format!("no node or replica is called {name:?}; replicas: {known}")));
    };
    let indices = replicas.iter().map(|replica| replica.index).collect();
    Ok((node.directives.clone(), indices, replicas.iter().map(|replica| replica.id.to_string()).collect()))
}

fn replica(replica: &crate::fleet::Replica) -> Replica {
    Replica {
        id: replica.id.to_string(),
        suspect: replica.suspect,
        epoch: replica.epoch,
        own_in_flight: replica.own.in_flight(),
        state: Some(replica.state.wire.clone()),
        load: Some(replica.load.wire),
    }
}
