//! The blocks that one life of an engine has cached, kept up to date by its events. Pure: it knows neither sockets nor time, and `CacheLog`
//! owns it. It translates the engine's hashes, which differ between releases, into keys that a router can compute from a prompt.

use std::cmp::Ordering;
use std::collections::hash_map::Entry;

use hostler_placement::block_keys::{BlockKey, KeyChain};
use rustc_hash::FxHashMap;

use super::kv_event::{BlocksRemoved, BlocksStored, ExtraKey, KvEvent};

/// The number of keys, and the XOR of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CacheDigest {
    pub count: u64,
    pub xor: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// It was not there before.
    Stored(BlockKey),
    /// It was there before.
    Removed(BlockKey),
    Cleared,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    pub changes: Vec<Change>,
    /// Events of known kinds.
    pub events: u64,
    /// Blocks stored after a block that is not known.
    pub orphans: u64,
    /// Events about other memory or another cache group.
    pub ignored: u64,
    /// Events that contradict themselves.
    pub malformed: u64,
}

#[derive(Debug)]
pub(crate) struct BlockMirror {
    group: Option<CacheGroup>,
    /// There are several groups, and the engine does not say of what kind: the mirrored one may be
    /// any.
    has_unnamed_groups: bool,
    block_size: u32,
    /// By the engine's hash.
    blocks: FxHashMap<u64, MirroredBlock>,
    /// How many of the engine's hashes stand for a key: an adapter that was loaded again from
    /// another path has the same name and other hashes.
    keys: FxHashMap<BlockKey, u32>,
    xor: u64,
}

#[derive(Debug, Clone, Copy)]
struct MirroredBlock {
    key: BlockKey,
    copies: u32,
}

/// The cache group that is mirrored. Models with several kinds of attention keep a cache for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CacheGroup {
    index: Option<u32>,
    reach: AttentionSpan,
}

/// How far back a kind of attention looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AttentionSpan {
    Everything,
    /// Blocks before the window are let go while later ones stay.
    Window,
    /// Not a cache of tokens that continue each other.
    Other,
}

impl AttentionSpan {
    fn of(kind: Option<&str>) -> Self {
        match kind {
            // Releases that do not name the kind: nearly all models have one group.
            None | Some("full_attention" | "mla_attention" | "sink_full_attention") => Self::Everything,
            Some("sliding_window" | "sliding_window_mla" | "chunked_local_attention") => Self::Window,
            Some(_) => Self::Other,
        }
    }
}

impl BlockMirror {
    #[must_use]
    pub(crate) fn new() -> Self {
        Self { group: None, has_unnamed_groups: false, block_size: 0, blocks: FxHashMap::default(), keys: FxHashMap::default(), xor: 0 }
    }

    #[must_use]
    pub(crate) fn digest(&self) -> CacheDigest {
        CacheDigest { count: self.keys.len() as u64, xor: self.xor }
    }

    /// The keys, in no order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.keys.keys().copied()
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

    /// Forgets all blocks, but not what they are like.
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.keys.clear();
        self.xor = 0;
    }

    pub(crate) fn apply(&mut self, event: &KvEvent, effects: &mut Effects) {
        match event {
            KvEvent::Stored(stored) => self.store(stored, effects),
            KvEvent::Removed(removed) => self.remove(removed, effects),
            KvEvent::Cleared => {
                self.clear();
                effects.changes.push(Change::Cleared);
            }
            KvEvent::Unknown => return,
        }
        effects.events += 1;
    }

    fn store(&mut self, stored: &BlocksStored, effects: &mut Effects) {
        let (Ok(size), blocks) = (usize::try_from(stored.block_size), stored.hashes.len()) else { return };
        if !is_gpu(stored.medium.as_deref()) || !self.is_mirrored(stored, effects) {
            effects.ignored += 1;
            return;
        }
        match stored.tokens.len().checked_div(size).map(|all| all.cmp(&blocks)) {
            None | Some(Ordering::Less) => {
                effects.malformed += 1;
                return;
            }
            // A group with a window may report the tokens of blocks that it did not keep, and does
            // not say which of them have a hash.
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
            Some(parent) => self.blocks.get(&parent).map(|block| KeyChain::resume(block.key)),
        };
        let Some(mut chain) = chain else {
            effects.orphans += blocks as u64;
            return;
        };
        // Not before: the odd ends that some caches report have another size, and no parent that is
        // known.
        self.block_size = stored.block_size;
        for (number, (hash, tokens)) in stored.hashes.iter().zip(stored.tokens.chunks_exact(size)).enumerate() {
            let more = extra_key_bytes(stored, number);
            let key = if more.is_empty() { chain.push(tokens) } else { chain.push_with_extra(tokens, &more) };
            self.store_block(*hash, key, stored.parent.is_some(), effects);
        }
    }

    /// `is_copy`: the event stores a known block once more. That does not count in an event without
    /// a parent. Any client may have an engine report again which blocks of its prompt were cached
    /// (`kv_cache_report_mode`, since vLLM 0.26), and those are not removed more often for it. A
    /// first block that really has two copies is therefore given up with the first of them.
    fn store_block(&mut self, hash: u64, key: BlockKey, is_copy: bool, effects: &mut Effects) {
        match self.blocks.entry(hash) {
            // The first key stays: blocks stored after it continue that one.
            Entry::Occupied(mut block) => {
                let block = block.get_mut();
                block.copies = block.copies.saturating_add(u32::from(is_copy));
            }
            Entry::Vacant(vacant) => {
                vacant.insert(MirroredBlock { key, copies: 1 });
                let hashes = self.keys.entry(key).or_insert(0);
                *hashes = hashes.saturating_add(1);
                if *hashes == 1 {
                    self.xor ^= key;
                    effects.changes.push(Change::Stored(key));
                }
            }
        }
    }

    fn remove(&mut self, removed: &BlocksRemoved, effects: &mut Effects) {
        let is_other_group =
            self.group.is_some_and(|group| group.index.is_some() && removed.group.is_some() && group.index != removed.group);
        if !is_gpu(removed.medium.as_deref()) || is_other_group {
            effects.ignored += 1;
            return;
        }
        for hash in &removed.hashes {
            self.remove_block(*hash, effects);
        }
    }

    fn remove_block(&mut self, hash: u64, effects: &mut Effects) {
        let Entry::Occupied(mut block) = self.blocks.entry(hash) else { return };
        // A prompt that was computed twice stores its last block twice, and both copies are removed
        // one by one.
        if block.get().copies > 1 {
            block.get_mut().copies -= 1;
            return;
        }
        let key = block.remove().key;
        if let Entry::Occupied(mut hashes) = self.keys.entry(key) {
            *hashes.get_mut() -= 1;
            if *hashes.get() == 0 {
                hashes.remove();
                self.xor ^= key;
                effects.changes.push(Change::Removed(key));
            }
        }
    }

    /// Whether this event is about the mirrored group. The first events choose it: a group that
    /// looks back at everything or, in a model without one, a group with a window.
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
                self.clear();
                effects.changes.push(Change::Cleared);
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

/// An absent medium is the only one that the oldest releases have.
fn is_gpu(medium: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium.eq_ignore_ascii_case("GPU"))
}

fn seed_chain(stored: &BlocksStored) -> KeyChain {
    let lora = match (&stored.lora_name, stored.lora_id) {
        (Some(name), _) => name.clone(),
        // Releases that do not report the name: a router cannot ask for this, and it must not look
        // like the model without adapter.
        (None, Some(id)) => format!("\0{id}"),
        (None, None) => String::new(),
    };
    KeyChain::new(&lora, salt(stored).unwrap_or_default())
}

/// The cache salt: a bare string or, since vLLM 0.31, a string with a tag, among what the first
/// block depends on.
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

/// What the content of a block depends on besides its tokens, the adapter and the salt, as bytes;
/// empty as a rule. Images, for example, have equal tokens and unequal content.
fn extra_key_bytes(stored: &BlocksStored, block: usize) -> Vec<u8> {
    let is_salted = block == 0 && salt(stored).is_some();
    let mut bytes = Vec::new();
    if !is_salted {
        without_lora(stored, block).iter().for_each(|extra| extra.write_canonical(&mut bytes));
    }
    bytes
}

/// The keys of one block without the adapter's name, which stands there once.
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
