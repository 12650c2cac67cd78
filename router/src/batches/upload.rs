//! A file that is being uploaded: its bytes go to the disk as they come, and its owner's room is
//! taken until it is complete.

use std::path::PathBuf;

use tokio::io::{AsyncWriteExt, BufWriter};

use super::error::{BatchesError, DiskResult};
use super::object_id::{ObjectId, ObjectKind};
use super::private_files::{create, remove_folder, write_json};
use super::records::{FilePurpose, FileRecord};
use super::tenant_folder::{CONTENT, FILE_RECORD, TenantFolder};
use super::{Batches, new_id, now};

/// Most uploads of an owner at a time.
const MAX_UPLOADS: usize = 8;

/// Bytes that are written at a time.
const BUFFER_BYTES: usize = 256 * 1024;

/// Most characters of a file's name.
const MAX_NAME_CHARS: usize = 255;

/// What an owner's uploads may still take.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reserved {
    uploads: usize,
    bytes: u64,
}

/// The room of an upload, given back when it is dropped.
#[derive(Debug)]
struct UploadRoom {
    batches: Batches,
    owner: Box<str>,
    bytes: u64,
}

impl Drop for UploadRoom {
    fn drop(&mut self) {
        let mut reserved = self.batches.0.reserved.lock();
        if let Some(own) = reserved.get_mut(&self.owner) {
            own.uploads -= 1;
            own.bytes -= self.bytes;
            if own.uploads == 0 {
                reserved.remove(&self.owner);
            }
        }
    }
}

/// A file on its way. Dropped before its end, it is removed.
#[derive(Debug)]
pub(crate) struct Upload {
    id: ObjectId,
    tenant: TenantFolder,
    is_complete: bool,
    content: BufWriter<tokio::fs::File>,
    written: u64,
    room: UploadRoom,
}

impl Batches {
    /// Begins the upload of a file of at most `expected` bytes.
    ///
    /// # Errors
    /// If the owner has no room for it.
    pub(crate) async fn begin_upload(&self, owner: &str, expected: Option<u64>) -> Result<Upload, BatchesError> {
        let (owner, most) = (Box::<str>::from(owner), self.0.bounds.file_bytes);
        let bytes = expected.unwrap_or(most).min(most);
        let (upload, content) = self
            .block(move |batches| {
                let tenant = batches.tenant(&owner);
                let room = batches.reserve(&tenant, owner, bytes)?;
                let id = new_id(ObjectKind::File)?;
                let folder = tenant.begin(ObjectKind::File, &id)?;
                let path = folder.join(CONTENT);
                let content = create(&path).or_disk("write", &path)?;
                Ok(((id, tenant, room), content))
            })
            .await?;
        let (id, tenant, room) = upload;
        let content = BufWriter::with_capacity(BUFFER_BYTES, tokio::fs::File::from_std(content));
        Ok(Upload { id, tenant, is_complete: false, content, written: 0, room })
    }

    fn reserve(&self, tenant: &TenantFolder, owner: Box<str>, bytes: u64) -> Result<UploadRoom, BatchesError> {
        let bounds = &self.0.bounds;
        let _beginning = self.0.beginning.lock();
        let usage = tenant.usage()?;
        let mut reserved = self.0.reserved.lock();
        let (own, all) = (reserved.get(&owner).copied().unwrap_or_default(), reserved.values().map(|own| own.bytes).sum::<u64>());
        if own.uploads >= MAX_UPLOADS {
            return Err(BatchesError::Busy(format!("{MAX_UPLOADS} files of yours are on their way already: send this one after them")));
        }
        if usage.files + own.uploads >= bounds.tenant_files {
            let most = bounds.tenant_files;
            return Err(BatchesError::Quota(format!("you have {most} files, which is the most: delete some that you no longer need")));
        }
        if usage.bytes + own.bytes + bytes > bounds.tenant_bytes {
            let (has, most) = (usage.bytes + own.bytes, bounds.tenant_bytes);
            return Err(BatchesError::Quota(format!(
                "your files have {has} bytes and may have {most}: delete some that you no longer need"
            )));
        }
        self.check_total(all + bytes)?;
        let own = reserved.entry(owner.clone()).or_default();
        own.uploads += 1;
        own.bytes += bytes;
        drop(reserved);
        Ok(UploadRoom { batches: self.clone(), owner, bytes })
    }
}

impl Upload {
    /// Writes the next bytes.
    ///
    /// # Errors
    /// If the file becomes too large, or the disk is full.
    pub(crate) async fn write(&mut self, bytes: &[u8]) -> Result<(), BatchesError> {
        self.written += bytes.len() as u64;
        let most = self.room.batches.0.bounds.file_bytes;
        if self.written > most {
            return Err(BatchesError::TooLarge(format!("a file has at most {most} bytes: make several of it")));
        }
        self.content.write_all(bytes).await.or_disk("write", &self.tenant.folder(ObjectKind::File))
    }

    /// Makes the file one of its owner's, for `lifetime` seconds.
    ///
    /// # Errors
    /// If the disk is full.
    pub(crate) async fn finish(mut self, filename: &str, purpose: FilePurpose, lifetime: u64) -> Result<FileRecord, BatchesError> {
        self.content.flush().await.or_disk("write", &self.tenant.folder(ObjectKind::File))?;
        let created_at = now();
        let filename = filename.chars().filter(|character| !character.is_control()).take(MAX_NAME_CHARS).collect();
        let record =
            FileRecord { id: self.id.clone(), bytes: self.written, created_at, expires_at: created_at + lifetime, filename, purpose };
        let (batches, tenant, folder) = (self.room.batches.clone(), self.tenant.clone(), self.new_folder());
        let published = batches.block(move |batches| {
            let (path, content) = (folder.join(FILE_RECORD), folder.join(CONTENT));
            std::fs::File::open(&content).and_then(|content| content.sync_all()).or_disk("write", &content)?;
            write_json(&path, &record).or_disk("write", &path)?;
            tenant.publish(ObjectKind::File, &record.id, &folder)?;
            batches.count_bytes(record.bytes);
            Ok(record)
        });
        let record = published.await?;
        self.is_complete = true;
        Ok(record)
    }

    /// Its folder until it is complete.
    fn new_folder(&self) -> PathBuf {
        self.tenant.new_place(ObjectKind::File, &self.id)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // Two names are removed, which takes less than handing them to a thread.
        if !self.is_complete
            && let Err(error) = remove_folder(&self.new_folder())
        {
            tracing::debug!(%error, "half an upload is left until the next sweep");
        }
    }
}
