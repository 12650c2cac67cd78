//! The routes of OpenAI's Batch API: `/v1/files`, `/v1/batches`, and what is below them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hostler_api::{Route, ServedBy, Work};
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::file_body::FileBody;
use super::reply::{self, EdgeBody};
use crate::access_log::AccessEntry;
use crate::batches::multipart::{FORM_BYTES, FormEvent, FormReader, UploadFormError};
use crate::batches::{BatchCaller, BatchOrder, Batches, BatchesError, FilePurpose, FileRecord, KEPT_SECONDS, LIFETIME_BOUNDS, ListQuery};
use crate::inbound::Edge;
use crate::keys::Caller;
use crate::outcome::RefusalReason;

/// Longest time of an upload.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Longest value of a form's field that is no file.
const MAX_FIELD_BYTES: usize = 1024;

/// Most objects on a page of files and of batches, as OpenAI has it.
const MAX_LISTED_FILES: usize = 10_000;
const MAX_LISTED_BATCHES: usize = 100;
const LISTED_BATCHES: usize = 20;

/// Bounds of a batch's metadata: pairs, and characters of a name and of a value.
const METADATA_BOUNDS: (usize, usize, usize) = (16, 64, 512);

const OFF: &str = "this router has no Batch API: whoever runs it gives it a folder by the setting router.batches_dir \
                   (where it is set, the router's log says why it cannot be used)";

/// Whether the route is one of these.
pub(super) fn is_batch_route(route: Route) -> bool {
    matches!(route, Route::Files | Route::File | Route::FileContent | Route::Batches | Route::Batch | Route::CancelBatch)
}

type BatchReply = Result<Response<EdgeBody>, BatchesError>;

impl Edge {
    pub(super) async fn answer_batch_api(
        self: &Arc<Self>,
        route: Route,
        request: Box<Request<Incoming>>,
        caller: &Caller,
        entry: &AccessEntry,
    ) -> Response<EdgeBody> {
        let Some(batches) = &self.batches else {
            self.dispatch.metrics.count_refusal(RefusalReason::NoRoute);
            return reply::refuse_unread(request, reply::error(StatusCode::NOT_FOUND, "NotFoundError", OFF)).await;
        };
        let owner: &str = caller.owner();
        let path = request.uri().path().to_owned();
        let id = path.split('/').nth(3).unwrap_or_default();
        let query = request.uri().query().unwrap_or_default().to_owned();
        let answered = match (request.method(), route) {
            (&Method::POST, Route::Files) => self.upload(batches, owner, *request).await,
            (&Method::GET, Route::Files) => list_files(batches, owner, &query).await,
            (&Method::GET, Route::File) => batches.file(owner, id).await.map(|file| object(&file.object())),
            (&Method::DELETE, Route::File) => batches.remove_file(owner, id).await.map(|file| removed(&file)),
            (&Method::GET, Route::FileContent) => batches.open_content(owner, id).await.map(|(file, content)| content_of(&file, content)),
            (&Method::POST, Route::Batches) => self.create_batch(batches, request, caller, entry).await,
            (&Method::GET, Route::Batches) => list_batches(batches, owner, &query).await,
            (&Method::GET, Route::Batch) => batches.batch(owner, id).await.map(|batch| object(&batch.object())),
            (&Method::POST, Route::CancelBatch) => {
                let response = batches.cancel_batch(owner, id).await.map(|batch| object(&batch.object()));
                match response {
                    Ok(response) => Ok(reply::refuse_unread(request, response).await),
                    Err(error) => Err(error),
                }
            }
            _ => {
                self.dispatch.metrics.count_refusal(RefusalReason::NoRoute);
                return reply::refuse_unread(request, wrong_method(route)).await;
            }
        };
        answered.unwrap_or_else(|error| {
            self.dispatch.metrics.count_refusal(RefusalReason::Request);
            entry.record_refusal("malformed");
            refused(&error)
        })
    }

    /// Takes a file to the disk as it comes.
    async fn upload(&self, batches: &Batches, owner: &str, request: Request<Incoming>) -> BatchReply {
        let (head, body) = request.into_parts();
        let kind = head.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let form = FormReader::new(kind).map_err(malformed)?;
        if head.headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity") {
            return Err(BatchesError::invalid("file", "a file is uploaded as it is, without Content-Encoding"));
        }
        let length = head.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        let most = batches.bounds().file_bytes;
        if length.is_some_and(|length| length > most + FORM_BYTES) {
            return Err(BatchesError::TooLarge(format!("a file has at most {most} bytes: make several of it")));
        }
        let receiving = receive(batches, owner, (form, body, length), self.config.body_timeout);
        let received = timeout(UPLOAD_TIMEOUT, Box::pin(receiving)).await;
        received.unwrap_or_else(|_| Err(slow())).map(|file| object(&file.object()))
    }

    async fn create_batch(&self, batches: &Batches, request: Box<Request<Incoming>>, caller: &Caller, entry: &AccessEntry) -> BatchReply {
        let read = match self.read_request(request, caller, entry).await {
            Ok(read) => read,
            Err(unread) => return Ok(reply::unread_body(&unread)),
        };
        let order = parse_order(&read.body)?;
        let asked_by = BatchCaller { key: caller.key.to_string(), tenant: caller.tenant.to_string() };
        let made = batches.create_batch(caller.owner(), asked_by, order).await?;
        tracing::info!(batch = %made.id, key = %caller.key, tenant = %caller.tenant, "a batch was made");
        Ok(object(&made.object()))
    }
}

/// The fields of an upload's form.
#[derive(Debug, Default)]
struct UploadFields {
    purpose: Option<String>,
    filename: Option<String>,
    anchor: Option<String>,
    seconds: Option<String>,
}

async fn receive(
    batches: &Batches,
    owner: &str,
    (mut form, mut body, length): (FormReader, Incoming, Option<u64>),
    patience: Duration,
) -> Result<FileRecord, BatchesError> {
    let mut upload = batches.begin_upload(owner, length).await?;
    let (mut fields, mut field, mut text, mut received) = (UploadFields::default(), String::new(), Vec::new(), 0);
    let mut is_file = false;
    while let Some(frame) = timeout(patience, body.frame()).await.map_err(|_| slow())? {
        let frame = frame.map_err(|error| BatchesError::Invalid { message: format!("the upload broke: {error}"), param: None })?;
        let Ok(data) = frame.into_data() else { continue };
        received += data.len() as u64;
        if received > batches.bounds().file_bytes + FORM_BYTES {
            return Err(BatchesError::TooLarge(format!("a file has at most {} bytes: make several of it", batches.bounds().file_bytes)));
        }
        form.push(&data);
        while let Some(event) = form.next().map_err(malformed)? {
            match event {
                FormEvent::Part { name, filename } => {
                    is_file = name == "file";
                    if is_file && fields.filename.replace(filename.unwrap_or_else(|| "file".to_owned())).is_some() {
                        return Err(BatchesError::invalid("file", "the form has two files: send each on its own"));
                    }
                    (field, text) = (name, Vec::new());
                }
                FormEvent::Data(data) if is_file => upload.write(&data).await?,
                FormEvent::Data(data) => {
                    text.extend_from_slice(&data);
                    if text.len() > MAX_FIELD_BYTES {
                        return Err(BatchesError::Invalid { message: format!("the field {field:.50} is too long"), param: None });
                    }
                }
                FormEvent::PartEnd if is_file => {}
                FormEvent::PartEnd => {
                    let value = Some(String::from_utf8_lossy(&text).into_owned());
                    match field.as_str() {
                        "purpose" => fields.purpose = value,
                        "expires_after[anchor]" => fields.anchor = value,
                        "expires_after[seconds]" => fields.seconds = value,
                        _ => {}
                    }
                }
            }
        }
    }
    form.check_end().map_err(malformed)?;
    let filename = fields.filename.ok_or_else(|| BatchesError::invalid("file", "the form has no file: send one in the field `file`"))?;
    if fields.purpose.as_deref() != Some("batch") {
        return Err(BatchesError::invalid("purpose", "files are for batches here: send `batch` in the field `purpose`"));
    }
    let lifetime = match (fields.anchor, fields.seconds) {
        (None, None) => KEPT_SECONDS,
        (anchor, seconds) => check_lifetime("expires_after", anchor.as_deref(), seconds.and_then(|seconds| seconds.parse().ok()))?,
    };
    upload.finish(&filename, FilePurpose::Batch, lifetime).await
}

/// Seconds that a file is kept, if that is within bounds.
fn check_lifetime(param: &'static str, anchor: Option<&str>, seconds: Option<u64>) -> Result<u64, BatchesError> {
    let (shortest, longest) = (LIFETIME_BOUNDS.start(), LIFETIME_BOUNDS.end());
    seconds.filter(|seconds| anchor == Some("created_at") && LIFETIME_BOUNDS.contains(seconds)).ok_or_else(|| {
        let message = format!("`{param}` has the `anchor` created_at and from {shortest} to {longest} `seconds`");
        BatchesError::invalid(param, message)
    })
}

/// Reads the body of `POST /v1/batches`.
fn parse_order(body: &[u8]) -> Result<BatchOrder, BatchesError> {
    #[derive(Deserialize)]
    struct Written {
        input_file_id: String,
        endpoint: String,
        completion_window: String,
        metadata: Option<BTreeMap<String, String>>,
        output_expires_after: Option<Lifetime>,
    }
    #[derive(Deserialize)]
    struct Lifetime {
        anchor: String,
        seconds: u64,
    }
    let invalid = |error: serde_json::Error| {
        let message: String = format!("a batch has input_file_id, endpoint and completion_window: {error}").chars().take(300).collect();
        BatchesError::Invalid { message, param: None }
    };
    let written: Written = serde_json::from_slice(body).map_err(invalid)?;
    let route = Route::of(&written.endpoint);
    // Audio is sent as a form, which no line can hold.
    let is_form = matches!(route, Route::Transcriptions | Route::Translations);
    if !written.endpoint.starts_with("/v1/")
        || route.served_by() != ServedBy::Engine
        || route.work() == Work::Nothing
        || is_form
        || route == Route::Other
    {
        let message = "name the path of an API such as /v1/chat/completions, /v1/completions, /v1/responses or /v1/embeddings";
        return Err(BatchesError::invalid("endpoint", message));
    }
    if written.completion_window != "24h" {
        return Err(BatchesError::invalid("completion_window", "the only completion window is 24h"));
    }
    let (pairs, name, value) = METADATA_BOUNDS;
    let is_long = |(key, text): (&String, &String)| key.chars().count() > name || text.chars().count() > value;
    if written.metadata.as_ref().is_some_and(|metadata| metadata.len() > pairs || metadata.iter().any(is_long)) {
        let message = format!("metadata has at most {pairs} pairs, with names of {name} and values of {value} characters");
        return Err(BatchesError::invalid("metadata", message));
    }
    let lifetime =
        written.output_expires_after.map(|after| check_lifetime("output_expires_after", Some(&after.anchor), Some(after.seconds)));
    Ok(BatchOrder {
        input_file_id: written.input_file_id,
        endpoint: written.endpoint,
        metadata: written.metadata,
        output_lifetime: lifetime.transpose()?.unwrap_or(KEPT_SECONDS),
    })
}

async fn list_files(batches: &Batches, owner: &str, query: &str) -> BatchReply {
    let query = parse_query(query, (MAX_LISTED_FILES, MAX_LISTED_FILES))?;
    let page = batches.list_files(owner, query).await?;
    Ok(listed(page.objects.iter().map(FileRecord::object).collect(), page.has_more))
}

async fn list_batches(batches: &Batches, owner: &str, query: &str) -> BatchReply {
    let query = ListQuery { is_ascending: false, purpose: None, ..parse_query(query, (LISTED_BATCHES, MAX_LISTED_BATCHES))? };
    let page = batches.list_batches(owner, query).await?;
    Ok(listed(page.objects.iter().map(|batch| batch.object()).collect(), page.has_more))
}

/// Reads the query of a list. `limits` are the usual and the largest number of objects.
fn parse_query(query: &str, limits: (usize, usize)) -> Result<ListQuery, BatchesError> {
    let mut read = ListQuery { after: None, limit: limits.0, is_ascending: false, purpose: None };
    for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        let value = percent_decode_str(value).decode_utf8_lossy().into_owned();
        match name {
            "after" => read.after = Some(value),
            "purpose" => read.purpose = Some(value),
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=limits.1).contains(limit));
                read.limit = limit.ok_or_else(|| BatchesError::invalid("limit", format!("`limit` is from 1 to {}", limits.1)))?;
            }
            "order" => {
                read.is_ascending = match value.as_str() {
                    "asc" => true,
                    "desc" => false,
                    _ => return Err(BatchesError::invalid("order", "`order` is asc or desc")),
                }
            }
            _ => {}
        }
    }
    Ok(read)
}

fn object(object: &Value) -> Response<EdgeBody> {
    reply::json(StatusCode::OK, object.to_string())
}

fn listed(objects: Vec<Value>, has_more: bool) -> Response<EdgeBody> {
    let id = |object: Option<&Value>| object.map(|object| object["id"].clone());
    let (first, last) = (id(objects.first()), id(objects.last()));
    object(&json!({"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": has_more}))
}

fn removed(file: &FileRecord) -> Response<EdgeBody> {
    object(&json!({"id": file.id, "object": "file", "deleted": true}))
}

fn content_of(file: &FileRecord, content: std::fs::File) -> Response<EdgeBody> {
    let mut response = Response::new(EdgeBody::File(Box::new(FileBody::new(content, file.bytes))));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    // What somebody has uploaded is never a page of this origin.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    response
}

fn wrong_method(route: Route) -> Response<EdgeBody> {
    let allowed = match route {
        Route::Files | Route::Batches => "GET, POST",
        Route::File => "GET, DELETE",
        Route::CancelBatch => "POST",
        _ => "GET",
    };
    let mut response = reply::json(StatusCode::METHOD_NOT_ALLOWED, r#"{"detail":"Method Not Allowed"}"#);
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

fn malformed(error: UploadFormError) -> BatchesError {
    BatchesError::Invalid { message: error.to_string(), param: None }
}

fn slow() -> BatchesError {
    BatchesError::Invalid { message: "the file did not come in time: send it again".to_owned(), param: None }
}

/// An error in OpenAI's form. The rest of a request's body is not waited for.
fn refused(error: &BatchesError) -> Response<EdgeBody> {
    let (status, kind) = match error {
        BatchesError::NotFound(..) => (StatusCode::NOT_FOUND, "invalid_request_error"),
        BatchesError::Invalid { .. } => (StatusCode::BAD_REQUEST, "invalid_request_error"),
        BatchesError::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error"),
        BatchesError::Quota(_) => (StatusCode::TOO_MANY_REQUESTS, "insufficient_quota"),
        BatchesError::Busy(_) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded"),
        BatchesError::Conflict(_) => (StatusCode::CONFLICT, "invalid_request_error"),
        BatchesError::DiskFull => (StatusCode::INSUFFICIENT_STORAGE, "insufficient_storage"),
        BatchesError::Disk(_) => (StatusCode::INTERNAL_SERVER_ERROR, "server_error"),
    };
    let message = match error {
        // The error of a disk names paths, which are for the log.
        BatchesError::Disk(message) => {
            tracing::warn!(error = %message, "a call of the Batch API failed");
            "the router cannot use its folder of batches: its log says why".to_owned()
        }
        other => other.to_string(),
    };
    let param = match error {
        BatchesError::Invalid { param, .. } => *param,
        BatchesError::NotFound(..) => Some("id"),
        _ => None,
    };
    let body = json!({"error": {"message": message, "type": kind, "param": param, "code": status.as_u16()}});
    let mut response = reply::json(status, body.to_string());
    // OpenAI's SDKs repeat these statuses otherwise.
    if matches!(error, BatchesError::Quota(_) | BatchesError::Conflict(_) | BatchesError::DiskFull) {
        response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
    }
    if matches!(error, BatchesError::NotFound(..)) { response } else { reply::close_after(response) }
}

#[cfg(test)]
mod tests;
