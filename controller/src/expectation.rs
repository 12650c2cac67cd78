//! Tells the router when each model that the fleet can start takes requests, and what it waits for.
//! Clients read that. Pure.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use hostler_api::path_alias;
use hostler_cluster::{BudgetLeft, FleetSize, NodeState};
use hostler_proto::fleet::v1::{EntryUse, ExpectRequest, ExpectedModel};
use hostler_scheduler::{JobState, ScheduledJob};

use crate::observation::{EntryView, find_node, node_state, progress};

/// Limits of the router.
const MAX_MODELS: usize = 256;

const MAX_NAMES: usize = 8;

const MAX_NAME_BYTES: usize = 256;

/// Announcement for one entry; `None` if the entry has no nodes whatever clients ask for.
pub(crate) fn expect(view: &EntryView<'_>, now: SystemTime) -> Option<ExpectedModel> {
    if view.entry.size == FleetSize::Fixed(0) {
        return None;
    }
    let spent = view.memory.budget_left(view.entry, now).filter(BudgetLeft::is_over);
    let expected_in = if spent.is_some() {
        None
    } else if view.jobs.is_empty() {
        await_new_job(view, now)
    } else {
        view.jobs.iter().filter_map(|job| await_job(view, job, now)).min()
    };
    let expected_in_ms = expected_in.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
    let has_own_name = *view.names == [view.entry.model.clone()];
    let alias = path_alias(&view.entry.model).filter(|alias| has_own_name && is_usable(alias)).unwrap_or_default().to_owned();
    let reason = match &spent {
        Some(spent) => format!("its budget has ended ({}): whoever keeps the fleet may give it another", spent.describe()),
        None => explain(view, now),
    };
    Some(ExpectedModel { names: view.names.to_vec(), expected_in_ms, reason, alias, is_over: spent.is_some() })
}

/// What the entry's nodes were used for, for the router's metrics and findings.
pub(crate) fn use_of_nodes(view: &EntryView<'_>, now: SystemTime) -> EntryUse {
    let budget = view.memory.budget_left(view.entry, now);
    let ends_in = budget.as_ref().and_then(|left| left.ends_in);
    EntryUse {
        name: view.entry.name.clone(),
        node_seconds: view.memory.node_time().by_use().map(|(used, seconds)| (used.to_owned(), seconds)).into(),
        budget: budget.map(|left| left.describe()).unwrap_or_default(),
        budget_ends_in_ms: ends_in.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
    }
}

/// Announcement for all entries. The entry that is expected first announces a name that several
/// entries have.
pub(crate) fn announce(mut models: Vec<ExpectedModel>, mut entries: Vec<EntryUse>) -> ExpectRequest {
    models.sort_by_key(|model| (model.expected_in_ms.is_none(), model.expected_in_ms));
    let mut taken = BTreeSet::new();
    for model in &mut models {
        model.names.retain(|name| is_usable(name) && taken.insert(name.clone()));
        model.names.truncate(MAX_NAMES);
    }
    models.retain(|model| !model.names.is_empty());
    models.truncate(MAX_MODELS);
    entries.truncate(MAX_MODELS);
    ExpectRequest { models, entries }
}

/// Whether the router takes the name.
fn is_usable(name: &str) -> bool {
    !name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control)
}

/// Time until a job takes requests, as far as it is known.
fn await_job(view: &EntryView<'_>, job: &ScheduledJob, now: SystemTime) -> Option<Duration> {
    let cold_start = view.memory.learned_cold_start();
    match job.state {
        JobState::Queued => {
            let estimated = view.estimated_wait(job, now).filter(|left| !left.is_zero());
            let learned = || view.memory.learned_queue_wait()?.checked_sub(view.waited(job, now)?);
            Some(estimated.or_else(learned)? + cold_start.unwrap_or_default())
        }
        JobState::Running => {
            let node = find_node(view.nodes, &job.id);
            match node_state(node) {
                NodeState::Ready => Some(Duration::ZERO),
                NodeState::NotAttached | NodeState::Loading => {
                    let reported = node.and_then(progress).and_then(|(_, left)| left);
                    reported.or_else(|| cold_start?.checked_sub(view.ran(job, now)?))
                }
                NodeState::Draining | NodeState::Failed => None,
            }
        }
        JobState::Held | JobState::Suspended | JobState::Ending => None,
    }
}

/// Time until a job that is not submitted yet takes requests.
fn await_new_job(view: &EntryView<'_>, now: SystemTime) -> Option<Duration> {
    let pause = view.memory.pause(now).unwrap_or_default();
    Some(pause + view.memory.learned_queue_wait()? + view.memory.learned_cold_start()?)
}

/// Describes what an entry waits for, nearest stage first, in the scheduler's own words where it
/// has any.
fn explain(view: &EntryView<'_>, now: SystemTime) -> String {
    let in_state = |state: JobState| view.jobs.iter().filter(move |job| job.state == state);
    let state_of = |job: &&ScheduledJob| node_state(find_node(view.nodes, &job.id));
    let starting: Vec<&ScheduledJob> =
        in_state(JobState::Running).filter(|job| matches!(state_of(job), NodeState::NotAttached | NodeState::Loading)).collect();
    let stage = starting.iter().find_map(|job| Some(progress(find_node(view.nodes, &job.id)?)?.0)).unwrap_or_default();
    let comment = |state| in_state(state).map(|job| job.comment.as_str()).find(|comment| !comment.is_empty()).unwrap_or_default();
    let parts = [
        describe(starting.len(), ["starts", "start"], &stage),
        describe(in_state(JobState::Queued).count(), ["waits", "wait"], comment(JobState::Queued)),
        describe(in_state(JobState::Held).count(), ["is held", "are held"], comment(JobState::Held)),
        describe(in_state(JobState::Suspended).count(), ["is suspended", "are suspended"], comment(JobState::Suspended)),
    ];
    let sentences: Vec<String> = parts.into_iter().flatten().collect();
    if !sentences.is_empty() {
        sentences.join("; ")
    } else if !view.refusal.is_empty() {
        format!("the scheduler refused a job: {}", view.refusal)
    } else if let Some(pause) = view.memory.pause(now) {
        format!("its last job failed; the next one is submitted in {} s", pause.as_secs() + 1)
    } else if view.memory.desired_jobs() == 0 {
        "it has no job; one is submitted for this request".to_owned()
    } else {
        "a job is being submitted for it".to_owned()
    }
}

/// Text such as `2 jobs wait: the comment`; `None` for no jobs.
fn describe(count: usize, verbs: [&str; 2], comment: &str) -> Option<String> {
    let colon = if comment.is_empty() { "" } else { ": " };
    match count {
        0 => None,
        1 => Some(format!("1 job {}{colon}{comment}", verbs[0])),
        _ => Some(format!("{count} jobs {}{colon}{comment}", verbs[1])),
    }
}

#[cfg(test)]
mod tests;
