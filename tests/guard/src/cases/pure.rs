//! Parts of the paths that wait for nothing, each measured separately.

use std::hint::black_box;

use anyhow::ensure;
use bytes::Bytes;
use hostler_placement::affinity::Popularity;
use hostler_placement::block_keys::{self, KeyChain};
use hostler_placement::cost::{Candidate, Conditions, PricingInput, place};
use hostler_placement::rates::Rates;
use hostler_router::sse::{Dialect, SseScanner};

use super::clients::EVENT;
use crate::counted::{counting_begins, counting_ends};

/// Number of repetitions.
pub(crate) const TIMES: u32 = 1_000;

fn count(mut work: impl FnMut()) {
    (0..TIMES / 10).for_each(|_| work());
    counting_begins();
    (0..TIMES).for_each(|_| work());
    counting_ends();
}

pub(crate) fn scanner() -> anyhow::Result<()> {
    let mut scanner = SseScanner::new(Dialect::OpenAi);
    let event = Bytes::from_static(EVENT.as_bytes());
    count(|| {
        black_box(scanner.process(black_box(event.clone())));
    });
    ensure!(scanner.event_count() == u64::from(TIMES + TIMES / 10), "the scanner saw only {} events", scanner.event_count());
    Ok(())
}

/// Choice among replicas under mixed load, an eighth of which hold a part of the prompt.
pub(crate) fn place_among(count_of: usize) -> anyhow::Result<()> {
    const TOKENS: u32 = 8_000;
    let mut random = fastrand::Rng::with_seed(1);
    let candidates: Vec<Candidate> = (0..count_of)
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
        .collect();
    let prompt: Vec<u32> = (0..TOKENS).collect();
    let prompt = block_keys::token_keys(KeyChain::new("", ""), &prompt, 16);
    let arrivals = Popularity::default().arrive(&prompt, 16, 0.1);
    let ask = PricingInput { tokens: TOKENS, output: 300.0, long_output: 900.0, arrivals: &arrivals };
    let conditions = Conditions { nominal: Rates::default(), utilisation: 0.0 };
    let mut priced = Vec::new();
    count(|| {
        black_box(place(black_box(&ask), black_box(&candidates), &conditions, &mut priced, &mut random));
    });
    Ok(())
}

/// Keys of 1,000 tokens in blocks of 16.
pub(crate) fn token_keys() -> anyhow::Result<()> {
    let tokens: Vec<u32> = (0..1_000).collect();
    count(|| {
        black_box(block_keys::token_keys(KeyChain::new("", ""), black_box(&tokens), 16));
    });
    Ok(())
}

/// Keys of a kilobyte of text.
pub(crate) fn text_keys() -> anyhow::Result<()> {
    let text = [b'x'; 1_024];
    count(|| {
        black_box(block_keys::text_keys(KeyChain::new("", ""), black_box(&text)));
    });
    Ok(())
}
