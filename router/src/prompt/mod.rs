//! The models' tokenizers and templates as agents deliver them, and the encoding of prompts on a
//! bounded pool of threads.
//!
//! An encoder is used only after it has agreed with an engine about a few samples, and only for the
//! forms of prompts about which it has (see `prove`). Proof with one front-end does not hold for
//! the other, which encodes some prompts differently. Other modules decide how tokens are used, and
//! the fleet knows which replica has which files. Callers are sessions (`offer_files`,
//! `receive_part`), the task that keeps encoders proved, and placement for each request (`encode`).

mod bundle;
mod disk;
mod encoder_table;
mod engine_question;
mod proof;
mod rendering;
mod transfer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hostler_prompt::{Dialect, EncodedPrompt, Encoder, Progress, PromptForm, PromptForms, PromptRequest};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::lanes::Lanes;
use crate::thread_pool::{PoolError, ThreadPool};
use bundle::ShortHash;
use disk::DiskCache;
use encoder_table::{EncoderTable, Generation, OfferAction};
pub(crate) use engine_question::EngineQuestion;
use rendering::RenderingCounts;
pub(crate) use rendering::{EngineRendering, MAX_RENDERED_BYTES, RenderingEngine, RenderingFailure};
pub(crate) use transfer::FilesPiece;

/// SHA-256 of a model's files as one encoded `PromptBundle`.
pub(crate) type FilesHash = [u8; 32];

/// What decides the tokens that a replica sees: its files, unless its agent could not read them,
/// and its front-end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenRules {
    pub files: Option<FilesHash>,
    pub dialect: Dialect,
}

impl From<EncoderKey> for TokenRules {
    fn from(reader: EncoderKey) -> Self {
        Self { files: Some(reader.files), dialect: reader.dialect }
    }
}

/// The key of the encoder that turns a request into a replica's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct EncoderKey {
    pub files: FilesHash,
    pub dialect: Dialect,
}

/// Bytes for the remembered segments of one encoder: about 16 million tokens, the text of some
/// hundred long chats.
const SEGMENT_CACHE_BYTES: usize = 64 * 1024 * 1024;

/// How long a request waits for its tokens, including the wait for a thread. After that the tokens
/// cost more than a better placement gains.
const ENCODE_DEADLINE: Duration = Duration::from_secs(2);

/// Most encoders built at once. Each build takes a thread for a second, and a few times the files'
/// memory.
const MAX_BUILDS: usize = 2;

/// The encoders of all models. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Prompts(Arc<PromptsInner>);

#[derive(Debug)]
struct PromptsInner {
    table: Mutex<EncoderTable>,
    disk: Option<DiskCache>,
    pool: ThreadPool,
    builds: Semaphore,
    building: TaskTracker,
    encodes: AtomicU64,
    busy: AtomicU64,
    failed: AtomicU64,
    renderings: RenderingCounts,
}

/// The status of the files with some hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EncoderStatus {
    /// The files are not here, and not on their way.
    Missing,
    /// The files are on their way or being read.
    Loading,
    /// The encoder is ready, but has not been compared with an engine.
    Unproved,
    /// The encoder agrees with an engine: requests may be encoded.
    Proved,
    /// The encoder agrees only about these forms of prompts.
    PartlyProved(PromptForms),
    /// Encoder and engine differ; the text says where.
    Mismatch(String),
    /// No encoder can be built; the text says why.
    Unusable(String),
}

impl EncoderStatus {
    #[must_use]
    pub(crate) fn as_str(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Loading => "loading",
            Self::Unproved => "unproved",
            Self::Proved | Self::PartlyProved(_) => "proved",
            Self::Mismatch(_) => "different",
            Self::Unusable(_) => "unusable",
        }
    }

    /// Whether requests of at least one form may be encoded.
    #[must_use]
    pub(crate) fn is_proved(&self) -> bool {
        matches!(self, Self::Proved | Self::PartlyProved(_))
    }

    /// Whether no encoder will read some of the model's prompts, or any.
    #[must_use]
    pub(crate) fn leaves_prompts(&self) -> bool {
        matches!(self, Self::PartlyProved(_) | Self::Mismatch(_) | Self::Unusable(_))
    }

    /// Which requests are placed by text, or why all are; empty if nothing is wrong, or only for a
    /// moment.
    #[must_use]
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::PartlyProved(forms) => forms.unproved_remark(),
            Self::Mismatch(reason) | Self::Unusable(reason) => reason.clone(),
            Self::Missing | Self::Loading | Self::Unproved | Self::Proved => String::new(),
        }
    }
}

/// Why a request has no tokens. The client need not know: the request is placed by its text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotEncoded {
    #[error("no encoder of this model has been proved against its engine")]
    NotProved,
    /// The encoder is not proved for prompts of this form.
    #[error("{}", .0.unproved_reason())]
    FormNotProved(PromptForm),
    /// The prompts of this route or form are not read here.
    #[error("the prompt of this kind of request is not read")]
    NotUnderstood,
    /// Too many requests wait for a thread, or the encoding took too long.
    #[error("the threads that encode prompts are busy")]
    Busy,
    /// The template or the tokenizer refused this request; the text says why.
    #[error("{0}")]
    Failed(String),
    #[error("{0}")]
    NotRendered(RenderingFailure),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PromptStats {
    /// How many models have each status, by [`EncoderStatus::as_str`].
    pub models: [(&'static str, usize); 6],
    pub encodes: u64,
    /// Bytes of text that went through a tokenizer.
    pub encoded_bytes: u64,
    pub segment_hits: u64,
    pub segment_misses: u64,
    pub segment_bytes: usize,
    /// Requests that were not encoded because the pool was full or took too long.
    pub busy: u64,
    pub failed: u64,
    /// Requests whose tokens an engine has said.
    pub rendered: u64,
    /// Requests whose tokens an engine has not said in time.
    pub rendered_late: u64,
    /// Requests that an engine was not asked about, refused to render, or answered otherwise.
    pub not_rendered: u64,
}

impl Prompts {
    /// Creates an empty set of encoders.
    ///
    /// Files are kept in the folder `prompt` of `cache_dir`, so that a restarted router need not
    /// ask for them again. With an empty path nothing is kept. This lists the folder synchronously:
    /// call it at start.
    #[must_use]
    pub(crate) fn new(cache_dir: PathBuf, threads: usize) -> Self {
        let disk = (cache_dir != Path::new("")).then(|| DiskCache::open(&cache_dir));
        Self(Arc::new(PromptsInner {
            table: Mutex::default(),
            disk,
            pool: ThreadPool::new(threads),
            builds: Semaphore::new(MAX_BUILDS),
            building: TaskTracker::new(),
            encodes: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            renderings: RenderingCounts::default(),
        }))
    }

    /// Handles a replica's offer of these files of `bytes` bytes.
    ///
    /// They are read from disk, or `fetch` asks the agent for them; nothing is done if they are
    /// here or on their way. Repeat the call with each report until then: only a later offer
    /// restarts a transfer that stalls or breaks. Must be called within a runtime.
    pub(crate) fn offer_files(&self, hash: FilesHash, bytes: u64, fetch: &dyn Fn()) {
        let on_disk = self.0.disk.as_ref().is_some_and(|disk| disk.may_have(&hash));
        let next = self.0.table.lock().offer(hash, bytes, on_disk, Instant::now());
        match next {
            OfferAction::Nothing => {}
            OfferAction::Fetch => fetch(),
            OfferAction::Read(life) => self.build(hash, life, None),
        }
    }

    /// Takes in a piece of the requested files. Must be called within a runtime.
    pub(crate) fn receive_part(&self, hash: &FilesHash, part: FilesPiece) {
        let whole = self.0.table.lock().receive_part(hash, part, Instant::now());
        if let Some((life, bundle)) = whole {
            self.build(*hash, life, Some(bundle));
        }
    }

    #[must_use]
    pub(crate) fn status(&self, reader: &EncoderKey) -> EncoderStatus {
        self.0.table.lock().status(reader, Instant::now())
    }

    /// Compares a ready encoder with an engine of its dialect, `replica` behind `lanes`, which
    /// serves `model`.
    ///
    /// Does nothing if the encoder is not ready, has been compared with this dialect, or is being
    /// compared. If the engine cannot be asked, the encoder stays unproved. Call this again with
    /// any replica of that front-end; for a second after such a failure nothing is done.
    pub(crate) async fn prove(&self, reader: EncoderKey, lanes: &Lanes, replica: u32, model: &str) {
        let Some((life, encoder)) = self.0.table.lock().begin_proof(&reader, Instant::now()) else { return };
        let proving = ProofGuard { prompts: self, reader, life };
        let target = proof::ProofTarget { engine: EngineQuestion { lanes, replica }, model, dialect: reader.dialect };
        let (files, front_end) = (ShortHash(&reader.files), reader.dialect);
        match proof::compare_samples(&self.0.pool, &encoder, &target).await {
            Ok(proved) => {
                let (forms, samples) = (proved.forms, proved.samples);
                match proved.doubt {
                    None => tracing::info!(%files, ?front_end, model, samples, "prompts are encoded as the engine encodes them"),
                    Some(why) => {
                        let remark = forms.unproved_remark();
                        tracing::warn!(
                            event = "tokenizer_not_exact",
                            %files, ?front_end, model, samples, why,
                            "the engine encodes some prompts in another way: {remark}"
                        );
                    }
                }
                proving.set_outcome(Ok(forms));
            }
            Err(proof::ProofFailure::Mismatch(why)) => {
                tracing::warn!(
                    event = "tokenizer_not_exact",
                    %files, ?front_end, model, why,
                    "the engine encodes prompts in another way: requests for it are placed by text"
                );
                proving.set_outcome(Err(why));
            }
            Err(proof::ProofFailure::NoAnswer(why)) => {
                // Engines come and go, so this is worth only one warning.
                if self.0.table.lock().record_no_answer(&reader, life, Instant::now()) {
                    tracing::warn!(%files, model, why, "cannot compare with the engine: until then requests for it are placed by text");
                } else {
                    tracing::debug!(%files, model, why, "cannot compare with the engine");
                }
            }
        }
    }

    /// The tokens that an engine will see for `tenant`'s request with this path and body, or the
    /// first of them. `goes_on` is asked now and then, on another thread, whether more are wanted.
    ///
    /// # Errors
    /// If there are none, or not soon enough. The request may be placed without them.
    pub(crate) async fn encode(
        &self,
        (tenant, reader): (u64, &EncoderKey),
        path: &str,
        body: Bytes,
        mut goes_on: impl FnMut(Progress<'_>) -> bool + Send + 'static,
    ) -> Result<EncodedPrompt, NotEncoded> {
        let (encoder, proved) = self.0.table.lock().proved_encoder(reader, Instant::now()).ok_or(NotEncoded::NotProved)?;
        let (path, dialect) = (path.to_owned(), reader.dialect);
        let encoding = self.0.pool.run((tenant, body.len()), move || {
            let request = PromptRequest::parse(&path, &body).ok_or(NotEncoded::NotUnderstood)?;
            if let Some(form) = request.forms().without(proved).iter().next() {
                return Err(NotEncoded::FormNotProved(form));
            }
            encoder.encode_prefix(dialect, &request, &mut goes_on).map_err(|error| NotEncoded::Failed(error.to_string()))
        });
        let encoded = match tokio::time::timeout(ENCODE_DEADLINE, encoding).await {
            Ok(Ok(encoded)) => encoded,
            Ok(Err(PoolError::Full)) | Err(_) => Err(NotEncoded::Busy),
            Ok(Err(PoolError::Panicked)) => {
                Err(NotEncoded::Failed("the encoder failed on this request in a way that nobody foresaw".into()))
            }
        };
        let counter = match &encoded {
            Ok(_) => &self.0.encodes,
            Err(NotEncoded::NotUnderstood | NotEncoded::FormNotProved(_)) => return encoded,
            Err(NotEncoded::Busy) => &self.0.busy,
            Err(_) => &self.0.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        encoded
    }

    #[must_use]
    pub(crate) fn stats(&self) -> PromptStats {
        let (models, stats) = self.0.table.lock().stats(Instant::now());
        PromptStats {
            models,
            encodes: self.0.encodes.load(Ordering::Relaxed),
            encoded_bytes: stats.encoded_bytes,
            segment_hits: stats.hits,
            segment_misses: stats.misses,
            segment_bytes: stats.cache_bytes,
            busy: self.0.busy.load(Ordering::Relaxed),
            failed: self.0.failed.load(Ordering::Relaxed),
            rendered: self.0.renderings.rendered.load(Ordering::Relaxed),
            rendered_late: self.0.renderings.late.load(Ordering::Relaxed),
            not_rendered: self.0.renderings.failed.load(Ordering::Relaxed),
        }
    }

    /// Waits at most `limit` until no thread reads or builds an encoder: a build that has begun
    /// cannot be stopped.
    pub(crate) async fn finish(&self, limit: Duration) {
        self.0.building.close();
        if tokio::time::timeout(limit, self.0.building.wait()).await.is_err() {
            tracing::debug!("leaving while a model's files are being read");
        }
    }

    /// Builds an encoder from `bundle`, or from the disk, on a blocking thread, and reports the
    /// result to the table.
    fn build(&self, hash: FilesHash, life: Generation, bundle: Option<Vec<u8>>) {
        let prompts = self.clone();
        self.0.building.spawn(async move {
            let _turn = prompts.0.builds.acquire().await;
            let built = prompts.clone();
            let built = tokio::task::spawn_blocking(move || built.0.build_encoder(&hash, bundle)).await;
            let built = built.unwrap_or_else(|_| BuildOutcome::Unusable("reading them failed in a way that nobody foresaw".into()));
            if let BuildOutcome::Unusable(why) = &built {
                tracing::warn!(
                    event = "tokenizer_not_exact",
                    files = %ShortHash(&hash), why,
                    "a model's files cannot be used: requests for it are placed by text"
                );
            }
            prompts.0.table.lock().finish_build(&hash, life, built, Instant::now());
        });
    }
}

#[derive(Debug)]
enum BuildOutcome {
    Encoder(Arc<Encoder>),
    /// The file on disk is not what it should be.
    NotOnDisk,
    /// The bundle does not have the requested hash.
    Corrupted,
    Unusable(String),
}

impl PromptsInner {
    /// Builds an encoder, blocking the thread.
    fn build_encoder(&self, hash: &FilesHash, bundle: Option<Vec<u8>>) -> BuildOutcome {
        let (bundle, came) = match bundle {
            Some(bundle) if bundle::bundle_hash(&bundle) == *hash => (bundle, true),
            Some(bundle) => {
                let (files, bytes) = (ShortHash(hash), bundle.len());
                tracing::warn!(%files, bytes, "a model's files were damaged on their way: they will be asked for again");
                return BuildOutcome::Corrupted;
            }
            None => match self.disk.as_ref().and_then(|disk| disk.read(hash)) {
                Some(bundle) => (bundle, false),
                None => return BuildOutcome::NotOnDisk,
            },
        };
        let encoder = match bundle::build_encoder(&bundle, SEGMENT_CACHE_BYTES) {
            Ok(encoder) => encoder,
            Err(error) => return BuildOutcome::Unusable(error.to_string()),
        };
        if let Some(disk) = self.disk.as_ref().filter(|_| came) {
            disk.write(hash, &bundle);
        }
        BuildOutcome::Encoder(Arc::new(encoder))
    }
}

/// A running comparison. When it is dropped, another may begin.
struct ProofGuard<'a> {
    prompts: &'a Prompts,
    reader: EncoderKey,
    life: Generation,
}

impl ProofGuard<'_> {
    fn set_outcome(&self, outcome: Result<PromptForms, String>) {
        self.prompts.0.table.lock().set_proof(&self.reader, self.life, outcome);
    }
}

impl Drop for ProofGuard<'_> {
    fn drop(&mut self) {
        self.prompts.0.table.lock().end_proof(&self.reader, self.life);
    }
}

#[cfg(test)]
pub(crate) mod tests;
