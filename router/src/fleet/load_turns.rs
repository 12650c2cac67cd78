//! Turns of nodes to read models from file systems that they share: at most `router.max_loads` at
//! once from each. `TurnQueue` decides; `LoadTurns` holds it and tells the agents.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::directives::Directives;

/// How long a turn lasts at most, where its node neither gives it back nor leaves: its agent may
/// hang in the read.
const LEASE: Duration = Duration::from_secs(3600);

/// Attachment of an agent, of which each has one wish at most.
type Attachment = u64;

/// How a node's wish stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TurnWord {
    Granted,
    /// So many nodes come first.
    Queued(u32),
}

/// Who reads, and who waits, by file system. Reads no clock and tells nobody.
#[derive(Debug)]
struct TurnQueue {
    /// 0 grants everything.
    max_loads: u32,
    file_systems: BTreeMap<String, FileSystemTurns>,
}

#[derive(Debug, Default)]
struct FileSystemTurns {
    holders: BTreeMap<Attachment, Instant>,
    waiting: VecDeque<Attachment>,
    /// What each of those that wait was told last.
    told: BTreeMap<Attachment, TurnWord>,
}

impl TurnQueue {
    /// Takes a wish in; one that `holds` reads already, whatever the limit.
    fn ask(&mut self, node: Attachment, file_system: &str, holds: bool, now: Instant) {
        if self.file_systems.get(file_system).is_none_or(|turns| !turns.has(node)) {
            self.leave(node);
        }
        let turns = self.file_systems.entry(file_system.to_owned()).or_default();
        if holds {
            turns.waiting.retain(|waiting| *waiting != node);
            turns.holders.entry(node).or_insert(now);
            turns.told.insert(node, TurnWord::Granted);
        } else if !turns.has(node) {
            turns.waiting.push_back(node);
        }
    }

    /// Forgets what a node wanted.
    fn leave(&mut self, node: Attachment) {
        self.file_systems.retain(|_, turns| {
            turns.holders.remove(&node);
            turns.told.remove(&node);
            turns.waiting.retain(|waiting| *waiting != node);
            !turns.holders.is_empty() || !turns.waiting.is_empty()
        });
    }

    /// Grants what may be granted, first come, first served. Returns the news for each node.
    fn advance(&mut self, now: Instant) -> Vec<(Attachment, String, TurnWord)> {
        let max_loads = usize::try_from(self.max_loads).unwrap_or(usize::MAX);
        let mut news = Vec::new();
        for (file_system, turns) in &mut self.file_systems {
            turns.holders.retain(|_, since| now.duration_since(*since) < LEASE);
            while max_loads == 0 || turns.holders.len() < max_loads {
                let Some(next) = turns.waiting.pop_front() else { break };
                turns.holders.insert(next, now);
            }
            let holders = turns.holders.keys().map(|node| (*node, TurnWord::Granted));
            let queued = (0..).zip(&turns.waiting).map(|(ahead, node)| (*node, TurnWord::Queued(ahead)));
            for (node, word) in holders.chain(queued) {
                if turns.told.insert(node, word) != Some(word) {
                    news.push((node, file_system.clone(), word));
                }
            }
        }
        news
    }
}

impl FileSystemTurns {
    fn has(&self, node: Attachment) -> bool {
        self.holders.contains_key(&node) || self.waiting.contains(&node)
    }
}

/// The turns of one router.
#[derive(Debug)]
pub(crate) struct LoadTurns(Mutex<TurnDesk>);

#[derive(Debug)]
struct TurnDesk {
    queue: TurnQueue,
    /// Agents that have asked.
    agents: BTreeMap<Attachment, Directives>,
}

impl LoadTurns {
    pub(crate) fn new(max_loads: u32) -> Self {
        Self(Mutex::new(TurnDesk { queue: TurnQueue { max_loads, file_systems: BTreeMap::new() }, agents: BTreeMap::new() }))
    }

    /// The limit, which agents learn when they attach; 0 is none.
    pub(super) fn max_loads(&self) -> u32 {
        self.0.lock().queue.max_loads
    }

    pub(super) fn ask(&self, agent: Attachment, directives: &Directives, file_system: &str, holds: bool) {
        let mut desk = self.0.lock();
        desk.agents.entry(agent).or_insert_with(|| directives.clone());
        desk.queue.ask(agent, file_system, holds, Instant::now());
        desk.advance();
    }

    pub(super) fn leave(&self, agent: Attachment) {
        let mut desk = self.0.lock();
        if desk.agents.remove(&agent).is_some() {
            desk.queue.leave(agent);
            desk.advance();
        }
    }

    /// Ends turns that are beyond their lease. Agents report every few seconds, so it is called as
    /// often as that.
    pub(super) fn advance(&self) {
        self.0.lock().advance();
    }
}

impl TurnDesk {
    fn advance(&mut self) {
        for (agent, file_system, word) in self.queue.advance(Instant::now()) {
            let ahead = match word {
                TurnWord::Granted => None,
                TurnWord::Queued(ahead) => Some(ahead),
            };
            let is_told = self.agents.get(&agent).is_some_and(|directives| directives.tell_turn(&file_system, ahead));
            if !is_told && let Some(turns) = self.queue.file_systems.get_mut(&file_system) {
                // Its queue is full: the next report brings another attempt.
                turns.told.remove(&agent);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(max_loads: u32) -> TurnQueue {
        TurnQueue { max_loads, file_systems: BTreeMap::new() }
    }

    fn news(queue: &mut TurnQueue, now: Instant) -> Vec<(Attachment, TurnWord)> {
        queue.advance(now).into_iter().map(|(node, _, word)| (node, word)).collect()
    }

    #[test]
    fn so_many_nodes_read_at_once_and_the_rest_in_their_order() {
        let (mut turns, now) = (queue(2), Instant::now());
        (1..=4).for_each(|node| turns.ask(node, "files:/m", false, now));
        let granted = TurnWord::Granted;
        assert_eq!(news(&mut turns, now), [(1, granted), (2, granted), (3, TurnWord::Queued(0)), (4, TurnWord::Queued(1))]);
        assert_eq!(news(&mut turns, now), [], "nothing is said twice");
        turns.leave(2);
        assert_eq!(news(&mut turns, now), [(3, granted), (4, TurnWord::Queued(0))]);
    }

    #[test]
    fn file_systems_have_turns_of_their_own() {
        let (mut turns, now) = (queue(1), Instant::now());
        turns.ask(1, "a", false, now);
        turns.ask(2, "b", false, now);
        assert_eq!(news(&mut turns, now), [(1, TurnWord::Granted), (2, TurnWord::Granted)]);
        turns.ask(1, "b", false, now);
        assert_eq!(news(&mut turns, now), [(1, TurnWord::Queued(0))], "a node has one wish");
        assert_eq!(turns.file_systems.len(), 1, "what nobody wants is forgotten");
    }

    #[test]
    fn a_node_that_reads_already_counts_whatever_the_limit() {
        let (mut turns, now) = (queue(1), Instant::now());
        turns.ask(1, "a", true, now);
        turns.ask(2, "a", true, now);
        turns.ask(3, "a", false, now);
        assert_eq!(news(&mut turns, now), [(3, TurnWord::Queued(0))], "another router has granted the two");
        turns.leave(1);
        assert_eq!(news(&mut turns, now), []);
        turns.leave(2);
        assert_eq!(news(&mut turns, now), [(3, TurnWord::Granted)]);
    }

    #[test]
    fn a_turn_ends_with_its_lease() {
        let (mut turns, now) = (queue(1), Instant::now());
        turns.ask(1, "a", false, now);
        turns.ask(2, "a", false, now);
        turns.advance(now);
        assert_eq!(news(&mut turns, now + LEASE), [(2, TurnWord::Granted)]);
    }
}
