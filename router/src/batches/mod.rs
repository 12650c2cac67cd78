//! The files and batches of OpenAI's Batch API on the disk: who may have how much, and what each
//! call changes. `edge` has the routes, and `batch_runs` has the requests answered.
//!
//! A batch's record belongs to the router that has its lock. Others only leave the wish to cancel.

mod error;
pub(crate) mod multipart;
mod object_id;
mod open_batch;
mod private_files;
mod records;
mod tenant_folder;
mod upload;

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Notify;

use crate::config::RouterConfig;
use crate::random::random;

pub(crate) use error::BatchesError;
use error::DiskResult;
pub(crate) use object_id::ObjectId;
use object_id::ObjectKind;
pub(crate) use open_batch::{AnsweredRequest, BatchRequest, FoundBatch, OpenBatch};
use private_files::{make_folder, open_lock, write_json};
pub(crate) use records::{
    BatchCaller, BatchEnding, BatchFault, BatchOrder, BatchRecord, FilePurpose, FileRecord, KEPT_SECONDS, LIFETIME_BOUNDS, RequestCounts,
};
use tenant_folder::{BATCH_RECORD, CANCEL, CONTENT, INPUT, TenantFolder};
use upload::Reserved;

/// Bounds of files and batches.
#[derive(Debug, Clone)]
pub(crate) struct BatchBounds {
    pub(crate) file_bytes: u64,
    pub(crate) requests: usize,
    pub(crate) body_bytes: usize,
    pub(crate) tenant_bytes: u64,
    pub(crate) tenant_files: usize,
    pub(crate) tenant_unfinished: usize,
    pub(crate) bytes: u64,
}

impl BatchBounds {
    fn of(config: &RouterConfig) -> Self {
        Self {
            file_bytes: config.batches_max_file_bytes,
            requests: config.batches_max_requests,
            body_bytes: config.max_body_bytes.min(hostler_batch_file::MAX_BODY_BYTES),
            tenant_bytes: config.batches_tenant_bytes,
            tenant_files: config.batches_tenant_files,
            tenant_unfinished: config.batches_tenant_unfinished,
            bytes: config.batches_max_bytes,
        }
    }
}

/// Which objects a list has, from the newest unless `is_ascending`.
#[derive(Debug, Clone)]
pub(crate) struct ListQuery {
    pub(crate) after: Option<String>,
    pub(crate) limit: usize,
    pub(crate) is_ascending: bool,
    pub(crate) purpose: Option<String>,
}

/// A page of a list.
#[derive(Debug)]
pub(crate) struct ListPage<T> {
    pub(crate) objects: Vec<T>,
    pub(crate) has_more: bool,
}

/// All files and batches. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Batches(Arc<BatchesShared>);

#[derive(Debug)]
struct BatchesShared {
    root: PathBuf,
    bounds: BatchBounds,
    /// What uploads on their way may still take, by their owner.
    reserved: Mutex<FxHashMap<Box<str>, Reserved>>,
    /// Held while something is checked against the bounds and begun, by threads that may block.
    beginning: Mutex<()>,
    /// Bytes of everybody, as last measured, and what was added since.
    total_bytes: AtomicU64,
    /// Counts of the batches that run in this router.
    progress: Mutex<FxHashMap<ObjectId, RequestCounts>>,
    /// Notified when there is another batch.
    changed: Notify,
}

impl Batches {
    /// Opens the folder of the settings, if there is one that can be used. Without it a router
    /// still has everything else. Blocks.
    pub(crate) fn open_if_set(config: &RouterConfig) -> Option<Self> {
        if config.batches_dir.as_os_str().is_empty() {
            return None;
        }
        let warn =
            |error: &BatchesError| tracing::warn!(event = "batches_off", %error, "there is no Batch API (setting router.batches_dir)");
        Self::open(config).inspect_err(warn).ok()
    }

    /// Opens the folder, and makes it if it is not there. Blocks.
    ///
    /// # Errors
    /// If it cannot be used, or its file system has no locks: then two routers could run one batch.
    fn open(config: &RouterConfig) -> Result<Self, BatchesError> {
        let root = std::path::absolute(&config.batches_dir).or_disk("find", &config.batches_dir)?;
        make_folder(&root).or_disk("make", &root)?;
        let path = root.join("lock");
        let probe = open_lock(&path).or_disk("write", &path)?;
        if let Err(TryLockError::Error(error)) = probe.try_lock_shared() {
            return Err(BatchesError::disk("lock files in", &root, &error));
        }
        Ok(Self(Arc::new(BatchesShared {
            root,
            bounds: BatchBounds::of(config),
            reserved: Mutex::default(),
            beginning: Mutex::default(),
            total_bytes: AtomicU64::new(0),
            progress: Mutex::default(),
            changed: Notify::new(),
        })))
    }

    pub(crate) fn bounds(&self) -> &BatchBounds {
        &self.0.bounds
    }

    fn tenant(&self, owner: &str) -> TenantFolder {
        TenantFolder::of(&self.0.root, owner)
    }

    /// Runs what blocks on a thread for that.
    async fn block<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, BatchesError> + Send + 'static,
    ) -> Result<T, BatchesError> {
        let batches = self.clone();
        let working = tokio::task::spawn_blocking(move || work(&batches));
        working.await.unwrap_or_else(|error| Err(BatchesError::Disk(error.to_string())))
    }

    pub(crate) async fn file(&self, owner: &str, id: &str) -> Result<FileRecord, BatchesError> {
        let (tenant, id) = (self.tenant(owner), id.to_owned());
        self.block(move |_| find_file(&tenant, &id)).await
    }

    /// A file and its content.
    pub(crate) async fn open_content(&self, owner: &str, id: &str) -> Result<(FileRecord, File), BatchesError> {
        let (tenant, id) = (self.tenant(owner), id.to_owned());
        self.block(move |_| {
            let record = find_file(&tenant, &id)?;
            let content = tenant.open_content(&record.id)?;
            Ok((record, content))
        })
        .await
    }

    /// Removes a file. A batch that was made of it has its content until it ends.
    pub(crate) async fn remove_file(&self, owner: &str, id: &str) -> Result<FileRecord, BatchesError> {
        let (tenant, id) = (self.tenant(owner), id.to_owned());
        self.block(move |batches| {
            let record = find_file(&tenant, &id)?;
            if tenant.remove(ObjectKind::File, &record.id)? {
                batches.count_removed(record.bytes);
            }
            Ok(record)
        })
        .await
    }

    pub(crate) async fn list_files(&self, owner: &str, query: ListQuery) -> Result<ListPage<FileRecord>, BatchesError> {
        let (tenant, now) = (self.tenant(owner), now());
        self.block(move |_| {
            let is_wanted = |file: &FileRecord| query.purpose.as_ref().is_none_or(|purpose| file.purpose.as_str() == purpose);
            list(tenant.ids(ObjectKind::File)?, &query, |id| Ok(tenant.file(id, now)?.filter(is_wanted)))
        })
        .await
    }

    pub(crate) async fn list_batches(&self, owner: &str, query: ListQuery) -> Result<ListPage<BatchRecord>, BatchesError> {
        let tenant = self.tenant(owner);
        self.block(move |batches| {
            list(tenant.ids(ObjectKind::Batch)?, &query, |id| Ok(tenant.batch(id)?.map(|batch| batches.with_progress(batch))))
        })
        .await
    }

    pub(crate) async fn batch(&self, owner: &str, id: &str) -> Result<BatchRecord, BatchesError> {
        let (tenant, id) = (self.tenant(owner), id.to_owned());
        self.block(move |batches| Ok(batches.with_progress(find_batch(&tenant, &id)?))).await
    }

    /// Makes a batch of a file of the same owner.
    pub(crate) async fn create_batch(&self, owner: &str, caller: BatchCaller, order: BatchOrder) -> Result<BatchRecord, BatchesError> {
        let tenant = self.tenant(owner);
        let made = self.block(move |batches| batches.make_batch(&tenant, caller, order)).await?;
        self.0.changed.notify_one();
        Ok(made)
    }

    fn make_batch(&self, tenant: &TenantFolder, caller: BatchCaller, order: BatchOrder) -> Result<BatchRecord, BatchesError> {
        let file = find_file(tenant, &order.input_file_id)?;
        if file.purpose != FilePurpose::Batch {
            return Err(BatchesError::invalid("input_file_id", "this file is no input: upload one with the purpose batch"));
        }
        let bounds = &self.0.bounds;
        let _beginning = self.0.beginning.lock();
        let usage = tenant.usage()?;
        if usage.unfinished >= bounds.tenant_unfinished {
            let most = bounds.tenant_unfinished;
            return Err(BatchesError::Quota(format!("you have {most} unfinished batches, which is the most: wait for one, or cancel it")));
        }
        self.check_total(0)?;
        if usage.batches >= bounds.tenant_files {
            self.forget_oldest(tenant)?;
        }
        let id = new_id(ObjectKind::Batch)?;
        let new = tenant.begin(ObjectKind::Batch, &id)?;
        // Its content stays for the batch when the file is removed or expires.
        let (content, input) = (tenant.place(ObjectKind::File, &file.id).join(CONTENT), new.join(INPUT));
        fs::hard_link(&content, &input).or_else(|_| fs::copy(&content, &input).map(|_| ())).or_disk("copy", &content)?;
        let record = BatchRecord::new(id.clone(), file.id, caller, order, now());
        let path = new.join(BATCH_RECORD);
        write_json(&path, &record).or_disk("write", &path)?;
        tenant.publish(ObjectKind::Batch, &id, &new)?;
        Ok(record)
    }

    /// Removes the oldest batch that has ended, to make room for another one.
    fn forget_oldest(&self, tenant: &TenantFolder) -> Result<(), BatchesError> {
        for id in tenant.ids(ObjectKind::Batch)? {
            if tenant.batch(&id)?.is_none_or(|batch| batch.status.is_ended()) {
                tenant.remove(ObjectKind::Batch, &id)?;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Has a batch end with what is done.
    pub(crate) async fn cancel_batch(&self, owner: &str, id: &str) -> Result<BatchRecord, BatchesError> {
        let (tenant, id) = (self.tenant(owner), id.to_owned());
        self.block(move |batches| {
            let record = find_batch(&tenant, &id)?;
            if record.status.is_ended() || record.ending.is_some() {
                let status = record.status.as_str();
                return Err(BatchesError::Conflict(format!("Cannot cancel a batch with status '{status}'.")));
            }
            let path = tenant.place(ObjectKind::Batch, &record.id).join(CANCEL);
            if record.cancelling_at.is_none() {
                write_json(&path, &now()).or_disk("write", &path)?;
            }
            Ok(batches.with_progress(find_batch(&tenant, &id)?))
        })
        .await
    }

    /// A batch with its counts, if it runs in this router.
    fn with_progress(&self, record: BatchRecord) -> BatchRecord {
        let counts = self.0.progress.lock().get(&record.id).copied().filter(|_| !record.status.is_ended());
        BatchRecord { counts: counts.unwrap_or(record.counts), ..record }
    }

    /// Shows the counts of a batch that runs here; `None` when it has stopped.
    pub(crate) fn set_progress(&self, id: &ObjectId, counts: Option<RequestCounts>) {
        let mut progress = self.0.progress.lock();
        match counts {
            Some(counts) => drop(progress.insert(id.clone(), counts)),
            None => drop(progress.remove(id)),
        }
    }

    /// Resolves when there may be another batch.
    pub(crate) async fn wait_changed(&self) {
        self.0.changed.notified().await;
    }

    /// All unfinished batches. Those in `ended` are not looked at, and those that have ended are
    /// put there.
    pub(crate) async fn find_unfinished(
        &self,
        mut ended: FxHashSet<ObjectId>,
    ) -> Result<(Vec<FoundBatch>, FxHashSet<ObjectId>), BatchesError> {
        self.block(move |batches| {
            let (mut found, mut kept) = (Vec::new(), FxHashSet::default());
            for tenant in TenantFolder::all(&batches.0.root).or_disk("read", &batches.0.root)? {
                for id in tenant.ids(ObjectKind::Batch)? {
                    if ended.remove(&id) || tenant.batch(&id)?.is_none_or(|batch| batch.status.is_ended()) {
                        kept.insert(id);
                    } else {
                        found.push(FoundBatch::new(tenant.clone(), id));
                    }
                }
            }
            found.sort_by(|one, other| one.id.cmp(&other.id));
            Ok((found, kept))
        })
        .await
    }

    /// Removes what has expired, and measures the rest.
    pub(crate) async fn sweep(&self) -> Result<(), BatchesError> {
        self.block(|batches| {
            let mut bytes = 0;
            for tenant in TenantFolder::all(&batches.0.root).or_disk("read", &batches.0.root)? {
                bytes += tenant.sweep(now())?;
            }
            batches.0.total_bytes.store(bytes, Ordering::Relaxed);
            Ok(())
        })
        .await
    }

    /// Checks that there is room for more bytes within what all owners may have.
    fn check_total(&self, bytes: u64) -> Result<(), BatchesError> {
        let total = self.0.total_bytes.load(Ordering::Relaxed);
        if total.saturating_add(bytes) < self.0.bounds.bytes { Ok(()) } else { Err(BatchesError::DiskFull) }
    }

    fn count_bytes(&self, bytes: u64) {
        self.0.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn count_removed(&self, bytes: u64) {
        let _ = self.0.total_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |total| Some(total.saturating_sub(bytes)));
    }
}

fn find_file(tenant: &TenantFolder, id: &str) -> Result<FileRecord, BatchesError> {
    let found = ObjectId::parse(ObjectKind::File, id).map(|id| tenant.file(&id, now())).transpose()?.flatten();
    found.ok_or_else(|| BatchesError::NotFound(ObjectKind::File, id.to_owned()))
}

fn find_batch(tenant: &TenantFolder, id: &str) -> Result<BatchRecord, BatchesError> {
    let found = ObjectId::parse(ObjectKind::Batch, id).map(|id| tenant.batch(&id)).transpose()?.flatten();
    found.ok_or_else(|| BatchesError::NotFound(ObjectKind::Batch, id.to_owned()))
}

/// The page of a list, of ids from the oldest to the newest. Only what is on it is read.
fn list<T>(
    ids: Vec<ObjectId>,
    query: &ListQuery,
    mut read: impl FnMut(&ObjectId) -> Result<Option<T>, BatchesError>,
) -> Result<ListPage<T>, BatchesError> {
    let after = query.after.as_deref();
    let is_beyond = |id: &&ObjectId| match (after, query.is_ascending) {
        (None, _) => true,
        (Some(after), true) => id.as_str() > after,
        (Some(after), false) => id.as_str() < after,
    };
    let mut ids: Vec<&ObjectId> = ids.iter().filter(is_beyond).collect();
    if !query.is_ascending {
        ids.reverse();
    }
    let mut objects = Vec::new();
    for id in ids {
        let Some(object) = read(id)? else { continue };
        if objects.len() == query.limit {
            return Ok(ListPage { objects, has_more: true });
        }
        objects.push(object);
    }
    Ok(ListPage { objects, has_more: false })
}

fn new_id(kind: ObjectKind) -> Result<ObjectId, BatchesError> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let bytes = random().map_err(|error| BatchesError::Disk(format!("the system gives no random numbers: {error}")))?;
    Ok(ObjectId::new(kind, u64::try_from(since.as_millis()).unwrap_or(u64::MAX), bytes))
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Writes the record of a batch into its folder.
fn write_record(folder: &Path, record: &BatchRecord) -> Result<(), BatchesError> {
    let path = folder.join(BATCH_RECORD);
    write_json(&path, record).or_disk("write", &path)
}

#[cfg(test)]
mod tests;
