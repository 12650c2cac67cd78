//! Launch of an agent in a replica over several nodes: as the head, which has its members beside
//! its own part, or as a member, which serves the head and nobody else.

use std::path::Path;
use std::sync::Arc;

use hostler_boot::Shutdown;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::gang::address::address_of;
use crate::gang::setup::{PartSetup, compared_environment, digest_model};
use crate::gang::{Gang, GangPlace, GangSettings};
use crate::host::{EngineProgram, ReplicaPlan};
use crate::join::PeerAccess;
use crate::leave::LeaveTerms;
use crate::member::{Member, MemberEnd, MemberParts};
use crate::replica_launch::ReplicaLaunch;
use crate::router_target::RouterTarget;
use crate::uplink::AttachLimits;
use crate::vllm::arguments::without_server_flags;
use crate::{Agent, AgentError, job, keeper};

/// The head's place among its members.
pub(crate) struct HeadSeat {
    place: GangPlace,
    /// Address in the head's file.
    published: String,
    gang: Arc<Gang>,
    listener: TcpListener,
}

impl Agent {
    /// Opens the place where members join this agent, if it is a head.
    pub(crate) async fn open_gang(&self) -> Result<Option<HeadSeat>, AgentError> {
        let Some(place) = GangPlace::of(&self.config)? else { return Ok(None) };
        let access = self.peer_access();
        let (listener, bound) = place.head.bind(access.is_beyond_host()).await?;
        let interface = self.config.replica_interface.clone();
        let own = address_of(&interface).ok().filter(|_| !interface.is_empty());
        let published = place.head.publish(bound, &self.host, own);
        let published = published.map_err(|error| AgentError::HeadFile { file: place.head.to_string(), reason: error.to_string() })?;
        tracing::info!(event = "head_listens", address = %bound, nodes = place.nodes, "the other nodes of the replica join here");
        let setup = self.part_setup(self.plan.replicas.first());
        let gang = Gang::new(GangSettings { nodes: place.nodes, lease: place.lease, setup, interface, access });
        Ok(Some(HeadSeat { place, published, gang, listener }))
    }

    /// Serves the head of this replica until it lets this node go.
    ///
    /// # Errors
    /// When the engine cannot be described, or no head takes this node in.
    pub(crate) async fn run_member(mut self, place: GangPlace, shutdown: Shutdown) -> Result<(), AgentError> {
        let survivors = self.run_dir.take_survivors();
        keeper::end_survivors(survivors).await;
        let (specs, _, _) = self.engine_specs(Vec::new())?;
        let Some((plan, spec, _)) = specs.into_iter().next() else { return Ok(()) };
        let terms = LeaveTerms::in_job(&self.config, self.job.as_deref());
        let parts = MemberParts {
            place,
            setup: self.part_setup(Some(plan)),
            host: self.host.clone(),
            gpus: plan.gpus.iter().map(|gpu| gpu.name.clone()).collect(),
            interface: self.config.replica_interface.clone(),
            access: self.peer_access(),
            limits: AttachLimits::new(&self.config, self.job.is_some()),
            leave_within: [terms.longest(true), terms.longest(false)],
            spec,
        };
        let clock = AbortOnDropHandle::new(tokio::spawn(job::drain_in_time(self.job.clone(), self.config.job_interval, shutdown.clone())));
        let end = Member::new(parts).run(&shutdown).await;
        drop(clock);
        match end {
            MemberEnd::Left => {
                self.run_dir.remove();
                Ok(())
            }
            MemberEnd::Unattached(reason) => {
                self.run_dir.remove();
                Err(AgentError::Unattached(reason))
            }
            MemberEnd::ProcessesLeft => {
                self.run_dir.leave_to_successor();
                Err(AgentError::EnginesLeft)
            }
        }
    }

    fn peer_access(&self) -> PeerAccess {
        PeerAccess::new(self.access.clone(), RouterTarget::of(&self.config))
    }

    /// What this node's part must have in common with the others.
    fn part_setup(&self, replica: Option<&ReplicaPlan>) -> PartSetup {
        let choices = replica.map(|replica| self.plan.choices(replica, self.plan.front_end.in_use)).unwrap_or_default();
        let mut arguments: Vec<String> = choices.iter().flat_map(|choice| choice.to_arguments().map(str::to_owned)).collect();
        arguments.extend(without_server_flags(&self.config.engine_args));
        let folder = Path::new(&self.config.model);
        if !folder.is_dir() {
            arguments.insert(0, self.config.model.clone());
        }
        let engine = match (&self.engine, self.plan.setup.version) {
            (EngineProgram::Vllm { .. }, Some(version)) => format!("vLLM {version}"),
            (EngineProgram::Vllm { .. }, None) => "vLLM of an unknown version".to_owned(),
            (EngineProgram::Simulated { .. } | EngineProgram::Attached { .. }, _) => "the simulated engine".to_owned(),
        };
        let gpus = replica.map_or(0, |replica| replica.gpus.len());
        PartSetup {
            engine,
            model: digest_model(folder),
            arguments,
            environment: compared_environment(),
            gpus,
            nodes: self.config.nodes_per_replica,
        }
    }
}

/// Resolves when a member has to leave, and the replica with it.
pub(crate) async fn wait_member_leaves(gang: Option<&Gang>) {
    let Some(gang) = gang else { return std::future::pending().await };
    let reason = gang.wait_leaving().await;
    tracing::info!(event = "member_leaves", reason, "a node of the replica has to leave, and the replica with it");
}

impl HeadSeat {
    /// Gives the head's part its members, and serves them until `end`.
    pub(crate) fn begin(self, launches: &mut [ReplicaLaunch<'_>], end: CancellationToken) -> (Arc<Gang>, JoinHandle<()>) {
        let gang = self.gang.clone();
        launches.iter_mut().for_each(|(_, spec, _)| spec.gang = Some(gang.clone()));
        let served = tokio::spawn(async move {
            self.gang.serve(self.listener, end).await;
            self.place.head.withdraw(&self.published);
        });
        (gang, served)
    }
}
