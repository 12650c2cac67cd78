//! Number of nodes that an entry wants now. A fixed size is as written. An elastic size grows while
//! requests wait and shrinks when nodes are idle.

use std::time::{Duration, SystemTime};

use crate::entry::{FleetEntry, FleetSize};
use crate::memory::Memory;
use crate::observation::Demand;
use crate::since;
use crate::stages::Stages;

/// Time for which requests must wait before the entry grows. Requests also wait briefly while a
/// replica reads prompts.
const GROW_AFTER: Duration = Duration::from_secs(30);

/// Computes the desired size, and updates the memory behind it.
pub(crate) fn resize(entry: &FleetEntry, stages: &Stages, demand: &Demand, memory: &mut Memory, now: SystemTime) -> usize {
    let size = match entry.size {
        _ if memory.budget_left(entry, now).is_some_and(|left| left.is_over()) => 0,
        FleetSize::Fixed(nodes) => nodes,
        FleetSize::Elastic { min, max, idle_after } => {
            let size = recall_size(stages, memory).clamp(min, max);
            let is_complete = count(stages.serving.len()) >= size;
            let is_wanted = demand.is_within(idle_after);
            let used = count_used(stages, memory, idle_after, now).max(u32::from(is_wanted));
            let is_short = has_pressure(demand.waiting > 0 && is_complete, memory, now);
            // A client that caused a submission may have given up because the queue is long, and
            // returns once the job is ready.
            let is_coming = !is_complete && (is_wanted || stages.coming() > 0 || memory.awaits_jobs());
            let followed = match size {
                0 => used,
                _ if is_short => size.saturating_add(1),
                _ if is_coming || demand.waiting > 0 => size,
                _ => size.min(used),
            };
            followed.clamp(min, max)
        }
    };
    memory.size = Some(size);
    usize::try_from(size).expect("a u32 fits a usize on every host with GPUs")
}

/// Size of the previous step, inferred from the jobs if unknown.
///
/// In that case jobs that do not serve yet count as replacements of those that end soon. While jobs
/// of an unknown controller may still be listed, each counts as desired.
fn recall_size(stages: &Stages, memory: &Memory) -> u32 {
    let due = stages.serving.iter().filter(|job| memory.record(job).is_due).count();
    let seen = count(stages.live() - stages.coming().min(due));
    if memory.is_recovering() { memory.size.unwrap_or_default().max(seen) } else { memory.size.unwrap_or(seen) }
}

/// Serving nodes that have had a request within this time, or are new.
fn count_used(stages: &Stages, memory: &Memory, idle_after: Duration, now: SystemTime) -> u32 {
    let is_used = |last: Option<SystemTime>| last.is_none_or(|last| since(now, last) < idle_after);
    let records = stages.serving.iter().map(|job| memory.record(job));
    count(records.filter(|record| is_used(record.busy.max(record.ready))).count())
}

/// Whether requests have waited for a while although all nodes serve. If so, the time starts over.
fn has_pressure(requests_wait: bool, memory: &mut Memory, now: SystemTime) -> bool {
    memory.pressure_since = requests_wait.then(|| memory.pressure_since.unwrap_or(now));
    let is_long = memory.pressure_since.is_some_and(|begin| since(now, begin) >= GROW_AFTER);
    memory.pressure_since = memory.pressure_since.filter(|_| !is_long);
    is_long
}

fn count(jobs: usize) -> u32 {
    u32::try_from(jobs).unwrap_or(u32::MAX)
}
