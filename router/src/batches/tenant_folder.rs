//! The folder of one owner: a folder for each file and each batch, named by its id. Whatever is
//! being made or removed has a name with a dot before it. The disk is the truth, so that several
//! routers can share it. Blocks.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::error::{BatchesError, DiskResult};
use super::object_id::{ObjectId, ObjectKind};
use super::private_files::{make_folder, read_json, remove_folder, sync_folder};
use super::records::{BatchRecord, FileRecord, KEPT_SECONDS};
use crate::folder_names::folder_names;

/// A folder that is being made or removed for this long was left by a router that has died. An
/// upload takes an hour at most.
const LEFTOVER_AGE: Duration = Duration::from_secs(2 * 3600);

pub(super) const FILE_RECORD: &str = "file.json";
pub(super) const CONTENT: &str = "content";
pub(super) const BATCH_RECORD: &str = "batch.json";
pub(super) const INPUT: &str = "input.jsonl";
pub(super) const JOURNAL: &str = "journal";
/// Taken by the router that runs the batch.
pub(super) const LOCK: &str = "lock";
/// There once somebody has cancelled the batch, with the time in it.
pub(super) const CANCEL: &str = "cancel";

/// What an owner has on the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TenantUsage {
    pub(super) files: usize,
    pub(super) batches: usize,
    pub(super) unfinished: usize,
    pub(super) bytes: u64,
}

#[derive(Debug, Clone)]
pub(super) struct TenantFolder(PathBuf);

impl TenantFolder {
    /// The folder of an owner, which need not exist. Its name is a hash, because owners have any
    /// names.
    pub(super) fn of(root: &Path, owner: &str) -> Self {
        let name: String = Sha256::digest(owner.as_bytes())[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        Self(root.join(name))
    }

    /// The folders of all owners.
    pub(super) fn all(root: &Path) -> io::Result<Vec<Self>> {
        let is_name = |name: &str| name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        Ok(folder_names(root)?.into_iter().filter(|name| is_name(name)).map(|name| Self(root.join(name))).collect())
    }

    pub(super) fn folder(&self, kind: ObjectKind) -> PathBuf {
        self.0.join(match kind {
            ObjectKind::File => "files",
            ObjectKind::Batch => "batches",
        })
    }

    pub(super) fn place(&self, kind: ObjectKind, id: &ObjectId) -> PathBuf {
        self.folder(kind).join(id.as_str())
    }

    /// The folder of something that is not complete yet.
    pub(super) fn new_place(&self, kind: ObjectKind, id: &ObjectId) -> PathBuf {
        self.folder(kind).join(format!(".new-{id}"))
    }

    /// Makes the folder of something new, to be `publish`ed.
    pub(super) fn begin(&self, kind: ObjectKind, id: &ObjectId) -> Result<PathBuf, BatchesError> {
        let new = self.new_place(kind, id);
        make_folder(&new).or_disk("make", &new)?;
        Ok(new)
    }

    /// Gives something that is complete its name.
    pub(super) fn publish(&self, kind: ObjectKind, id: &ObjectId, new: &Path) -> Result<(), BatchesError> {
        let place = self.place(kind, id);
        sync_folder(new).and_then(|()| fs::rename(new, &place)).and_then(|()| sync_folder(&self.folder(kind))).or_disk("write", &place)
    }

    /// Removes something; `false` if it is not there.
    pub(super) fn remove(&self, kind: ObjectKind, id: &ObjectId) -> Result<bool, BatchesError> {
        let (place, old) = (self.place(kind, id), self.folder(kind).join(format!(".old-{id}")));
        match fs::rename(&place, &old) {
            Ok(()) => remove_folder(&old).or_disk("remove", &old).map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(BatchesError::disk("remove", &place, &error)),
        }
    }

    /// Ids from the oldest to the newest.
    pub(super) fn ids(&self, kind: ObjectKind) -> Result<Vec<ObjectId>, BatchesError> {
        let folder = self.folder(kind);
        let mut ids: Vec<ObjectId> =
            folder_names(&folder).or_disk("read", &folder)?.iter().filter_map(|name| ObjectId::parse(kind, name)).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// A file that has not expired.
    pub(super) fn file(&self, id: &ObjectId, now: u64) -> Result<Option<FileRecord>, BatchesError> {
        let path = self.place(ObjectKind::File, id).join(FILE_RECORD);
        let record: Option<FileRecord> = read_json(&path).or_disk("read", &path)?;
        Ok(record.filter(|record| record.expires_at > now))
    }

    /// A batch as the disk has it, with the wish to cancel it.
    pub(super) fn batch(&self, id: &ObjectId) -> Result<Option<BatchRecord>, BatchesError> {
        let place = self.place(ObjectKind::Batch, id);
        let record: Option<BatchRecord> = read_json(&place.join(BATCH_RECORD)).or_disk("read", &place)?;
        Ok(record.map(|mut record| {
            if let Some(asked_at) = cancel_time(&place).filter(|_| record.cancelling_at.is_none()) {
                record.cancel(asked_at);
            }
            record
        }))
    }

    pub(super) fn usage(&self) -> Result<TenantUsage, BatchesError> {
        let mut usage = TenantUsage::default();
        for id in self.ids(ObjectKind::File)? {
            usage.files += 1;
            usage.bytes += self.file_bytes(&id);
        }
        for id in self.ids(ObjectKind::Batch)? {
            usage.batches += 1;
            usage.bytes += self.batch_bytes(&id);
            usage.unfinished += usize::from(self.batch(&id)?.is_some_and(|batch| !batch.status.is_ended()));
        }
        Ok(usage)
    }

    /// Bytes of a file's content.
    pub(super) fn file_bytes(&self, id: &ObjectId) -> u64 {
        fs::metadata(self.place(ObjectKind::File, id).join(CONTENT)).map_or(0, |content| content.len())
    }

    /// Bytes that a batch has beside its files: its journal, and its input if that file is gone.
    pub(super) fn batch_bytes(&self, id: &ObjectId) -> u64 {
        let place = self.place(ObjectKind::Batch, id);
        let journal = fs::metadata(place.join(JOURNAL)).map_or(0, |journal| journal.len());
        journal + fs::metadata(place.join(INPUT)).map_or(0, |input| if input.nlink() > 1 { 0 } else { input.len() })
    }

    /// Removes what only an unfinished batch needs.
    pub(super) fn remove_work(&self, id: &ObjectId) -> Result<(), BatchesError> {
        for name in [JOURNAL, INPUT] {
            let path = self.place(ObjectKind::Batch, id).join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(BatchesError::disk("remove", &path, &error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes what has expired or was left half made, and returns the bytes of the rest.
    pub(super) fn sweep(&self, now: u64) -> Result<u64, BatchesError> {
        let mut bytes = 0;
        for id in self.ids(ObjectKind::File)? {
            if self.file(&id, now)?.is_none() {
                self.remove(ObjectKind::File, &id)?;
            } else {
                bytes += self.file_bytes(&id);
            }
        }
        for id in self.ids(ObjectKind::Batch)? {
            let ended_at = self.batch(&id)?.and_then(|batch| batch.ended_at);
            if ended_at.is_some_and(|ended_at| ended_at + KEPT_SECONDS <= now) {
                self.remove(ObjectKind::Batch, &id)?;
                continue;
            }
            if ended_at.is_some() {
                self.remove_work(&id)?;
            }
            bytes += self.batch_bytes(&id);
        }
        for kind in [ObjectKind::File, ObjectKind::Batch] {
            let folder = self.folder(kind);
            for name in folder_names(&folder).or_disk("read", &folder)?.iter().filter(|name| name.starts_with('.')) {
                let path = folder.join(name);
                let changed = fs::metadata(&path).and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
                if changed.elapsed().is_ok_and(|age| age > LEFTOVER_AGE) {
                    remove_folder(&path).or_disk("remove", &path)?;
                }
            }
        }
        Ok(bytes)
    }

    pub(super) fn open_content(&self, id: &ObjectId) -> Result<File, BatchesError> {
        let path = self.place(ObjectKind::File, id).join(CONTENT);
        File::open(&path).or_disk("read", &path)
    }
}

/// When somebody has cancelled the batch with this folder, if anybody has.
pub(super) fn cancel_time(place: &Path) -> Option<u64> {
    fs::read_to_string(place.join(CANCEL)).ok()?.trim().parse().ok()
}
