//! Benchmarks of a placement.
//!
//! The first measures the cost alone, for 64 and 1,000 candidates, idle and with a price on
//! congestion. The second measures the whole choice from the prompt's tokens on, that is keys,
//! match, overlay, arrivals and cost, for 8k and 100k tokens.
//!
//! `cargo bench -p hostler-placement --bench cost`

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use hostler_placement::affinity::{Arrivals, CacheIndex, ChainGaps, InFlightOverlay, Popularity, PromptKeys, PromptToMatch, ReplicaSlot};
use hostler_placement::block_keys::{BlockKey, KeyChain, token_keys};
use hostler_placement::cost::{Candidate, Conditions, PricingInput, place};
use hostler_placement::rates::Rates;

/// Allocator of the router itself.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TOKENS: u32 = 8_000;

/// Replicas under mixed load, an eighth of which hold a part of the prompt.
fn candidates(count: usize) -> Vec<Candidate> {
    let mut random = fastrand::Rng::with_seed(1);
    (0..count)
        .map(|replica| Candidate {
            replica,
            matched: if random.u32(..8) == 0 { random.u32(..TOKENS) } else { 0 },
            loaded: 0,
            read: 0,
            load_seconds: 0.0,
            in_flight: random.u32(..64),
            pending: random.u64(..40_000),
            context: random.u64(..400_000),
            capacity: 500_000,
            kv_use: random.f64(),
            budget: 8192,
            overdue: 0.0,
            rates: Rates::default(),
            time_left: f64::INFINITY,
            most_beside: u32::MAX,
            doubtful: false,
        })
        .collect()
}

fn placing(criterion: &mut Criterion) {
    let tokens: Vec<u32> = (0..TOKENS).collect();
    let keys = token_keys(KeyChain::new("", ""), &tokens, 16);
    let popularity = Popularity::default();
    let arrivals: Vec<Arrivals> = (0..20).map(|arrival| popularity.arrive(&keys, 16, f64::from(arrival) * 0.1)).collect();
    let ask = PricingInput { tokens: TOKENS, output: 300.0, long_output: 900.0, arrivals: &arrivals[19] };
    let mut group = criterion.benchmark_group("place");
    for count in [64, 1_000] {
        let candidates = candidates(count);
        for (load, utilisation) in [("idle", 0.0), ("busy", 0.8)] {
            let conditions = Conditions { nominal: Rates::default(), utilisation };
            let (mut priced, mut random) = (Vec::new(), fastrand::Rng::with_seed(1));
            group.bench_function(BenchmarkId::new(load, count), |bencher| {
                bencher.iter(|| place(black_box(&ask), black_box(&candidates), &conditions, &mut priced, &mut random));
            });
        }
    }
    group.finish();
}

/// Measures the whole choice.
///
/// All replicas hold a fifth of the prompt, an eighth of them a half and three most of it. They
/// have a million other blocks between them, and as many requests in flight as there are replicas.
fn choosing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("choice");
    for (count, length) in [(64, 8_000), (1_000, 8_000), (64, 100_000), (1_000, 100_000)] {
        let mut random = fastrand::Rng::with_seed(2);
        let tokens: Vec<u32> = (0..length).collect();
        let keys: Arc<[BlockKey]> = token_keys(KeyChain::new("", ""), &tokens, 16).into();
        let (index, overlay, popularity) = (CacheIndex::new(), Arc::<InFlightOverlay>::default(), Popularity::default());
        let slots: Vec<(ReplicaSlot, ChainGaps)> = (0..count).map(|_| (index.open(), ChainGaps::None)).collect();
        let mut pledges = Vec::new();
        for (number, (slot, _)) in slots.iter().enumerate() {
            let fifths = if number % 21 == 7 && number < 64 { 4 } else { 1 + usize::from(number % 8 == 0) };
            index.store(*slot, &keys[..keys.len() * fifths / 5]);
            index.store(*slot, &(0..1_000_000 / count).map(|_| random.u64(..)).collect::<Vec<BlockKey>>());
            pledges.push(overlay.add_placed(*slot, PromptKeys::whole((0..500).map(|_| random.u64(..)).collect())));
        }
        let mut candidates = candidates(count);
        let conditions = Conditions { nominal: Rates::default(), utilisation: 0.0 };
        let (mut priced, mut now) = (Vec::new(), 0.0);
        group.bench_function(BenchmarkId::new(format!("{length} tokens"), count), |bencher| {
            bencher.iter(|| {
                now += 0.001;
                let keys = token_keys(KeyChain::new("", ""), black_box(&tokens), 16);
                let mut matched = index.matched_blocks(&keys, &slots);
                overlay.raise_matches(&PromptToMatch::whole(&keys), &slots, &mut matched);
                for (candidate, blocks) in candidates.iter_mut().zip(&matched) {
                    candidate.matched = blocks * 16;
                }
                let arrivals = popularity.arrive(&keys, 16, now);
                let ask = PricingInput { tokens: length, output: 300.0, long_output: 900.0, arrivals: &arrivals };
                place(&ask, black_box(&candidates), &conditions, &mut priced, &mut random)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, placing, choosing);
criterion_main!(benches);
