//! Sleep state of the engine and its memory, which `/sleep` and `/wake_up` change and
//! `/is_sleeping` reports.
//!
//! The stepping task gets separate commands.

use parking_lot::Mutex;

/// Memory pools that vLLM puts to sleep and wakes by name.
const POOLS: [&str; 2] = ["weights", "kv_cache"];

/// State of one engine's memory.
#[derive(Debug, Default)]
pub(crate) struct SleepState {
    state: Mutex<SleepFlags>,
}

#[derive(Debug, Default, Clone, Copy)]
struct SleepFlags {
    /// Level of the sleep; 0 when awake.
    level: u8,
    /// Pools that sleep, in the order of `POOLS`.
    asleep: [bool; POOLS.len()],
    /// The weights are lost: level 2 forgets them until they are read again.
    weights_lost: bool,
}

impl SleepState {
    /// Puts everything to sleep at this level, 1 or 2.
    pub(crate) fn sleep(&self, level: u8) {
        let mut state = self.state.lock();
        state.level = level;
        state.asleep = [true; POOLS.len()];
        state.weights_lost |= level >= 2;
    }

    /// Wakes these pools, or all, and returns whether none sleeps any more.
    pub(crate) fn wake(&self, tags: &[String]) -> bool {
        let mut state = self.state.lock();
        for (pool, asleep) in POOLS.iter().zip(&mut state.asleep) {
            *asleep &= !tags.is_empty() && !tags.iter().any(|tag| tag == pool);
        }
        let awake = !state.asleep.contains(&true);
        if awake {
            state.level = 0;
        }
        awake
    }

    pub(crate) fn reload(&self) {
        self.state.lock().weights_lost = false;
    }

    /// Level of the sleep; 0 when awake.
    pub(crate) fn level(&self) -> u8 {
        self.state.lock().level
    }

    /// Whether answers come from forgotten weights, and are therefore nonsense.
    pub(crate) fn has_lost_weights(&self) -> bool {
        self.state.lock().weights_lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_awake_when_every_pool_is() {
        let slumber = SleepState::default();
        slumber.sleep(2);
        assert_eq!(slumber.level(), 2);
        assert!(!slumber.wake(&["weights".to_owned()]));
        assert!(slumber.has_lost_weights());
        slumber.reload();
        assert!(slumber.wake(&["kv_cache".to_owned()]));
        assert!(!slumber.has_lost_weights());
        assert_eq!(slumber.level(), 0);
    }
}
