//! Engines that somebody else runs: the agent serves them, and leaves them alone.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hostler_proto::lane::ROUTER_SERVER;
use hostler_sim::EngineArgs;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

use crate::harness::{CHAT, Fleet, Setup, chat, chat_stream, soon, until};

/// An engine of somebody else's, which ends when it is aborted.
fn run_engine(socket: &Path) -> JoinHandle<()> {
    run_engine_with(socket, "")
}

fn run_engine_with(socket: &Path, more: &str) -> JoinHandle<()> {
    let _ = std::fs::remove_file(socket);
    let flags = format!("--uds {} --served-model-name theirs --sim-start-ms 0 --sim-step-ms 2 {more}", socket.display());
    let args = EngineArgs::from_flags(&flags.split_whitespace().collect::<Vec<_>>());
    tokio::spawn(async move { hostler_sim::serve(args, std::future::pending::<()>()).await.unwrap() })
}

/// Waits until the router knows this many replicas.
async fn until_known(fleet: &Fleet, replicas: usize) {
    until("the replicas known", async || {
        let known = fleet.admin().replicas().await.map_err(|status| status.to_string())?;
        if known.len() == replicas { Ok(()) } else { Err(format!("{known:?}")) }
    })
    .await;
}

fn target(folder: &TempDir, name: &str) -> String {
    format!("unix:{}", folder.path().join(name).display())
}

#[tokio::test(start_paused = true)]
async fn an_attached_engine_is_served_and_found_again_when_it_returns() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("a.sock");
    let fleet = Fleet::launch(Setup::agents(1).attach(&[target(&folder, "a.sock")])).await;
    let theirs = run_engine(&socket);
    fleet.until_ready().await;
    for mut body in [chat(3), chat_stream(3)] {
        body["model"] = json!("theirs");
        let answer = fleet.edge().post(CHAT, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let replica = fleet.until_replica("n0/0", "both answered", |replica| replica.served == 2).await;
    assert_eq!(replica.models, ["theirs"]);
    assert!(replica.reason.contains("not ours"), "{}", replica.reason);

    theirs.abort();
    let _ = theirs.await;
    fleet.until_replica("n0/0", "not ready", |replica| !replica.is_ready()).await;
    let theirs = run_engine(&socket);
    fleet.until_ready().await;
    until("an answer", async || {
        let answer = fleet.edge().post(CHAT, &json!({"model": "theirs", "messages": [{"role": "user", "content": "hi"}]})).await;
        if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    assert!(!theirs.is_finished(), "nobody ended it");
}

#[tokio::test(start_paused = true)]
async fn an_attached_engine_that_is_not_there_keeps_no_other_waiting() {
    let folder = TempDir::new().unwrap();
    let theirs = run_engine(&folder.path().join("b.sock"));
    let fleet = Fleet::launch(Setup::agents(1).attach(&["a.sock", "b.sock"].map(|name| target(&folder, name)))).await;
    until_known(&fleet, 2).await;
    fleet.until_replica("n0/1", "ready", |replica| replica.is_ready()).await;
    let absent = fleet.until_replica("n0/0", "waits", |replica| replica.reason.contains("waits for unix:")).await;
    assert!(!absent.is_ready() && !theirs.is_finished());
}

#[tokio::test(start_paused = true)]
async fn attached_engines_are_left_alone_when_their_agent_ends() {
    let folder = TempDir::new().unwrap();
    let engines = ["a.sock", "b.sock"].map(|name| run_engine(&folder.path().join(name)));
    let mut fleet = Fleet::start(Setup::agents(1).attach(&["a.sock", "b.sock"].map(|name| target(&folder, name)))).await;
    for _ in 0..4 {
        assert_eq!(fleet.edge().post(CHAT, &json!({"model": "theirs", "messages": [{"role": "user", "content": "hi"}]})).await.status, 200);
    }
    let agent = fleet.agents.remove(0);
    agent.shutdown.drain();
    soon("the agent's end", agent.task).await.unwrap().unwrap();
    assert!(engines.iter().all(|engine| !engine.is_finished()));
}

#[tokio::test(start_paused = true)]
async fn an_engine_with_a_key_is_attached_with_its_file() {
    let folder = TempDir::new().unwrap();
    let _theirs = run_engine_with(&folder.path().join("a.sock"), "--api-key sk-theirs");
    let engine = || Setup::agents(1).attach(&[target(&folder, "a.sock")]);
    let fleet = Fleet::launch(engine()).await;
    until_known(&fleet, 1).await;
    let refused = fleet.until_replica("n0/0", "refused", |replica| replica.reason.contains("--attach-key-file")).await;
    assert!(!refused.is_ready());

    let key_file = folder.path().join("key");
    std::fs::write(&key_file, "sk-theirs\n").unwrap();
    std::fs::set_permissions(&key_file, Permissions::from_mode(0o600)).unwrap();
    let fleet = Fleet::launch(engine().agent(|agent| agent.attach_key_file.clone_from(&key_file))).await;
    fleet.until_ready().await;
    for mut body in [chat(3), chat_stream(3)] {
        body["model"] = json!("theirs");
        let answer = fleet.edge().post(CHAT, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let replica = fleet.replica("n0/0").await;
    assert!(!format!("{replica:?}").contains("sk-theirs"), "no operator sees it: {replica:?}");
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_a_router_at_times_is_not_attached_in_between() {
    let folder = TempDir::new().unwrap();
    let listener = UnixListener::bind(folder.path().join("a.sock")).unwrap();
    let is_router = Arc::new(AtomicBool::new(true));
    let answers_as_router = is_router.clone();
    // Every third answer is a router's, the first one too, for as long as one is there at all.
    tokio::spawn(async move {
        let mut answered = 0;
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let server = if answers_as_router.load(Ordering::Relaxed) && answered % 3 == 0 { ROUTER_SERVER } else { "uvicorn" };
            let body = r#"{"object":"list","data":[{"id":"theirs"}]}"#;
            let head = format!("HTTP/1.1 200 OK\r\nserver: {server}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            if stream.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {
                answered += 1;
                let _ = stream.write_all([head.as_str(), body].concat().as_bytes()).await;
            }
        }
    });
    let fleet = Fleet::launch(Setup::agents(1).attach(&[target(&folder, "a.sock")])).await;
    until_known(&fleet, 1).await;
    fleet.until_replica("n0/0", "refused", |replica| replica.reason.contains("a router answers there")).await;
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!fleet.replica("n0/0").await.is_ready());
    }
    is_router.store(false, Ordering::Relaxed);
    fleet.until_ready().await;
}

/// Answers every request as the edge of a router does.
fn run_router(socket: &Path, status: &'static str) {
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let body = r#"{"object":"list","data":[{"id":"theirs"}]}"#;
                let answer = format!("HTTP/1.1 {status}\r\nserver: {ROUTER_SERVER}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                while stream.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) && stream.write_all(answer.as_bytes()).await.is_ok() {}
            });
        }
    });
}

#[tokio::test(start_paused = true)]
async fn a_router_is_not_attached_as_an_engine() {
    let folder = TempDir::new().unwrap();
    run_router(&folder.path().join("a.sock"), "200 OK");
    // A router without engines.
    run_router(&folder.path().join("b.sock"), "503 Service Unavailable");
    let fleet = Fleet::launch(Setup::agents(1).attach(&["a.sock", "b.sock"].map(|name| target(&folder, name)))).await;
    until_known(&fleet, 2).await;
    for id in ["n0/0", "n0/1"] {
        let refused = fleet.until_replica(id, "refused", |replica| replica.reason.contains("a router answers there")).await;
        assert!(!refused.is_ready());
    }
    let models = fleet.edge().get("/v1/models").await;
    assert_eq!(models.header("server"), Some(ROUTER_SERVER), "so routers are recognized");
}
