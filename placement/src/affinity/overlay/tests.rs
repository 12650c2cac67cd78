use super::*;
use crate::affinity::CacheIndex;

fn chain(shared: u64, own: u64, tail: u64) -> Arc<[BlockKey]> {
    (0..shared).chain((0..own).map(|block| tail * 1000 + block)).collect()
}

fn raise(overlay: &InFlightOverlay, keys: &[BlockKey], slots: &[(ReplicaSlot, ChainGaps)], matched: &mut [u32]) {
    overlay.raise_matches(&PromptToMatch::whole(keys), slots, matched);
}

fn slots(count: usize) -> Vec<(ReplicaSlot, ChainGaps)> {
    let index = CacheIndex::new();
    (0..count).map(|_| (index.open(), ChainGaps::None)).collect()
}

#[test]
fn a_prompt_in_flights_common_prefix_counts_as_cached() {
    let (overlay, slots) = (Arc::new(InFlightOverlay::default()), slots(3));
    let _first = overlay.add_placed(slots[0].0, PromptKeys::whole(chain(10, 20, 1)));
    let _second = overlay.add_placed(slots[1].0, PromptKeys::whole(chain(10, 20, 2)));
    let mut matched = [0, 0, 0];
    raise(&overlay, &chain(10, 20, 2), &slots, &mut matched);
    assert_eq!(matched, [10, 30, 0]);
    let mut matched = [0, 0, 0];
    raise(&overlay, &chain(10, 0, 0), &slots, &mut matched);
    assert_eq!(matched, [10, 10, 0]);
}

#[test]
fn the_overlay_never_lowers_a_match() {
    let (overlay, slots) = (Arc::new(InFlightOverlay::default()), slots(1));
    let _pledge = overlay.add_placed(slots[0].0, PromptKeys::whole(chain(10, 20, 1)));
    for (cached, expected) in [(0, 10), (9, 10), (10, 10), (25, 25), (30, 30), (31, 31)] {
        let mut matched = [cached];
        raise(&overlay, &chain(10, 20, 2), &slots, &mut matched);
        assert_eq!(matched, [expected]);
    }
}

#[test]
fn the_longest_prompt_in_flight_on_a_replica_counts() {
    let (overlay, slots) = (Arc::new(InFlightOverlay::default()), slots(1));
    let pledges: Vec<InFlightBlocks> =
        [5, 17, 3].map(|length| overlay.add_placed(slots[0].0, PromptKeys::whole(chain(length, 4, length)))).into();
    let mut matched = [0];
    raise(&overlay, &chain(30, 0, 0), &slots, &mut matched);
    assert_eq!(matched, [17]);
    drop(pledges);
}

#[test]
fn a_prompt_leaves_when_its_guard_is_dropped() {
    let (overlay, slots) = (Arc::new(InFlightOverlay::default()), slots(1));
    let keys = chain(10, 0, 0);
    let (one, same) = (
        overlay.add_placed(slots[0].0, PromptKeys::whole(Arc::clone(&keys))),
        overlay.add_placed(slots[0].0, PromptKeys::whole(Arc::clone(&keys))),
    );
    let raised = || {
        let mut matched = [0];
        raise(&overlay, &keys, &slots, &mut matched);
        matched[0]
    };
    drop(one);
    assert_eq!(raised(), 10, "the other request is still in flight");
    drop(same);
    assert_eq!(raised(), 0);
    assert!(overlay.is_empty());
}

#[test]
fn unrelated_prompts_and_replicas_do_not_change_a_match() {
    let (overlay, slots) = (Arc::new(InFlightOverlay::default()), slots(3));
    let _empty = overlay.add_placed(slots[0].0, PromptKeys::whole(Arc::from([])));
    let _other = overlay.add_placed(slots[2].0, PromptKeys::whole(chain(10, 0, 0)));
    assert_eq!(overlay.len(), 1);
    let mut matched = [0, 0];
    raise(&overlay, &chain(10, 0, 0), &slots[..2], &mut matched);
    raise(&overlay, &[], &slots[..2], &mut matched);
    assert_eq!(matched, [0, 0]);
}

#[test]
fn only_the_newest_of_many_equal_prefixes_are_compared() {
    let (overlay, slots) = (Arc::new(InFlightOverlay::default()), slots(2));
    let _oldest = overlay.add_placed(slots[0].0, PromptKeys::whole(chain(20, 0, 0)));
    let _rest: Vec<InFlightBlocks> =
        (0..300).map(|tail| overlay.add_placed(slots[1].0, PromptKeys::whole(chain(5, 1, tail + 1)))).collect();
    let mut matched = [0, 0];
    raise(&overlay, &chain(20, 0, 0), &slots, &mut matched);
    assert_eq!(matched, [0, 5]);
}

#[test]
fn a_partly_tokenized_prompt_is_compared_by_text_beyond() {
    let (overlay, slots) = (Arc::new(InFlightOverlay::default()), slots(2));
    let (text, other) = (chain(20, 20, 1), chain(30, 10, 2));
    let _pledge = overlay.add_placed(slots[0].0, PromptKeys { keys: chain(4, 0, 0), text: text.clone() });
    let matched = |keys: &[BlockKey], text: &[BlockKey], blocks: u32| {
        let mut matched = [0, 0];
        overlay.raise_matches(&PromptToMatch { keys, blocks, text }, &slots, &mut matched);
        matched
    };
    assert_eq!(matched(&chain(4, 0, 0), &text, 160), [160, 0], "all of it");
    assert_eq!(matched(&chain(100, 60, 0), &other, 160), [80, 0], "half of its text is half of its tokens");
    assert_eq!(matched(&chain(4, 2, 9), &chain(0, 40, 9), 160), [4, 0], "its tokens say more than its text");
    assert_eq!(matched(&chain(3, 2, 9), &text, 160), [3, 0], "the same text after other tokens is another prompt");
    assert_eq!(matched(&chain(4, 0, 0), &[], 4), [4, 0]);
}

#[test]
fn tokenizing_goes_on_while_a_prompt_in_flight_matches_further() {
    let overlay = Arc::new(InFlightOverlay::default());
    let slot = slots(1)[0].0;
    let beyond = |keys: &[BlockKey], text: &[BlockKey], read: usize| {
        overlay.goes_beyond(&PromptToMatch { text, ..PromptToMatch::whole(keys) }, read)
    };
    assert!(!beyond(&chain(4, 0, 0), &[], 0), "nothing is in flight");
    let _read = overlay.add_placed(slot, PromptKeys::whole(chain(10, 0, 0)));
    assert!(beyond(&chain(9, 0, 0), &[], 0));
    assert!(!beyond(&chain(10, 0, 0), &[], 0) && !beyond(&chain(8, 1, 7), &[], 0));
    let begun = overlay.add_placed(slot, PromptKeys { keys: chain(10, 0, 0), text: chain(30, 0, 0) });
    assert!(beyond(&chain(12, 0, 0), &chain(20, 10, 3), 19));
    assert!(!beyond(&chain(12, 0, 0), &chain(20, 10, 3), 20), "from there on it is another text");
    assert!(!beyond(&[], &chain(20, 10, 3), 0));
    assert!(!beyond(&chain(5, 7, 8), &chain(20, 10, 3), 19), "its tokens are others already");
    assert!(overlay.has_partly_read());
    drop(begun);
    assert!(!overlay.has_partly_read());
}

#[test]
fn an_unplaced_prompt_is_seen_but_matched_by_no_replica() {
    let (overlay, slots) = (Arc::new(InFlightOverlay::default()), slots(1));
    let announced = overlay.add_unplaced(PromptKeys { keys: chain(4, 0, 0), text: chain(30, 0, 0) });
    let ours = PromptToMatch { keys: &chain(4, 0, 0), blocks: 9, text: &chain(30, 0, 0) };
    let mut matched = [0];
    overlay.raise_matches(&ours, &slots, &mut matched);
    assert_eq!((matched, overlay.goes_beyond(&ours, 5)), ([0], true));
    drop(announced);
    assert!(!overlay.goes_beyond(&ours, 5));
}
