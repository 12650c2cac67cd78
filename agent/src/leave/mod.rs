//! How an agent leaves.
//!
//! Answers may finish, unfinished ones are cut off with a reason, and the engines stop, all before
//! the party that ends the agent loses patience. `Agent::run` calls this once; `plan` divides the
//! time.

mod plan;

use std::time::Duration;

use hostler_boot::Shutdown;
use tokio::time::{Instant, sleep, sleep_until};

pub(crate) use self::plan::{LeaveMoments, LeavePlan};
use crate::config::AgentConfig;
use crate::engine::{Engine, LeaveDeadlines, Phase};
use crate::job::{Job, JobClock, default_grace};
use crate::node::NodeState;

/// Time to flush pieces.
///
/// They are sent as soon as they come; a busy machine takes milliseconds for it.
const FLUSH_TIME: Duration = Duration::from_millis(30);

/// How long an agent has for leaving, and in whose name it leaves.
#[derive(Debug, Clone)]
pub(crate) struct LeaveTerms {
    /// Plan if nobody kills the agent, or not soon.
    at_leisure: LeavePlan,
    /// Plan after SIGTERM from a sender that will kill; `None` if nobody does.
    hurried: Option<(Duration, LeavePlan)>,
    job: Option<String>,
}

impl LeaveTerms {
    /// Terms of a running agent, whose scheduler has announced how long it waits.
    pub(crate) fn in_job(config: &AgentConfig, clock: Option<&JobClock>) -> Self {
        Self::within(config, clock.map(JobClock::job), config.leave_grace.or_else(|| Some(clock?.grace)))
    }

    /// Terms as far as they are known without the scheduler.
    pub(crate) fn new(config: &AgentConfig, job: Option<&Job>) -> Self {
        Self::within(config, job, grace(config, job))
    }

    fn within(config: &AgentConfig, job: Option<&Job>, grace: Option<Duration>) -> Self {
        let (drain, stop) = (config.drain_timeout, config.stop_grace);
        Self {
            at_leisure: LeavePlan::at_leisure(drain, stop),
            hurried: grace.map(|grace| (grace, LeavePlan::within(grace, drain, stop))),
            job: job.map(|job| format!("{} job {}", job.scheduler.as_str(), job.id)),
        }
    }

    /// Longest time until everything has ended.
    pub(crate) fn longest(&self, is_hurried: bool) -> Duration {
        let plan = self.plan(is_hurried);
        plan.drain.saturating_add(plan.stop).saturating_add(plan.kill)
    }

    fn plan(&self, is_hurried: bool) -> LeavePlan {
        self.hurried.filter(|_| is_hurried).map_or(self.at_leisure, |(_, plan)| plan)
    }

    /// Message to clients whose answers are cut off.
    fn describe(&self, node: &str, is_hurried: bool) -> String {
        match &self.job {
            Some(job) if is_hurried => format!("the {job} is being ended by its scheduler: the answer was not complete in time"),
            Some(job) => format!("node {node} leaves the {job}: the answer was not complete in time"),
            None => format!("node {node} is leaving: the answer was not complete in time"),
        }
    }

    /// Terms in words, a sentence each; none if nobody kills the agent.
    pub(crate) fn sentences(&self) -> Vec<String> {
        let Some((grace, plan)) = self.hurried else { return Vec::new() };
        let place = self.job.as_ref().map(|job| format!("{job}: ")).unwrap_or_default();
        let seconds = |duration: Duration| format!("{:.1} s", duration.as_secs_f32());
        vec![
            format!(
                "{place}{} from SIGTERM to the end (agent.leave_grace): answers may finish for {}, engines stop within {}",
                seconds(grace),
                seconds(plan.drain),
                seconds(plan.stop)
            ),
            format!("after SIGUSR1 answers may finish for {} (agent.drain_timeout)", seconds(self.at_leisure.drain)),
        ]
    }
}

/// Time from SIGTERM until the agent is killed; `None` if nobody kills it.
pub(crate) fn grace(config: &AgentConfig, job: Option<&Job>) -> Option<Duration> {
    config.leave_grace.or_else(|| job.map(|job| default_grace(job.scheduler)))
}

/// An agent that is leaving.
pub(crate) struct Leaving<'a> {
    pub(crate) terms: &'a LeaveTerms,
    pub(crate) node: &'a str,
    pub(crate) engines: &'a [Engine],
    pub(crate) state: &'a NodeState,
    pub(crate) shutdown: &'a Shutdown,
    /// Engines are left to the next agent.
    pub(crate) hands_over: bool,
}

/// Outcome of leaving.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left {
    /// Requests that were cut off.
    pub(crate) cut_off: u32,
    /// When killed processes should be gone.
    pub(crate) deadline: Instant,
    /// Time limit for the last reports after that.
    pub(crate) farewell: Duration,
}

impl Leaving<'_> {
    /// Tells the routers, lets the engines finish, and waits until all have stopped or no time is
    /// left.
    ///
    /// If the shutdown stops meanwhile, the engines are killed.
    pub(crate) async fn run(&self) -> Left {
        let mut is_hurried = self.shutdown.is_hurried();
        let mut plan = self.terms.plan(is_hurried);
        let mut moments = LeaveMoments::new(plan, Instant::now());
        self.retire(plan, moments);
        let mut cut_off = None;
        let stopped = self.wait_stopped();
        tokio::pin!(stopped);
        loop {
            tokio::select! {
                biased;
                () = self.shutdown.wait_stop() => {
                    tracing::warn!("killing the engines");
                    cut_off = cut_off.or_else(|| Some(self.in_flight()));
                    self.engines.iter().for_each(Engine::kill_now);
                    break;
                }
                () = &mut stopped => break,
                () = self.shutdown.wait_hurry(), if !is_hurried => {
                    is_hurried = true;
                    plan = self.terms.plan(true);
                    moments = moments.hurry(plan, Instant::now());
                    self.retire(plan, moments);
                }
                () = sleep_until(moments.drained_by), if cut_off.is_none() => cut_off = Some(self.cut_off(is_hurried)),
                // The engines keep the same deadlines; this one is for processes that cannot be
                // killed.
                () = sleep_until(moments.gone_by) => break,
            }
        }
        // Let the last pieces of answers leave before the connections do.
        sleep(FLUSH_TIME).await;
        // An engine that is handed over does not end its answers.
        if self.hands_over && cut_off.is_none() && self.in_flight() > 0 {
            cut_off = Some(self.cut_off(is_hurried));
        }
        let deadline = if is_hurried { moments.gone_by } else { Instant::now() + plan.stop + plan.kill };
        Left { cut_off: cut_off.unwrap_or(0), deadline, farewell: plan.farewell }
    }

    /// Retires the engines.
    ///
    /// They get a moment more than the drain, so that running answers are cut off before the
    /// engines stop.
    fn retire(&self, plan: LeavePlan, moments: LeaveMoments) {
        if self.hands_over {
            self.engines.iter().for_each(Engine::hand_over);
            return;
        }
        let deadlines = LeaveDeadlines { drained_by: moments.drained_by + plan.farewell, stop: plan.stop };
        self.engines.iter().for_each(|engine| engine.retire(deadlines));
    }

    /// Ends the running answers, each with its reason, and returns their number.
    fn cut_off(&self, is_hurried: bool) -> u32 {
        let count = self.in_flight();
        if count > 0 {
            tracing::warn!(event = "answers_cut", requests = count, "the time to finish is over: what still runs is cut off");
        }
        self.state.cut_off(self.terms.describe(self.node, is_hurried));
        count
    }

    fn in_flight(&self) -> u32 {
        self.engines.iter().map(|engine| engine.traffic().in_flight()).sum()
    }

    async fn wait_stopped(&self) {
        for engine in self.engines {
            let mut status = engine.status();
            let _ = status.wait_for(|status| status.phase == Phase::Stopped).await;
        }
    }
}
