//! The mirror against recordings, against a naive model, and against models with other kinds of
//! caches.

use std::collections::{BTreeMap, BTreeSet};

use hostler_placement::block_keys::token_keys;
use proptest::prelude::*;

use super::*;
use crate::cache::block_set::CacheDigest;
use crate::cache::kv_event;
use crate::cache::tests::{frames, removed, stored};

fn recorded(name: &str) -> (Vec<KvEvent>, BlockMirror, Effects) {
    let messages = frames(name);
    let events: Vec<KvEvent> =
        messages.iter().flat_map(|frames| kv_event::parse_events(&kv_event::parse_live(frames).unwrap().1).unwrap()).collect();
    let (mirror, effects) = applied(&events);
    (events, mirror, effects)
}

fn applied(events: &[KvEvent]) -> (BlockMirror, Effects) {
    let (mut mirror, mut effects) = (BlockMirror::new(), Effects::default());
    events.iter().for_each(|event| mirror.apply(event, &mut effects));
    (mirror, effects)
}

fn keys(mirror: &BlockMirror) -> BTreeSet<BlockKey> {
    mirror.blocks(CacheTier::Gpu).keys().collect()
}

fn digest_of(keys: &BTreeSet<BlockKey>) -> CacheDigest {
    CacheDigest { count: keys.len() as u64, xor: keys.iter().fold(0, |xor, key| xor ^ key) }
}

/// Blocks of a reader that applies each change in turn; every change must be effective.
fn followed(changes: &[Change]) -> BTreeSet<BlockKey> {
    let mut keys = BTreeSet::new();
    for change in changes {
        match *change {
            Change::Stored(key) => assert!(keys.insert(key)),
            Change::Removed(key) => assert!(keys.remove(&key)),
            Change::Cleared => keys.clear(),
        }
    }
    keys
}

fn tokens_of(event: &KvEvent) -> &[u32] {
    match event {
        KvEvent::Stored(stored) => &stored.tokens,
        _ => panic!("it stores"),
    }
}

#[test]
fn recorded_events_become_the_keys_that_a_router_computes() {
    let (events, mirror, effects) = recorded("kv_0.32_int.frames.hex");
    let prompt = tokens_of(&events[0]);
    let (plain, salted) = (token_keys(KeyChain::new("", ""), prompt, 128), token_keys(KeyChain::new("", "tenant-a"), prompt, 128));
    let keys = keys(&mirror);
    assert!(plain.iter().chain(&salted).all(|key| keys.contains(key)));
    let continued: Vec<u32> = [prompt, tokens_of(&events[1])].concat();
    assert!(keys.contains(&token_keys(KeyChain::new("", ""), &continued, 128)[2]));
    assert_eq!((effects.orphans, effects.ignored, effects.malformed), (0, 0, 0));
    assert_eq!((mirror.block_size(), mirror.has_holes()), (128, false));
    assert_eq!(mirror.blocks(CacheTier::Gpu).digest(), digest_of(&keys));
}

#[test]
fn a_recording_with_evictions_adapters_and_resets_is_mirrored_throughout() {
    let (events, mirror, effects) = recorded("kv_0.32_bytes_cbor_bs32.frames.hex");
    assert_eq!((effects.orphans, effects.ignored, effects.malformed), (0, 0, 0));
    assert_eq!(followed(&effects.changes), keys(&mirror));
    let seen: BTreeSet<BlockKey> =
        effects.changes.iter().filter_map(|change| if let Change::Stored(key) = change { Some(*key) } else { None }).collect();
    let prompt = tokens_of(&events[0]);
    for (lora, salt) in [("", ""), ("", "s1"), ("ad1", "")] {
        assert!(token_keys(KeyChain::new(lora, salt), prompt, 32).iter().all(|key| seen.contains(key)), "{lora:?} {salt:?}");
    }
    // Each reset is in the recording; blocks stored since the last one are cached.
    let last_reset = events.iter().rposition(|event| *event == KvEvent::Cleared).unwrap();
    assert_eq!(keys(&mirror), keys(&applied(&events[last_reset..]).0));
}

#[test]
fn a_block_stored_twice_stays_until_both_copies_are_removed() {
    let (mut mirror, mut effects) = applied(&[stored(None, &[1, 2]), stored(Some(1), &[2]), removed(2)]);
    assert_eq!(mirror.blocks(CacheTier::Gpu).digest().count, 2);
    mirror.apply(&removed(2), &mut effects);
    assert_eq!(mirror.blocks(CacheTier::Gpu).digest().count, 1);
    assert_eq!(effects.changes.len(), 3);
}

#[test]
fn orphan_blocks_and_their_removals_are_ignored() {
    let (mirror, effects) = applied(&[stored(Some(9), &[1, 2]), stored(None, &[3]), removed(1), stored(Some(2), &[4])]);
    assert_eq!(effects.orphans, 3);
    assert_eq!(keys(&mirror), token_keys(KeyChain::new("", ""), &[3, 3], 2).into_iter().collect());
}

#[test]
fn two_hashes_of_equal_content_are_one_block() {
    // Load an adapter again from another path.
    let again = |hash| {
        let KvEvent::Stored(mut event) = stored(None, &[1]) else { panic!("it stores") };
        event.hashes = vec![hash];
        KvEvent::Stored(event)
    };
    let (mut mirror, mut effects) = applied(&[again(1), again(2), removed(1)]);
    assert_eq!(mirror.blocks(CacheTier::Gpu).digest().count, 1);
    mirror.apply(&removed(2), &mut effects);
    assert_eq!(mirror.blocks(CacheTier::Gpu).digest(), CacheDigest::default());
}

fn with(event: KvEvent, change: impl FnOnce(&mut BlocksStored)) -> KvEvent {
    let KvEvent::Stored(mut event) = event else { panic!("it stores") };
    change(&mut event);
    KvEvent::Stored(event)
}

fn text(text: &str) -> ExtraKey {
    ExtraKey::Text(text.to_owned())
}

fn keys_with(lora: Option<&str>, extra_keys: Vec<ExtraKey>) -> BTreeSet<BlockKey> {
    let event = with(stored(None, &[1, 2]), |event| {
        event.lora_name = lora.map(str::to_owned);
        event.extra_keys = extra_keys;
    });
    keys(&applied(&[event]).0)
}

#[test]
fn adapters_and_salts_are_found_in_every_form() {
    let expected = |lora, salt| token_keys(KeyChain::new(lora, salt), &[1, 1, 2, 2], 2).into_iter().collect::<BTreeSet<BlockKey>>();
    let tagged = || ExtraKey::List(vec![text("cache_salt"), text("s")]);
    let one = |extra| ExtraKey::List(vec![extra]);
    assert_eq!(keys_with(None, vec![]), expected("", ""));
    assert_eq!(keys_with(None, vec![ExtraKey::Null, ExtraKey::Null]), expected("", ""));
    assert_eq!(keys_with(None, vec![one(text("s")), ExtraKey::Null]), expected("", "s"));
    assert_eq!(keys_with(None, vec![one(tagged()), ExtraKey::Null]), expected("", "s"));
    assert_eq!(keys_with(Some("a"), vec![one(text("a")), one(text("a"))]), expected("a", ""));
    assert_eq!(keys_with(Some("a"), vec![ExtraKey::List(vec![text("a"), text("s")]), one(text("a"))]), expected("a", "s"));
    assert_eq!(keys_with(Some("a"), vec![ExtraKey::List(vec![text("a"), tagged()]), one(text("a"))]), expected("a", "s"));
    assert_eq!(keys_with(Some("a"), vec![ExtraKey::List(vec![text("a"), text("a")]), one(text("a"))]), expected("a", "a"));
    let numbered = with(stored(None, &[1, 2]), |event| event.lora_id = Some(1));
    assert!(keys(&applied(&[numbered]).0).is_disjoint(&expected("", "")));
}

#[test]
fn blocks_with_images_never_equal_plain_blocks() {
    let image = |id: &str, offset| ExtraKey::List(vec![ExtraKey::List(vec![text(id), ExtraKey::Integer(offset)])]);
    let plain = keys_with(None, vec![]);
    let first = keys_with(None, vec![image("cat", 0), ExtraKey::Null]);
    assert!(first.is_disjoint(&plain), "the second block continues the first");
    assert_eq!(first, keys_with(None, vec![image("cat", 0), ExtraKey::Null]));
    assert!(first.is_disjoint(&keys_with(None, vec![image("dog", 0), ExtraKey::Null])));
    assert!(first.is_disjoint(&keys_with(None, vec![image("cat", 1), ExtraKey::Null])));
    let second = keys_with(None, vec![ExtraKey::Null, image("cat", 0)]);
    assert_eq!(second.intersection(&plain).count(), 1);
    let salted_image = keys_with(None, vec![ExtraKey::List(vec![image("cat", 0), text("s")]), ExtraKey::Null]);
    assert!(salted_image.is_disjoint(&first) && salted_image.is_disjoint(&keys_with(None, vec![ExtraKey::List(vec![text("s")])])));
}

fn in_group(event: KvEvent, index: u32, kind: &str) -> KvEvent {
    with(event, |event| (event.group, event.kind) = (Some(index), Some(kind.to_owned())))
}

#[test]
fn the_full_attention_group_is_mirrored_among_several() {
    let full = || in_group(stored(None, &[1, 2]), 1, "full_attention");
    let window = || in_group(stored(None, &[1, 2, 3]), 0, "sliding_window");
    let state = || in_group(stored(None, &[4]), 2, "mamba");
    for order in [[full(), window(), state()], [window(), full(), state()], [state(), window(), full()]] {
        let (mut mirror, mut effects) = applied(&order);
        assert_eq!((mirror.blocks(CacheTier::Gpu).digest().count, mirror.has_holes()), (2, false), "{order:?}");
        let of_window = KvEvent::Removed(BlocksRemoved { hashes: vec![1], medium: None, group: Some(0) });
        mirror.apply(&of_window, &mut effects);
        assert_eq!(mirror.blocks(CacheTier::Gpu).digest().count, 2);
        assert_eq!(followed(&effects.changes), keys(&mirror));
    }
    let (mirror, _) = applied(&[in_group(stored(None, &[1]), 0, "mla_attention")]);
    assert_eq!(mirror.blocks(CacheTier::Gpu).digest().count, 1);
}

#[test]
fn a_model_with_only_sliding_windows_may_have_holes() {
    let (mirror, effects) = applied(&[in_group(stored(None, &[1, 2]), 0, "sliding_window"), removed(1)]);
    assert_eq!((mirror.blocks(CacheTier::Gpu).digest().count, mirror.has_holes()), (1, true));
    assert_eq!(effects.ignored, 0);
}

#[test]
fn blocks_in_other_memory_than_the_gpus_and_the_hosts_are_ignored() {
    let on = |medium: &str| with(stored(None, &[1]), |event| event.medium = Some(medium.to_owned()));
    let off = |medium: &str| KvEvent::Removed(BlocksRemoved { hashes: vec![1], medium: Some(medium.to_owned()), group: None });
    let (mirror, effects) = applied(&[on("REMOTE"), on("DISK"), on("GPU"), off("CPU"), off("STORAGE")]);
    assert_eq!((mirror.blocks(CacheTier::Gpu).digest().count, effects.ignored), (1, 3));
}

#[test]
fn a_contradictory_event_changes_nothing() {
    let (mirror, effects) = applied(&[
        with(stored(None, &[1, 2]), |event| event.tokens.truncate(3)),
        with(stored(None, &[1]), |event| event.block_size = 0),
        with(stored(None, &[1]), |event| event.tokens.extend([1, 1])),
    ]);
    assert_eq!((mirror.blocks(CacheTier::Gpu).digest().count, effects.malformed, effects.ignored), (0, 2, 1));
    // Tokens after the last whole block belong to no block.
    let (mirror, _) = applied(&[with(stored(None, &[1]), |event| event.tokens.push(9))]);
    assert_eq!(mirror.blocks(CacheTier::Gpu).digest().count, 1);
}

#[test]
fn blocks_reported_again_are_removed_with_their_one_copy() {
    // `kv_cache_report_mode` makes an engine report the cached blocks of a prompt again, from the
    // first one on.
    let (mirror, _) = applied(&[stored(None, &[1, 2, 3]), stored(None, &[1, 2, 3]), removed(3), removed(2), removed(1)]);
    assert_eq!(mirror.blocks(CacheTier::Gpu).digest(), CacheDigest::default());
}

#[test]
fn a_partial_orphan_block_does_not_decide_the_block_size() {
    let odd = with(stored(Some(99), &[7]), |event| {
        event.block_size = 1;
        event.tokens.truncate(1);
    });
    let (mirror, effects) = applied(&[odd, stored(None, &[1, 2])]);
    assert_eq!((mirror.blocks(CacheTier::Gpu).digest().count, effects.orphans, effects.ignored), (2, 1, 0));
}

#[test]
fn several_groups_without_a_kind_may_have_holes() {
    let in_unnamed = |group| with(stored(None, &[1]), |event| event.group = Some(group));
    assert!(!applied(&[in_unnamed(0), in_unnamed(0)]).0.has_holes());
    assert!(applied(&[in_unnamed(0), in_unnamed(1)]).0.has_holes());
}

/// Steps of an engine with blocks 1..=12, each stored after the block with half its number.
#[derive(Debug, Clone)]
enum Step {
    Store(u64),
    Remove(u64),
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![8 => (1_u64..=12).prop_map(Step::Store), 8 => (1_u64..=12).prop_map(Step::Remove), 1 => Just(Step::Clear)]
}

fn parent(block: u64) -> Option<u64> {
    Some(block / 2).filter(|&parent| parent > 0)
}

/// Key of a block, found by walking to it from the beginning.
fn key_of(block: u64) -> BlockKey {
    let mut chain = parent(block).map_or(KeyChain::new("", ""), |parent| KeyChain::resume(key_of(parent)));
    chain.push(&[u32::try_from(block).unwrap(); 2])
}

proptest! {
    #[test]
    fn any_history_yields_the_blocks_of_a_naive_count(steps in prop::collection::vec(step(), 0..120)) {
        let (mut mirror, mut effects) = (BlockMirror::new(), Effects::default());
        let mut copies: BTreeMap<u64, u32> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Store(block) => {
                    mirror.apply(&stored(parent(block), &[block]), &mut effects);
                    // A first block reported again may not be a second copy.
                    let is_told_again = parent(block).is_none() && copies.contains_key(&block);
                    if !is_told_again && parent(block).is_none_or(|parent| copies.contains_key(&parent)) {
                        *copies.entry(block).or_default() += 1;
                    }
                }
                Step::Remove(block) => {
                    mirror.apply(&removed(block), &mut effects);
                    if let Some(count) = copies.get_mut(&block) {
                        *count -= 1;
                    }
                    copies.retain(|_, count| *count > 0);
                }
                Step::Clear => {
                    mirror.apply(&KvEvent::Cleared, &mut effects);
                    copies.clear();
                }
            }
            let expected: BTreeSet<BlockKey> = copies.keys().map(|&block| key_of(block)).collect();
            prop_assert_eq!(keys(&mirror), expected.clone());
            prop_assert_eq!(mirror.blocks(CacheTier::Gpu).digest(), digest_of(&expected));
        }
        prop_assert_eq!(followed(&effects.changes), keys(&mirror));
    }
}
