//! Staging: a copy of the model on the node's own disk, made before the engine starts. Whatever the
//! number of agents and engines, a node reads the model once.
//!
//! `EngineSpec` has one `ModelStage` for all engines of an agent. A failure stops nothing: the
//! engine reads the model where it lies. `plan` and the comparison with engines of an earlier agent
//! see only the model's own place.

mod copy;
mod entry;
mod error;
mod eviction;
mod manifest;
mod place;
mod progress;
mod source;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use self::copy::{BLOCK_BYTES, Copy};
use self::entry::{Entry, StageFolder};
use self::error::StageError;
use self::manifest::{Journal, Manifest};
use self::place::{Candidate, Place, choose, expand};
use self::progress::{StageProgress, StageStep};
use self::source::SourceFolder;
use crate::config::AgentConfig;
use crate::container;
use crate::host::available_memory;
use crate::load_turns::{LoadTurns, Turn};
use crate::mounts::{FileSystem, FileSystemKind};
use crate::prompt_files::{hub_cache, resolve_folder};
use crate::vllm::CommandLine;
use crate::vllm::arguments::{expand_config_file, is_given, value_of};

/// Time without a byte after which an engine does not wait any longer. Servers of parallel file
/// systems fail over within two to five minutes.
const STALL_LIMIT: Duration = Duration::from_secs(5 * 60);

/// How often a copy, or the one of another agent, is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// How long a failure is not tried again: the engines of a node start one after another.
const RETRY_AFTER: Duration = Duration::from_secs(10 * 60);

/// Without it, an engine is called as its model's place.
const NAME_FLAG: &str = "--served-model-name";

/// Setting with which the place is chosen here.
const AUTO: &str = "auto";

/// How an agent's engines get their model.
#[derive(Debug)]
pub(crate) struct ModelStage {
    /// `agent.stage`; empty stages nothing.
    place: String,
    bound: u64,
    /// As the engine's command line names it.
    model: String,
    /// Whether the arguments name the model for requests; else its path would be its name.
    is_named: bool,
    /// The model's folder is looked up with these.
    revision: Option<String>,
    downloads: PathBuf,
    any_format: bool,
    turns: Arc<LoadTurns>,
    progress: Mutex<Arc<StageProgress>>,
    /// When the last attempt failed. Locked while one is made.
    failed: tokio::sync::Mutex<Option<Instant>>,
}

/// A copy that is whole, and what it took.
struct Staged {
    entry: Entry,
    bytes: u64,
    bytes_read: u64,
    waited: Duration,
}

/// How an engine is to read its model.
#[derive(Debug, Default)]
pub(crate) struct PreparedModel {
    /// The copy, which nobody removes while this lives; `None` for the model's own place.
    copy: Option<Entry>,
    /// Time in which the engine waited for a turn, and for the copy.
    pub(crate) waited: Duration,
    pub(crate) staged_in: Duration,
}

impl PreparedModel {
    /// Folder of the copy; `None` for the model's own place.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        self.copy.as_ref().map(Entry::model)
    }
}

impl ModelStage {
    /// `None` where engines read no model: they are attached, or none is named.
    pub(crate) fn of(config: &AgentConfig, turns: Arc<LoadTurns>) -> Option<Self> {
        let arguments = expand_config_file(&config.engine_args);
        let format = value_of(&arguments, "--load-format");
        if config.model.is_empty() || !config.attach.is_empty() || format == Some("dummy") {
            return None;
        }
        Some(Self {
            place: config.stage.clone(),
            bound: config.stage_bytes,
            model: config.model.clone(),
            is_named: is_given(&arguments, NAME_FLAG),
            revision: value_of(&arguments, "--revision").map(str::to_owned),
            downloads: value_of(&arguments, "--download-dir").map_or_else(|| hub_cache(|name| std::env::var_os(name)), PathBuf::from),
            any_format: format.is_some(),
            turns,
            progress: Mutex::default(),
            failed: tokio::sync::Mutex::default(),
        })
    }

    /// Makes or checks the copy, if there is to be one. Reports why there is none.
    ///
    /// Waits as long as bytes come. Engines of one agent wait for each other's copy.
    pub(crate) async fn prepare(&self) -> PreparedModel {
        let began = Instant::now();
        let mut last_failed = self.failed.lock().await;
        let is_off = self.place.is_empty() || last_failed.is_some_and(|failed| failed.elapsed() < RETRY_AFTER);
        if is_off {
            return PreparedModel::default();
        }
        let progress = Arc::new(StageProgress::default());
        *self.progress.lock() = Arc::clone(&progress);
        let _ends_with_this = CancelOnDrop(Arc::clone(&progress));
        let staged = self.stage(&progress).await;
        progress.enter(StageStep::None, 0);
        let took = began.elapsed();
        match staged {
            Ok(Some(Staged { entry, bytes, bytes_read, waited })) => {
                let folder = entry.model();
                let seconds = (took.as_secs_f64() * 10.0).round() / 10.0;
                tracing::info!(event = "model_staged", seconds, bytes, read = bytes_read, folder = %folder.display(), "the model is on this node");
                *last_failed = None;
                PreparedModel { copy: Some(entry), waited, staged_in: took.saturating_sub(waited) }
            }
            Ok(None) => PreparedModel::default(),
            Err(error) => {
                tracing::warn!(
                    event = "model_not_staged",
                    kind = error.kind(),
                    "the model is not staged, and the engine reads it where it lies: {error}"
                );
                *last_failed = Some(Instant::now());
                PreparedModel { staged_in: took, ..PreparedModel::default() }
            }
        }
    }

    /// Waits for a turn to read the model where it lies, if other hosts share that file system.
    pub(crate) async fn wait_turn(&self) -> Option<Turn> {
        let (model, revision, downloads) = (self.model.clone(), self.revision.clone(), self.downloads.clone());
        let lies_on = on_thread("model-place", move || {
            let folder = resolve_folder(&model, revision.as_deref(), &downloads)?;
            FileSystem::of(&std::fs::canonicalize(folder).ok()?)
        });
        let file_system = lies_on.await.flatten().filter(|found| found.kind == FileSystemKind::Shared)?;
        self.turns.acquire(&file_system.source).await
    }

    /// What an engine waits for, in words; `None` if it does not.
    pub(crate) fn waits_for(&self) -> Option<String> {
        self.turns.waits_for().or_else(|| self.progress.lock().describe())
    }

    /// The engine's command line with the copy in the model's place, under the model's own name.
    pub(crate) fn redirect(&self, line: &CommandLine, copy: &Path) -> CommandLine {
        let mut line = line.clone();
        let is_named = self.is_named || line.arguments.iter().any(|argument| argument == NAME_FLAG);
        if let Some(model) = line.arguments.iter_mut().find(|argument| **argument == *self.model) {
            *model = copy.into();
            container::bind(&mut line.container, copy);
            if !is_named {
                line.arguments.extend([OsString::from(NAME_FLAG), OsString::from(&self.model)]);
            }
        }
        line
    }

    /// A model's card with the model's own place for the copy's.
    pub(crate) fn restore_card(&self, card: &Bytes, copy: &Path) -> Bytes {
        let (Ok(text), Some(copy)) = (std::str::from_utf8(card), copy.to_str()) else { return card.clone() };
        let quoted = |path: &str| serde_json::Value::from(path).to_string();
        text.replace(&quoted(copy), &quoted(&self.model)).into()
    }

    /// The copy of this model, whole; `None` if it needs none.
    async fn stage(&self, progress: &Arc<StageProgress>) -> Result<Option<Staged>, StageError> {
        progress.enter(StageStep::Looking, 0);
        let (place, bound, model) = (self.place.clone(), self.bound, self.model.clone());
        let (revision, downloads, any_format) = (self.revision.clone(), self.downloads.clone(), self.any_format);
        let found = watch_thread(progress, move |_| {
            let folder = resolve_folder(&model, revision.as_deref(), &downloads).ok_or_else(|| StageError::NoFolder(model.into()))?;
            let source = SourceFolder::list(&folder, any_format)?;
            let lies_on = FileSystem::of(&source.path);
            let chosen = choose_place(&place, bound, source.bytes(), lies_on.as_ref())?;
            let Some(Place { path, because }) = chosen else { return Ok(None) };
            tracing::info!(because, place = %path.display(), "the model is copied to this node");
            let folder = StageFolder::open(&path)?;
            folder.check_bound(source.bytes(), bound)?;
            let entry = folder.entry(&source.digest())?;
            Ok(Some((source, lies_on, folder, entry)))
        });
        let Some((source, lies_on, folder, entry)) = found.await? else {
            tracing::info!("the model is on a disk of this host: it is not staged");
            return Ok(None);
        };
        let (bytes, bound) = (source.bytes(), self.bound);
        progress.enter(StageStep::Following, bytes);
        let locked = watch_thread(progress, move |progress| {
            let lock = follow(&entry, progress)?;
            progress.enter(StageStep::Checking, 0);
            let copy = Copy { source: &source, entry: &entry.folder, block_bytes: BLOCK_BYTES, progress };
            let checked = copy.check(Manifest::read(&entry.folder))?;
            let is_whole = checked.iter().all(Option::is_some);
            if is_whole && copy.is_recorded(&checked) {
                return Ok((source, entry, lock, None));
            }
            if !is_whole {
                folder.make_room(&source.digest(), bytes, copy.missing_bytes(&checked), bound)?;
            }
            Ok((source, entry, lock, Some(checked)))
        });
        let (source, entry, lock, checked) = locked.await?;
        let Some(checked) = checked else {
            return Ok(Some(Staged { entry, bytes, bytes_read: 0, waited: Duration::ZERO }));
        };
        let began = Instant::now();
        let shared = lies_on.filter(|found| found.kind == FileSystemKind::Shared && checked.iter().any(Option::is_none));
        let turn = match shared {
            Some(shared) => self.turns.acquire_while(&shared.source, || drop(lock.set_modified(std::time::SystemTime::now()))).await,
            None => None,
        };
        let waited = turn.as_ref().map_or(Duration::ZERO, |_| began.elapsed());
        let missing = source.files.iter().zip(&checked).filter(|(_, found)| found.is_none()).map(|(file, _)| file.bytes).sum();
        progress.enter(StageStep::Copying, missing);
        let copied = watch_thread(progress, move |progress| {
            let _lock = lock;
            Copy { source: &source, entry: &entry.folder, block_bytes: BLOCK_BYTES, progress }.run(checked)?;
            Ok(entry)
        });
        let copied = copied.await;
        drop(turn);
        Ok(Some(Staged { entry: copied?, bytes, bytes_read: progress.bytes_read(), waited }))
    }
}

/// Waits until no other agent of this node copies the entry, and returns the lock of the one that
/// does.
#[expect(clippy::disallowed_methods, reason = "blocks by contract, on a thread of its own")]
fn follow(entry: &Entry, progress: &StageProgress) -> Result<std::fs::File, StageError> {
    loop {
        if let Some(lock) = entry.try_lock_copy()? {
            return Ok(lock);
        }
        if progress.is_cancelled() {
            return Err(StageError::Cancelled);
        }
        progress.follow(Journal::count(&entry.folder) * BLOCK_BYTES, entry.last_sign());
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// Place for a model's copy; `None` where `auto` finds the model on a disk of this host already.
fn choose_place(setting: &str, bound: u64, bytes: u64, lies_on: Option<&FileSystem>) -> Result<Option<Place>, StageError> {
    let variable = |name: &str| std::env::var(name).ok();
    if setting != AUTO {
        let path = std::path::absolute(expand(setting, variable)?).map_err(|error| StageError::target(Path::new(setting), error))?;
        return Ok(Some(Place { path, because: "agent.stage".to_owned() }));
    }
    if lies_on.is_some_and(|found| found.kind != FileSystemKind::Shared) {
        return Ok(None);
    }
    choose(&Candidate::of_this_node(bound, variable), bytes, available_memory().unwrap_or(0)).map(Some)
}

/// Where staged models would go here, in words, for `hostler doctor`. Blocks on the disks.
///
/// # Errors
/// Why nothing can be staged.
pub fn describe_stage(config: &AgentConfig) -> Result<String, String> {
    let is_off = config.stage.is_empty();
    let setting = if is_off { AUTO } else { &config.stage };
    // Where the model lies is not asked, so there is a place or an error.
    let place =
        choose_place(setting, config.stage_bytes, 1, None).and_then(|place| place.ok_or_else(|| StageError::NoPlace(String::new())));
    let Place { path, because } = place.map_err(|error| error.to_string())?;
    if is_off {
        return Ok(format!("off; agent.stage = \"auto\" would copy models to {because}"));
    }
    StageFolder::open(&path).map_err(|error| error.to_string())?;
    Ok(format!("models are copied to {}, by {because}", path.display()))
}

/// Runs blocking work on a thread of its own, and leaves it when nothing comes any longer.
///
/// A read of a hung file system cannot be ended: its thread stays until it returns, which a thread
/// of the runtime must not.
async fn watch_thread<T: Send + 'static>(
    progress: &Arc<StageProgress>,
    work: impl FnOnce(&StageProgress) -> Result<T, StageError> + Send + 'static,
) -> Result<T, StageError> {
    let counts = Arc::clone(progress);
    let mut outcome = std::pin::pin!(on_thread("stage", move || work(&counts)));
    let (mut sign, mut since) = (progress.sign_of_life(), Instant::now());
    loop {
        tokio::select! {
            // Only a thread that panicked, or could not be started, says nothing.
            outcome = &mut outcome => return outcome.unwrap_or(Err(StageError::Cancelled)),
            () = sleep(LOOK_INTERVAL) => {}
        }
        let now = progress.sign_of_life();
        if now != sign {
            (sign, since) = (now, Instant::now());
        } else if since.elapsed() > STALL_LIMIT {
            progress.cancel();
            return Err(StageError::Stalled(STALL_LIMIT));
        }
    }
}

async fn on_thread<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, outcome) = oneshot::channel();
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(move || drop(done.send(work())));
    match started {
        Ok(_) => outcome.await.ok(),
        Err(error) => {
            tracing::warn!(%error, "cannot start a thread");
            None
        }
    }
}

/// Ends a copy that nobody waits for any longer.
struct CancelOnDrop(Arc<StageProgress>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests;
