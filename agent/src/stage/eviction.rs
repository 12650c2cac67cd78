//! Which staged models go to make room for another one. Pure.

use std::time::SystemTime;

/// A staged model beside the one that needs room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Neighbor {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) last_used: SystemTime,
}

/// Room for a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// Bytes of the model, and those of them that are still to be written.
    pub(super) bytes: u64,
    pub(super) missing: u64,
    /// Bytes that all staged models may have.
    pub(super) bound: u64,
    pub(super) free: u64,
}

impl Room {
    /// How many bytes have to go, where the others have so many.
    fn lack(self, others: u64) -> u64 {
        let beyond_bound = (others + self.bytes).saturating_sub(self.bound);
        beyond_bound.max(self.missing.saturating_sub(self.free))
    }
}

/// Names of those that are not in use and go, the least recently used first.
///
/// `in_use` are bytes of models that have to stay. `Err` has the bytes that even then are missing.
pub(super) fn choose_evictions(mut idle: Vec<Neighbor>, in_use: u64, room: Room) -> Result<Vec<String>, u64> {
    idle.sort_by(|one, other| one.last_used.cmp(&other.last_used).then_with(|| one.name.cmp(&other.name)));
    let mut lack = room.lack(in_use + idle.iter().map(|neighbor| neighbor.bytes).sum::<u64>());
    let mut gone = Vec::new();
    for neighbor in idle {
        if lack == 0 {
            break;
        }
        lack = lack.saturating_sub(neighbor.bytes);
        gone.push(neighbor.name);
    }
    if lack == 0 { Ok(gone) } else { Err(lack) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn idle(name: &str, bytes: u64, used: u64) -> Neighbor {
        Neighbor { name: name.into(), bytes, last_used: SystemTime::UNIX_EPOCH + Duration::from_secs(used) }
    }

    fn neighbors() -> Vec<Neighbor> {
        vec![idle("new", 30, 9), idle("old", 30, 1), idle("older", 10, 0)]
    }

    #[test]
    fn what_fits_evicts_nothing() {
        let room = Room { bytes: 20, missing: 20, bound: 100, free: 50 };
        assert_eq!(choose_evictions(neighbors(), 0, room), Ok(Vec::new()));
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let room = Room { bytes: 50, missing: 50, bound: 100, free: 500 };
        assert_eq!(choose_evictions(neighbors(), 0, room), Ok(vec!["older".into(), "old".into()]));
        let full = Room { bytes: 20, missing: 20, bound: 100, free: 15 };
        assert_eq!(choose_evictions(neighbors(), 0, full), Ok(vec!["older".into()]), "the disk is the limit");
    }

    #[test]
    fn what_is_in_use_stays_even_if_there_is_no_room() {
        let room = Room { bytes: 50, missing: 50, bound: 100, free: 500 };
        assert_eq!(choose_evictions(neighbors(), 60, room), Err(10));
    }

    #[test]
    fn what_is_copied_already_needs_no_more_room() {
        let room = Room { bytes: 50, missing: 5, bound: 200, free: 6 };
        assert_eq!(choose_evictions(neighbors(), 0, room), Ok(Vec::new()));
    }
}
