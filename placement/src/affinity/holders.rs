//! Set of slots that hold one block, in eight bytes.
//!
//! Very few replicas hold most blocks, and many hold shared prefixes. Up to three slots are written
//! in the eight bytes themselves, more of them as a bitmask in the [`Masks`] of the shard. For
//! [`CacheIndex`](super::CacheIndex) only.

use super::ReplicaSlot;

/// Highest slot number: three of them, each plus one because 0 means none, fit into 63 bits.
pub(super) const MAX_SLOT: u32 = (1 << FIELD_BITS) - 2;

const FIELD_BITS: u32 = 21;
const FIELDS: u32 = 3;
const FIELD: u64 = (1 << FIELD_BITS) - 1;
const MASK_FLAG: u64 = 1 << 63;

/// A set of slots. The top bit says whether the rest is the number of a mask or three slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Holders(u64);

/// Unpacked [`Holders`].
enum HoldersForm {
    Few([u32; FIELDS as usize]),
    Mask(u32),
}

impl Holders {
    fn from_fields(fields: [u32; FIELDS as usize]) -> Self {
        Self(fields.iter().rev().fold(0, |packed, field| (packed << FIELD_BITS) | u64::from(*field)))
    }

    fn from_mask(mask: u32) -> Self {
        Self(MASK_FLAG | u64::from(mask))
    }

    #[expect(clippy::cast_possible_truncation, reason = "a field has 21 bits, and a mask was a u32 before it was packed")]
    fn unpack(self) -> HoldersForm {
        if self.0 & MASK_FLAG != 0 {
            return HoldersForm::Mask(self.0 as u32);
        }
        HoldersForm::Few([0, 1, 2].map(|field| ((self.0 >> (field * FIELD_BITS)) & FIELD) as u32))
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Adds a slot; `false` if it was already there.
    pub(super) fn insert(&mut self, slot: ReplicaSlot, masks: &mut Masks) -> bool {
        match self.unpack() {
            HoldersForm::Mask(mask) => masks.insert(mask, slot),
            HoldersForm::Few(fields) if fields.contains(&(slot.0 + 1)) => false,
            HoldersForm::Few(mut fields) => {
                if let Some(free) = fields.iter_mut().find(|field| **field == 0) {
                    *free = slot.0 + 1;
                    *self = Self::from_fields(fields);
                } else {
                    let mask = masks.take(slot);
                    masks.insert(mask, slot);
                    for field in fields {
                        masks.insert(mask, ReplicaSlot(field - 1));
                    }
                    *self = Self::from_mask(mask);
                }
                true
            }
        }
    }

    /// Removes a slot; `false` if it was not there.
    ///
    /// A mask is given back when two slots are left, not three, so that a block that comes and goes
    /// on a fourth replica does not change its form each time.
    pub(super) fn remove(&mut self, slot: ReplicaSlot, masks: &mut Masks) -> bool {
        match self.unpack() {
            HoldersForm::Few(mut fields) => {
                let Some(field) = fields.iter_mut().find(|field| **field == slot.0 + 1) else { return false };
                *field = 0;
                *self = Self::from_fields(fields);
            }
            HoldersForm::Mask(mask) => {
                if !masks.remove(mask, slot) {
                    return false;
                }
                if masks.words(mask).iter().map(|word| word.count_ones()).sum::<u32>() < FIELDS {
                    let mut fields = [0; FIELDS as usize];
                    for (field, left) in fields.iter_mut().zip(set_bits(masks.words(mask))) {
                        *field = left + 1;
                    }
                    masks.give_back(mask);
                    *self = Self::from_fields(fields);
                }
            }
        }
        true
    }

    /// Writes the slots that are also in `among` into `out`, which has the same length.
    ///
    /// Higher slots are ignored.
    pub(super) fn intersect(self, masks: &Masks, among: &[u64], out: &mut [u64]) {
        out.fill(0);
        match self.unpack() {
            HoldersForm::Few(fields) => {
                for field in fields.into_iter().filter(|field| *field != 0) {
                    let (word, bit) = bit_of(ReplicaSlot(field - 1));
                    if let (Some(out), Some(among)) = (out.get_mut(word), among.get(word)) {
                        *out |= bit & among;
                    }
                }
            }
            HoldersForm::Mask(mask) => {
                for ((out, among), held) in out.iter_mut().zip(among).zip(masks.words(mask)) {
                    *out = among & held;
                }
            }
        }
    }
}

/// Word and bit of a slot in a bitmask.
pub(super) fn bit_of(slot: ReplicaSlot) -> (usize, u64) {
    (slot.index() / 64, 1 << (slot.0 % 64))
}

/// Numbers of the set bits.
pub(super) fn set_bits(words: &[u64]) -> impl Iterator<Item = u32> + '_ {
    words.iter().zip(0u32..).flat_map(|(&word, number)| {
        let mut rest = word;
        std::iter::from_fn(move || {
            let bit = (rest != 0).then(|| number * 64 + rest.trailing_zeros());
            rest &= rest.wrapping_sub(1);
            bit
        })
    })
}

/// Bitmasks of one width, in one allocation.
///
/// The width is that of the highest slot so far: 8 bytes for each 64 slots.
#[derive(Debug, Default)]
pub(super) struct Masks {
    words: Vec<u64>,
    width: usize,
    free: Vec<u32>,
}

impl Masks {
    fn words(&self, mask: u32) -> &[u64] {
        let start = mask as usize * self.width;
        &self.words[start..start + self.width]
    }

    fn word(&mut self, mask: u32, word: usize) -> &mut u64 {
        &mut self.words[mask as usize * self.width + word]
    }

    fn insert(&mut self, mask: u32, slot: ReplicaSlot) -> bool {
        let (word, bit) = bit_of(slot);
        self.widen(word + 1);
        let word = self.word(mask, word);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    fn remove(&mut self, mask: u32, slot: ReplicaSlot) -> bool {
        let (word, bit) = bit_of(slot);
        if word >= self.width {
            return false;
        }
        let word = self.word(mask, word);
        let had = *word & bit != 0;
        *word &= !bit;
        had
    }

    /// Takes an empty mask with room for this slot.
    fn take(&mut self, slot: ReplicaSlot) -> u32 {
        self.widen(bit_of(slot).0 + 1);
        if let Some(mask) = self.free.pop() {
            return mask;
        }
        let mask = u32::try_from(self.words.len() / self.width).expect("a shard with 2^32 masks would be larger than any memory");
        if self.words.capacity() < self.words.len() + self.width {
            // Grow by a quarter instead of doubling: these masks are most of the memory when many
            // replicas share a prefix.
            self.words.reserve_exact((self.words.len() / 4).next_multiple_of(self.width).max(4 * self.width));
        }
        self.words.resize(self.words.len() + self.width, 0);
        mask
    }

    fn give_back(&mut self, mask: u32) {
        let start = mask as usize * self.width;
        self.words[start..start + self.width].fill(0);
        self.free.push(mask);
        if self.free.len() * self.width == self.words.len() {
            *self = Self { width: self.width, ..Self::default() };
        }
    }

    fn widen(&mut self, width: usize) {
        if width <= self.width {
            return;
        }
        let mut words = Vec::with_capacity(self.words.len() / self.width.max(1) * width);
        for mask in self.words.chunks_exact(self.width.max(1)) {
            words.extend_from_slice(mask);
            words.resize(words.len() + width - self.width, 0);
        }
        self.words = words;
        self.width = width;
    }

    pub(super) fn bytes(&self) -> usize {
        self.words.capacity() * size_of::<u64>() + self.free.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests;
