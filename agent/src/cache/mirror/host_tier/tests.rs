//! The host's tier against a recording, against a naive model, and where its events lack something.

use std::collections::{BTreeMap, BTreeSet};

use hostler_placement::block_keys::token_keys;
use proptest::prelude::*;

use super::*;
use crate::cache::CacheTier;
use crate::cache::block_set::CacheDigest;
use crate::cache::kv_event::{self, ExtraKey, KvEvent};
use crate::cache::mirror::BlockMirror;
use crate::cache::tests::{frames, removed, stored};

fn applied(events: &[KvEvent]) -> (BlockMirror, Effects) {
    let (mut mirror, mut effects) = (BlockMirror::new(), Effects::default());
    events.iter().for_each(|event| mirror.apply(event, &mut effects));
    mirror.end_batch(&mut effects);
    (mirror, effects)
}

/// The same event of the host's tier.
fn on_host(event: KvEvent) -> KvEvent {
    let medium = Some("CPU".to_owned());
    match event {
        KvEvent::Stored(stored) => KvEvent::Stored(Box::new(BlocksStored { medium, ..*stored })),
        KvEvent::Removed(removed) => KvEvent::Removed(BlocksRemoved { medium, ..removed }),
        other => other,
    }
}

/// A block of the host's tier by its hash alone, as engines report it that do not describe blocks.
fn undescribed(hash: u64) -> KvEvent {
    let medium = Some("CPU".to_owned());
    KvEvent::Stored(Box::new(BlocksStored { hashes: vec![hash], medium, ..BlocksStored::default() }))
}

fn with_extra(event: KvEvent, extra: &str) -> KvEvent {
    let KvEvent::Stored(mut event) = event else { panic!("it stores") };
    event.extra_keys = vec![ExtraKey::Text(extra.to_owned())];
    KvEvent::Stored(event)
}

fn keys(mirror: &BlockMirror, tier: CacheTier) -> BTreeSet<BlockKey> {
    mirror.blocks(tier).keys().collect()
}

fn count(mirror: &BlockMirror) -> u64 {
    mirror.blocks(CacheTier::Host).digest().count
}

#[test]
fn recorded_host_copies_have_the_keys_of_the_gpus_blocks_whatever_their_order() {
    let recorded = frames("kv_0.33_tiers.frames.hex");
    let batches: Vec<Vec<KvEvent>> =
        recorded.iter().map(|frames| kv_event::parse_events(&kv_event::parse_live(frames).unwrap().1).unwrap()).collect();
    let (mut mirror, mut effects) = (BlockMirror::new(), Effects::default());
    let mut seen = Vec::new();
    for batch in &batches {
        batch.iter().for_each(|event| mirror.apply(event, &mut effects));
        mirror.end_batch(&mut effects);
        seen.push([CacheTier::Gpu, CacheTier::Host].map(|tier| keys(&mirror, tier)));
    }
    let KvEvent::Stored(prompt) = &batches[0][0] else { panic!("it begins with a prompt") };
    let prompt: BTreeSet<BlockKey> = token_keys(KeyChain::new("", ""), &prompt.tokens, 16).into_iter().collect();
    // The prompt's three chunks are copied, then its blocks leave the GPU.
    assert_eq!(seen[1], [prompt.clone(), prompt.clone()]);
    assert_eq!(seen[2], [BTreeSet::new(), prompt.clone()]);
    // A prompt that only another tier had comes back in chunks whose parents follow them.
    assert_eq!(seen[3][1].len(), prompt.len() + 48);
    // Two files have blocks that the cut recording lacks.
    assert_eq!((effects.orphans, effects.files.len()), (32, 0));
    // The first prompt's first chunk is dropped.
    assert_eq!(seen[4][1].len(), prompt.len() + 32);
    assert_eq!((effects.ignored, effects.malformed), (0, 0));
}

#[test]
fn a_copy_told_by_its_hash_alone_has_the_gpu_blocks_key_even_just_after_that_block_has_left() {
    let known = [stored(None, &[1, 2]), undescribed(1), removed(2), undescribed(2)];
    let (mirror, effects) = applied(&known);
    let both: BTreeSet<BlockKey> = token_keys(KeyChain::new("", ""), &[1, 1, 2, 2], 2).into_iter().collect();
    assert_eq!((keys(&mirror, CacheTier::Host), effects.orphans), (both, 0));
    let (mirror, effects) = applied(&[stored(None, &[1]), undescribed(9)]);
    assert_eq!((count(&mirror), effects.orphans), (0, 1));
}

#[test]
fn copies_of_salted_prompts_are_never_taken_for_plain_ones() {
    let plain = on_host(stored(None, &[5]));
    let (mirror, _) = applied(&[stored(None, &[1]), plain.clone()]);
    assert_eq!(count(&mirror), 1, "an engine without salts has plain blocks");
    let (mirror, effects) = applied(&[with_extra(stored(None, &[1]), "tenant"), plain]);
    assert_eq!((count(&mirror), effects.orphans), (0, 1), "the event does not say whose block 5 is");
    let (mirror, _) = applied(&[with_extra(stored(None, &[1]), "tenant"), on_host(stored(Some(1), &[2]))]);
    assert_eq!(count(&mirror), 1, "a block after a known one is known");
}

#[test]
fn copies_after_images_are_known_only_by_their_hash() {
    let image = |event| {
        let KvEvent::Stored(mut event) = event else { panic!("it stores") };
        event.extra_keys = vec![ExtraKey::List(vec![ExtraKey::Text("image".to_owned()), ExtraKey::Text("1".to_owned())])];
        KvEvent::Stored(event)
    };
    let (mirror, effects) = applied(&[stored(None, &[1]), image(stored(Some(1), &[2])), on_host(stored(None, &[1, 2, 3]))]);
    assert_eq!(keys(&mirror, CacheTier::Host), keys(&mirror, CacheTier::Gpu));
    assert_eq!(effects.orphans, 1);
}

#[test]
fn a_block_of_two_chunks_stays_until_both_are_dropped() {
    let chunks = [stored(None, &[1, 2]), on_host(stored(None, &[1, 2])), on_host(stored(Some(1), &[2, 3]))];
    let (mut mirror, mut effects) = applied(&chunks);
    let drop = |hashes: &[u64]| on_host(KvEvent::Removed(BlocksRemoved { hashes: hashes.to_vec(), ..BlocksRemoved::default() }));
    mirror.apply(&drop(&[1, 2, 99]), &mut effects);
    assert_eq!(count(&mirror), 2);
    mirror.apply(&drop(&[2, 3]), &mut effects);
    assert_eq!(mirror.blocks(CacheTier::Host).digest(), CacheDigest::default());
}

#[test]
fn a_file_counts_only_if_all_its_blocks_are_known() {
    let written = |event| applied(&[stored(None, &[1, 2]), on_storage(event)]).1;
    let hashes =
        |effects: &Effects| effects.files.iter().map(|file| file.blocks.iter().map(|(hash, _)| *hash).collect()).collect::<Vec<Vec<u64>>>();
    assert_eq!(hashes(&written(stored(Some(1), &[2, 3]))), [[2, 3]], "block 3 continues block 2");
    for unknown in [stored(Some(9), &[3, 4]), undescribed(2)] {
        let effects = written(unknown);
        assert!(effects.files.is_empty() && effects.orphans > 0, "{effects:?}");
    }
    let long = stored(None, &(1..=257).collect::<Vec<_>>());
    assert_eq!((written(long).files, written(stored(None, &[1])).files.len()), (Vec::new(), 1), "no plan has so many blocks in a file");
    let image = with_extra(stored(Some(1), &[2]), "image");
    let (_, effects) = applied(&[stored(None, &[1]), image, on_storage(stored(Some(1), &[2, 3]))]);
    assert!(effects.files.is_empty(), "block 3 may be another image's");
}

#[test]
fn a_reset_of_the_cache_forgets_the_copies_too() {
    let (mirror, _) = applied(&[stored(None, &[1]), on_host(stored(None, &[1])), KvEvent::Cleared]);
    assert_eq!(count(&mirror), 0);
}

/// Steps of an engine with blocks 1..=12, each stored after the block with half its number.
#[derive(Debug, Clone)]
enum Step {
    StoreOnGpu(u64),
    RemoveFromGpu(u64),
    StoreOnHost(u64),
    NameOnHost(u64),
    RemoveFromHost(u64),
    Elsewhere(u64),
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let block = || 1_u64..=12;
    prop_oneof![
        6 => block().prop_map(Step::StoreOnGpu),
        5 => block().prop_map(Step::RemoveFromGpu),
        6 => block().prop_map(Step::StoreOnHost),
        3 => block().prop_map(Step::NameOnHost),
        5 => block().prop_map(Step::RemoveFromHost),
        2 => block().prop_map(Step::Elsewhere),
        1 => Just(Step::Clear),
    ]
}

fn parent(block: u64) -> Option<u64> {
    Some(block / 2).filter(|&parent| parent > 0)
}

fn key_of(block: u64) -> BlockKey {
    let mut chain = parent(block).map_or(KeyChain::new("", ""), |parent| KeyChain::resume(key_of(parent)));
    chain.push(&[u32::try_from(block).unwrap(); 2])
}

fn on_storage(event: KvEvent) -> KvEvent {
    let KvEvent::Stored(mut event) = event else { panic!("it stores") };
    event.medium = Some("STORAGE".to_owned());
    KvEvent::Stored(event)
}

proptest! {
    #[test]
    fn any_history_of_all_media_yields_two_independent_sets(steps in prop::collection::vec(step(), 0..150)) {
        // The block size is known from the first block on.
        let begin = stored(None, &[40]);
        let ((mut mirror, mut effects), (mut gpu_alone, mut others)) = (applied(std::slice::from_ref(&begin)), applied(std::slice::from_ref(&begin)));
        let mut copies: BTreeMap<u64, u32> = BTreeMap::new();
        // Blocks whose key the mirror may know: on the GPU, on the host, or lately gone from the
        // GPU.
        let (mut on_gpu, mut departed): (BTreeMap<u64, u32>, BTreeSet<u64>) = Default::default();
        let mut has_reported = false;
        for step in steps {
            let is_known = |block: u64, copies: &BTreeMap<u64, u32>, on_gpu: &BTreeMap<u64, u32>, departed: &BTreeSet<u64>| {
                copies.contains_key(&block) || on_gpu.contains_key(&block) || departed.contains(&block)
            };
            let event = match step {
                Step::StoreOnGpu(block) => {
                    let is_told_again = parent(block).is_none() && on_gpu.contains_key(&block);
                    if !is_told_again && parent(block).is_none_or(|parent| on_gpu.contains_key(&parent)) {
                        *on_gpu.entry(block).or_default() += 1;
                    }
                    stored(parent(block), &[block])
                }
                Step::RemoveFromGpu(block) => {
                    if let Some(count) = on_gpu.get_mut(&block) {
                        *count -= 1;
                        if *count == 0 && has_reported {
                            departed.insert(block);
                        }
                    }
                    on_gpu.retain(|_, count| *count > 0);
                    removed(block)
                }
                Step::StoreOnHost(block) => {
                    has_reported = true;
                    let knows = |block| is_known(block, &copies, &on_gpu, &departed);
                    if knows(block) || parent(block).is_none_or(knows) {
                        *copies.entry(block).or_default() += 1;
                    }
                    on_host(stored(parent(block), &[block]))
                }
                Step::NameOnHost(block) => {
                    has_reported = true;
                    if is_known(block, &copies, &on_gpu, &departed) {
                        *copies.entry(block).or_default() += 1;
                    }
                    undescribed(block)
                }
                Step::RemoveFromHost(block) => {
                    if let Some(count) = copies.get_mut(&block) {
                        *count -= 1;
                    }
                    copies.retain(|_, count| *count > 0);
                    on_host(removed(block))
                }
                Step::Elsewhere(block) => on_storage(stored(parent(block), &[block])),
                Step::Clear => {
                    (copies, on_gpu, departed) = Default::default();
                    KvEvent::Cleared
                }
            };
            mirror.apply(&event, &mut effects);
            mirror.end_batch(&mut effects);
            if matches!(event, KvEvent::Cleared) || !matches!(step, Step::StoreOnHost(_) | Step::NameOnHost(_) | Step::RemoveFromHost(_)) {
                gpu_alone.apply(&event, &mut others);
            }
            let expected: BTreeSet<BlockKey> = copies.keys().map(|&block| key_of(block)).collect();
            let xor = expected.iter().fold(0, |xor, key| xor ^ key);
            prop_assert_eq!(keys(&mirror, CacheTier::Host), expected.clone());
            prop_assert_eq!(mirror.blocks(CacheTier::Host).digest(), CacheDigest { count: expected.len() as u64, xor });
            prop_assert_eq!(keys(&mirror, CacheTier::Gpu), keys(&gpu_alone, CacheTier::Gpu));
        }
        let mut followed = BTreeSet::new();
        for change in effects.host_changes {
            match change {
                Change::Stored(key) => assert!(followed.insert(key), "stored twice"),
                Change::Removed(key) => assert!(followed.remove(&key), "removed twice"),
                Change::Cleared => followed.clear(),
            }
        }
        prop_assert_eq!(followed, keys(&mirror, CacheTier::Host));
    }
}
