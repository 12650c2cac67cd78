//! Mirror of the blocks that one life of an engine has cached, updated by the engine's events.
//!
//! It has a set of keys for each tier: the GPU's memory and the host's.
//!
//! The mirror is pure: it knows neither sockets nor time, and `CacheLog` owns it. It translates the
//! engine's hashes, which differ between releases, into keys that a router can compute from a
//! prompt.

mod host_tier;

use std::cmp::Ordering;

use hostler_placement::block_keys::{BlockKey, KeyChain};

use self::host_tier::HostTier;
use super::CacheTier;
use super::block_set::BlockSet;
use super::change_log::Change;
use super::kv_event::{BlocksRemoved, BlocksStored, ExtraKey, KvEvent};

/// A file that an engine has written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileBlocks {
    /// The engine's hash of the block before the first one.
    pub(super) parent: Option<u64>,
    /// Blocks in their order, by the engine's hashes.
    pub(super) blocks: Vec<(u64, BlockKey)>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    /// Changes of the GPU's tier.
    pub changes: Vec<Change>,
    /// Changes of the host's tier.
    pub host_changes: Vec<Change>,
    /// Files that the engine has written.
    pub files: Vec<FileBlocks>,
    /// Events of known kinds.
    pub events: u64,
    /// Blocks that are left out: they follow a block that is not known, or lack what their key
    /// depends on.
    pub orphans: u64,
    /// Events about other memory or another cache group.
    pub ignored: u64,
    /// Events that contradict themselves.
    pub malformed: u64,
}

#[derive(Debug)]
pub(crate) struct BlockMirror {
    group: Option<CacheGroup>,
    /// The engine has several groups and does not name their kinds, so the mirrored one may be any.
    has_unnamed_groups: bool,
    block_size: u32,
    gpu: BlockSet,
    host: HostTier,
}

/// The mirrored cache group. Models with several kinds of attention keep a cache for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CacheGroup {
    index: Option<u32>,
    reach: AttentionSpan,
}

/// How far back a kind of attention looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AttentionSpan {
    Everything,
    /// Blocks before the window are dropped while later ones stay.
    Window,
    /// A cache whose tokens do not continue each other.
    Other,
}

impl AttentionSpan {
    fn of(kind: Option<&str>) -> Self {
        match kind {
            // Releases that do not name the kind fall here: nearly all their models have one group.
            None | Some("full_attention" | "mla_attention" | "sink_full_attention") => Self::Everything,
            Some("sliding_window" | "sliding_window_mla" | "chunked_local_attention") => Self::Window,
            Some(_) => Self::Other,
        }
    }
}

impl BlockMirror {
    #[must_use]
    pub(crate) fn new() -> Self {
        Self { group: None, has_unnamed_groups: false, block_size: 0, gpu: BlockSet::default(), host: HostTier::default() }
    }

    #[must_use]
    pub(super) fn blocks(&self, tier: CacheTier) -> &BlockSet {
        match tier {
            CacheTier::Gpu => &self.gpu,
            CacheTier::Host => self.host.blocks(),
        }
    }

    /// Whether the engine has shown that it has this tier.
    #[must_use]
    pub(crate) fn has_tier(&self, tier: CacheTier) -> bool {
        tier == CacheTier::Gpu || self.host.has_reported()
    }

    /// Tokens that a block holds; 0 before the first.
    #[must_use]
    pub(crate) fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Whether a cached block may follow one that is not.
    #[must_use]
    pub(crate) fn has_holes(&self) -> bool {
        self.has_unnamed_groups || self.group.is_some_and(|group| group.reach == AttentionSpan::Window)
    }

    /// Forgets all blocks, but keeps the block size and the group.
    pub(crate) fn clear(&mut self) {
        self.gpu.clear();
        self.host.clear();
    }

    pub(crate) fn apply(&mut self, event: &KvEvent, effects: &mut Effects) {
        match event {
            KvEvent::Stored(stored) => self.store(stored, effects),
            KvEvent::Removed(removed) => self.remove(removed, effects),
            // An engine may empty its host tier with the GPU's and reports neither which nor the
            // removals.
            KvEvent::Cleared => self.clear_with(effects),
            KvEvent::Unknown => return,
        }
        effects.events += 1;
    }

    /// Ends a batch of events, within which blocks of the host's tier may come before their
    /// parents.
    pub(crate) fn end_batch(&mut self, effects: &mut Effects) {
        self.host.end_batch(effects);
    }

    fn clear_with(&mut self, effects: &mut Effects) {
        self.clear();
        effects.changes.push(Change::Cleared);
        effects.host_changes.push(Change::Cleared);
    }

    fn store(&mut self, stored: &BlocksStored, effects: &mut Effects) {
        match tier_of(stored.medium.as_deref()) {
            Some(CacheTier::Gpu) => self.store_on_gpu(stored, effects),
            Some(CacheTier::Host) if !self.is_other_group(stored.group) => {
                self.host.store(stored, &self.gpu, self.block_size, effects);
            }
            None if is_file(stored.medium.as_deref()) && !self.is_other_group(stored.group) => {
                self.host.note_file(stored, &self.gpu, self.block_size, effects);
            }
            _ => effects.ignored += 1,
        }
    }

    fn store_on_gpu(&mut self, stored: &BlocksStored, effects: &mut Effects) {
        let (Ok(size), blocks) = (usize::try_from(stored.block_size), stored.hashes.len()) else { return };
        if !self.is_mirrored(stored, effects) {
            effects.ignored += 1;
            return;
        }
        match stored.tokens.len().checked_div(size).map(|all| all.cmp(&blocks)) {
            None | Some(Ordering::Less) => {
                effects.malformed += 1;
                return;
            }
            // A group with a window may report the tokens of blocks that it did not keep, without
            // saying which of them have a hash.
            Some(Ordering::Greater) => {
                effects.ignored += 1;
                return;
            }
            Some(Ordering::Equal) => {}
        }
        if self.block_size != 0 && self.block_size != stored.block_size {
            effects.ignored += 1;
            return;
        }
        let chain = match stored.parent {
            None => Some(seed_chain(stored)),
            Some(parent) => self.gpu.key_of(parent).map(KeyChain::resume),
        };
        let Some(mut chain) = chain else {
            effects.orphans += blocks as u64;
            return;
        };
        // Set the size only now: the odd ends that some caches report have another size and no
        // known parent.
        self.block_size = stored.block_size;
        for (number, (hash, tokens)) in stored.hashes.iter().zip(stored.tokens.chunks_exact(size)).enumerate() {
            let more = extra_key_bytes(stored, number);
            self.host.note_extras(number == 0 && salt(stored).is_some(), !more.is_empty());
            let key = if more.is_empty() { chain.push(tokens) } else { chain.push_with_extra(tokens, &more) };
            // Copies are not counted in an event without a parent. Any client may make an engine
            // report the cached blocks of its prompt again (`kv_cache_report_mode`, since vLLM
            // 0.26), and the engine does not remove those blocks more often. A first block that
            // really has two copies is therefore dropped when its first copy is removed.
            if self.gpu.store(*hash, key, stored.parent.is_some()) {
                effects.changes.push(Change::Stored(key));
            }
        }
    }

    fn remove(&mut self, removed: &BlocksRemoved, effects: &mut Effects) {
        match tier_of(removed.medium.as_deref()).filter(|_| !self.is_other_group(removed.group)) {
            Some(CacheTier::Gpu) => {
                // A prompt that was computed twice stores its last block twice, and the engine
                // removes the copies one by one.
                for hash in &removed.hashes {
                    let Some(gone) = self.gpu.remove(*hash) else { continue };
                    self.host.note_departure(*hash, gone.key);
                    if gone.is_last {
                        effects.changes.push(Change::Removed(gone.key));
                    }
                }
            }
            Some(CacheTier::Host) => self.host.remove(removed, effects),
            None => effects.ignored += 1,
        }
    }

    fn is_other_group(&self, group: Option<u32>) -> bool {
        self.group.is_some_and(|mirrored| mirrored.index.is_some() && group.is_some() && mirrored.index != group)
    }

    /// Whether this event is about the mirrored group.
    ///
    /// The first events choose the group: one that looks back at everything or, in a model without
    /// such a group, one with a window.
    fn is_mirrored(&mut self, stored: &BlocksStored, effects: &mut Effects) -> bool {
        let seen = CacheGroup { index: stored.group, reach: AttentionSpan::of(stored.kind.as_deref()) };
        match (self.group, seen.reach) {
            (_, AttentionSpan::Other) => false,
            (Some(group), _) if group == seen => true,
            (None, _) => {
                self.group = Some(seen);
                true
            }
            (Some(CacheGroup { reach: AttentionSpan::Window, .. }), AttentionSpan::Everything) => {
                self.clear_with(effects);
                self.block_size = 0;
                self.group = Some(seen);
                true
            }
            (Some(_), _) => {
                self.has_unnamed_groups |= stored.kind.is_none();
                false
            }
        }
    }
}

/// Tier of a medium; `None` for media that are not the engine's own memory. The oldest releases
/// have only the GPU and do not name it.
fn tier_of(medium: Option<&str>) -> Option<CacheTier> {
    match medium {
        None => Some(CacheTier::Gpu),
        Some(name) if name.eq_ignore_ascii_case("GPU") => Some(CacheTier::Gpu),
        Some(name) if name.eq_ignore_ascii_case("CPU") => Some(CacheTier::Host),
        Some(_) => None,
    }
}

/// Whether a medium is the files that engines share.
fn is_file(medium: Option<&str>) -> bool {
    medium.is_some_and(|name| name.eq_ignore_ascii_case("STORAGE"))
}

fn seed_chain(stored: &BlocksStored) -> KeyChain {
    let lora = match (&stored.lora_name, stored.lora_id) {
        (Some(name), _) => name.clone(),
        // Some releases do not report the name. Routers cannot ask for this adapter, and its blocks
        // must not look like the model's own.
        (None, Some(id)) => format!("\0{id}"),
        (None, None) => String::new(),
    };
    KeyChain::new(&lora, salt(stored).unwrap_or_default())
}

/// Cache salt among the extra keys of the first block.
///
/// The salt is a bare string or, since vLLM 0.31, a string with a tag.
fn salt(stored: &BlocksStored) -> Option<&str> {
    if stored.parent.is_some() {
        return None;
    }
    match without_lora(stored, 0).as_slice() {
        [only] => parse_salt(only),
        _ => None,
    }
}

fn parse_salt(extra: &ExtraKey) -> Option<&str> {
    match extra {
        ExtraKey::Text(salt) => Some(salt),
        ExtraKey::List(pair) => match pair.as_slice() {
            [ExtraKey::Text(tag), ExtraKey::Text(salt)] if tag == "cache_salt" => Some(salt),
            _ => None,
        },
        _ => None,
    }
}

/// Extra keys of a block as bytes, without the adapter and the salt.
///
/// Usually empty. Images, for example, have equal tokens and unequal content.
fn extra_key_bytes(stored: &BlocksStored, block: usize) -> Vec<u8> {
    let is_salted = block == 0 && salt(stored).is_some();
    let mut bytes = Vec::new();
    if !is_salted {
        without_lora(stored, block).iter().for_each(|extra| extra.write_canonical(&mut bytes));
    }
    bytes
}

/// Extra keys of one block without the adapter's name, which occurs there once.
fn without_lora(stored: &BlocksStored, block: usize) -> Vec<&ExtraKey> {
    let mut keys: Vec<&ExtraKey> = match stored.extra_keys.get(block) {
        None | Some(ExtraKey::Null) => Vec::new(),
        Some(ExtraKey::List(keys)) => keys.iter().collect(),
        Some(other) => vec![other],
    };
    if let Some(lora) = &stored.lora_name
        && let Some(at) = keys.iter().position(|extra| matches!(extra, ExtraKey::Text(text) if text == lora))
    {
        keys.remove(at);
    }
    keys
}

#[cfg(test)]
mod tests;
