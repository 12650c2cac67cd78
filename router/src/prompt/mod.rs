//! The models' tokenizers and templates as agents deliver them, and the encoding of prompts on a bounded pool of threads.
//!
//! An encoder is used only after it has agreed with an engine about a few samples, and for the forms of prompts about which it has: see
//! `prove`. What was proved with one front-end is not believed of the other, which encodes some prompts in another way. What is made of
//! the tokens is decided elsewhere; which replica has which files is known to the fleet. Called by sessions (`offered`, `part`), by whoever
//! keeps the encoders proved, and for each request by the edge (`encode`).

mod disk;
mod files;
mod pool;
mod proof;
mod table;
mod transfer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hostler_prompt::{Dialect, Encoded, Encoder, Form, Forms, Progress, Request};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::lanes::Lanes;
use disk::Disk;
use files::Short;
use pool::{Pool, Refused};
use table::{Life, Next, Table};
pub use transfer::FilesPiece;

/// SHA-256 of a model's files as one encoded `PromptBundle`.
pub type FilesHash = [u8; 32];

/// What turns a request into the tokens that a replica sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Reader {
    /// The files of its model.
    pub files: FilesHash,
    /// The rules of its engine's front-end.
    pub dialect: Dialect,
}

/// What the segments that one encoder remembers may take: about 16 million tokens, which is the text of some hundred long chats.
const SEGMENTS_BYTES: usize = 64 * 1024 * 1024;

/// How long a request waits for its tokens, its turn included. Beyond that the tokens cost more than a better place gains.
const ENCODE_DEADLINE: Duration = Duration::from_secs(2);

/// Files that are read, checked and made into an encoder at once. Each takes a thread for a second and a few times the files' memory.
const BUILDS: usize = 2;

/// The encoders of all models. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Prompts(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    table: Mutex<Table>,
    disk: Option<Disk>,
    pool: Pool,
    builds: Semaphore,
    building: TaskTracker,
    encodes: AtomicU64,
    busy: AtomicU64,
    failed: AtomicU64,
}

/// What is known of the files that have some hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// They are not here, and not on their way.
    Missing,
    /// They are on their way, or being read.
    Loading,
    /// Their encoder is ready, but has not been compared with an engine.
    Unproved,
    /// Their encoder agrees with an engine: requests may be encoded.
    Proved,
    /// It agrees about these forms of prompts only: requests that have no others may be encoded.
    Partly(Forms),
    /// Their encoder and an engine differ, and where.
    Different(String),
    /// No encoder can be made of them, and why.
    Unusable(String),
}

impl Standing {
    /// One word, for metrics and listings.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Loading => "loading",
            Self::Unproved => "unproved",
            Self::Proved | Self::Partly(_) => "proved",
            Self::Different(_) => "different",
            Self::Unusable(_) => "unusable",
        }
    }

    /// Whether requests may be encoded, of some form at least.
    #[must_use]
    pub fn is_proved(&self) -> bool {
        matches!(self, Self::Proved | Self::Partly(_))
    }

    /// Which requests are placed by text, or why all are; empty when nothing stands in the way, or only for a moment.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Partly(forms) => forms.remark(),
            Self::Different(reason) | Self::Unusable(reason) => reason.clone(),
            Self::Missing | Self::Loading | Self::Unproved | Self::Proved => String::new(),
        }
    }
}

/// Why there are no tokens for a request. None of these is the client's concern: the request is placed by its text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// There is no encoder that agrees with the engine.
    #[error("no encoder of this model has been proved against its engine")]
    NotProved,
    /// There is, but not for prompts of this form.
    #[error("{}", .0.unproved())]
    FormNotProved(Form),
    /// Its route or form is not one whose prompt is read here.
    #[error("the prompt of this kind of request is not read")]
    NotUnderstood,
    /// Too many wait for the pool, or the encoding took too long.
    #[error("the threads that encode prompts are busy")]
    Busy,
    /// The template or the tokenizer refused this request, and why.
    #[error("{0}")]
    Failed(String),
}

/// Figures for the metrics page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figures {
    /// How many models stand how, by `Standing::word`.
    pub models: [(&'static str, usize); 6],
    /// Requests that were encoded.
    pub encodes: u64,
    /// Bytes of text that went through a tokenizer.
    pub encoded_bytes: u64,
    /// Segments of prompts whose tokens were remembered.
    pub segment_hits: u64,
    /// Segments of prompts that had to be encoded.
    pub segment_misses: u64,
    /// Bytes that remembered segments take now.
    pub segment_bytes: usize,
    /// Requests that were not encoded because the pool was full or took too long.
    pub busy: u64,
    /// Requests that a template or tokenizer refused.
    pub failed: u64,
}

impl Prompts {
    /// Nothing is known yet. Files are kept in the folder `prompt` of `cache_dir` so that a restarted router need not ask for them again;
    /// with an empty path nothing is kept. What that folder holds is listed here, at once: call it at start.
    #[must_use]
    pub fn new(cache_dir: PathBuf, threads: usize) -> Self {
        let disk = (cache_dir != Path::new("")).then(|| Disk::open(&cache_dir));
        Self(Arc::new(Inner {
            table: Mutex::default(),
            disk,
            pool: Pool::new(threads),
            builds: Semaphore::new(BUILDS),
            building: TaskTracker::new(),
            encodes: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }))
    }

    /// A replica says that it has these files, `bytes` long. They are read from disk, or its agent is asked for them by `fetch`; or
    /// nothing is done because they are here or on their way. To be called again with each report while they are not: a transfer that
    /// stalls or breaks is begun again by a later offer only. Must be called within a runtime.
    pub fn offered(&self, hash: FilesHash, bytes: u64, fetch: &dyn Fn()) {
        let on_disk = self.0.disk.as_ref().is_some_and(|disk| disk.may_have(&hash));
        let next = self.0.table.lock().offered(hash, bytes, on_disk, Instant::now());
        match next {
            Next::Nothing => {}
            Next::Fetch => fetch(),
            Next::Read(life) => self.build(hash, life, None),
        }
    }

    /// A piece of the files that were asked for has come. Must be called within a runtime.
    pub fn part(&self, hash: &FilesHash, part: FilesPiece) {
        let whole = self.0.table.lock().part(hash, part, Instant::now());
        if let Some((life, bundle)) = whole {
            self.build(*hash, life, Some(bundle));
        }
    }

    /// What is known of these files, with this dialect.
    #[must_use]
    pub fn standing(&self, reader: &Reader) -> Standing {
        self.0.table.lock().standing(reader, Instant::now())
    }

    /// Compares an encoder that stands ready with an engine, `replica` behind `lanes`, which serves its `model` by a front-end of this
    /// dialect. Does nothing when the encoder is not ready, has been compared with such a one, or is being compared. An engine that cannot
    /// be asked leaves it unproved: call it again, with any replica of that front-end; within a second of such a failure nothing is done.
    pub async fn prove(&self, reader: Reader, lanes: &Lanes, replica: u32, model: &str) {
        let Some((life, encoder)) = self.0.table.lock().begin_proof(&reader, Instant::now()) else { return };
        let proving = Proving { prompts: self, reader, life };
        let asked = proof::Asked { lanes, replica, model, dialect: reader.dialect };
        let (files, front_end) = (Short(&reader.files), reader.dialect);
        match proof::run(&self.0.pool, &encoder, &asked).await {
            Ok(proved) => {
                let (forms, samples) = (proved.forms, proved.samples);
                match proved.doubt {
                    None => tracing::info!(%files, ?front_end, model, samples, "prompts are encoded as the engine encodes them"),
                    Some(why) => {
                        let remark = forms.remark();
                        tracing::warn!(%files, ?front_end, model, samples, why, "the engine encodes some prompts in another way: {remark}");
                    }
                }
                proving.set(Ok(forms));
            }
            Err(proof::Failure::Different(why)) => {
                tracing::warn!(%files, ?front_end, model, why, "the engine encodes prompts in another way: requests for it are placed by text");
                proving.set(Err(why));
            }
            Err(proof::Failure::NoAnswer(why)) => {
                // Engines come and go; it is worth a warning only once.
                if self.0.table.lock().silence(&reader, life, Instant::now()) {
                    tracing::warn!(%files, model, why, "cannot compare with the engine: until then requests for it are placed by text");
                } else {
                    tracing::debug!(%files, model, why, "cannot compare with the engine");
                }
            }
        }
    }

    /// The tokens that an engine will see for a request with this path and body, or those of the beginning: `goes_on` is asked now and then,
    /// on another thread, whether more are wanted.
    ///
    /// # Errors
    /// When there are none, or not soon enough; the request may be placed without them.
    pub async fn encode(
        &self,
        reader: &Reader,
        path: &str,
        body: Bytes,
        mut goes_on: impl FnMut(Progress<'_>) -> bool + Send + 'static,
    ) -> Result<Encoded, Unread> {
        let (encoder, proved) = self.0.table.lock().proved(reader, Instant::now()).ok_or(Unread::NotProved)?;
        let (path, dialect) = (path.to_owned(), reader.dialect);
        let encoding = self.0.pool.run(move || {
            let request = Request::parse(&path, &body).ok_or(Unread::NotUnderstood)?;
            if let Some(form) = request.forms().without(proved).iter().next() {
                return Err(Unread::FormNotProved(form));
            }
            encoder.encode_while(dialect, &request, &mut goes_on).map_err(|error| Unread::Failed(error.to_string()))
        });
        let encoded = match tokio::time::timeout(ENCODE_DEADLINE, encoding).await {
            Ok(Ok(encoded)) => encoded,
            Ok(Err(Refused::Full)) | Err(_) => Err(Unread::Busy),
            Ok(Err(Refused::Panicked)) => Err(Unread::Failed("the encoder failed on this request in a way that nobody foresaw".into())),
        };
        let counter = match &encoded {
            Ok(_) => &self.0.encodes,
            Err(Unread::NotUnderstood | Unread::FormNotProved(_)) => return encoded,
            Err(Unread::Busy) => &self.0.busy,
            Err(_) => &self.0.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        encoded
    }

    /// Figures for the metrics page.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let (models, stats) = self.0.table.lock().figures(Instant::now());
        Figures {
            models,
            encodes: self.0.encodes.load(Ordering::Relaxed),
            encoded_bytes: stats.encoded_bytes,
            segment_hits: stats.hits,
            segment_misses: stats.misses,
            segment_bytes: stats.cache_bytes,
            busy: self.0.busy.load(Ordering::Relaxed),
            failed: self.0.failed.load(Ordering::Relaxed),
        }
    }

    /// Waits until nothing is being read or made into an encoder, for `limit` at most: what a thread has begun it ends.
    pub async fn finish(&self, limit: Duration) {
        self.0.building.close();
        if tokio::time::timeout(limit, self.0.building.wait()).await.is_err() {
            tracing::debug!("leaving while a model's files are being read");
        }
    }

    /// Makes an encoder of `bundle`, or of what the disk has, on a blocking thread; then the table knows the result.
    fn build(&self, hash: FilesHash, life: Life, bundle: Option<Vec<u8>>) {
        let prompts = self.clone();
        self.0.building.spawn(async move {
            let _turn = prompts.0.builds.acquire().await;
            let built = prompts.clone();
            let built = tokio::task::spawn_blocking(move || built.0.made(&hash, bundle)).await;
            let built = built.unwrap_or_else(|_| Made::Unusable("reading them failed in a way that nobody foresaw".into()));
            if let Made::Unusable(why) = &built {
                tracing::warn!(files = %Short(&hash), why, "a model's files cannot be used: requests for it are placed by text");
            }
            prompts.0.table.lock().made(&hash, life, built, Instant::now());
        });
    }
}

/// What has become of a model's files.
#[derive(Debug)]
enum Made {
    Encoder(Arc<Encoder>),
    /// What the disk had is not what it should be.
    NotOnDisk,
    /// Another bundle came than was asked for.
    Corrupted,
    Unusable(String),
}

impl Inner {
    /// Blocking.
    fn made(&self, hash: &FilesHash, bundle: Option<Vec<u8>>) -> Made {
        let (bundle, came) = match bundle {
            Some(bundle) if files::hash(&bundle) == *hash => (bundle, true),
            Some(bundle) => {
                let (files, bytes) = (Short(hash), bundle.len());
                tracing::warn!(%files, bytes, "a model's files were damaged on their way: they will be asked for again");
                return Made::Corrupted;
            }
            None => match self.disk.as_ref().and_then(|disk| disk.read(hash)) {
                Some(bundle) => (bundle, false),
                None => return Made::NotOnDisk,
            },
        };
        let encoder = match files::encoder(&bundle, SEGMENTS_BYTES) {
            Ok(encoder) => encoder,
            Err(error) => return Made::Unusable(error.to_string()),
        };
        if let Some(disk) = self.disk.as_ref().filter(|_| came) {
            disk.write(hash, &bundle);
        }
        Made::Encoder(Arc::new(encoder))
    }
}

/// A comparison under way. When it is dropped, another one may begin.
struct Proving<'a> {
    prompts: &'a Prompts,
    reader: Reader,
    life: Life,
}

impl Proving<'_> {
    fn set(&self, outcome: Result<Forms, String>) {
        self.prompts.0.table.lock().set_proof(&self.reader, self.life, outcome);
    }
}

impl Drop for Proving<'_> {
    fn drop(&mut self) {
        self.prompts.0.table.lock().end_proof(&self.reader, self.life);
    }
}

#[cfg(test)]
pub(crate) mod tests;
