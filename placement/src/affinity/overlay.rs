//! What requests in flight will leave in caches: a prompt that was sent to a replica is as good as cached there, long before its engine
//! says so. Without it, a burst of equal prompts is spread over replicas that each compute it anew.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::{Holes, Seat};
use crate::keys::Key;

/// Requests in flight that are compared with a prompt whose first block they share, the newest first. Where that block is a system prompt
/// of thousands of requests, an older one is likely to be in the index by now.
const COMPARED: usize = 256;

/// Prompts of requests in flight, by the key of their first block and the order in which they came. As large as what is in flight: the
/// bound is that of admission.
#[derive(Debug, Default)]
pub struct Overlay {
    prompts: RwLock<BTreeMap<(Key, u64), Prompt>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Prompt {
    seat: Seat,
    keys: Arc<[Key]>,
}

/// A prompt's place in the overlay. Drop it when the prompt has been computed and its blocks are reported, and when the request fails or
/// its replica's life ends: a seat that is used again must find nothing here.
#[derive(Debug)]
#[must_use = "the prompt leaves the overlay when this is dropped"]
pub struct Pledge {
    overlay: Arc<Overlay>,
    place: Option<(Key, u64)>,
}

impl Overlay {
    /// A prompt has been sent to a replica.
    pub fn enter(self: &Arc<Self>, seat: Seat, keys: Arc<[Key]>) -> Pledge {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let place = keys.first().map(|first| (*first, number));
        if let Some(place) = place {
            self.prompts.write().insert(place, Prompt { seat, keys });
        }
        Pledge { overlay: Arc::clone(self), place }
    }

    /// Raises `matched` (in the order of `seats`, which are all different) where a request in flight shares more with this chain than what
    /// is cached. Compares with the 256 newest requests that share the first block.
    pub fn raise(&self, keys: &[Key], seats: &[(Seat, Holes)], matched: &mut [u32]) {
        let Some(first) = keys.first() else { return };
        let prompts = self.prompts.read();
        let mut newest = prompts.range((Bound::Included((*first, 0)), Bound::Included((*first, u64::MAX)))).rev().take(COMPARED).peekable();
        if newest.peek().is_none() {
            return;
        }
        let mut numbers = vec![usize::MAX; seats.iter().map(|(seat, _)| seat.index() + 1).max().unwrap_or(0)];
        for (number, (seat, _)) in seats.iter().enumerate() {
            numbers[seat.index()] = number;
        }
        for (_, prompt) in newest {
            let matched = numbers.get(prompt.seat.index()).and_then(|number| matched.get_mut(*number));
            if let Some(matched) = matched {
                *matched = u32::try_from(common(keys, &prompt.keys, *matched as usize)).unwrap_or(u32::MAX);
            }
        }
    }

    /// Prompts in flight.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prompts.read().len()
    }

    /// None is in flight.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The blocks that two chains have in common, or `known` if that is more. Equal keys mean equal beginnings, so one comparison beyond
/// `known` tells whether there is more, and the end is bisected.
fn common(left: &[Key], right: &[Key], known: usize) -> usize {
    let most = left.len().min(right.len());
    if known >= most || left[known] != right[known] {
        return known;
    }
    let (mut equal, mut end) = (known + 1, most);
    while equal < end {
        let middle = equal.midpoint(end);
        if left[middle] == right[middle] {
            equal = middle + 1;
        } else {
            end = middle;
        }
    }
    equal
}

impl Drop for Pledge {
    fn drop(&mut self) {
        if let Some(place) = &self.place {
            self.overlay.prompts.write().remove(place);
        }
    }
}

#[cfg(test)]
mod tests;
