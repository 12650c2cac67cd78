//! Policies that add up their knowledge of each replica, each in a different unit: the ideas of
//! llm-d's precise prefix scorer, of Dynamo's router and of SMG's expected wait.

use hostler_placement::block_keys::BlockKey;
use rustc_hash::FxHashMap;

use super::block_holders::{BlockHolders, TieredHolders};
use super::{Policy, index_of_least};
use crate::fleet::{FleetState, ReplicaReport};
use crate::random::whole;
use crate::request::{BLOCK_TOKENS, Request};

/// What a block on the host counts in llm-d, by default.
const LLM_D_HOST_CREDIT: f64 = 0.8;

/// Credit of such a block in Dynamo here. With its default of 0.75 the mean time to the first token
/// was 1.3 to 1.6 times as long where memory was short.
const DYNAMO_HOST_CREDIT: f64 = 1.0;

/// Scores from 0 to 1 for the prefix, the queue and the KV cache, relative to the other replicas,
/// with the weights 3, 2 and 2.
///
/// The prefix index is exact, and has copies on the host.
#[derive(Debug)]
pub(super) struct WeightedScores {
    index: TieredHolders,
    replicas: usize,
    random: fastrand::Rng,
}

impl WeightedScores {
    pub(super) fn new(replicas: usize, random: fastrand::Rng) -> Self {
        Self { index: TieredHolders::new(LLM_D_HOST_CREDIT), replicas, random }
    }
}

impl Policy for WeightedScores {
    fn place(&mut self, _id: usize, request: &Request, seen: &FleetState, _now: f64) -> Option<usize> {
        let matched = self.index.matched(request.prompt_keys(), self.replicas);
        let waiting: Vec<f64> = seen.loads.iter().map(|load| -f64::from(load.waiting)).collect();
        let (prefix, queue) = (relative(&matched), relative(&waiting));
        let score = |replica: usize| 3.0 * prefix[replica] + 2.0 * queue[replica] + 2.0 * (1.0 - seen.loads[replica].kv_use);
        Some(index_of_least((0..self.replicas).map(|replica| -score(replica)), &mut self.random))
    }

    fn on_report(&mut self, replica: usize, report: &ReplicaReport) {
        self.index.apply(replica, report);
    }
}

/// Scales values to 1 for the greatest and 0 for the least; 1 for all if all are equal.
fn relative(values: &[f64]) -> Vec<f64> {
    let (least, most) =
        values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(*value), most.max(*value)));
    values.iter().map(|value| if most > least { (value - least) / (most - least) } else { 1.0 }).collect()
}

/// Blocks of prompts that a replica would have to compute, plus different blocks that its requests
/// would hold; the least wins.
///
/// The prefix index is exact, and has copies on the host.
#[derive(Debug)]
pub(super) struct BlockCost {
    index: TieredHolders,
    active: Vec<ActiveWork>,
    sent: FxHashMap<usize, CountedRequest>,
    random: fastrand::Rng,
}

/// Work of one replica, as the router counts it.
#[derive(Debug, Default)]
struct ActiveWork {
    /// Tokens of prompts without a first token.
    prefill: u64,
    /// Blocks of the prompts of requests in flight, and the number of requests for each.
    blocks: FxHashMap<BlockKey, u32>,
}

#[derive(Debug)]
struct CountedRequest {
    replica: usize,
    request: Request,
    uncached: u32,
}

impl BlockCost {
    pub(super) fn new(replicas: usize, random: fastrand::Rng) -> Self {
        let active = (0..replicas).map(|_| ActiveWork::default()).collect();
        Self { index: TieredHolders::new(DYNAMO_HOST_CREDIT), active, sent: FxHashMap::default(), random }
    }
}

impl Policy for BlockCost {
    fn place(&mut self, id: usize, request: &Request, _seen: &FleetState, _now: f64) -> Option<usize> {
        let keys = request.prompt_keys();
        let matched = self.index.matched(keys, self.active.len());
        let uncached: Vec<u32> = matched.iter().map(|blocks| request.prompt - whole(blocks * f64::from(BLOCK_TOKENS))).collect();
        let cost = |(replica, active): (usize, &ActiveWork)| {
            let prefill = (active.prefill + u64::from(uncached[replica])) as f64 / f64::from(BLOCK_TOKENS);
            // The blocks of other requests are closed under prefixes.
            let shared = keys.partition_point(|key| active.blocks.contains_key(key));
            prefill + (active.blocks.len() + keys.len() - shared) as f64
        };
        let replica = index_of_least(self.active.iter().enumerate().map(cost), &mut self.random);
        let active = &mut self.active[replica];
        active.prefill += u64::from(uncached[replica]);
        keys.iter().for_each(|key| *active.blocks.entry(*key).or_default() += 1);
        self.sent.insert(id, CountedRequest { replica, request: request.clone(), uncached: uncached[replica] });
        Some(replica)
    }

    fn on_report(&mut self, replica: usize, report: &ReplicaReport) {
        self.index.apply(replica, report);
    }

    fn on_first_token(&mut self, id: usize, _seen: &FleetState, _now: f64) {
        if let Some(sent) = self.sent.get(&id) {
            self.active[sent.replica].prefill -= u64::from(sent.uncached);
        }
    }

    fn on_last_token(&mut self, id: usize, _seen: &FleetState, _now: f64) {
        let Some(sent) = self.sent.remove(&id) else { return };
        let blocks = &mut self.active[sent.replica].blocks;
        for key in sent.request.prompt_keys() {
            if let Some(count) = blocks.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    blocks.remove(key);
                }
            }
        }
    }
}

/// Tokens of prompts to compute, including the new one's, over the replica's recent speed.
///
/// The cache is estimated from the prompts sent there.
#[derive(Debug)]
pub(super) struct ExpectedWait {
    tree: BlockHolders,
    /// Tokens of prompts without a first token.
    pending: Vec<u64>,
    /// Tokens per second, as a moving mean.
    speeds: Vec<f64>,
    /// For each request without a first token: its replica, its tokens, and when it was sent.
    sent: FxHashMap<usize, (usize, u32, f64)>,
    random: fastrand::Rng,
}

impl ExpectedWait {
    pub(super) fn new(replicas: usize, random: fastrand::Rng) -> Self {
        let (pending, speeds) = (vec![0; replicas], vec![10_000.0; replicas]);
        Self { tree: BlockHolders::default(), pending, speeds, sent: FxHashMap::default(), random }
    }
}

impl Policy for ExpectedWait {
    fn place(&mut self, id: usize, request: &Request, _seen: &FleetState, now: f64) -> Option<usize> {
        let keys = request.prompt_keys();
        let matched = self.tree.matched(keys, self.pending.len());
        let uncached = |replica: usize| request.prompt - u32::try_from(matched[replica]).unwrap_or(0) * BLOCK_TOKENS;
        let wait = |replica: usize| (self.pending[replica] + u64::from(uncached(replica))) as f64 / self.speeds[replica];
        let replica = index_of_least((0..self.pending.len()).map(wait), &mut self.random);
        self.pending[replica] += u64::from(uncached(replica));
        self.sent.insert(id, (replica, uncached(replica), now));
        self.tree.store(replica, &keys[matched[replica]..]);
        Some(replica)
    }

    fn on_first_token(&mut self, id: usize, _seen: &FleetState, now: f64) {
        let Some((replica, uncached, sent)) = self.sent.remove(&id) else { return };
        // While the request waited, the replica computed the prompts ahead and its own.
        let speed = self.pending[replica] as f64 / (now - sent).max(1e-3);
        self.speeds[replica] = 0.95 * self.speeds[replica] + 0.05 * speed.clamp(1000.0, 100_000.0);
        self.pending[replica] -= u64::from(uncached);
    }
}
