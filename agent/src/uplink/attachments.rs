//! Attachment of this agent to routers, and the reasons if there is none.
//!
//! In a batch job, an agent that no router accepts gives its node back instead of holding it until
//! the job ends. Sessions record the state, and `Agent::run` waits for it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::config::AgentConfig;
use crate::router_target::RouterTarget;

/// Default time that an agent in a job waits for its first router.
const JOB_ATTACH_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// Default time that an agent in a job whose routers have all gone waits for another one.
const JOB_ROUTER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// How long a refusal may last.
///
/// A node that died counts as attached until its connection is found dead and its lease has lapsed,
/// which takes half a minute.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(60);

/// When an agent that is attached to no router gives up; `None` if it tries for as long as it
/// lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttachLimits {
    /// Limit since the agent's start, if it has never attached.
    attach: Option<Duration>,
    /// Limit since the last router was lost.
    lost: Option<Duration>,
}

impl AttachLimits {
    pub(crate) fn new(config: &AgentConfig, is_in_job: bool) -> Self {
        let limit = |set: Option<Duration>, in_job| set.or(is_in_job.then_some(in_job)).filter(|limit| !limit.is_zero());
        Self { attach: limit(config.attach_timeout, JOB_ATTACH_TIMEOUT), lost: limit(config.router_timeout, JOB_ROUTER_TIMEOUT) }
    }
}

/// Results of the attempts to attach so far.
#[derive(Debug)]
pub struct Attachments {
    record: watch::Sender<AttachRecord>,
}

#[derive(Debug)]
struct AttachRecord {
    /// `router`, or `head` for a member of a replica over several nodes.
    whom: &'static str,
    /// The agent's start, or when the last router was lost.
    since: Instant,
    has_attached: bool,
    /// Number of routers that have this agent now.
    routers: usize,
    /// Routers that refuse this agent, since when, and their message.
    refusals: FxHashMap<SocketAddr, (Instant, String)>,
    /// Reason of the last failed attempt.
    last_failure: String,
}

/// Decision about an agent that may not be attached.
#[derive(Debug, PartialEq, Eq)]
enum AttachVerdict {
    /// A router has the agent, or the agent may try forever.
    TryOn,
    WaitUntil(Instant),
    GiveUp(String),
}

impl Default for Attachments {
    fn default() -> Self {
        Self::to("router")
    }
}

impl Attachments {
    /// Attachments to a member's head.
    pub(crate) fn to_head() -> Self {
        Self::to("head")
    }

    fn to(whom: &'static str) -> Self {
        let record = AttachRecord {
            whom,
            since: Instant::now(),
            has_attached: false,
            routers: 0,
            refusals: FxHashMap::default(),
            last_failure: format!("no {whom} was found"),
        };
        Self { record: watch::Sender::new(record) }
    }

    /// Records that a router has this agent, until the guard is dropped.
    pub(crate) fn record_attached(self: &Arc<Self>) -> AttachedGuard {
        self.record.send_modify(|record| {
            record.has_attached = true;
            record.routers += 1;
        });
        AttachedGuard(self.clone())
    }

    pub(crate) fn record_refusal(&self, router: SocketAddr, reason: &str) {
        self.record.send_modify(|record| {
            let since = record.refusals.get(&router).map_or_else(Instant::now, |(since, _)| *since);
            record.refusals.insert(router, (since, reason.to_owned()));
            record.last_failure = format!("{router}: {reason}");
        });
    }

    /// Records a failed attempt whose reason may pass.
    pub(crate) fn record_failure(&self, router: SocketAddr, reason: &str) {
        self.record.send_modify(|record| {
            record.refusals.remove(&router);
            record.last_failure = format!("{router}: {reason}");
        });
    }

    /// Records that a router's address is unknown.
    pub(super) fn record_unresolved(&self, target: &RouterTarget, reason: &str) {
        self.record.send_modify(|record| record.last_failure = format!("{target}: {reason}"));
    }

    /// Forgets a router that no target has any longer, so that its refusal does not count.
    pub(super) fn forget(&self, router: SocketAddr) {
        self.record.send_if_modified(|record| record.refusals.remove(&router).is_some());
    }

    /// Resolves with the reason when an agent that no router accepts should give up.
    pub(crate) async fn wait_given_up(&self, limits: AttachLimits) -> String {
        let mut changes = self.record.subscribe();
        loop {
            let verdict = changes.borrow_and_update().judge(limits, Instant::now());
            match verdict {
                AttachVerdict::GiveUp(reason) => return reason,
                // The channel cannot close, because this object owns the sender.
                AttachVerdict::TryOn => drop(changes.changed().await),
                AttachVerdict::WaitUntil(deadline) => tokio::select! {
                    () = sleep_until(deadline) => {}
                    _ = changes.changed() => {}
                },
            }
        }
    }
}

/// A router that has this agent.
#[derive(Debug)]
pub(crate) struct AttachedGuard(Arc<Attachments>);

impl Drop for AttachedGuard {
    fn drop(&mut self) {
        self.0.record.send_modify(|record| {
            record.routers -= 1;
            record.since = Instant::now();
        });
    }
}

impl AttachRecord {
    fn judge(&self, limits: AttachLimits, now: Instant) -> AttachVerdict {
        if self.routers > 0 {
            return AttachVerdict::TryOn;
        }
        if self.has_attached {
            return self.judge_lost(limits.lost, now);
        }
        let Some(attach) = limits.attach else { return AttachVerdict::TryOn };
        let refusal = attach.min(REFUSAL_TIMEOUT);
        if let Some((router, (_, reason))) = self.refusals.iter().find(|(_, (since, _))| now >= *since + refusal) {
            return AttachVerdict::GiveUp(format!(
                "the {} at {router} has refused this agent for {} s: {reason}",
                self.whom,
                refusal.as_secs_f32()
            ));
        }
        let ends_at = self.since + attach;
        if now >= ends_at {
            let limit = attach.as_secs_f32();
            return AttachVerdict::GiveUp(format!(
                "this agent has attached to no {} within {limit} s (agent.attach_timeout): {}",
                self.whom, self.last_failure
            ));
        }
        let refused_until = self.refusals.values().map(|(since, _)| *since + refusal).min();
        AttachVerdict::WaitUntil(refused_until.map_or(ends_at, |until| until.min(ends_at)))
    }

    /// Decides about an agent that has lost its routers.
    ///
    /// Refusals do not count here: the routers that accepted it once may be back.
    fn judge_lost(&self, limit: Option<Duration>, now: Instant) -> AttachVerdict {
        // A clock cannot represent every duration that can be set.
        let Some((limit, ends_at)) = limit.and_then(|limit| Some((limit, self.since.checked_add(limit)?))) else {
            return AttachVerdict::TryOn;
        };
        if now < ends_at {
            return AttachVerdict::WaitUntil(ends_at);
        }
        let limit = limit.as_secs_f32();
        AttachVerdict::GiveUp(format!("no {} has had this agent for {limit} s (agent.router_timeout): {}", self.whom, self.last_failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: AttachLimits = AttachLimits { attach: Some(Duration::from_secs(300)), lost: Some(Duration::from_secs(1800)) };
    const NEVER: AttachLimits = AttachLimits { attach: None, lost: None };

    fn router(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    async fn given_up_after(attachments: &Attachments, limits: AttachLimits) -> Option<(u64, String)> {
        let begun = Instant::now();
        let given_up = tokio::time::timeout(Duration::from_secs(86_400), attachments.wait_given_up(limits)).await;
        given_up.ok().map(|reason| (begun.elapsed().as_secs(), reason))
    }

    #[test]
    fn attach_limits_apply_only_in_jobs_or_by_setting() {
        let limits = |configured: Option<u64>, is_in_job| {
            let set = configured.map(Duration::from_secs);
            AttachLimits::new(&AgentConfig { attach_timeout: set, router_timeout: set, ..AgentConfig::default() }, is_in_job)
        };
        assert_eq!([limits(None, false), limits(Some(0), true)], [NEVER; 2]);
        assert_eq!(limits(None, true), LIMITS);
        for is_in_job in [false, true] {
            let second = Some(Duration::from_secs(1));
            assert_eq!(limits(Some(1), is_in_job), AttachLimits { attach: second, lost: second });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_reaching_no_router_gives_up_with_a_reason() {
        let attachments = Attachments::default();
        attachments.record_failure(router(1), "cannot connect: Connection refused");
        let (after, reason) = given_up_after(&attachments, LIMITS).await.unwrap();
        assert_eq!(after, 300);
        assert!(reason.contains("within 300 s") && reason.ends_with("127.0.0.1:1: cannot connect: Connection refused"), "{reason}");
        assert_eq!(given_up_after(&attachments, NEVER).await, None, "without limits it tries on");
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_refused_for_a_whole_minute_gives_up() {
        let attachments = Attachments::default();
        let second = Duration::from_secs(1);
        attachments.record_refusal(router(1), "refused: another agent is attached as node `n0`");
        tokio::time::advance(50 * second).await;
        attachments.record_failure(router(1), "connection lost");
        attachments.record_refusal(router(1), "refused: another agent is attached as node `n0`");
        tokio::time::advance(10 * second).await;
        attachments.record_refusal(router(1), "refused: another agent is attached as node `n0` still");
        let (after, reason) = given_up_after(&attachments, LIMITS).await.unwrap();
        assert_eq!(after, 50, "it counts from the first refusal in a row");
        assert!(reason.contains("for 60 s") && reason.ends_with("`n0` still"), "{reason}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_refusal_of_a_forgotten_router_does_not_count() {
        let attachments = Attachments::default();
        attachments.record_refusal(router(1), "refused: of another fleet");
        attachments.forget(router(1));
        attachments.record_unresolved(&RouterTarget::File("/fleet/endpoint.json".into()), "there is none");
        let (after, reason) = given_up_after(&attachments, LIMITS).await.unwrap();
        assert_eq!(after, 300);
        assert!(reason.ends_with("/fleet/endpoint.json: there is none"), "{reason}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_gives_up_half_an_hour_after_its_last_router() {
        let attachments = Arc::<Attachments>::default();
        attachments.record_refusal(router(1), "refused");
        let (one, other) = (attachments.record_attached(), attachments.record_attached());
        attachments.record_refusal(router(2), "refused");
        assert_eq!(given_up_after(&attachments, LIMITS).await, None, "two have it");
        drop(one);
        assert_eq!(given_up_after(&attachments, LIMITS).await, None, "one has it");
        drop(other);
        let half = Duration::from_secs(900);
        assert!(tokio::time::timeout(half, attachments.wait_given_up(LIMITS)).await.is_err());
        drop(attachments.record_attached());
        attachments.record_failure(router(1), "cannot connect: Connection refused");
        let (after, reason) = given_up_after(&attachments, LIMITS).await.unwrap();
        assert_eq!(after, 1800, "it counts from the last router");
        assert!(reason.contains("for 1800 s (agent.router_timeout)") && reason.ends_with("Connection refused"), "{reason}");
        assert_eq!(given_up_after(&attachments, NEVER).await, None);
    }
}
