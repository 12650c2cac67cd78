//! What is known of each model's files, and what an offer, a piece or a comparison changes. Reads no clock, waits for nothing.

use std::sync::Arc;
use std::time::Duration;

use hostler_prompt::{Dialect, Encoder, Forms, Stats};
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::files::{BUNDLE_BYTES, Short};
use super::transfer::{FilesPiece, Transfer};
use super::{FilesHash, Made, Reader, Standing};

/// The most models whose files are kept. An encoder of a large vocabulary takes about 100 MiB.
pub(super) const MODELS: usize = 64;

/// Bundles on their way at once: at 64 MiB each also a bound on memory.
const TRANSFERS: usize = 8;

/// After a transfer that broke: pieces that are still on their way must not reach the next one, and a warning need not come each second.
const PAUSE_AFTER_BREAK: Duration = Duration::from_secs(10);

/// After an engine could not be asked for tokens: it may be full, or have no such route.
const PAUSE_AFTER_SILENCE: Duration = Duration::from_secs(1);

/// A model that was offered or used within this time is not dropped for another one: a fleet of more models than are kept would otherwise
/// make encoders all day.
const KEPT_FOR: Duration = Duration::from_secs(10 * 60);

/// One stay of a hash in the table. What was begun for an earlier one is ignored when it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Life(u64);

/// What an offer calls for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Nothing,
    /// Ask the agent.
    Fetch,
    /// Read them from disk, then call `made`.
    Read(Life),
}

#[derive(Debug, Default)]
pub(super) struct Table {
    entries: FxHashMap<FilesHash, Entry>,
    lives: u64,
    /// What encoders did that are not kept any more: counters must not fall.
    gone: Stats,
    /// Somebody was told that there are more models than are kept.
    told_full: bool,
}

#[derive(Debug)]
struct Entry {
    life: Life,
    /// When it was last offered, or used.
    wanted: Instant,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Not here; not asked for before that time.
    Missing(Instant),
    Coming(Transfer),
    /// They are read, checked, and made into an encoder.
    Building,
    Ready(Arc<Encoder>, Proofs),
    Unusable(String),
}

/// What comparisons with engines of each dialect have shown.
#[derive(Debug, Default)]
struct Proofs {
    python: Proof,
    rust: Proof,
}

impl Proofs {
    fn of(&self, dialect: Dialect) -> &Proof {
        match dialect {
            Dialect::Python => &self.python,
            Dialect::Rust => &self.rust,
        }
    }

    fn of_mut(&mut self, dialect: Dialect) -> &mut Proof {
        match dialect {
            Dialect::Python => &mut self.python,
            Dialect::Rust => &mut self.rust,
        }
    }
}

#[derive(Debug)]
enum Proof {
    Unproved {
        /// A comparison is under way.
        running: bool,
        /// An engine could not be asked, and somebody was told. The next one is not asked before that time.
        silent_until: Option<Instant>,
    },
    /// For prompts of these forms.
    Proved(Forms),
    Different(String),
}

impl Default for Proof {
    fn default() -> Self {
        Self::Unproved { running: false, silent_until: None }
    }
}

impl Table {
    /// A replica has these files.
    pub(super) fn offered(&mut self, hash: FilesHash, bytes: u64, on_disk: bool, now: Instant) -> Next {
        let coming = self.coming(&hash, now);
        if !self.entries.contains_key(&hash) && !self.has_room(now) {
            return Next::Nothing;
        }
        let lives = &mut self.lives;
        let entry = self.entries.entry(hash).or_insert_with(|| {
            *lives += 1;
            Entry { life: Life(*lives), wanted: now, stage: Stage::Missing(now) }
        });
        entry.wanted = now;
        match &entry.stage {
            Stage::Missing(not_before) if now >= *not_before => {}
            Stage::Coming(transfer) if transfer.has_stalled(now) => {
                tracing::info!(files = %Short(&hash), "a transfer of a model's files stalled: it begins again");
            }
            _ => return Next::Nothing,
        }
        let (next, stage) = match usize::try_from(bytes) {
            _ if on_disk => (Next::Read(entry.life), Stage::Building),
            Ok(bytes @ 1..=BUNDLE_BYTES) if coming < TRANSFERS => (Next::Fetch, Stage::Coming(Transfer::new(bytes, now))),
            Ok(1..=BUNDLE_BYTES) => (Next::Nothing, Stage::Missing(now)),
            _ => {
                let why = format!("they have {bytes} bytes; from 1 to {BUNDLE_BYTES} are taken");
                tracing::warn!(files = %Short(&hash), why, "a model's files cannot be used: requests for it are placed by text");
                (Next::Nothing, Stage::Unusable(why))
            }
        };
        entry.stage = stage;
        next
    }

    /// A piece has come; gives back the bundle when it was the last one. Then `made` is to be called.
    pub(super) fn part(&mut self, hash: &FilesHash, part: FilesPiece, now: Instant) -> Option<(Life, Vec<u8>)> {
        let entry = self.entries.get_mut(hash)?;
        // A piece of a transfer that broke, or of one that was asked for twice.
        let Stage::Coming(transfer) = &mut entry.stage else { return None };
        match transfer.take(part, now) {
            Ok(false) => None,
            Ok(true) => match std::mem::replace(&mut entry.stage, Stage::Building) {
                Stage::Coming(transfer) => Some((entry.life, transfer.into_content())),
                _ => None,
            },
            Err(broken) => {
                let files = Short(hash);
                tracing::warn!(%files, reason = %broken, "a transfer of a model's files is dropped: they will be asked for again");
                entry.stage = Stage::Missing(now + PAUSE_AFTER_BREAK);
                None
            }
        }
    }

    /// The files have been read and checked.
    pub(super) fn made(&mut self, hash: &FilesHash, life: Life, made: Made, now: Instant) {
        let Some(entry) = self.entry(hash, life) else { return };
        entry.stage = match made {
            Made::Encoder(encoder) => Stage::Ready(encoder, Proofs::default()),
            Made::NotOnDisk => Stage::Missing(now),
            Made::Corrupted => Stage::Missing(now + PAUSE_AFTER_BREAK),
            Made::Unusable(why) => Stage::Unusable(why),
        };
    }

    pub(super) fn standing(&self, reader: &Reader, now: Instant) -> Standing {
        self.entries.get(&reader.files).map_or(Standing::Missing, |entry| entry.standing(reader.dialect, now))
    }

    /// The encoder, when requests may be encoded with it, and of which forms.
    pub(super) fn proved(&mut self, reader: &Reader, now: Instant) -> Option<(Arc<Encoder>, Forms)> {
        let entry = self.entries.get_mut(&reader.files)?;
        entry.wanted = now;
        match &entry.stage {
            Stage::Ready(encoder, proofs) => match proofs.of(reader.dialect) {
                Proof::Proved(forms) => Some((encoder.clone(), *forms)),
                Proof::Unproved { .. } | Proof::Different(_) => None,
            },
            _ => None,
        }
    }

    /// The encoder, when it is to be compared with an engine and nobody else does. `end_proof` must follow.
    pub(super) fn begin_proof(&mut self, reader: &Reader, now: Instant) -> Option<(Life, Arc<Encoder>)> {
        let entry = self.entries.get_mut(&reader.files)?;
        let Stage::Ready(encoder, proofs) = &mut entry.stage else { return None };
        match proofs.of_mut(reader.dialect) {
            Proof::Unproved { running, silent_until } if !*running && silent_until.is_none_or(|until| now >= until) => {
                *running = true;
                Some((entry.life, encoder.clone()))
            }
            _ => None,
        }
    }

    /// The comparison has an outcome.
    pub(super) fn set_proof(&mut self, reader: &Reader, life: Life, outcome: Result<Forms, String>) {
        if let Some(proof) = self.proof(reader, life) {
            *proof = outcome.map_or_else(Proof::Different, Proof::Proved);
        }
    }

    /// The comparison is over, with or without an outcome.
    pub(super) fn end_proof(&mut self, reader: &Reader, life: Life) {
        if let Some(Proof::Unproved { running, .. }) = self.proof(reader, life) {
            *running = false;
        }
    }

    /// An engine could not be asked; `true` when that had not happened before.
    pub(super) fn silence(&mut self, reader: &Reader, life: Life, now: Instant) -> bool {
        match self.proof(reader, life) {
            Some(Proof::Unproved { silent_until, .. }) => silent_until.replace(now + PAUSE_AFTER_SILENCE).is_none(),
            _ => false,
        }
    }

    /// How many models stand how, and what all encoders did.
    pub(super) fn figures(&self, now: Instant) -> ([(&'static str, usize); 6], Stats) {
        let text = String::new;
        let standings = [
            Standing::Missing,
            Standing::Loading,
            Standing::Unproved,
            Standing::Proved,
            Standing::Different(text()),
            Standing::Unusable(text()),
        ];
        let mut models = standings.map(|standing| (standing.word(), 0));
        let mut stats = self.gone;
        for entry in self.entries.values() {
            let word = entry.worst(now).word();
            models.iter_mut().filter(|(name, _)| *name == word).for_each(|(_, count)| *count += 1);
            if let Stage::Ready(encoder, _) = &entry.stage {
                let own = encoder.stats();
                add(&mut stats, own);
                stats.cache_bytes += own.cache_bytes;
            }
        }
        (models, stats)
    }

    fn proof(&mut self, reader: &Reader, life: Life) -> Option<&mut Proof> {
        match self.entry(&reader.files, life)? {
            Entry { stage: Stage::Ready(_, proofs), .. } => Some(proofs.of_mut(reader.dialect)),
            _ => None,
        }
    }

    fn entry(&mut self, hash: &FilesHash, life: Life) -> Option<&mut Entry> {
        self.entries.get_mut(hash).filter(|entry| entry.life == life)
    }

    /// Transfers under way of other files than these. What has come of those that stalled is given up.
    fn coming(&mut self, except: &FilesHash, now: Instant) -> usize {
        let mut coming = 0;
        for (_, entry) in self.entries.iter_mut().filter(|(hash, _)| *hash != except) {
            match &entry.stage {
                Stage::Coming(transfer) if transfer.has_stalled(now) => entry.stage = Stage::Missing(now),
                Stage::Coming(_) => coming += 1,
                _ => {}
            }
        }
        coming
    }

    /// Whether another model can be kept, when need be in the place of the one wanted least recently.
    fn has_room(&mut self, now: Instant) -> bool {
        if self.entries.len() < MODELS {
            return true;
        }
        let Some((&oldest, _)) = self.entries.iter().min_by_key(|(_, entry)| entry.wanted) else { return true };
        let old_enough = |entry: &Entry| now.duration_since(entry.wanted) >= KEPT_FOR;
        if !self.entries.get(&oldest).is_some_and(old_enough) {
            if !std::mem::replace(&mut self.told_full, true) {
                tracing::warn!(kept = MODELS, "more models than tokenizers are kept for: requests for the others are placed by text");
            }
            return false;
        }
        if let Some(Entry { stage: Stage::Ready(encoder, _), .. }) = self.entries.remove(&oldest) {
            add(&mut self.gone, encoder.stats());
        }
        true
    }
}

/// Adds what only grows.
fn add(sum: &mut Stats, more: Stats) {
    sum.hits += more.hits;
    sum.misses += more.misses;
    sum.encoded_bytes += more.encoded_bytes;
}

impl Entry {
    /// For figures: how it stands with the engines that there are. A fleet seldom has both front-ends; nobody compares with the other one.
    fn worst(&self, now: Instant) -> Standing {
        let rank = |standing: &Standing| match standing {
            Standing::Different(_) => 2,
            Standing::Proved | Standing::Partly(_) => 1,
            _ => 0,
        };
        let standings = Dialect::ALL.map(|dialect| self.standing(dialect, now));
        standings.into_iter().max_by_key(rank).unwrap_or(Standing::Missing)
    }

    fn standing(&self, dialect: Dialect, now: Instant) -> Standing {
        match &self.stage {
            Stage::Missing(_) => Standing::Missing,
            Stage::Coming(transfer) if transfer.has_stalled(now) => Standing::Missing,
            Stage::Coming(_) | Stage::Building => Standing::Loading,
            Stage::Ready(_, proofs) => match proofs.of(dialect) {
                Proof::Unproved { .. } => Standing::Unproved,
                Proof::Proved(Forms::ALL) => Standing::Proved,
                Proof::Proved(forms) => Standing::Partly(*forms),
                Proof::Different(why) => Standing::Different(why.clone()),
            },
            Stage::Unusable(why) => Standing::Unusable(why.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
