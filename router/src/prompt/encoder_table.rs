//! The state of each model's files, and its changes by offers, pieces and comparisons. Reads no
//! clock and waits for nothing.

use std::sync::Arc;
use std::time::Duration;

use hostler_prompt::{Dialect, Encoder, EncoderStats, PromptForms};
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::bundle::{MAX_BUNDLE_BYTES, ShortHash};
use super::transfer::{FilesPiece, Transfer};
use super::{BuildOutcome, EncoderKey, EncoderStatus, FilesHash};

/// Most models whose encoders are kept. An encoder of a large vocabulary takes about 100 MiB.
pub(super) const MAX_MODELS: usize = 64;

/// Most simultaneous transfers of bundles. At 64 MiB each this also bounds memory.
const MAX_TRANSFERS: usize = 8;

/// Pause after a broken transfer. Pieces still on their way must not reach the next transfer, and a
/// warning must not come every second.
const RETRY_AFTER_FAILED_TRANSFER: Duration = Duration::from_secs(10);

/// Pause after an engine could not be queried for tokens. It may be full, or lack the route.
const RETRY_AFTER_NO_ANSWER: Duration = Duration::from_secs(1);

/// Shortest time that an offered or used model is kept. Otherwise a fleet with more models than are
/// kept would build encoders all day.
const MIN_RETENTION: Duration = Duration::from_secs(10 * 60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Generation(u64);

/// The action on files that a replica offers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OfferAction {
    Nothing,
    /// Ask the agent for the files.
    Fetch,
    /// Read the files from disk, then call [`EncoderTable::finish_build`].
    Read(Generation),
}

#[derive(Debug, Default)]
pub(super) struct EncoderTable {
    entries: FxHashMap<FilesHash, EncoderEntry>,
    generations: u64,
    /// Counters of dropped encoders, because the sums must not fall.
    evicted_stats: EncoderStats,
    /// Whether the warning about too many models was given.
    has_warned_full: bool,
}

#[derive(Debug)]
struct EncoderEntry {
    generation: Generation,
    last_used: Instant,
    stage: EncoderStage,
}

#[derive(Debug)]
enum EncoderStage {
    /// The files are not here, and not requested before this time.
    Missing(Instant),
    Transferring(Transfer),
    Building,
    Ready(Arc<Encoder>, Proofs),
    Unusable(String),
}

/// Results of comparing with engines of each dialect.
#[derive(Debug, Default)]
struct Proofs {
    python: ProofState,
    rust: ProofState,
}

impl Proofs {
    fn of(&self, dialect: Dialect) -> &ProofState {
        match dialect {
            Dialect::Python => &self.python,
            Dialect::Rust => &self.rust,
        }
    }

    fn of_mut(&mut self, dialect: Dialect) -> &mut ProofState {
        match dialect {
            Dialect::Python => &mut self.python,
            Dialect::Rust => &mut self.rust,
        }
    }
}

#[derive(Debug)]
enum ProofState {
    Unproved {
        running: bool,
        /// Set once an engine could not be asked, which was logged. No engine is asked before this
        /// time.
        silent_until: Option<Instant>,
    },
    /// The encoder is proved for prompts of these forms.
    Proved(PromptForms),
    Different(String),
}

impl Default for ProofState {
    fn default() -> Self {
        Self::Unproved { running: false, silent_until: None }
    }
}

impl EncoderTable {
    pub(super) fn offer(&mut self, hash: FilesHash, bytes: u64, on_disk: bool, now: Instant) -> OfferAction {
        let coming = self.count_transfers(&hash, now);
        if !self.entries.contains_key(&hash) && !self.make_room(now) {
            return OfferAction::Nothing;
        }
        let lives = &mut self.generations;
        let entry = self.entries.entry(hash).or_insert_with(|| {
            *lives += 1;
            EncoderEntry { generation: Generation(*lives), last_used: now, stage: EncoderStage::Missing(now) }
        });
        entry.last_used = now;
        match &entry.stage {
            EncoderStage::Missing(not_before) if now >= *not_before => {}
            EncoderStage::Transferring(transfer) if transfer.has_stalled(now) => {
                tracing::info!(files = %ShortHash(&hash), "a transfer of a model's files stalled: it begins again");
            }
            _ => return OfferAction::Nothing,
        }
        let (next, stage) = match usize::try_from(bytes) {
            _ if on_disk => (OfferAction::Read(entry.generation), EncoderStage::Building),
            Ok(bytes @ 1..=MAX_BUNDLE_BYTES) if coming < MAX_TRANSFERS => {
                (OfferAction::Fetch, EncoderStage::Transferring(Transfer::new(bytes, now)))
            }
            Ok(1..=MAX_BUNDLE_BYTES) => (OfferAction::Nothing, EncoderStage::Missing(now)),
            _ => {
                let why = format!("they have {bytes} bytes; from 1 to {MAX_BUNDLE_BYTES} are taken");
                tracing::warn!(
                    event = "tokenizer_not_exact",
                    files = %ShortHash(&hash), why,
                    "a model's files cannot be used: requests for it are placed by text"
                );
                (OfferAction::Nothing, EncoderStage::Unusable(why))
            }
        };
        entry.stage = stage;
        next
    }

    /// Takes in a piece. Returns the bundle once it is complete; then call `finish_build`.
    pub(super) fn receive_part(&mut self, hash: &FilesHash, part: FilesPiece, now: Instant) -> Option<(Generation, Vec<u8>)> {
        let entry = self.entries.get_mut(hash)?;
        // The piece belongs to a broken transfer, or to one that was requested twice.
        let EncoderStage::Transferring(transfer) = &mut entry.stage else { return None };
        match transfer.append(part, now) {
            Ok(false) => None,
            Ok(true) => match std::mem::replace(&mut entry.stage, EncoderStage::Building) {
                EncoderStage::Transferring(transfer) => Some((entry.generation, transfer.into_content())),
                _ => None,
            },
            Err(broken) => {
                let files = ShortHash(hash);
                tracing::warn!(%files, reason = %broken, "a transfer of a model's files is dropped: they will be asked for again");
                entry.stage = EncoderStage::Missing(now + RETRY_AFTER_FAILED_TRANSFER);
                None
            }
        }
    }

    /// Records that the files have been read and checked.
    pub(super) fn finish_build(&mut self, hash: &FilesHash, life: Generation, made: BuildOutcome, now: Instant) {
        let Some(entry) = self.entry_mut(hash, life) else { return };
        entry.stage = match made {
            BuildOutcome::Encoder(encoder) => EncoderStage::Ready(encoder, Proofs::default()),
            BuildOutcome::NotOnDisk => EncoderStage::Missing(now),
            BuildOutcome::Corrupted => EncoderStage::Missing(now + RETRY_AFTER_FAILED_TRANSFER),
            BuildOutcome::Unusable(why) => EncoderStage::Unusable(why),
        };
    }

    pub(super) fn status(&self, reader: &EncoderKey, now: Instant) -> EncoderStatus {
        self.entries.get(&reader.files).map_or(EncoderStatus::Missing, |entry| entry.status(reader.dialect, now))
    }

    /// The encoder and the forms that it may encode, if it is proved.
    pub(super) fn proved_encoder(&mut self, reader: &EncoderKey, now: Instant) -> Option<(Arc<Encoder>, PromptForms)> {
        let entry = self.entries.get_mut(&reader.files)?;
        entry.last_used = now;
        match &entry.stage {
            EncoderStage::Ready(encoder, proofs) => match proofs.of(reader.dialect) {
                ProofState::Proved(forms) => Some((encoder.clone(), *forms)),
                ProofState::Unproved { .. } | ProofState::Different(_) => None,
            },
            _ => None,
        }
    }

    /// The encoder, if it should be compared with an engine and nobody else does so. `end_proof`
    /// must follow.
    pub(super) fn begin_proof(&mut self, reader: &EncoderKey, now: Instant) -> Option<(Generation, Arc<Encoder>)> {
        let entry = self.entries.get_mut(&reader.files)?;
        let EncoderStage::Ready(encoder, proofs) = &mut entry.stage else { return None };
        match proofs.of_mut(reader.dialect) {
            ProofState::Unproved { running, silent_until } if !*running && silent_until.is_none_or(|until| now >= until) => {
                *running = true;
                Some((entry.generation, encoder.clone()))
            }
            _ => None,
        }
    }

    /// Records the outcome of the comparison.
    pub(super) fn set_proof(&mut self, reader: &EncoderKey, life: Generation, outcome: Result<PromptForms, String>) {
        if let Some(proof) = self.proof_mut(reader, life) {
            *proof = outcome.map_or_else(ProofState::Different, ProofState::Proved);
        }
    }

    /// Ends the comparison, with or without an outcome.
    pub(super) fn end_proof(&mut self, reader: &EncoderKey, life: Generation) {
        if let Some(ProofState::Unproved { running, .. }) = self.proof_mut(reader, life) {
            *running = false;
        }
    }

    pub(super) fn record_no_answer(&mut self, reader: &EncoderKey, life: Generation, now: Instant) -> bool {
        match self.proof_mut(reader, life) {
            Some(ProofState::Unproved { silent_until, .. }) => silent_until.replace(now + RETRY_AFTER_NO_ANSWER).is_none(),
            _ => false,
        }
    }

    /// Models by status, and the counters of all encoders.
    pub(super) fn stats(&self, now: Instant) -> ([(&'static str, usize); 6], EncoderStats) {
        let text = String::new;
        let standings = [
            EncoderStatus::Missing,
            EncoderStatus::Loading,
            EncoderStatus::Unproved,
            EncoderStatus::Proved,
            EncoderStatus::Mismatch(text()),
            EncoderStatus::Unusable(text()),
        ];
        let mut models = standings.map(|standing| (standing.as_str(), 0));
        let mut stats = self.evicted_stats;
        for entry in self.entries.values() {
            let word = entry.worst_status(now).as_str();
            models.iter_mut().filter(|(name, _)| *name == word).for_each(|(_, count)| *count += 1);
            if let EncoderStage::Ready(encoder, _) = &entry.stage {
                let own = encoder.stats();
                add(&mut stats, own);
                stats.cache_bytes += own.cache_bytes;
            }
        }
        (models, stats)
    }

    fn proof_mut(&mut self, reader: &EncoderKey, life: Generation) -> Option<&mut ProofState> {
        match self.entry_mut(&reader.files, life)? {
            EncoderEntry { stage: EncoderStage::Ready(_, proofs), .. } => Some(proofs.of_mut(reader.dialect)),
            _ => None,
        }
    }

    fn entry_mut(&mut self, hash: &FilesHash, life: Generation) -> Option<&mut EncoderEntry> {
        self.entries.get_mut(hash).filter(|entry| entry.generation == life)
    }

    /// Running transfers of other files, after dropping stalled ones.
    fn count_transfers(&mut self, except: &FilesHash, now: Instant) -> usize {
        let mut coming = 0;
        for (_, entry) in self.entries.iter_mut().filter(|(hash, _)| *hash != except) {
            match &entry.stage {
                EncoderStage::Transferring(transfer) if transfer.has_stalled(now) => entry.stage = EncoderStage::Missing(now),
                EncoderStage::Transferring(_) => coming += 1,
                _ => {}
            }
        }
        coming
    }

    /// Makes room for one more model, if necessary by dropping the least recently used one. `false`
    /// if none may be dropped.
    fn make_room(&mut self, now: Instant) -> bool {
        if self.entries.len() < MAX_MODELS {
            return true;
        }
        let Some((&oldest, _)) = self.entries.iter().min_by_key(|(_, entry)| entry.last_used) else { return true };
        let old_enough = |entry: &EncoderEntry| now.duration_since(entry.last_used) >= MIN_RETENTION;
        if !self.entries.get(&oldest).is_some_and(old_enough) {
            if !std::mem::replace(&mut self.has_warned_full, true) {
                tracing::warn!(kept = MAX_MODELS, "more models than tokenizers are kept for: requests for the others are placed by text");
            }
            return false;
        }
        if let Some(EncoderEntry { stage: EncoderStage::Ready(encoder, _), .. }) = self.entries.remove(&oldest) {
            add(&mut self.evicted_stats, encoder.stats());
        }
        true
    }
}

fn add(sum: &mut EncoderStats, more: EncoderStats) {
    sum.hits += more.hits;
    sum.misses += more.misses;
    sum.encoded_bytes += more.encoded_bytes;
}

impl EncoderEntry {
    /// The worst status over the dialects in use, for figures. A fleet seldom has both front-ends,
    /// so one of them is often never compared.
    fn worst_status(&self, now: Instant) -> EncoderStatus {
        let rank = |standing: &EncoderStatus| match standing {
            EncoderStatus::Mismatch(_) => 2,
            EncoderStatus::Proved | EncoderStatus::PartlyProved(_) => 1,
            _ => 0,
        };
        let standings = Dialect::ALL.map(|dialect| self.status(dialect, now));
        standings.into_iter().max_by_key(rank).unwrap_or(EncoderStatus::Missing)
    }

    fn status(&self, dialect: Dialect, now: Instant) -> EncoderStatus {
        match &self.stage {
            EncoderStage::Missing(_) => EncoderStatus::Missing,
            EncoderStage::Transferring(transfer) if transfer.has_stalled(now) => EncoderStatus::Missing,
            EncoderStage::Transferring(_) | EncoderStage::Building => EncoderStatus::Loading,
            EncoderStage::Ready(_, proofs) => match proofs.of(dialect) {
                ProofState::Unproved { .. } => EncoderStatus::Unproved,
                ProofState::Proved(PromptForms::ALL) => EncoderStatus::Proved,
                ProofState::Proved(forms) => EncoderStatus::PartlyProved(*forms),
                ProofState::Different(why) => EncoderStatus::Mismatch(why.clone()),
            },
            EncoderStage::Unusable(why) => EncoderStatus::Unusable(why.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
