//! The Batch API at the edge: the whole course of a batch, routers that are killed and followed,
//! cancels, bounds, and what other tenants see.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use hostler_router::RouterConfig;
use http::{Method, Request};
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{Answer, Endpoint, Fleet, MODEL, RunningRouter, Setup, hostler, until};

const COMPLETIONS: &str = "/v1/completions";

/// Tokens of the answer to a request: as many as its number says.
fn tokens(number: usize) -> usize {
    number % 7 + 1
}

/// The line of a request whose prompt is tokens already.
fn line(number: usize) -> String {
    let body = json!({"model": MODEL, "prompt": [number, 1, 2], "max_tokens": tokens(number)});
    format!("{}\n", json!({"custom_id": format!("r-{number}"), "method": "POST", "url": COMPLETIONS, "body": body}))
}

fn lines(count: usize) -> String {
    (0..count).map(line).collect()
}

/// A client of the edge, with the key of a tenant if there are keys.
#[derive(Debug, Clone)]
struct BatchClient {
    edge: Endpoint,
    key: Option<String>,
}

impl BatchClient {
    fn of(edge: Endpoint) -> Self {
        Self { edge, key: None }
    }

    fn with_key(&self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self.clone() }
    }

    async fn call(&self, method: Method, path: &str, body: Option<(&str, Vec<u8>)>) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let (kind, body) = body.unwrap_or(("application/json", Vec::new()));
        self.edge.request(request.header("content-type", kind).body(Full::new(Bytes::from(body))).unwrap()).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, None).await
    }

    async fn upload(&self, content: &str) -> Answer {
        let form = format!(
            "--XY\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--XY\r\nContent-Disposition: form-data; name=\"file\"; \
             filename=\"../in.jsonl\"\r\n\r\n{content}\r\n--XY--\r\n"
        );
        self.call(Method::POST, "/v1/files", Some(("multipart/form-data; boundary=XY", form.into_bytes()))).await
    }

    /// Uploads a file, and returns its id.
    async fn file(&self, content: &str) -> String {
        let answer = self.upload(content).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["id"].as_str().unwrap().to_owned()
    }

    async fn order(&self, order: &Value) -> Answer {
        self.call(Method::POST, "/v1/batches", Some(("application/json", order.to_string().into_bytes()))).await
    }

    /// Makes a batch of these lines, and returns its id.
    async fn batch(&self, content: &str) -> String {
        let file = self.file(content).await;
        let answer = self.order(&json!({"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"})).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["id"].as_str().unwrap().to_owned()
    }

    async fn cancel(&self, id: &str) -> Answer {
        self.call(Method::POST, &format!("/v1/batches/{id}/cancel"), None).await
    }

    async fn show(&self, id: &str) -> Value {
        self.get(&format!("/v1/batches/{id}")).await.json()
    }

    async fn until_status(&self, id: &str, status: &str) -> Value {
        self.until_batch(id, status, |batch| batch["status"] == status).await
    }

    async fn until_batch(&self, id: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        until(what, async || {
            let batch = self.show(id).await;
            if is(&batch) { Ok(batch) } else { Err(batch.to_string()) }
        })
        .await
    }

    async fn content(&self, id: &Value) -> Vec<Value> {
        let answer = self.get(&format!("/v1/files/{}/content", id.as_str().unwrap())).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A folder for batches, and a fleet whose router has it.
async fn start(agents: usize, change: impl FnOnce(&mut RouterConfig)) -> (Fleet, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("batches");
    let setup = Setup::agents(agents).router(|router| {
        router.batches_dir = path;
        change(router);
    });
    (Fleet::start(setup).await, folder)
}

/// Fails unless each of these requests has one right answer.
fn assert_answered(answers: &[Value], count: usize) {
    let by_id: BTreeMap<&str, &Value> = answers.iter().map(|answer| (answer["custom_id"].as_str().unwrap(), answer)).collect();
    assert_eq!((answers.len(), by_id.len()), (count, count));
    for number in 0..count {
        let response = &by_id[format!("r-{number}").as_str()]["response"];
        assert_eq!(response["status_code"], 200, "{response}");
        assert_eq!(response["body"]["usage"]["completion_tokens"], tokens(number), "{response}");
    }
}

/// Folders and files below a path, and the bits of their mode.
fn modes(path: &Path) -> Vec<(bool, u32)> {
    use std::os::unix::fs::PermissionsExt;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        found.push((metadata.is_dir(), metadata.permissions().mode() & 0o777));
        if metadata.is_dir() {
            found.extend(modes(&entry.path()));
        }
    }
    found
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_answered_into_its_two_files() {
    let (fleet, folder) = start(1, |_| ()).await;
    let client = BatchClient::of(fleet.edge());
    let refused = json!({"custom_id": "refused", "method": "POST", "url": COMPLETIONS, "body": {"model": "nothing", "prompt": "a"}});
    let id = client.batch(&format!("{}{refused}\n", lines(40))).await;
    let batch = client.until_status(&id, "completed").await;
    assert_eq!(batch["request_counts"], json!({"total": 41, "completed": 40, "failed": 1}), "{batch}");
    assert!(batch["completed_at"].is_u64() && batch["errors"].is_null() && batch["endpoint"] == COMPLETIONS, "{batch}");
    assert_answered(&client.content(&batch["output_file_id"]).await, 40);
    let failed = client.content(&batch["error_file_id"]).await;
    assert_eq!((failed.len(), &failed[0]["custom_id"], &failed[0]["response"]["status_code"]), (1, &json!("refused"), &json!(404)));

    let files = client.get("/v1/files").await.json();
    let purposes: Vec<&str> = files["data"].as_array().unwrap().iter().map(|file| file["purpose"].as_str().unwrap()).collect();
    assert_eq!(purposes, ["batch_output", "batch_output", "batch"], "{files}");
    assert_eq!(files["data"][2]["filename"], "../in.jsonl", "a name is only a name");
    let input = files["data"][2]["id"].as_str().unwrap();
    let removed = client.call(Method::DELETE, &format!("/v1/files/{input}"), None).await.json();
    assert_eq!(removed, json!({"id": input, "object": "file", "deleted": true}));
    assert_eq!(client.get(&format!("/v1/files/{input}")).await.status, 404);
    let page = client.get("/v1/files?order=asc&limit=1").await.json();
    assert_eq!((&page["data"][0]["purpose"], &page["has_more"]), (&json!("batch_output"), &json!(true)));
    assert_eq!(client.get("/v1/batches").await.json()["data"][0]["id"], id.as_str());
    assert!(modes(folder.path()).iter().all(|(is_dir, mode)| *mode == if *is_dir { 0o700 } else { 0o600 }), "{:?}", modes(folder.path()));
    assert_eq!(fleet.routers[0].metric("hostler_batch_requests_total").await, 41.0);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_wrong_input_fails_the_batch_with_the_lines() {
    let (fleet, _folder) = start(1, |_| ()).await;
    let client = BatchClient::of(fleet.edge());
    let stream = line(2).replace("\"max_tokens\"", "\"stream\":true,\"max_tokens\"");
    let other = line(3).replace(COMPLETIONS, "/v1/embeddings");
    let id = client.batch(&[line(0), line(0), "{\n".to_owned(), stream, other, "{\n".repeat(20)].concat()).await;
    let batch = client.until_status(&id, "failed").await;
    let faults = batch["errors"]["data"].as_array().unwrap();
    let seen: Vec<(&str, u64)> =
        faults.iter().map(|fault| (fault["code"].as_str().unwrap(), fault["line"].as_u64().unwrap_or(0))).collect();
    let expected = [("duplicate_custom_id", 2), ("invalid_json_line", 3), ("stream_not_supported", 4), ("mismatched_endpoint", 5)];
    assert!(seen.starts_with(&expected) && seen.len() == 11 && seen[10].0 == "more_errors", "{faults:?}");
    let empty = client.batch("\n").await;
    assert_eq!(client.until_status(&empty, "failed").await["errors"]["data"][0]["code"], "empty_file");
    assert_eq!(client.cancel(&empty).await.status, 409);
    for (order, param) in [
        (json!({"input_file_id": "file-1", "endpoint": COMPLETIONS, "completion_window": "24h"}), "id"),
        (json!({"input_file_id": "file-1", "endpoint": "/v1/models", "completion_window": "24h"}), "endpoint"),
        (json!({"input_file_id": "file-1", "endpoint": COMPLETIONS, "completion_window": "1h"}), "completion_window"),
    ] {
        let answer = client.order(&order).await.json();
        assert_eq!(answer["error"]["param"], param, "{answer}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_batch_ends_with_what_is_done() {
    let (fleet, _folder) = start(1, |router| router.batches_in_flight_each = 4).await;
    let client = BatchClient::of(fleet.edge());
    let id = client.batch(&lines(5_000)).await;
    client.until_batch(&id, "some answers", |batch| batch["request_counts"]["completed"].as_u64() >= Some(20)).await;
    let cancelled = client.cancel(&id).await.json();
    assert!(cancelled["status"] == "cancelling" && cancelled["cancelling_at"].is_u64(), "{cancelled}");
    let batch = client.until_status(&id, "cancelled").await;
    let done = usize::try_from(batch["request_counts"]["completed"].as_u64().unwrap()).unwrap();
    assert!((20..5_000).contains(&done) && batch["cancelled_at"].is_u64(), "{batch}");
    assert_eq!(client.content(&batch["output_file_id"]).await.len(), done);
    assert_eq!(client.cancel(&id).await.status, 409);
    fleet.until_idle().await;
}

/// A router beside the fleet's first one, for the same folder, with an agent of its own.
async fn start_next(fleet: &mut Fleet, folder: &TempDir) -> RunningRouter {
    let config = RouterConfig { operators_socket: folder.path().join("o.sock"), ..fleet.router_config() };
    let next = RunningRouter::start(config).await;
    fleet.add_agent(vec![next.agents.to_string()]).await;
    next
}

async fn until_ended(router: &RunningRouter) {
    until("the router's end", async || if router.task.is_finished() { Ok(()) } else { Err(String::new()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_of_a_stopped_router_answers_each_request_once() {
    let (mut fleet, folder) = start(1, |router| router.batches_in_flight_each = 8).await;
    let client = BatchClient::of(fleet.edge());
    let id = client.batch(&lines(400)).await;
    client.until_batch(&id, "some answers", |batch| batch["request_counts"]["completed"].as_u64() >= Some(30)).await;
    fleet.routers[0].shutdown.stop();
    until_ended(&fleet.routers[0]).await;
    let journal = find(folder.path(), "journal").unwrap();
    let whole = std::fs::read(&journal).unwrap();
    std::fs::write(&journal, [&whole[..], b"0123456789abcdef 7 + {\"half"].concat()).unwrap();
    let next = start_next(&mut fleet, &folder).await;
    let client = BatchClient::of(next.edge());
    let batch = client.until_status(&id, "completed").await;
    assert_eq!(batch["request_counts"], json!({"total": 400, "completed": 400, "failed": 0}), "{batch}");
    assert_answered(&client.content(&batch["output_file_id"]).await, 400);
    let asked = next.metric("hostler_batch_requests_total").await;
    assert!(asked <= 370.0, "what had an answer is not asked again: {asked}");
    next.shutdown.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_passes_to_a_router_of_its_folder_when_the_first_drains() {
    let (mut fleet, folder) = start(1, |router| router.batches_in_flight_each = 2).await;
    let client = BatchClient::of(fleet.edge());
    let id = client.batch(&lines(600)).await;
    client.until_batch(&id, "some answers", |batch| batch["request_counts"]["completed"].as_u64() >= Some(10)).await;
    let next = start_next(&mut fleet, &folder).await;
    let other = BatchClient::of(next.edge());
    assert_eq!((&other.show(&id).await["status"], next.metric("hostler_batch_requests_total").await), (&json!("in_progress"), 0.0));
    fleet.routers[0].shutdown.drain();
    until_ended(&fleet.routers[0]).await;
    let batch = other.until_status(&id, "completed").await;
    assert_answered(&other.content(&batch["output_file_id"]).await, 600);
    assert!(next.metric("hostler_batch_requests_total").await > 0.0);
    next.shutdown.stop();
}

/// A file or folder of this name below a folder.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.ends_with(name) {
                return Some(path);
            }
        }
    }
    None
}

/// Makes a key of a tenant.
async fn create_key(file: &Path, tenant: &str) -> String {
    let made = hostler(&["keys", "create", "--tenant", tenant, "--file", file.to_str().unwrap()]).await;
    assert!(made.success, "{}", made.stderr);
    made.stdout.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_see_their_own_batches_and_a_revoked_key_ends_them() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    let (own, others) = (create_key(&keys, "physics").await, create_key(&keys, "biology").await);
    let setup = Setup::agents(1).router(|router| {
        router.batches_dir = folder.path().join("batches");
        router.batches_in_flight_each = 2;
        router.keys_file.clone_from(&keys);
    });
    let fleet = Fleet::start(setup).await;
    let client = BatchClient::of(fleet.edge());
    assert_eq!(client.get("/v1/batches").await.status, 401);
    let (physics, biology) = (client.with_key(&own), client.with_key(&others));
    let file = physics.file(&lines(20_000)).await;
    let id = physics.batch(&lines(20_000)).await;
    for path in [format!("/v1/files/{file}"), format!("/v1/files/{file}/content"), format!("/v1/batches/{id}")] {
        assert_eq!(
            (biology.get(&path).await.status, physics.get(&path).await.status.as_u16()),
            (http::StatusCode::NOT_FOUND, 200),
            "{path}"
        );
    }
    assert_eq!(biology.cancel(&id).await.status, 404);
    assert_eq!(biology.call(Method::DELETE, &format!("/v1/files/{file}"), None).await.status, 404);
    let order = json!({"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"});
    assert_eq!(biology.order(&order).await.status, 404);
    for list in ["/v1/files", "/v1/batches"] {
        assert_eq!(biology.get(list).await.json()["data"], json!([]));
    }
    physics.until_batch(&id, "some answers", |batch| batch["request_counts"]["completed"].as_u64() >= Some(5)).await;
    let (key_id, second) = (own.split('_').nth(1).unwrap(), create_key(&keys, "physics").await);
    let revoked = hostler(&["keys", "revoke", key_id, "--file", keys.to_str().unwrap()]).await;
    assert!(revoked.success, "{}", revoked.stderr);
    let physics = client.with_key(&second);
    until("the second key", async || {
        let answer = physics.get("/v1/batches").await;
        if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    let batch = physics.until_status(&id, "failed").await;
    let fault = &batch["errors"]["data"][0];
    assert!(fault["code"] == "invalid_api_key" && fault["message"].as_str().unwrap().contains("was revoked"), "{batch}");
    assert!(!physics.content(&batch["output_file_id"]).await.is_empty(), "what was done is there");
}

#[tokio::test(start_paused = true)]
async fn bounds_of_files_and_batches_are_told() {
    let (fleet, _folder) = start(1, |router| {
        router.batches_tenant_files = 2;
        router.batches_tenant_unfinished = 1;
        router.batches_max_file_bytes = 100_000;
        router.batches_max_requests = 300;
        router.batches_in_flight_each = 1;
    })
    .await;
    let client = BatchClient::of(fleet.edge());
    let large = client.upload(&lines(1_000)).await;
    assert_eq!((large.status.as_u16(), &large.json()["error"]["type"]), (413, &json!("invalid_request_error")), "{}", large.text());
    let long = client.batch(&lines(300)).await;
    let file = client.file(&lines(301)).await;
    let refused = client.order(&json!({"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"})).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["type"]), (429, &json!("insufficient_quota")), "{}", refused.text());
    let refused = client.upload(&lines(1)).await;
    assert!(refused.status == 429 && refused.text().contains("2 files"), "{}", refused.text());
    client.until_status(&long, "completed").await;
    let many = client.order(&json!({"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"})).await.json();
    let many = client.until_status(many["id"].as_str().unwrap(), "failed").await;
    assert_eq!(many["errors"]["data"][0]["code"], "too_many_requests", "{many}");
}

#[tokio::test(start_paused = true)]
async fn without_its_folder_the_api_names_the_setting() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    for path in ["/v1/files", "/v1/batches", "/v1/batches/batch_1", "/v1/files/file-1/content"] {
        let answer = fleet.edge().get(path).await;
        assert!(answer.status == 404 && answer.text().contains("router.batches_dir"), "{path}: {}", answer.text());
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_folder_keeps_what_is_there_and_goes_on_with_room() {
    let (fleet, folder) = start(1, |router| router.batches_max_bytes = 150_000).await;
    let client = BatchClient::of(fleet.edge());
    let filler = client.file(&"x".repeat(120_000)).await;
    let id = client.batch(&lines(100)).await;
    // Its answers do not fit: the batch waits instead of failing.
    until("a full folder", async || {
        let refused = client.upload(&lines(150)).await;
        if refused.status == 507 { Ok(()) } else { Err(refused.text()) }
    })
    .await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    let waiting = client.show(&id).await;
    let done = waiting["request_counts"]["completed"].as_u64().unwrap();
    assert!(waiting["status"] == "in_progress" && done < 100, "{waiting}");
    assert!(find(folder.path(), "journal").is_some());
    assert_eq!(client.call(Method::DELETE, &format!("/v1/files/{filler}"), None).await.status, 200);
    let batch = client.until_batch(&id, "an end", |batch| batch["status"] == "completed").await;
    assert_answered(&client.content(&batch["output_file_id"]).await, 100);
}
