//! A batch whose lock this router has: its input, the journal of its answers, and its results.
//! Blocks: `batch_runs` moves it to a thread for each step.

use std::fs::{File, TryLockError};
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hostler_batch_file::{FileError, Input, InputBounds, Journal, Outcome, RequestLine, parse_request, write_output};

use super::error::{BatchesError, DiskResult};
use super::object_id::{ObjectId, ObjectKind};
use super::private_files::{create, make_folder, open_lock, remove_folder, write_json};
use super::records::{BatchEnding, BatchFault, BatchRecord, BatchStatus, FilePurpose, FileRecord, RequestCounts};
use super::tenant_folder::{CONTENT, FILE_RECORD, INPUT, JOURNAL, LOCK, TenantFolder, cancel_time};
use super::{Batches, new_id, now, write_record};

/// How often the counts of a batch go to its record, for other routers.
const RECORD_INTERVAL: Duration = Duration::from_secs(10);

/// Most bytes of lines that are read in a step, unless one alone has more.
const MAX_STEP_BYTES: usize = 8 << 20;

/// An unfinished batch on the disk.
#[derive(Debug, Clone)]
pub(crate) struct FoundBatch {
    tenant: TenantFolder,
    pub(crate) id: ObjectId,
}

impl FoundBatch {
    pub(super) fn new(tenant: TenantFolder, id: ObjectId) -> Self {
        Self { tenant, id }
    }

    /// The folder of its owner, which distinguishes owners.
    pub(crate) fn owner(&self) -> PathBuf {
        self.tenant.folder(ObjectKind::Batch)
    }
}

/// A request that is to be sent.
#[derive(Debug)]
pub(crate) struct BatchRequest {
    pub(crate) number: usize,
    /// Number of its model in the batch.
    pub(crate) model_number: usize,
    pub(crate) model: String,
    pub(crate) custom_id: String,
    pub(crate) body: Bytes,
    pub(crate) has_priority: bool,
}

/// A request that has ended.
#[derive(Debug)]
pub(crate) struct AnsweredRequest {
    pub(crate) number: usize,
    pub(crate) custom_id: String,
    pub(crate) outcome: Outcome,
}

/// What a step has found.
#[derive(Debug)]
pub(crate) struct BatchStep {
    pub(crate) requests: Vec<BatchRequest>,
    pub(crate) counts: RequestCounts,
    /// When somebody has cancelled the batch.
    pub(crate) cancelled_at: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct OpenBatch {
    batches: Batches,
    tenant: TenantFolder,
    folder: PathBuf,
    record: BatchRecord,
    work: Option<BatchWork>,
    is_resumed: bool,
    /// When the record was last written.
    recorded: Instant,
    _lock: File,
}

/// Input and answers of a batch that has begun.
#[derive(Debug)]
struct BatchWork {
    input: Input,
    journal: Journal,
    /// First request that was not looked at in this life.
    next: usize,
}

impl OpenBatch {
    /// Takes the lock of a batch; `None` if another router has it, or the batch has ended.
    ///
    /// # Errors
    /// If the batch cannot be read.
    pub(crate) fn open(batches: &Batches, found: &FoundBatch) -> Result<Option<Self>, BatchesError> {
        let folder = found.tenant.place(ObjectKind::Batch, &found.id);
        let path = folder.join(LOCK);
        let lock = open_lock(&path).or_disk("write", &path)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(BatchesError::disk("lock", &path, &error)),
        }
        let Some(record) = found.tenant.batch(&found.id)?.filter(|record| !record.status.is_ended()) else { return Ok(None) };
        let (batches, tenant, is_resumed) = (batches.clone(), found.tenant.clone(), record.in_progress_at.is_some());
        Ok(Some(Self { batches, tenant, folder, record, work: None, is_resumed, recorded: Instant::now(), _lock: lock }))
    }

    pub(crate) fn record(&self) -> &BatchRecord {
        &self.record
    }

    /// Checks the input, and reads the answers so far. A batch whose input is wrong has failed
    /// then.
    ///
    /// # Errors
    /// If the disk does not let it.
    pub(crate) fn begin(&mut self) -> Result<(), BatchesError> {
        let bounds = InputBounds {
            requests: self.batches.bounds().requests,
            body_bytes: self.batches.bounds().body_bytes,
            endpoint: Some(self.record.endpoint.clone()),
        };
        let input = match Input::check(&self.folder.join(INPUT), &bounds) {
            Ok(input) => input,
            Err(error) => {
                self.record.fail(input_faults(error)?, now());
                self.write_record()?;
                return self.remove_work();
            }
        };
        let journal = Journal::open(&self.folder.join(JOURNAL), &input).map_err(disk_error)?;
        self.record.begin(input.requests(), now());
        self.work = Some(BatchWork { input, journal, next: 0 });
        self.write_record()
    }

    /// Checks that there is room for answers, unless none are awaited.
    ///
    /// # Errors
    /// If there is none: then nothing should be asked.
    pub(crate) fn check_room(&self) -> Result<(), BatchesError> {
        if self.record.status == BatchStatus::Cancelling { Ok(()) } else { self.batches.check_total(0) }
    }

    /// Number of models of the batch.
    pub(crate) fn model_count(&self) -> usize {
        self.work.as_ref().map_or(0, |work| work.input.model_count())
    }

    /// Whether a router has begun it before this one has it, perhaps with other models.
    pub(crate) fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// Keeps answers, and reads up to `room` requests that have none and were not read before.
    ///
    /// # Errors
    /// If the disk does not let it; answers that were not kept are to be asked for again.
    pub(crate) fn advance(&mut self, answered: Vec<AnsweredRequest>, room: usize) -> Result<BatchStep, BatchesError> {
        for request in answered {
            self.keep(request)?;
        }
        let mut requests = Vec::new();
        let mut bytes = 0;
        if let Some(BatchWork { input, journal, next }) = &mut self.work {
            while requests.len() < room && bytes < MAX_STEP_BYTES && *next < input.requests() {
                if !journal.has(*next) {
                    let line = Bytes::from(input.read(*next).map_err(disk_error)?);
                    bytes += line.len();
                    requests.push(read_request(&line, *next, input.model(*next)));
                }
                *next += 1;
            }
        }
        if self.recorded.elapsed() >= RECORD_INTERVAL {
            self.write_record()?;
        }
        Ok(BatchStep { requests, counts: self.counts(), cancelled_at: cancel_time(&self.folder) })
    }

    fn keep(&mut self, AnsweredRequest { number, custom_id, outcome }: AnsweredRequest) -> Result<(), BatchesError> {
        let Some(BatchWork { input, journal, .. }) = &mut self.work else { return Ok(()) };
        let output = write_output(&output_id(input, number), &custom_id, outcome);
        self.batches.check_total(output.json.len() as u64)?;
        journal.append(number, &output.json, output.is_failed).map_err(disk_error)?;
        self.batches.count_bytes(output.json.len() as u64);
        Ok(())
    }

    fn counts(&self) -> RequestCounts {
        let Some(BatchWork { journal, .. }) = &self.work else { return self.record.counts };
        let (answered, failed) = (journal.answered(), journal.failed());
        RequestCounts { completed: answered - failed, failed, ..self.record.counts }
    }

    /// Whether every request has an answer.
    pub(crate) fn is_complete(&self) -> bool {
        self.work.as_ref().is_some_and(|work| work.journal.is_complete())
    }

    /// Shows that the batch ends early.
    ///
    /// # Errors
    /// If the disk does not let it.
    pub(crate) fn cancel(&mut self, asked_at: u64) -> Result<(), BatchesError> {
        if self.record.status == BatchStatus::Cancelling {
            return Ok(());
        }
        self.record.cancel(asked_at);
        self.write_record()
    }

    /// Forces all that is known to the disk, so that another router can go on.
    ///
    /// # Errors
    /// If the disk does not let it.
    pub(crate) fn pause(&mut self) -> Result<(), BatchesError> {
        if let Some(work) = &mut self.work {
            work.journal.sync().map_err(disk_error)?;
        }
        self.write_record()
    }

    /// Writes the results and ends the batch. After a crash in between, the same call goes on.
    ///
    /// # Errors
    /// If the disk does not let it; nothing is lost.
    pub(crate) fn finish(&mut self, ending: BatchEnding, faults: Vec<BatchFault>) -> Result<(), BatchesError> {
        self.record.counts = self.counts();
        let ending = self.record.ending.unwrap_or(ending);
        let ids = match self.record.result_ids.clone() {
            Some(ids) => ids,
            None => {
                let ids = [new_id(ObjectKind::File)?, new_id(ObjectKind::File)?];
                self.record.faults = faults;
                self.record.finalize(ending, ids.clone(), now());
                if let Some(work) = &mut self.work {
                    work.journal.sync().map_err(disk_error)?;
                }
                self.write_record()?;
                ids
            }
        };
        let [output, error] = ids;
        if let Some(work) = self.work.take() {
            let expired;
            let results = self.write_results(&work, [output, error], ending == BatchEnding::Expired)?;
            [(self.record.output_file_id, _), (self.record.error_file_id, expired)] = results;
            self.record.counts.failed += expired;
        }
        self.record.end(now());
        self.write_record()?;
        self.remove_work()
    }

    /// Writes output and error file. Returns their ids, of those that have lines, and the number of
    /// lines for requests that have expired.
    fn write_results(
        &self,
        work: &BatchWork,
        [output, error]: [ObjectId; 2],
        expires: bool,
    ) -> Result<[(Option<ObjectId>, usize); 2], BatchesError> {
        let output = self.write_result(output, "output", |file| {
            work.journal.write_answers(|is_failed| !is_failed, |line| write_line(file, line)).map(|()| 0)
        })?;
        let error = self.write_result(error, "error", |file| {
            work.journal.write_answers(|is_failed| is_failed, |line| write_line(file, line))?;
            let unanswered = (0..work.input.requests()).filter(|number| expires && !work.journal.has(*number));
            let mut expired = 0;
            for number in unanswered {
                let line = Bytes::from(work.input.read(number)?);
                let message = "the batch has expired before this request was answered: send it in another batch".to_owned();
                let outcome = Outcome::Failed { code: "batch_expired", message };
                let output = write_output(&output_id(&work.input, number), &parse_again(&line).custom_id, outcome);
                write_line(file, &output.json).and_then(|()| write_line(file, b"\n"))?;
                expired += 1;
            }
            Ok(expired)
        })?;
        Ok([output, error])
    }

    /// Writes a file of results, unless a call before this one has; `None` if it has no line.
    fn write_result(
        &self,
        id: ObjectId,
        name: &str,
        fill: impl FnOnce(&mut BufWriter<File>) -> Result<usize, FileError>,
    ) -> Result<(Option<ObjectId>, usize), BatchesError> {
        let folder = self.tenant.begin(ObjectKind::File, &id)?;
        remove_folder(&folder).and_then(|()| make_folder(&folder)).or_disk("make", &folder)?;
        let path = folder.join(CONTENT);
        let mut file = BufWriter::with_capacity(1 << 20, create(&path).or_disk("write", &path)?);
        let filled = fill(&mut file).map_err(disk_error)?;
        let file = file.into_inner().map_err(|error| error.into_error()).or_disk("write", &path)?;
        file.sync_all().or_disk("write", &path)?;
        let bytes = file.metadata().or_disk("read", &path)?.len();
        if bytes == 0 {
            remove_folder(&folder).or_disk("remove", &folder)?;
            return Ok((None, filled));
        }
        let created_at = now();
        let record = FileRecord {
            id: id.clone(),
            bytes,
            created_at,
            expires_at: created_at + self.record.output_lifetime,
            filename: format!("{}_{name}.jsonl", self.record.id),
            purpose: FilePurpose::BatchOutput,
        };
        let path = folder.join(FILE_RECORD);
        write_json(&path, &record).or_disk("write", &path)?;
        // A call before this one may have come this far.
        self.tenant.remove(ObjectKind::File, &id)?;
        self.tenant.publish(ObjectKind::File, &id, &folder)?;
        self.batches.count_bytes(bytes);
        Ok((Some(id), filled))
    }

    fn write_record(&mut self) -> Result<(), BatchesError> {
        self.record.counts = self.counts();
        self.recorded = Instant::now();
        write_record(&self.folder, &self.record)
    }

    fn remove_work(&mut self) -> Result<(), BatchesError> {
        self.work = None;
        let bytes = self.tenant.batch_bytes(&self.record.id);
        self.tenant.remove_work(&self.record.id)?;
        self.batches.count_removed(bytes);
        Ok(())
    }
}

fn write_line(file: &mut BufWriter<File>, line: &[u8]) -> Result<(), FileError> {
    file.write_all(line).map_err(|source| FileError::File { verb: "write", path: "a file of results".into(), source })
}

/// The id of an answer, equal in every life of the batch.
fn output_id(input: &Input, number: usize) -> String {
    format!("batch_req_{:032x}_{number}", input.digest())
}

fn read_request(line: &Bytes, number: usize, model_number: usize) -> BatchRequest {
    let request = parse_again(line);
    BatchRequest {
        number,
        model_number,
        model: request.model.clone().into_owned(),
        custom_id: request.custom_id.clone().into_owned(),
        body: line.slice_ref(request.body.as_bytes()),
        has_priority: request.has_priority,
    }
}

fn parse_again(line: &[u8]) -> RequestLine<'_> {
    parse_request(line).expect("the line was checked, and is the same")
}

/// What a client is told of a wrong input.
fn input_faults(error: FileError) -> Result<Vec<BatchFault>, BatchesError> {
    match error {
        FileError::Input { problems, .. } => {
            let more = problems.count - problems.first.len();
            let lines = problems.first.into_iter().map(|problem| BatchFault {
                code: problem.code.to_owned(),
                message: format!("line {}: {}", problem.line, problem.message),
                param: problem.param.map(str::to_owned),
                line: Some(problem.line),
            });
            let rest = (more > 0).then(|| BatchFault::whole("more_errors", format!("{more} more lines are wrong")));
            Ok(lines.chain(rest).collect())
        }
        FileError::Empty(_) => Ok(vec![BatchFault::whole("empty_file", "the input file has no request".to_owned())]),
        other => Err(disk_error(other)),
    }
}

fn disk_error(error: FileError) -> BatchesError {
    match error {
        FileError::File { verb, path, source } => BatchesError::disk(verb, &path, &source),
        other => BatchesError::Disk(other.to_string()),
    }
}
