//! Which lost answers the end of a batch job explains, in words for the client.

use std::sync::Arc;

use tokio::time::Instant;

use crate::fleet::{FleetView, Job, Replica};

/// Why an answer of `replica` was lost, which `message` says as far as the lane knows it. Where the job of its node is at its end, that is
/// the reason, whatever was seen of it; before its end the job is named. `view` may know the job's end better than the request's placement did.
#[must_use]
pub(super) fn explain_loss(view: &FleetView, replica: &Replica, now: Instant, message: String) -> String {
    let known = view.present(replica).and_then(|present| present.job.as_ref());
    let is_same = |job: &&Arc<Job>| replica.job.as_ref().is_none_or(|placed| placed.id == job.id && placed.run == job.run);
    let Some(job) = known.filter(is_same).or(replica.job.as_ref()) else { return message };
    let node = &replica.node;
    if job.leaves_at.is_none_or(|leaves_at| leaves_at > now) {
        return if message.contains(&job.id) { message } else { format!("{message} ({job} on node {node})") };
    }
    match job.ends_at.map(|ends_at| ends_at.saturating_duration_since(now).as_secs()) {
        Some(0) => format!("the {job} on node {node} reached its deadline: {message}"),
        Some(left) => format!("the {job} on node {node} has its deadline in {left} s: {message}"),
        None => format!("the {job} on node {node} is leaving: {message}"),
    }
}

#[cfg(test)]
mod tests;
