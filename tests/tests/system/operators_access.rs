//! Access of operators to a router: its own user on its socket, others with an admin key, and never
//! a web page in a browser.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use prost::Message;
use rustix::process::Signal;

use crate::harness::{Endpoint, Fleet, PROGRAM, Program, Setup, Workplace, hostler, soon};

const DRAIN: &str = "/hostler.fleet.v1.Fleet/Drain";

/// User who is neither root nor the one who runs the tests.
const NOBODY: u32 = 65_534;

/// Body of a plain HTTP request that imitates a call to drain a replica.
fn drain_call(target: &str) -> Bytes {
    let message = hostler_proto::fleet::v1::TargetRequest { target: target.to_owned() }.encode_to_vec();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0][..], &length, &message].concat().into()
}

/// Request that a script in a web page posts, with these headers.
fn post(headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let request = headers.iter().fold(Request::post(DRAIN), |request, (name, value)| request.header(*name, *value));
    request.body(Full::from(drain_call("n0/0"))).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_web_page_on_this_host_cannot_drain() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let ways = [Endpoint::Tcp(fleet.routers[0].admin), Endpoint::Unix(fleet.admin().socket().into())];
    let text = ("content-type", "text/plain");
    for way in ways {
        for (headers, status, words) in [
            (&[text, ("origin", "https://evil.example")][..], 403, "web page"),
            (&[text, ("origin", "null")], 403, "web page"),
            (&[text, ("sec-fetch-site", "cross-site")], 403, "web page"),
            (&[text], 415, "application/grpc"),
            (&[], 415, "application/grpc"),
        ] {
            let refused = way.request(post(headers)).await;
            assert_eq!(refused.status, status, "{headers:?} to {way:?}: {}", refused.text());
            assert!(refused.text().contains(words), "{}", refused.text());
        }
        // A cross-site request that needs a preflight gets no permission.
        let preflight = Request::options(DRAIN).header("origin", "https://evil.example").header("access-control-request-method", "POST");
        let answer = way.request(preflight.body(Full::default()).unwrap()).await;
        assert!(answer.status == 403 && answer.header("access-control-allow-origin").is_none(), "{}", answer.text());
    }
    let answer = fleet.edge().post(crate::harness::CHAT, &crate::harness::chat(2)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(fleet.replica("n0/0").await.is_ready(), "nothing was drained");
}

#[tokio::test(start_paused = true)]
async fn a_foreign_name_for_loopback_shows_no_figures() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let page = |path: &str, host: &str| Request::get(path).header("host", host).body(Full::default()).unwrap();
    let router = Endpoint::Tcp(fleet.routers[0].admin);
    for host in ["evil.example", "evil.example:8002", "127.0.0.1.evil.example"] {
        let refused = router.request(page("/metrics", host)).await;
        assert!(refused.status == 403 && refused.text().contains("localhost"), "{host}: {}", refused.text());
        assert_eq!(router.request(page("/readyz", host)).await.status, 200, "load balancers say what they like");
    }
    for host in ["127.0.0.1", "localhost:8002", "[::1]:8002"] {
        assert_eq!(router.request(page("/metrics", host)).await.status, 200, "{host}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_without_keys_sends_operators_to_its_socket() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let refused = hostler(&["drain", "n0/0", "--admin", &fleet.routers[0].admin.to_string()]).await;
    assert!(!refused.success, "{}", refused.stdout);
    for words in ["router.keys_file", fleet.admin().socket()] {
        assert!(refused.stderr.contains(words), "{words}: {}", refused.stderr);
    }
    assert!(fleet.replica("n0/0").await.is_ready());
    let listed = hostler(&["ps", "--admin", fleet.admin().socket()]).await;
    assert!(listed.success && listed.stdout.contains(" ready "), "{}", listed.stderr);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_user_of_this_host_reaches_no_operators_call() {
    if !rustix::process::geteuid().is_root() {
        println!("not run: only root can become another user");
        return;
    }
    let fleet = Fleet::start(Setup::agents(1)).await;
    // Others can read this place: the program, and the socket's folder with a mode that its user
    // would never leave.
    let place = tempfile::Builder::new().prefix("h-").tempdir_in("/tmp").unwrap();
    fs::set_permissions(place.path(), Permissions::from_mode(0o755)).unwrap();
    let program = place.path().join("hostler");
    fs::copy(PROGRAM, &program).unwrap();
    let as_nobody = async |arguments: &[&str]| {
        let mut command = std::process::Command::new(&program);
        command.args(arguments).env_clear().current_dir("/").uid(NOBODY).gid(NOBODY);
        let ended = soon("another user's command", tokio::process::Command::from(command).output()).await.unwrap();
        assert!(!ended.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ended.stdout));
        String::from_utf8(ended.stderr).unwrap()
    };
    let socket = fleet.admin().socket();
    let refused = as_nobody(&["drain", "n0/0", "--admin", socket]).await;
    assert!(refused.contains("is its user's alone") && refused.contains("--admin HOST:PORT --admin-key-file FILE"), "{refused}");
    let refused = as_nobody(&["drain", "n0/0"]).await;
    assert!(refused.contains("no router of yours runs on this host"), "{refused}");
    let refused = as_nobody(&["drain", "n0/0", "--admin", &fleet.routers[0].admin.to_string()]).await;
    assert!(refused.contains("router.keys_file"), "{refused}");
    // Modes are the first barrier, the kernel's credentials of the peer the second.
    fs::set_permissions(socket, Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(Path::new(socket).parent().unwrap(), Permissions::from_mode(0o755)).unwrap();
    let refused = as_nobody(&["drain", "n0/0", "--admin", socket]).await;
    assert!(!refused.contains("is its user's alone"), "it could connect: {refused}");
    assert!(fleet.replica("n0/0").await.is_ready(), "nothing was drained");
}

/// A separate router on free ports, and its socket.
async fn router(workplace: &Workplace, name: &str) -> (Program, PathBuf) {
    let local = ["--listen", "127.0.0.1:0", "--agents-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    let router = workplace.start(name, &[&["router"], &local[..]].concat());
    let socket = router.admin().await.socket().into();
    (router, socket)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_users_single_router_is_found_and_several_need_choosing() {
    let others = hostler_router::find_operators_sockets().await;
    if !others.is_empty() {
        println!("not run: routers of yours that this test did not start would be found, too: {others:?}");
        return;
    }
    let workplace = Workplace::new();
    let ps = async |arguments: &[&str]| workplace.run(&[&["ps"], arguments].concat()).await;
    let none = ps(&[]).await;
    assert!(!none.success && none.stderr.contains("no router of yours runs on this host"), "{}", none.stderr);

    let (mut first, first_socket) = router(&workplace, "first").await;
    assert_eq!(fs::metadata(&first_socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(first_socket.parent().unwrap(), workplace.path().join("hostler"));
    let found = ps(&[]).await;
    assert!(found.success, "{}", found.stderr);

    let (mut second, second_socket) = router(&workplace, "second").await;
    let several = ps(&[]).await;
    assert!(!several.success && several.stderr.contains("2 routers of yours run on this host"), "{}", several.stderr);
    for socket in [&first_socket, &second_socket] {
        let path = socket.to_str().unwrap();
        assert!(several.stderr.contains(&format!("--admin {path}")), "{}", several.stderr);
        let chosen = ps(&["--admin", path]).await;
        assert!(chosen.success && ps(&["--admin", &format!("unix:{path}")]).await.success, "{}", chosen.stderr);
    }
    let config = workplace.file("hostler.toml", &format!("[router]\noperators_socket = {second_socket:?}\n"));
    assert!(ps(&["--config", &config]).await.success, "the configuration says which");

    // A killed router leaves its socket but does not count; a router that exits removes it.
    first.signal(Signal::KILL);
    first.ended().await;
    assert!(first_socket.exists() && ps(&[]).await.success);
    second.signal(Signal::TERM);
    second.ended().await;
    assert!(!second_socket.exists() && !ps(&[]).await.success);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_or_unsafe_operators_socket_is_an_error() {
    let workplace = Workplace::new();
    let (_first, socket) = router(&workplace, "first").await;
    let local = ["--listen", "127.0.0.1:0", "--agents-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--operators-socket"];
    for (path, words) in
        [(socket.to_str().unwrap(), "in use by another process"), ("/tmp/hostler-test.sock", "a folder of your own with mode 700")]
    {
        let refused = workplace.run(&[&["router"], &local[..], &[path]].concat()).await;
        assert!(!refused.success && refused.stderr.contains(words), "{}", refused.stderr);
        assert!(refused.stderr.contains("router.operators_socket"), "{}", refused.stderr);
    }
    assert!(workplace.run(&["ps", "--admin", socket.to_str().unwrap()]).await.success, "the living one is left alone");
}
