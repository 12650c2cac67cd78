//! Carries a scenario out: starts the nodes, causes its faults and undoes them.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, advance, sleep, timeout};

use super::engine::{Death, SimulatedEngine};
use super::node::Incarnation;
use super::router::RunningRouter;
use super::scenario::{FleetFault, NodePlan, Scenario};
use super::world::World;
use crate::fleet::ReplicaOrder;
use crate::outcome::LossCause;

/// How long a fleet may take to be whole again once no fault is left.
const HEAL_TIME: Duration = Duration::from_secs(60);

/// Longest time that somebody can be out of reach without being lost.
const NEWS_TIME: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct SimulatedFleet {
    world: Arc<World>,
    plans: Vec<NodePlan>,
    /// The present agent of each node.
    nodes: Mutex<Vec<Arc<Incarnation>>>,
    /// All agents, including replaced ones.
    incarnations: Mutex<Vec<Arc<Incarnation>>>,
    /// The routers. Clients reach the last one.
    routers: Mutex<Vec<Arc<RunningRouter>>>,
    /// Held during a change of routers, so that only one happens at a time.
    succession: tokio::sync::Mutex<()>,
}

impl SimulatedFleet {
    /// Starts a fleet and waits until all replicas are ready.
    pub(super) async fn start(world: &Arc<World>, scenario: &Scenario) -> Arc<Self> {
        let fleet = Arc::new(Self {
            world: world.clone(),
            plans: scenario.nodes.clone(),
            nodes: Mutex::default(),
            incarnations: Mutex::default(),
            routers: Mutex::default(),
            succession: tokio::sync::Mutex::default(),
        });
        fleet.start_router();
        for node in 0..fleet.plans.len() {
            let first = fleet.start_agent(node, 1);
            fleet.nodes.lock().push(first);
        }
        fleet.await_whole().await;
        fleet
    }

    fn start_router(&self) -> Arc<RunningRouter> {
        let router = self.world.start_router();
        self.world.lead_agents_to(Some(&router));
        self.world.lead_clients_to(Some(&router));
        self.routers.lock().push(router.clone());
        router
    }

    fn start_agent(&self, node: usize, life: u64) -> Arc<Incarnation> {
        let plan = &self.plans[node];
        let engine = |(index, step): (usize, &Duration)| {
            SimulatedEngine::start(format!("{}.{life}/{index}", plan.name), *step, self.world.trace.clone())
        };
        let started = Incarnation::start(&self.world, &plan.name, life, plan.steps.iter().enumerate().map(engine).collect());
        self.incarnations.lock().push(started.clone());
        started
    }

    fn node(&self, node: usize) -> Arc<Incarnation> {
        self.nodes.lock()[node].clone()
    }

    /// The node and the engine of a replica.
    fn replica(&self, replica: usize) -> (Arc<Incarnation>, usize) {
        let nodes = self.nodes.lock();
        let mut all = nodes.iter().flat_map(|node| (0..node.engines.len()).map(move |index| (node.clone(), index)));
        all.nth(replica).expect("the scenario knows how many there are")
    }

    fn engine(&self, replica: usize) -> Arc<SimulatedEngine> {
        let (node, index) = self.replica(replica);
        node.engines[index].clone()
    }

    /// Causes a fault. Returns when it is over.
    pub(super) async fn inject(&self, fault: FleetFault) {
        self.world.trace.note(format_args!("fault: {fault:?}"));
        match fault {
            FleetFault::EngineDies { replica, death, restart_after } => self.engine(replica).die(death, restart_after),
            FleetFault::EngineHangs { replica, time, is_killed } => {
                let engine = self.engine(replica);
                engine.hang(time);
                sleep(time).await;
                if is_killed {
                    engine.die(Death::Lost, Duration::from_secs(1));
                }
            }
            FleetFault::EngineRefuses { replica, status, time } => {
                let engine = self.engine(replica);
                engine.refuse(Some(status));
                sleep(time).await;
                engine.refuse(None);
            }
            FleetFault::ReplicaRestarts { replica } => self.order(replica, ReplicaOrder::Restart).await,
            FleetFault::ReplicaDrains { replica, time } => {
                self.order(replica, ReplicaOrder::Drain).await;
                sleep(time).await;
                self.order(replica, ReplicaOrder::Release).await;
            }
            FleetFault::ReplicaSleeps { replica, time } => {
                self.order(replica, ReplicaOrder::Sleep { level: 1 }).await;
                sleep(time).await;
                self.order(replica, ReplicaOrder::Wake).await;
            }
            FleetFault::NodeLeaves { node, time } => {
                let old = self.node(node);
                old.leave().await;
                sleep(time).await;
                self.replace_agent(node, &old);
            }
            FleetFault::ConnectionBreaks { node } => self.node(node).cut(),
            FleetFault::Partition { node, time } => {
                let node = self.node(node);
                node.partition(true);
                sleep(time).await;
                node.partition(false);
            }
            FleetFault::SlowNetwork { node, delay, time } => {
                let usual = self.plans[node].delay;
                let node = self.node(node);
                node.set_delay(delay);
                sleep(time).await;
                node.set_delay(usual);
            }
            FleetFault::AgentDies { node, time } => {
                let dead = self.node(node);
                dead.kill();
                sleep(time).await;
                self.replace_agent(node, &dead);
            }
            FleetFault::AgentIsReplaced { node, time } => self.replace_silent_agent(node, time).await,
            FleetFault::RouterIsSuspended { time } => advance(time).await,
            FleetFault::RouterDies { time } => {
                let _alone = self.succession.lock().await;
                self.world.lead_agents_to(None);
                self.world.lead_clients_to(None);
                let dead = self.routers.lock().clone();
                for router in &dead {
                    router.kill().await;
                }
                sleep(time).await;
                self.start_router();
            }
            FleetFault::RouterIsReplaced => self.replace_router().await,
        }
    }

    /// Sends an operator's order.
    async fn order(&self, replica: usize, order: ReplicaOrder) {
        let Some(router) = self.world.router() else { return };
        let (node, index) = self.replica(replica);
        let directives = {
            let view = router.state.fleet.view();
            view.nodes.iter().find(|known| *known.name == *node.node).map(|known| known.directives.clone())
        };
        if let Some(directives) = directives {
            let ordered = directives.order(order, vec![u32::try_from(index).unwrap_or(u32::MAX)]).await;
            self.world.trace.note(format_args!("the order was answered: {:?}", ordered.map_err(|status| status.code())));
        }
    }

    /// Starts another life of a node's agent, unless that has happened already.
    fn replace_agent(&self, node: usize, before: &Arc<Incarnation>) -> Option<Arc<Incarnation>> {
        if self.node(node).life != before.life {
            return None;
        }
        let next = self.start_agent(node, before.life + 1);
        self.nodes.lock()[node] = next.clone();
        Some(next)
    }

    async fn replace_silent_agent(&self, node: usize, time: Duration) {
        let old = self.node(node);
        // An agent that never had the name may still get it.
        let has_the_name = self.is_attached(&old);
        old.partition(true);
        let Some(new) = self.replace_agent(node, &old) else { return };
        let until = Instant::now() + time;
        while Instant::now() < until && !self.is_attached(&new) {
            sleep(Duration::from_millis(2)).await;
        }
        if has_the_name && self.is_attached(&new) {
            self.world.trace.note(format_args!("{} life {} is fenced", old.node, old.life));
            old.fence();
        }
        tokio::time::sleep_until(until).await;
        old.retire();
        old.partition(false);
        sleep(Duration::from_secs(3)).await;
        old.kill();
    }

    /// Whether the routers that run take this incarnation for the node's agent.
    fn is_attached(&self, incarnation: &Incarnation) -> bool {
        let is_its = |router: &Arc<RunningRouter>| {
            let view = router.state.fleet.view();
            view.nodes.iter().any(|node| *node.name == *incarnation.node && node.agent_run == incarnation.life && node.is_attached)
        };
        self.routers.lock().iter().filter(|router| !router.has_ended()).all(is_its)
    }

    /// Replaces the router as `hostler router --takeover` does.
    async fn replace_router(&self) {
        let _alone = self.succession.lock().await;
        let Some(old) = self.world.router() else { return };
        let new = self.world.start_router();
        self.world.lead_agents_to(Some(&new));
        old.begin_succession();
        self.routers.lock().push(new.clone());
        let replicas = self.plans.iter().map(|plan| plan.steps.len()).sum();
        let is_ready = async {
            while new.state.fleet.view().replicas.len() < replicas {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = timeout(Duration::from_secs(10), is_ready).await;
        self.world.lead_clients_to(Some(&new));
        old.give_place();
        self.world.trace.note(format_args!("router {} serves in the place of {}", new.number, old.number));
    }

    /// Undoes the remaining faults, and waits until the fleet is whole.
    pub(super) async fn heal(&self) {
        for node in self.nodes.lock().iter() {
            node.partition(false);
            // Operators' orders may not have reached all engines.
            node.engines.iter().for_each(|engine| engine.bring_back());
        }
        self.await_whole().await;
    }

    async fn await_whole(&self) {
        let replicas: usize = self.plans.iter().map(|plan| plan.steps.len()).sum();
        let is_whole = || {
            let router = self.world.router()?;
            let view = router.state.fleet.view();
            let ready = view.replicas.iter().filter(|replica| replica.is_ready() && !replica.lease_lapsed).count();
            (ready == replicas).then_some(())
        };
        let whole = async {
            while is_whole().is_none() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        if timeout(HEAL_TIME, whole).await.is_err() {
            self.world.trace.violation("the fleet is not whole again");
        }
    }

    /// Checks that nothing is counted any more once all requests have ended.
    pub(super) async fn check_idle(&self) {
        // Reports of ended requests, and cancels, are still on their way.
        sleep(NEWS_TIME).await;
        for router in self.routers.lock().iter() {
            for cause in [LossCause::Draining, LossCause::Silent] {
                let count = router.departed_streams(cause);
                if count > 0 {
                    self.world.trace.note(format_args!("router {}: {count} streams moved, {}", router.number, cause.as_str()));
                }
            }
            for left in router.leftovers() {
                self.world.trace.violation(format_args!("router {} still counts {left}", router.number));
            }
        }
        for incarnation in self.incarnations.lock().iter() {
            if incarnation.in_flight() > 0 {
                let (node, life, count) = (&incarnation.node, incarnation.life, incarnation.in_flight());
                self.world.trace.violation(format_args!("{node} life {life} still serves {count} requests"));
            }
        }
    }
}
