//! LoRA adapters of the engine by name: loaded and unloaded at run time, and served beside the
//! model.
//!
//! Their paths are only checked for existence.

use std::path::Path;

use parking_lot::Mutex;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Adapter {
    pub(crate) name: String,
    pub(crate) path: String,
}

/// All adapters, in the order in which they were loaded.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    loaded: Mutex<Vec<Adapter>>,
}

/// Why an adapter is not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadAdapterError {
    /// An adapter of this name is loaded.
    Known,
    Missing,
}

impl Adapters {
    pub(crate) fn load(&self, adapter: Adapter, in_place: bool) -> Result<(), LoadAdapterError> {
        let mut loaded = self.loaded.lock();
        let known = loaded.iter().position(|known| known.name == adapter.name);
        if known.is_some() && !in_place {
            return Err(LoadAdapterError::Known);
        }
        if !Path::new(&adapter.path).exists() {
            return Err(LoadAdapterError::Missing);
        }
        match known {
            Some(at) => loaded[at] = adapter,
            None => loaded.push(adapter),
        }
        Ok(())
    }

    /// Removes an adapter, and returns whether it was there.
    pub(crate) fn unload(&self, name: &str) -> bool {
        let mut loaded = self.loaded.lock();
        let before = loaded.len();
        loaded.retain(|adapter| adapter.name != name);
        loaded.len() < before
    }

    pub(crate) fn all(&self) -> Vec<Adapter> {
        self.loaded.lock().clone()
    }
}
