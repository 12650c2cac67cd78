//! What the disk keeps of a file and of a batch, and the objects of OpenAI's API that are made of
//! it. Pure: the time is an argument, in seconds since 1970.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::object_id::ObjectId;

/// Seconds until a batch expires: the only `completion_window` that there is.
pub(crate) const WINDOW_SECONDS: u64 = 24 * 3600;

/// Seconds that a file is kept unless its owner says otherwise, and a batch after its end.
pub(crate) const KEPT_SECONDS: u64 = 30 * 24 * 3600;

/// Shortest and longest life of a file, in seconds, that its owner may ask for.
pub(crate) const LIFETIME_BOUNDS: std::ops::RangeInclusive<u64> = 3600..=KEPT_SECONDS;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FilePurpose {
    Batch,
    BatchOutput,
}

impl FilePurpose {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    pub(crate) id: ObjectId,
    pub(crate) bytes: u64,
    pub(crate) created_at: u64,
    pub(crate) expires_at: u64,
    /// As the client has named it, never a path here.
    pub(crate) filename: String,
    pub(crate) purpose: FilePurpose,
}

impl FileRecord {
    pub(crate) fn object(&self) -> Value {
        let Self { id, bytes, created_at, expires_at, filename, purpose } = self;
        json!({
            "id": id, "object": "file", "bytes": bytes, "created_at": created_at, "expires_at": expires_at, "filename": filename,
            "purpose": purpose.as_str(), "status": "processed", "status_details": null,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub(crate) enum BatchStatus {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Completed,
    Expired,
    Cancelling,
    Cancelled,
}

impl BatchStatus {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }

    pub(crate) fn is_ended(self) -> bool {
        matches!(self, Self::Failed | Self::Completed | Self::Expired | Self::Cancelled)
    }
}

/// How a batch ends whose output is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchEnding {
    Completed,
    Expired,
    Cancelled,
    /// Its caller may send no more requests.
    Failed,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RequestCounts {
    pub(crate) total: usize,
    /// Requests with a status of 2xx.
    pub(crate) completed: usize,
    pub(crate) failed: usize,
}

/// Why a batch failed, at a line of its input or as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchFault {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) line: Option<u32>,
}

impl BatchFault {
    pub(crate) fn whole(code: &str, message: String) -> Self {
        Self { code: code.to_owned(), message, param: None, line: None }
    }
}

/// What a client asks for.
#[derive(Debug)]
pub(crate) struct BatchOrder {
    pub(crate) input_file_id: String,
    pub(crate) endpoint: String,
    pub(crate) metadata: Option<BTreeMap<String, String>>,
    /// Seconds that the output is kept.
    pub(crate) output_lifetime: u64,
}

/// The owner of a batch: the id of a key and its tenant, both empty without keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchCaller {
    pub(crate) key: String,
    pub(crate) tenant: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    pub(crate) id: ObjectId,
    pub(crate) caller: BatchCaller,
    pub(crate) endpoint: String,
    pub(crate) input_file_id: ObjectId,
    pub(crate) metadata: Option<BTreeMap<String, String>>,
    pub(crate) output_lifetime: u64,
    pub(crate) status: BatchStatus,
    pub(crate) faults: Vec<BatchFault>,
    pub(crate) counts: RequestCounts,
    /// How it ends, once that is certain.
    pub(crate) ending: Option<BatchEnding>,
    /// Ids of output and error file once they are certain, whether or not there will be such files.
    pub(crate) result_ids: Option<[ObjectId; 2]>,
    pub(crate) output_file_id: Option<ObjectId>,
    pub(crate) error_file_id: Option<ObjectId>,
    pub(crate) created_at: u64,
    pub(crate) in_progress_at: Option<u64>,
    pub(crate) expires_at: u64,
    pub(crate) finalizing_at: Option<u64>,
    pub(crate) ended_at: Option<u64>,
    pub(crate) cancelling_at: Option<u64>,
}

impl BatchRecord {
    pub(crate) fn new(id: ObjectId, input_file_id: ObjectId, caller: BatchCaller, order: BatchOrder, now: u64) -> Self {
        Self {
            id,
            caller,
            endpoint: order.endpoint,
            input_file_id,
            metadata: order.metadata,
            output_lifetime: order.output_lifetime,
            status: BatchStatus::Validating,
            faults: Vec::new(),
            counts: RequestCounts::default(),
            ending: None,
            result_ids: None,
            output_file_id: None,
            error_file_id: None,
            created_at: now,
            in_progress_at: None,
            expires_at: now + WINDOW_SECONDS,
            finalizing_at: None,
            ended_at: None,
            cancelling_at: None,
        }
    }

    /// Its input was checked.
    pub(crate) fn begin(&mut self, total: usize, now: u64) {
        self.counts.total = total;
        self.in_progress_at = self.in_progress_at.or(Some(now));
        if self.status == BatchStatus::Validating {
            self.status = BatchStatus::InProgress;
        }
    }

    /// Nothing of it can be sent, or no more.
    pub(crate) fn fail(&mut self, faults: Vec<BatchFault>, now: u64) {
        self.faults = faults;
        (self.status, self.ended_at) = (BatchStatus::Failed, Some(now));
    }

    pub(crate) fn cancel(&mut self, asked_at: u64) {
        if !self.status.is_ended() && self.ending.is_none() {
            (self.status, self.cancelling_at) = (BatchStatus::Cancelling, Some(asked_at));
        }
    }

    /// Its results are written from now on, under these ids.
    pub(crate) fn finalize(&mut self, ending: BatchEnding, result_ids: [ObjectId; 2], now: u64) {
        (self.ending, self.result_ids, self.finalizing_at) = (Some(ending), Some(result_ids), Some(now));
        if ending != BatchEnding::Cancelled {
            self.status = BatchStatus::Finalizing;
        }
    }

    /// Its results are there.
    pub(crate) fn end(&mut self, now: u64) {
        self.status = match self.ending {
            Some(BatchEnding::Expired) => BatchStatus::Expired,
            Some(BatchEnding::Cancelled) => BatchStatus::Cancelled,
            Some(BatchEnding::Failed) => BatchStatus::Failed,
            Some(BatchEnding::Completed) | None => BatchStatus::Completed,
        };
        self.ended_at = Some(now);
    }

    pub(crate) fn object(&self) -> Value {
        let ended = |status| self.ended_at.filter(|_| self.status == status);
        let faults = |faults: &[BatchFault]| json!({"object": "list", "data": faults});
        let RequestCounts { total, completed, failed } = self.counts;
        json!({
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": (!self.faults.is_empty()).then(|| faults(&self.faults)),
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status.as_str(),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": ended(BatchStatus::Completed),
            "failed_at": ended(BatchStatus::Failed),
            "expired_at": ended(BatchStatus::Expired),
            "cancelling_at": self.cancelling_at,
            "cancelled_at": ended(BatchStatus::Cancelled),
            "request_counts": {"total": total, "completed": completed, "failed": failed},
            "metadata": self.metadata,
        })
    }
}

#[cfg(test)]
mod tests;
