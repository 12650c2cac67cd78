//! Benchmarks of the structures of `affinity`: the longest match of a prompt on 64 and 1,000
//! replicas, a change of the index, and the memory and time of a fleet of 1,000 replicas.
//!
//! `cargo bench -p hostler-placement --bench affinity -- --quick`

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hostler_placement::affinity::{
    ApproxPrefixIndex, CacheIndex, ChainGaps, InFlightOverlay, Popularity, PromptKeys, PromptToMatch, ReplicaSlot,
};
use hostler_placement::block_keys::BlockKey;

/// Capacity of a replica: 500,000 tokens in blocks of 16.
const CAPACITY: usize = 31_000;

/// Blocks of other prompts in the index, so that its tables exceed the processor's caches.
const OTHERS: usize = 2_000_000;

fn keys(random: &mut fastrand::Rng, count: usize) -> Vec<BlockKey> {
    (0..count).map(|_| random.u64(..)).collect()
}

/// An index in which all replicas hold a fifth of a prompt, an eighth of them a half, and three
/// most of it.
fn shared(
    random: &mut fastrand::Rng,
    replicas: usize,
    prompt: &[BlockKey],
    holes: ChainGaps,
) -> (CacheIndex, Vec<(ReplicaSlot, ChainGaps)>) {
    let index = CacheIndex::new();
    let slots: Vec<(ReplicaSlot, ChainGaps)> = (0..replicas).map(|_| (index.open(), holes)).collect();
    for (number, (slot, _)) in slots.iter().enumerate() {
        let fifths = match number {
            7 | 20 | 40 => 4,
            _ if number % 8 == 0 => 2,
            _ => 1,
        };
        index.store(*slot, &prompt[..prompt.len() * fifths / 5]);
        index.store(*slot, &keys(random, OTHERS / replicas));
    }
    (index, slots)
}

fn matching(criterion: &mut Criterion) {
    let mut random = fastrand::Rng::with_seed(1);
    let mut group = criterion.benchmark_group("match");
    // Always use the same prompt, so that its entries are in the processor's caches.
    for (replicas, blocks) in [(64, 500), (64, 6250), (1000, 500), (1000, 6250)] {
        let name = |what: &str| BenchmarkId::new(format!("{what}, {blocks} blocks"), replicas);
        let prompt = keys(&mut random, blocks);
        let unknown = keys(&mut random, blocks);
        let (index, mut slots) = shared(&mut random, replicas, &prompt, ChainGaps::None);
        group.bench_function(name("shared"), |bencher| bencher.iter(|| black_box(index.matched_blocks(&prompt, &slots))));
        group.bench_function(name("unknown"), |bencher| bencher.iter(|| black_box(index.matched_blocks(&unknown, &slots))));
        slots.iter_mut().for_each(|slot| slot.1 = ChainGaps::Possible);
        group.bench_function(name("shared, with holes"), |bencher| bencher.iter(|| black_box(index.matched_blocks(&prompt, &slots))));
    }
    group.finish();
}

fn writing(criterion: &mut Criterion) {
    let mut random = fastrand::Rng::with_seed(2);
    let (index, slots) = shared(&mut random, 64, &[], ChainGaps::None);
    let mut group = criterion.benchmark_group("write");
    for blocks in [100, 10_000] {
        // New keys each time, as in an engine that evicts as much as it stores.
        let mut batches = (0..).map(|_| keys(&mut random, blocks));
        group.throughput(Throughput::Elements(2 * blocks as u64));
        group.bench_function(BenchmarkId::new("store and remove", blocks), |bencher| {
            bencher.iter_batched_ref(
                || batches.next().unwrap_or_default(),
                |batch| {
                    index.store(slots[3].0, batch);
                    index.remove(slots[3].0, batch);
                },
                criterion::BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

fn others(criterion: &mut Criterion) {
    let mut random = fastrand::Rng::with_seed(3);
    let prompt: Arc<[BlockKey]> = keys(&mut random, 6250).into();
    let index = CacheIndex::new();
    let slots: Vec<(ReplicaSlot, ChainGaps)> = (0..64).map(|_| (index.open(), ChainGaps::None)).collect();

    let overlay = Arc::new(InFlightOverlay::default());
    let _in_flight: Vec<_> = (0..1000)
        .map(|number| {
            let mut other = prompt.to_vec();
            other[6 * number + 1] ^= 1;
            overlay.add_placed(slots[number % 64].0, PromptKeys::whole(other.into()))
        })
        .collect();
    criterion.bench_function("overlay, 1000 requests in flight that share their beginning", |bencher| {
        bencher.iter(|| {
            let mut matched = [0; 64];
            overlay.raise_matches(&PromptToMatch::whole(&prompt), &slots, &mut matched);
            black_box(matched)
        });
    });

    let popularity = Popularity::default();
    criterion.bench_function("popularity, 6250 blocks", |bencher| bencher.iter(|| black_box(popularity.arrive(&prompt, 16, 1.0))));
    let arrivals = popularity.arrive(&prompt, 16, 1.0);
    criterion.bench_function("discounted tokens, 6250 blocks", |bencher| {
        bencher.iter(|| black_box(arrivals.discounted_tokens(black_box(20_000), black_box(100_000))));
    });

    let guess = ApproxPrefixIndex::default();
    let slots: Vec<ReplicaSlot> = (0..64).map(|_| guess.open(CAPACITY)).collect();
    for (number, slot) in slots.iter().enumerate() {
        guess.record_sent(*slot, &prompt[..number * 97]);
    }
    criterion.bench_function("guess, match of 6250 blocks on 64 replicas", |bencher| {
        bencher.iter(|| black_box(guess.matched_blocks(&prompt, &slots)));
    });
    criterion.bench_function("guess, 6250 blocks sent", |bencher| bencher.iter(|| guess.record_sent(slots[5], &prompt)));
}

/// Builds a fleet in which each replica has different blocks, the worst case for memory.
///
/// Runs once, since it takes seconds and more than a gigabyte.
#[expect(clippy::print_stdout, reason = "the figures of this benchmark")]
fn fleet(_: &mut Criterion) {
    let mut random = fastrand::Rng::with_seed(4);
    let index = CacheIndex::new();
    let (mut taken, mut slowest) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..1000 {
        let (slot, blocks) = (index.open(), keys(&mut random, CAPACITY));
        let start = Instant::now();
        index.store(slot, &blocks);
        taken += start.elapsed();
        slowest = slowest.max(start.elapsed());
    }
    let stored = index.len();
    println!(
        "fleet of 1000 replicas with {CAPACITY} blocks each: {:.1} s, the slowest replica {:.0} ms, {:.1} bytes for each block",
        taken.as_secs_f64(),
        slowest.as_secs_f64() * 1e3,
        index.bytes() as f64 / stored as f64,
    );
}

criterion_group!(benches, matching, writing, others, fleet);
criterion_main!(benches);
