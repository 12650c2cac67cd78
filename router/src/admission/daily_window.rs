//! The use of the last 24 hours, in quarters of an hour: a daily budget that nothing refills early.

use serde::{Deserialize, Serialize};

const SLOT_MS: u64 = 15 * 60 * 1000;

const SLOTS: usize = 96;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "WindowRecord", into = "WindowRecord")]
pub(super) struct DailyWindow {
    /// Indexed by the number of the quarter of an hour, modulo [`SLOTS`].
    slots: [u64; SLOTS],
    newest_slot: u64,
    sum: u64,
    /// The part that requests in flight have reserved.
    reserved: u64,
}

/// A window on its way to another router.
#[derive(Serialize, Deserialize)]
struct WindowRecord {
    slots: Vec<u64>,
    newest_slot: u64,
    reserved: u64,
}

impl From<DailyWindow> for WindowRecord {
    fn from(window: DailyWindow) -> Self {
        Self { slots: window.slots.to_vec(), newest_slot: window.newest_slot, reserved: window.reserved }
    }
}

impl TryFrom<WindowRecord> for DailyWindow {
    type Error = &'static str;

    fn try_from(record: WindowRecord) -> Result<Self, Self::Error> {
        let slots = <[u64; SLOTS]>::try_from(record.slots).map_err(|_| "a day has 96 quarters of an hour")?;
        let sum = slots.iter().try_fold(0_u64, |sum, slot| sum.checked_add(*slot)).ok_or("more was used in a day than can be counted")?;
        Ok(Self { slots, newest_slot: record.newest_slot, sum, reserved: record.reserved })
    }
}

impl Default for DailyWindow {
    fn default() -> Self {
        Self { slots: [0; SLOTS], newest_slot: 0, sum: 0, reserved: 0 }
    }
}

impl DailyWindow {
    /// Milliseconds until `amount` fits into `limit`; 0 if it fits now, and a day if it never does.
    pub(super) fn wait_ms(&mut self, limit: u64, amount: u64, now: u64) -> u64 {
        self.advance(now);
        let mut sum = self.sum;
        if sum.saturating_add(amount) <= limit {
            return 0;
        }
        // A slot is over when a whole day has passed since it began.
        for age in (0..SLOTS as u64).rev() {
            let Some(number) = self.newest_slot.checked_sub(age) else { continue };
            sum -= self.slots[slot_index(number)];
            if sum.saturating_add(amount) <= limit {
                return ((number + SLOTS as u64) * SLOT_MS).saturating_sub(now);
            }
        }
        SLOT_MS * SLOTS as u64
    }

    /// Counts `amount` as used by a request in flight, until `release`.
    pub(super) fn reserve(&mut self, amount: u64, now: u64) {
        self.add(amount, now);
        self.reserved = self.reserved.saturating_add(amount);
    }

    /// Releases a request that has ended and was last counted with `amount`.
    pub(super) fn release(&mut self, amount: u64) {
        self.reserved = self.reserved.saturating_sub(amount);
    }

    /// The amount reserved by requests in flight, some of which they may return when they end.
    pub(super) fn reserved(&self) -> u64 {
        self.reserved.min(self.sum)
    }

    /// Counts `amount` as used.
    fn add(&mut self, amount: u64, now: u64) {
        self.advance(now);
        let newest = &mut self.slots[slot_index(self.newest_slot)];
        // Clamp, so that the sum, which counts the same, cannot overflow before its parts do.
        let amount = amount.min(u64::MAX - self.sum);
        *newest += amount;
        self.sum += amount;
    }

    /// Replaces the amount that a request in flight `reserved` at `then` by the amount `used`.
    pub(super) fn reconcile(&mut self, then: u64, reserved: u64, used: u64, now: u64) {
        self.add(used.saturating_sub(reserved), now);
        self.reserved = self.reserved.saturating_sub(reserved).saturating_add(used);
        if self.newest_slot < then / SLOT_MS + SLOTS as u64 {
            let counted = &mut self.slots[slot_index(then / SLOT_MS)];
            let less = reserved.saturating_sub(used).min(*counted);
            *counted -= less;
            self.sum -= less;
        }
    }

    /// Takes over the other window's larger counts.
    pub(super) fn merge(&mut self, before: &Self, now: u64) {
        self.advance(now);
        for number in before.newest_slot.saturating_sub(SLOTS as u64 - 1)..=before.newest_slot {
            if number + SLOTS as u64 > self.newest_slot {
                let counted = &mut self.slots[slot_index(number)];
                let more = before.slots[slot_index(number)].saturating_sub(*counted).min(u64::MAX - self.sum);
                *counted += more;
                self.sum += more;
            }
        }
    }

    /// The amount that may still be used, and the milliseconds until the whole limit is free again.
    pub(super) fn remaining(&mut self, limit: u64, now: u64) -> (u64, u64) {
        let reset = if self.is_empty(now) { 0 } else { self.wait_ms(self.sum, self.sum, now) };
        (limit.saturating_sub(self.sum), reset)
    }

    pub(super) fn is_empty(&mut self, now: u64) -> bool {
        self.advance(now);
        self.sum == 0
    }

    fn advance(&mut self, now: u64) {
        let number = now / SLOT_MS;
        for gone in self.newest_slot + 1..=number.min(self.newest_slot + SLOTS as u64) {
            self.sum -= std::mem::take(&mut self.slots[slot_index(gone)]);
        }
        self.newest_slot = self.newest_slot.max(number);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a remainder by 96")]
fn slot_index(number: u64) -> usize {
    (number % SLOTS as u64) as usize
}
