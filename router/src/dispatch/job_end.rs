//! Explains to the client when a lost answer is due to the end of a batch job.

use std::sync::Arc;

use tokio::time::Instant;

use crate::fleet::{FleetView, Job, Replica};

/// Punctuation that job ids may contain.
const ID_PUNCTUATION: [char; 5] = ['.', '-', '_', '[', ']'];

/// Why an answer of `replica` was lost. `message` is the lane's own explanation.
///
/// If the node's job is at its end, that is the reason, whatever the lane saw. Before its end, the
/// job is only named. `view` may know the job's end better than the request's placement did.
#[must_use]
pub(super) fn explain_loss(view: &FleetView, replica: &Replica, now: Instant, message: String) -> String {
    let known = view.present(replica).and_then(|present| present.job.as_ref());
    let is_same = |job: &&Arc<Job>| replica.job.as_ref().is_none_or(|placed| placed.id == job.id && placed.run == job.run);
    let Some(job) = known.filter(is_same).or(replica.job.as_ref()) else { return message };
    let node = &replica.node;
    let is_named = names(&message, &job.id);
    if job.leaves_at.is_none_or(|leaves_at| leaves_at > now) {
        return if is_named { message } else { format!("{message} ({job} on node {node})") };
    }
    let left = job.ends_at.map(|ends_at| ends_at.saturating_duration_since(now).as_secs());
    match (left, is_named) {
        (Some(0), true) => format!("{message} (the job reached its deadline)"),
        (Some(left), true) => format!("{message} (the job has its deadline in {left} s)"),
        (None, true) => message,
        (Some(0), false) => format!("the {job} on node {node} reached its deadline: {message}"),
        (Some(left), false) => format!("the {job} on node {node} has its deadline in {left} s: {message}"),
        (None, false) => format!("the {job} on node {node} is leaving: {message}"),
    }
}

/// Whether the message names `job ID`, and not a longer id that begins with it.
fn names(message: &str, id: &str) -> bool {
    let goes_on = |rest: &str| rest.starts_with(|next: char| next.is_ascii_alphanumeric() || ID_PUNCTUATION.contains(&next));
    let words = format!("job {id}");
    message.match_indices(&words).any(|(at, words)| !goes_on(&message[at + words.len()..]))
}

#[cfg(test)]
mod tests;
