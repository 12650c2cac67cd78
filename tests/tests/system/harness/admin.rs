//! An operator's view and actions at one router, over the gRPC of its operators' socket.

use std::path::Path;

use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use hostler_proto::fleet::v1::{
    Cache, Decision, ExpectRequest, ExpectedModel, ExplainRequest, ListRequest, ListResponse, LogsRequest, LoraRequest, ModelDemand, Node,
    OpenPageRequest, OpenPageResponse, Replica, SleepRequest, TargetRequest,
};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::wait::soon;

/// One replica as a router sees it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) id: String,
    pub(crate) phase: Phase,
    pub(crate) suspect: bool,
    pub(crate) reason: String,
    pub(crate) epoch: u64,
    pub(crate) restarts: u32,
    pub(crate) pid: u32,
    pub(crate) socket: String,
    /// Requests of the router that answers.
    pub(crate) local_in_flight: u32,
    /// Requests of all routers.
    pub(crate) in_flight: u32,
    pub(crate) served: u64,
    pub(crate) models: Vec<String>,
    /// Knowledge of the router about the replica's cached blocks.
    pub(crate) cache: Cache,
}

impl Seen {
    pub(crate) fn is_ready(&self) -> bool {
        self.phase == Phase::Ready && !self.suspect
    }
}

impl From<Replica> for Seen {
    fn from(replica: Replica) -> Self {
        let (state, load) = (replica.state.unwrap_or_default(), replica.load.unwrap_or_default());
        Self {
            id: replica.id,
            phase: state.phase(),
            suspect: replica.suspect,
            reason: state.reason,
            epoch: replica.epoch,
            restarts: state.restarts,
            pid: state.engine_pid,
            socket: state.engine_socket,
            local_in_flight: replica.local_in_flight,
            in_flight: load.in_flight,
            served: load.served,
            models: state.models.iter().map(|model| model.id.clone()).collect(),
            cache: replica.cache.unwrap_or_default(),
        }
    }
}

/// A client of a router's operators' socket.
///
/// It connects anew for each call, so it also works with a router that was restarted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Admin(&'static str);

impl Admin {
    pub(crate) fn at(socket: &Path) -> Self {
        // Leak a few bytes until the test ends, so that the client can be copied into every task.
        Self(socket.to_str().unwrap().to_owned().leak())
    }

    /// Path of the socket, for `--admin`.
    pub(crate) fn socket(self) -> &'static str {
        self.0
    }

    async fn client(self) -> Result<FleetClient<Channel>, Status> {
        let endpoint = Endpoint::from_shared(format!("unix:{}", self.0)).unwrap();
        let channel = endpoint.connect().await.map_err(|error| Status::unavailable(error.to_string()))?;
        Ok(FleetClient::new(channel))
    }

    pub(crate) async fn list(self) -> Result<ListResponse, Status> {
        soon("the fleet's list", async { Ok(self.client().await?.list(ListRequest {}).await?.into_inner()) }).await
    }

    pub(crate) async fn nodes(self) -> Result<Vec<Node>, Status> {
        Ok(self.list().await?.nodes)
    }

    pub(crate) async fn replicas(self) -> Result<Vec<Seen>, Status> {
        Ok(self.nodes().await?.into_iter().flat_map(|node| node.replicas).map(Seen::from).collect())
    }

    pub(crate) async fn replica(self, id: &str) -> Seen {
        let replicas = self.replicas().await.unwrap();
        let found = replicas.iter().find(|replica| replica.id == id).cloned();
        found.unwrap_or_else(|| panic!("no replica {id} in {replicas:?}"))
    }

    /// Announces a model as a controller does.
    pub(crate) async fn expect(self, name: &str, expected_in_ms: Option<u64>, reason: &str) -> Result<(), Status> {
        let model = ExpectedModel { names: vec![name.to_owned()], expected_in_ms, reason: reason.to_owned(), ..ExpectedModel::default() };
        let request = ExpectRequest { models: vec![model], ..ExpectRequest::default() };
        soon("an announcement's answer", async { self.client().await?.expect(request).await.map(|_| ()) }).await
    }

    /// Announces a model that will not come, as a controller whose budget has ended.
    pub(crate) async fn expect_no_more(self, name: &str, reason: &str) {
        let model = ExpectedModel { names: vec![name.to_owned()], reason: reason.to_owned(), is_over: true, ..ExpectedModel::default() };
        let request = ExpectRequest { models: vec![model], ..ExpectRequest::default() };
        soon("an announcement's answer", async { self.client().await.unwrap().expect(request).await.unwrap() }).await;
    }

    /// Clients' demand for a model, if it is attached or expected.
    pub(crate) async fn demand(self, model: &str) -> Option<ModelDemand> {
        self.list().await.unwrap().demand.into_iter().find(|demand| demand.model == model)
    }

    pub(crate) async fn open_page(self, request: OpenPageRequest) -> Result<OpenPageResponse, Status> {
        soon("a token for the page", async { Ok(self.client().await?.open_page(request).await?.into_inner()) }).await
    }

    pub(crate) async fn drain(self, target: &str) -> Result<Vec<String>, Status> {
        let request = TargetRequest { target: target.to_owned() };
        soon("a drain's answer", async { Ok(self.client().await?.drain(request).await?.into_inner().replicas) }).await
    }

    pub(crate) async fn restart(self, target: &str) -> Result<Vec<String>, Status> {
        let request = TargetRequest { target: target.to_owned() };
        soon("a restart's answer", async { Ok(self.client().await?.restart(request).await?.into_inner().replicas) }).await
    }

    pub(crate) async fn release(self, target: &str) -> Result<Vec<String>, Status> {
        let request = TargetRequest { target: target.to_owned() };
        soon("a release's answer", async { Ok(self.client().await?.release(request).await?.into_inner().replicas) }).await
    }

    pub(crate) async fn sleep(self, target: &str, level: u32) -> Result<Vec<String>, Status> {
        let request = SleepRequest { target: target.to_owned(), level };
        soon("the end of falling asleep", async { Ok(self.client().await?.sleep(request).await?.into_inner().replicas) }).await
    }

    pub(crate) async fn wake(self, target: &str) -> Result<Vec<String>, Status> {
        let request = TargetRequest { target: target.to_owned() };
        soon("the end of waking", async { Ok(self.client().await?.wake(request).await?.into_inner().replicas) }).await
    }

    /// Loads an adapter, or without a path unloads it.
    pub(crate) async fn lora(self, target: &str, name: &str, path: &str) -> Result<Vec<String>, Status> {
        let request = LoraRequest { target: target.to_owned(), name: name.to_owned(), path: path.to_owned() };
        soon("an adapter's coming or going", async { Ok(self.client().await?.lora(request).await?.into_inner().replicas) }).await
    }

    pub(crate) async fn logs(self, replica: &str, lines: u32) -> Result<Vec<String>, Status> {
        let request = LogsRequest { replica: replica.to_owned(), lines, member: None };
        soon("an engine's log", async { Ok(self.client().await?.logs(request).await?.into_inner().lines) }).await
    }

    /// Decisions about a request, or without an id the latest ones, the newest first.
    pub(crate) async fn explain(self, id: &str, most: u32) -> Result<Vec<Decision>, Status> {
        let request = ExplainRequest { id: id.to_owned(), most };
        soon("an explanation", async { Ok(self.client().await?.explain(request).await?.into_inner().decisions) }).await
    }
}
