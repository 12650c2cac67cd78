//! How many nodes an entry is to have now. A fixed size is as written; an elastic one grows while requests wait, and shrinks when nodes are idle.

use std::time::{Duration, SystemTime};

use crate::entry::{FleetEntry, FleetSize};
use crate::memory::Memory;
use crate::observation::Demand;
use crate::since;
use crate::stages::Stages;

/// Requests also wait in the router for moments, while a replica reads prompts.
const GROW_AFTER: Duration = Duration::from_secs(30);

/// The size from now on, and the memory of what it follows from.
pub(crate) fn resize(entry: &FleetEntry, stages: &Stages, demand: &Demand, memory: &mut Memory, now: SystemTime) -> usize {
    let size = match entry.size {
        FleetSize::Fixed(nodes) => nodes,
        FleetSize::Elastic { min, max, idle_after } => {
            let size = memory.size.unwrap_or_else(|| count(derive_size(stages, memory))).clamp(min, max);
            follow(size, idle_after, stages, demand, memory, now).clamp(min, max)
        }
    };
    memory.size = Some(size);
    usize::try_from(size).expect("a u32 fits a usize on every host with GPUs")
}

/// The size of an entry of which only the jobs are known. Those that do not serve yet are replacements for those that end soon, as far as there are any.
fn derive_size(stages: &Stages, memory: &Memory) -> usize {
    let due = stages.serving.iter().filter(|job| memory.record(job).is_due).count();
    stages.live() - stages.coming().min(due)
}

/// One step of an elastic size.
fn follow(size: u32, idle_after: Duration, stages: &Stages, demand: &Demand, memory: &mut Memory, now: SystemTime) -> u32 {
    let is_wanted = demand.is_within(idle_after);
    let serving = count(stages.serving.len());
    let used = stages.serving.iter().filter(|job| {
        let record = memory.record(job);
        record.busy.max(record.ready).is_none_or(|used| since(now, used) < idle_after)
    });
    let used = count(used.count()).max(u32::from(is_wanted));
    if demand.waiting == 0 || serving < size {
        memory.pressure_since = None;
    }
    if serving < size {
        // Who asked for a job may have given up for the length of the queue, and comes back when it is ready.
        return if is_wanted || stages.coming() > 0 || memory.awaits_jobs() { size } else { used };
    }
    if size == 0 {
        return used;
    }
    if demand.waiting > 0 {
        let pressure_since = *memory.pressure_since.get_or_insert(now);
        return if since(now, pressure_since) < GROW_AFTER { size } else { size.saturating_add(1) };
    }
    size.min(used)
}

fn count(jobs: usize) -> u32 {
    u32::try_from(jobs).unwrap_or(u32::MAX)
}
