//! What a replica probably holds whose engine tells nothing of its cache: the prompts that this router sent there, as far as they fit.
//!
//! It knows nothing of other routers' requests nor of what the engine generates, and forgets in the order of use as engines do. What the
//! engine says of cached tokens in its answers corrects it. The router's dispatch writes it; a seat's lock is held for one chain.

mod recency;

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use self::recency::Recency;
use super::Seat;
use crate::keys::Key;

/// For each replica the blocks that it was sent lately. About 100 bytes for each block of a replica's capacity at worst.
#[derive(Debug, Default)]
pub struct Guess {
    seats: RwLock<Seats>,
}

#[derive(Debug, Default)]
struct Seats {
    known: Vec<Option<Arc<Mutex<Recency>>>>,
    free: VecDeque<Seat>,
}

impl Guess {
    /// A new life of a replica whose cache has room for so many blocks; nothing is there.
    ///
    /// # Panics
    /// When four billion seats are open.
    pub fn open(&self, capacity_blocks: usize) -> Seat {
        let mut seats = self.seats.write();
        let seat = seats.free.pop_front().unwrap_or_else(|| {
            seats.known.push(None);
            Seat(u32::try_from(seats.known.len() - 1).expect("four billion engines at once: memory ends before"))
        });
        seats.known[seat.index()] = Some(Arc::new(Mutex::new(Recency::new(capacity_blocks))));
        seat
    }

    /// Ends a life. Its seat is used again: nobody may use it for this life any more.
    pub fn close(&self, seat: Seat) {
        let mut seats = self.seats.write();
        if seats.known.get_mut(seat.index()).and_then(Option::take).is_some() {
            seats.free.push_back(seat);
        }
    }

    /// A prompt has been sent there: it will be cached, at the expense of what has not been used for longest.
    pub fn sent(&self, seat: Seat, keys: &[Key]) {
        if let Some(blocks) = self.blocks(seat) {
            blocks.lock().touch(keys);
        }
    }

    /// The engine has said that only so many leading blocks of this prompt were cached: all that follows on them is forgotten, also in
    /// other chains. The engine has computed this prompt anew since; when its answer has come, say so with [`sent`](Self::sent).
    pub fn corrected(&self, seat: Seat, keys: &[Key], cached_blocks: u32) {
        if let Some(blocks) = self.blocks(seat) {
            blocks.lock().forget_after(keys, cached_blocks as usize);
        }
    }

    /// The leading blocks of a chain that each seat probably holds; 0 for a seat that is not open.
    #[must_use]
    pub fn matched(&self, keys: &[Key], seats: &[Seat]) -> Vec<u32> {
        let known = self.seats.read();
        let matched = |seat: &Seat| known.known.get(seat.index()).and_then(Option::as_ref).map_or(0, |blocks| blocks.lock().matched(keys));
        seats.iter().map(|seat| u32::try_from(matched(seat)).unwrap_or(u32::MAX)).collect()
    }

    fn blocks(&self, seat: Seat) -> Option<Arc<Mutex<Recency>>> {
        self.seats.read().known.get(seat.index()).cloned().flatten()
    }
}

#[cfg(test)]
mod tests;
