//! A host with several users: each has a separate fleet, and none reads, reaches or operates
//! another's.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use bytes::Bytes;
use hostler_boot::Shutdown;
use hostler_router::{Router, RouterConfig};
use http::Request;
use http_body_util::Full;
use serde_json::Value;

use crate::harness::{Admin, Answer, CHAT, Endpoint, Program, Workplace, chat, json_request, soon, until};

/// User who is neither root nor the one who runs the tests.
const NOBODY: u32 = 65_534;

/// Whether this process can become another user, which only root can.
fn can_be_another_user() -> bool {
    rustix::process::geteuid().is_root()
}

/// Workplace of the user who runs the test.
///
/// Files are protected by their own modes here: the folder above them is open.
fn our_workplace() -> Workplace {
    let ours = Workplace::new();
    fs::set_permissions(ours.path(), Permissions::from_mode(0o755)).unwrap();
    ours
}

/// Output of a program that the other user runs.
fn as_nobody(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(arguments).uid(NOBODY).gid(NOBODY).current_dir("/").stderr(Stdio::null());
    String::from_utf8_lossy(&command.output().unwrap().stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_edges_socket_is_private_and_recreated_when_removed() {
    let place = our_workplace();
    let local = || "127.0.0.1:0".to_owned();
    let operators_socket = place.path().join("run/o.sock");
    let config =
        RouterConfig { listen: local(), agents_listen: local(), admin_listen: local(), operators_socket, ..RouterConfig::default() };
    let router = Router::bind(config).await.unwrap().open_edge_socket().await;
    let (socket, shutdown) = (router.edge_socket().unwrap().to_owned(), Shutdown::new());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
    let running = tokio::spawn(router.run(shutdown.clone()));
    let edge = Endpoint::Unix(socket.clone());
    assert_eq!(edge.get("/v1/models").await.status, 200);
    fs::remove_file(&socket).unwrap();
    let models_request = || Request::get("/v1/models").body(Full::<Bytes>::default()).unwrap();
    let again = until("another socket", async || edge.try_send(models_request()).await).await;
    assert_eq!((again.status.as_u16(), mode(&socket)), (200, 0o600));
    drop(again);
    shutdown.drain();
    soon("the router's end", running).await.unwrap().unwrap();
    assert!(!socket.exists());
}

const FREE_PORTS: [&str; 6] = ["--listen", "127.0.0.1:0", "--agents-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];

fn start_router(place: &Workplace, flags: &[&str]) -> Program {
    place.start("router", &[&["router"], &FREE_PORTS[..], flags].concat())
}

fn start_agent(place: &Workplace, router: &str, node: &str) -> Program {
    let role = ["agent", "--router", router, "--node", node, "--engine", "simulated", "--replicas", "1", "--", "--sim-start-ms", "50"];
    place.start("agent", &role)
}

async fn until_ready(admin: Admin, router: &Program, agent: &Program) {
    until("a ready replica", async || {
        let seen = admin.replicas().await.map_err(|status| status.to_string())?;
        let logs = || format!("{seen:?}\n{}\n{}", router.stderr(), agent.stderr());
        if seen.iter().any(|replica| replica.is_ready()) { Ok(()) } else { Err(logs()) }
    })
    .await;
}

async fn ask(edge: &Endpoint, body: &Value, key: &str) -> Answer {
    let mut request: Request<Full<Bytes>> = json_request(CHAT, body);
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    edge.request(request).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_user_reads_and_operates_nothing() {
    if !can_be_another_user() {
        println!("not run: only root can become another user");
        return;
    }
    let (mut ours, theirs) = (our_workplace(), Workplace::of_user(NOBODY));
    let file = |name: &str| ours.path().join(name).to_str().unwrap().to_owned();
    let (fleet, keys, token, log) = (file("fleet"), file("keys.toml"), file("token"), file("access.log"));
    assert!(ours.run(&["init", "--dir", &fleet, "--out", &token]).await.success);
    let key = ours.run(&["keys", "create", "--name", "ours", "--file", &keys]).await.stdout.trim().to_owned();
    let join_token = fs::read_to_string(&token).unwrap().trim().to_owned();
    ours.environment.push(("HOSTLER_AGENT_JOIN_TOKEN_FILE", token.clone().leak()));
    let isolated = ["--isolate-tenants"];
    let flags = ["--tls-dir", &fleet, "--keys-file", &keys, "--access-log-file", &log];
    let router = start_router(&ours, &[&flags[..], &isolated].concat());
    let admin = router.admin().await;
    let agent = start_agent(&ours, &router.address("agents").await.to_string(), "n0");
    until_ready(admin, &router, &agent).await;
    assert_eq!(ask(&Endpoint::Tcp(router.address("edge").await), &chat(2), &key).await.status, 200);
    until("a line in the access log", async || if fs::read_to_string(&log).unwrap().is_empty() { Err(String::new()) } else { Ok(()) })
        .await;

    let root = ours.path().to_str().unwrap();
    let all = ["(", "-type", "f", "-o", "-type", "s", ")"];
    let open = as_nobody("find", &[&[root], &all[..], &["(", "-readable", "-o", "-writable", ")"]].concat());
    // Leave out this test's own files, and the models' tokenizers.
    let own = |path: &&str| path.ends_with(".out") || path.ends_with(".err") || path.contains("/.cache/");
    let open: Vec<&str> = open.lines().filter(|path| !own(path)).collect();
    assert!(open.is_empty(), "another user may open {open:#?}");
    let sockets = Command::new("find").args([root, "-type", "s"]).output().unwrap().stdout;
    let sockets = String::from_utf8(sockets).unwrap();
    for name in ["router-", ".sock.takeover", "e0/"] {
        assert!(sockets.contains(name), "{name} is among the sockets that were tried: {sockets}");
    }

    for pid in [&[router.pid(), agent.pid()][..], &ours.processes()].concat() {
        assert_eq!(as_nobody("cat", &[&format!("/proc/{pid}/environ")]), "");
        let command = as_nobody("cat", &[&format!("/proc/{pid}/cmdline")]);
        assert!(!command.is_empty() && !command.contains(&key) && !command.contains(&join_token), "{command}");
    }

    let address = router.address("admin").await.to_string();
    for call in [&["ps"][..], &["drain", "n0"], &["logs", "n0/0"]] {
        for way in [admin.socket(), &address] {
            let refused = theirs.run(&[call, &["--admin", way]].concat()).await;
            assert!(!refused.success, "{call:?} by {way}: {}", refused.stdout);
        }
    }
    let taken = theirs.run(&[&["router", "--takeover", "--operators-socket", admin.socket()], &FREE_PORTS[..]].concat()).await;
    assert!(!taken.success && taken.stderr.contains("router.operators_socket"), "{}", taken.stderr);
    assert!(admin.replicas().await.unwrap().iter().all(|replica| replica.is_ready()), "nothing was drained");
    assert!(!router.stderr().contains("begins to take"), "{}", router.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_users_can_run_fleets_side_by_side() {
    if !can_be_another_user() {
        println!("not run: only root can become another user");
        return;
    }
    let (ours, theirs) = (our_workplace(), Workplace::of_user(NOBODY));
    let router = start_router(&ours, &[]);
    let addresses = [router.address("edge").await, router.address("agents").await, router.address("admin").await];
    let agents = addresses[1].to_string();
    let agent = start_agent(&ours, &agents, "ours");
    until_ready(router.admin().await, &router, &agent).await;

    // The first user already has the usual ports.
    for (flag, address) in ["--listen", "--agents-listen", "--admin-listen"].into_iter().zip(addresses) {
        let flags = FREE_PORTS.map(str::to_owned);
        let at = flags.iter().position(|name| name == flag).unwrap();
        let mut flags = flags.to_vec();
        flags[at + 1] = address.to_string();
        flags.push("--takeover".to_owned());
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let refused = theirs.run(&[&["router"], &flags[..]].concat()).await;
        assert!(!refused.success && refused.stderr.contains(&format!("choose another address with {flag}")), "{}", refused.stderr);
    }
    // The usual router's port is taken, too: another user's engines would get the first user's
    // prompts.
    let mistaken = start_agent(&theirs, &agents, "theirs");
    until("the agent's refusal", async || {
        let message = mistaken.stderr();
        if message.contains("takes agents of its own user only") && message.contains("agent.router") { Ok(()) } else { Err(message) }
    })
    .await;
    drop(mistaken);
    let nodes = router.admin().await.nodes().await.unwrap();
    assert!(nodes.iter().all(|node| node.name == "ours"), "{nodes:?}");

    let their_router = start_router(&theirs, &[]);
    let their_agent = start_agent(&theirs, &their_router.address("agents").await.to_string(), "theirs");
    until_ready(their_router.admin().await, &their_router, &their_agent).await;
    for (place, own, router) in [(&ours, "ours/0", &router), (&theirs, "theirs/0", &their_router)] {
        let shown = place.run(&["ps", "--admin", router.admin().await.socket()]).await.stdout;
        let nodes = ["ours/0", "theirs/0"].map(|node| shown.split_whitespace().any(|word| word == node));
        assert_eq!(nodes, ["ours/0", "theirs/0"].map(|node| node == own), "{shown}");
        let edge = Endpoint::Tcp(router.address("edge").await);
        assert_eq!(edge.post(CHAT, &chat(2)).await.status, 200);
    }
}
