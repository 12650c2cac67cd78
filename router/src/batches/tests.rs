//! Folders of owners on a real disk: bounds, pages, expiry, results that were begun twice.

use tempfile::TempDir;

use super::*;

fn open(change: impl FnOnce(&mut RouterConfig)) -> (TempDir, Batches) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = RouterConfig { batches_dir: folder.path().join("b"), ..RouterConfig::default() };
    change(&mut config);
    let batches = Batches::open(&config).unwrap();
    (folder, batches)
}

fn caller() -> BatchCaller {
    BatchCaller { key: String::new(), tenant: String::new() }
}

async fn upload(batches: &Batches, owner: &str, content: &str) -> Result<FileRecord, BatchesError> {
    let mut upload = batches.begin_upload(owner, Some(content.len() as u64)).await?;
    upload.write(content.as_bytes()).await?;
    upload.finish("in.jsonl", FilePurpose::Batch, KEPT_SECONDS).await
}

fn lines(count: usize) -> String {
    let line = |number| format!("{{\"custom_id\":\"{number}\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{{}}}}\n");
    (0..count).map(line).collect()
}

async fn make(batches: &Batches, requests: usize) -> BatchRecord {
    let file = upload(batches, "", &lines(requests)).await.unwrap();
    let order = BatchOrder {
        input_file_id: file.id.to_string(),
        endpoint: "/v1/completions".to_owned(),
        metadata: None,
        output_lifetime: KEPT_SECONDS,
    };
    batches.create_batch("", caller(), order).await.unwrap()
}

async fn found(batches: &Batches) -> Vec<FoundBatch> {
    batches.find_unfinished(FxHashSet::default()).await.unwrap().0
}

fn answered(number: usize, status: u16) -> AnsweredRequest {
    let answer = hostler_batch_file::Answer {
        status: http::StatusCode::from_u16(status).unwrap(),
        headers: http::HeaderMap::new(),
        body: bytes::Bytes::from_static(b"{}"),
    };
    AnsweredRequest { number, custom_id: number.to_string(), outcome: hostler_batch_file::Outcome::Answered(answer) }
}

fn query(limit: usize) -> ListQuery {
    ListQuery { after: None, limit, is_ascending: false, purpose: None }
}

#[tokio::test]
async fn an_upload_that_is_dropped_leaves_nothing_and_gives_its_room_back() {
    let (folder, batches) = open(|config| config.batches_tenant_bytes = 10);
    let mut dropped = batches.begin_upload("a", Some(8)).await.unwrap();
    dropped.write(b"12345678").await.unwrap();
    assert!(matches!(batches.begin_upload("a", Some(8)).await, Err(BatchesError::Quota(_))));
    assert!(batches.begin_upload("b", Some(8)).await.is_ok(), "others have their own room");
    drop(dropped);
    let file = upload(&batches, "a", "12345678").await.unwrap();
    assert_eq!(batches.file("a", file.id.as_str()).await.unwrap().bytes, 8);
    assert!(matches!(batches.file("b", file.id.as_str()).await, Err(BatchesError::NotFound(..))));
    let tenant = TenantFolder::of(&folder.path().join("b"), "a");
    assert_eq!(std::fs::read_dir(tenant.folder(ObjectKind::File)).unwrap().count(), 1);
}

#[tokio::test]
async fn lists_are_read_in_pages_from_the_newest() {
    let (_folder, batches) = open(|_| ());
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(upload(&batches, "", "x").await.unwrap().id);
        // Ids of one millisecond sort by chance.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    ids.reverse();
    let page = batches.list_files("", query(2)).await.unwrap();
    assert_eq!((page.objects.iter().map(|file| file.id.clone()).collect::<Vec<_>>(), page.has_more), (ids[..2].to_vec(), true));
    let after = Some(ids[1].to_string());
    let page = batches.list_files("", ListQuery { after, ..query(3) }).await.unwrap();
    assert_eq!((page.objects.iter().map(|file| file.id.clone()).collect::<Vec<_>>(), page.has_more), (ids[2..].to_vec(), false));
    let page = batches.list_files("", ListQuery { is_ascending: true, purpose: Some("batch_output".to_owned()), ..query(9) }).await;
    assert!(page.unwrap().objects.is_empty());
}

#[tokio::test]
async fn a_batch_has_one_router_and_outlives_its_input_file() {
    let (_folder, batches) = open(|_| ());
    let record = make(&batches, 3).await;
    batches.remove_file("", record.input_file_id.as_str()).await.unwrap();
    let found = found(&batches).await;
    let mut open = OpenBatch::open(&batches, &found[0]).unwrap().unwrap();
    assert!(OpenBatch::open(&batches, &found[0]).unwrap().is_none(), "another router has it");
    open.begin().unwrap();
    assert!(!open.is_resumed());
    let step = open.advance(Vec::new(), 2).unwrap();
    assert_eq!(step.requests.iter().map(|request| request.number).collect::<Vec<_>>(), [0, 1]);
    open.advance(vec![answered(1, 200), answered(0, 400)], 0).unwrap();
    drop(open);
    // The next life asks for what has no answer.
    let mut open = OpenBatch::open(&batches, &found[0]).unwrap().unwrap();
    open.begin().unwrap();
    assert!(open.is_resumed() && open.model_count() == 1);
    let step = open.advance(Vec::new(), 9).unwrap();
    assert_eq!(step.requests.iter().map(|request| request.number).collect::<Vec<_>>(), [2]);
    assert_eq!(step.counts, RequestCounts { total: 3, completed: 1, failed: 1 });
    assert!(open.finish(BatchEnding::Expired, Vec::new()).is_ok());
    let ended = batches.batch("", record.id.as_str()).await.unwrap();
    assert_eq!((ended.status.as_str(), ended.counts), ("expired", RequestCounts { total: 3, completed: 1, failed: 2 }));
    let (_, mut errors) = batches.open_content("", ended.error_file_id.unwrap().as_str()).await.unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut errors, &mut text).unwrap();
    assert!(text.lines().count() == 2 && text.contains("batch_expired") && text.contains("\"status_code\":400"), "{text}");
}

#[tokio::test]
async fn results_that_a_crash_cut_off_are_written_once() {
    let (folder, batches) = open(|_| ());
    let record = make(&batches, 2).await;
    let found = found(&batches).await;
    let mut open = OpenBatch::open(&batches, &found[0]).unwrap().unwrap();
    open.begin().unwrap();
    open.advance(vec![answered(0, 200), answered(1, 200)], 0).unwrap();
    let place = TenantFolder::of(&folder.path().join("b"), "").place(ObjectKind::Batch, &record.id);
    let copy = |from: &Path, to: &Path, name: &str| {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    };
    let keep = |name: &str| copy(&place, folder.path(), name);
    ["journal", "input.jsonl"].iter().for_each(|name| keep(name));
    open.finish(BatchEnding::Completed, Vec::new()).unwrap();
    // The router was killed before it could say that the batch has ended.
    drop(open);
    let ended = batches.batch("", record.id.as_str()).await.unwrap();
    let unfinished = BatchRecord { status: records::BatchStatus::Finalizing, ended_at: None, output_file_id: None, ..ended.clone() };
    write_record(&place, &unfinished).unwrap();
    ["journal", "input.jsonl"].iter().for_each(|name| copy(folder.path(), &place, name));
    let mut open = OpenBatch::open(&batches, &found[0]).unwrap().unwrap();
    open.begin().unwrap();
    open.finish(BatchEnding::Completed, Vec::new()).unwrap();
    let again = batches.batch("", record.id.as_str()).await.unwrap();
    assert_eq!((again.status.as_str(), &again.output_file_id), ("completed", &ended.output_file_id));
    assert_eq!(batches.list_files("", query(9)).await.unwrap().objects.len(), 2, "input and output");
    assert!(!place.join("journal").exists() && !place.join("input.jsonl").exists());
}

#[tokio::test]
async fn what_has_expired_is_swept() {
    let (folder, batches) = open(|_| ());
    let (kept, expired) = (upload(&batches, "", "12").await.unwrap(), upload(&batches, "", "345").await.unwrap());
    let tenant = TenantFolder::of(&folder.path().join("b"), "");
    let record = FileRecord { expires_at: 1, ..expired.clone() };
    write_json(&tenant.place(ObjectKind::File, &expired.id).join("file.json"), &record).unwrap();
    assert!(matches!(batches.file("", expired.id.as_str()).await, Err(BatchesError::NotFound(..))), "expired before it is swept");
    batches.sweep().await.unwrap();
    assert_eq!(tenant.ids(ObjectKind::File).unwrap(), [kept.id]);
    assert_eq!(batches.0.total_bytes.load(Ordering::Relaxed), 2);
}
