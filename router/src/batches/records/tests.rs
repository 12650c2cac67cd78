//! The course of a batch, as its object tells it.

use super::*;
use crate::batches::object_id::ObjectKind;

fn id(kind: ObjectKind) -> ObjectId {
    ObjectId::new(kind, 1, [1; 10])
}

fn record() -> BatchRecord {
    let order =
        BatchOrder { input_file_id: String::new(), endpoint: "/v1/completions".to_owned(), metadata: None, output_lifetime: KEPT_SECONDS };
    let caller = BatchCaller { key: String::new(), tenant: String::new() };
    BatchRecord::new(id(ObjectKind::Batch), id(ObjectKind::File), caller, order, 1000)
}

#[test]
fn each_state_has_its_time() {
    let mut batch = record();
    let object = batch.object();
    assert_eq!((&object["status"], &object["expires_at"]), (&json!("validating"), &json!(1000 + 86_400)));
    batch.begin(3, 1001);
    assert_eq!((&batch.object()["status"], &batch.object()["in_progress_at"]), (&json!("in_progress"), &json!(1001)));
    batch.begin(3, 2000);
    assert_eq!(batch.in_progress_at, Some(1001), "a batch that goes on has begun before");
    batch.finalize(BatchEnding::Completed, [id(ObjectKind::File), id(ObjectKind::File)], 1002);
    assert_eq!((&batch.object()["status"], &batch.object()["finalizing_at"]), (&json!("finalizing"), &json!(1002)));
    batch.end(1003);
    let object = batch.object();
    assert_eq!((&object["status"], &object["completed_at"], &object["cancelled_at"]), (&json!("completed"), &json!(1003), &Value::Null));
}

#[test]
fn a_batch_ends_as_it_was_decided() {
    for (ending, status, time) in [
        (BatchEnding::Completed, "completed", "completed_at"),
        (BatchEnding::Expired, "expired", "expired_at"),
        (BatchEnding::Cancelled, "cancelled", "cancelled_at"),
        (BatchEnding::Failed, "failed", "failed_at"),
    ] {
        let mut batch = record();
        batch.finalize(ending, [id(ObjectKind::File), id(ObjectKind::File)], 7);
        batch.cancel(8);
        batch.end(9);
        let object = batch.object();
        assert_eq!((&object["status"], &object[time], &object["cancelling_at"]), (&json!(status), &json!(9), &Value::Null));
    }
}

#[test]
fn a_record_is_read_as_written() {
    let mut batch = record();
    batch.fail(vec![BatchFault::whole("empty_file", "it has no request".to_owned())], 5);
    let read: BatchRecord = serde_json::from_slice(&serde_json::to_vec(&batch).unwrap()).unwrap();
    assert_eq!(read.object(), batch.object());
    assert_eq!(read.object()["errors"]["data"][0]["code"], "empty_file");
}
