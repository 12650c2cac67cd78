use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use super::*;

fn names(uri: &str, hosts: &[&str], listens: &str) -> bool {
    let headers = hosts.iter().map(|host| (header::HOST, host.parse().unwrap())).collect();
    names_this_host(&uri.parse().unwrap(), &headers, listens)
}

#[test]
fn a_local_admin_request_names_an_ip_localhost_or_host() {
    for host in ["127.0.0.1:8002", "127.0.0.1", "[::1]:8002", "localhost:8002", "LOCALHOST", "10.0.0.7:80", "router-1:8002", ""] {
        let hosts: &[&str] = if host.is_empty() { &[] } else { &[host] };
        assert!(names("/metrics", hosts, "router-1:8002"), "{host}");
    }
    assert!(names("http://127.0.0.1:8002/metrics", &[], "127.0.0.1:8002"));
    let own = format!("{}:8002", rustix::system::uname().nodename().to_str().unwrap());
    assert!(names("/metrics", &[&own], "127.0.0.1:8002"), "{own}");
}

#[test]
fn a_request_for_a_foreign_host_is_always_recognized() {
    for host in ["evil.example:8002", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "router-1", "a b", "\u{e4}"] {
        assert!(!names("/metrics", &[host], "127.0.0.1:8002"), "{host}");
    }
    assert!(!names("http://evil.example/metrics", &[], "127.0.0.1:8002"), "HTTP/2");
    assert!(!names("http://127.0.0.1/metrics", &["evil.example"], "127.0.0.1:8002"), "both count");
    assert!(!names("/metrics", &["127.0.0.1", "evil.example"], "127.0.0.1:8002"));
}

/// Serves pages, one of which never ends, and returns their address.
async fn serve_pages(tasks: &mut JoinSet<()>) -> std::net::SocketAddr {
    // A paused clock advances by this much when idle, so sockets are served in time.
    tasks.spawn(async {
        loop {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let endless = || async { Body::from_stream(futures_util::stream::pending::<Result<String, std::io::Error>>()) };
    let routes = Router::new().route("/livez", get(|| async { "ok\n" })).route("/endless", get(endless));
    tasks.spawn(serve(listener, routes, CancellationToken::new()));
    address
}

async fn ask(address: std::net::SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
    stream
}

#[tokio::test(start_paused = true)]
async fn idle_admin_connections_make_room_for_requests() {
    let mut tasks = JoinSet::new();
    let address = serve_pages(&mut tasks).await;
    let mut idle = Vec::new();
    for _ in 0..MAX_CONNECTIONS + 50 {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    let mut answer = String::new();
    ask(address, "/livez").await.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("ok\n"), "{answer}");
    assert_eq!(idle[0].read(&mut [0]).await.unwrap(), 0, "what never asked is closed");
}

#[tokio::test(start_paused = true)]
async fn unread_answers_over_http2_make_room_for_requests() {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    // SETTINGS with an initial window of 0, then HEADERS of one GET of `/livez`.
    const NO_WINDOW: &[u8] = b"\0\0\x06\x04\0\0\0\0\0\0\x04\0\0\0\0";
    const ASK: &[u8] = b"\0\0\x0a\x01\x05\0\0\0\x01\x82\x86\x04\x06/livez";
    let mut tasks = JoinSet::new();
    let address = serve_pages(&mut tasks).await;
    let mut unread = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&[PREFACE, NO_WINDOW, ASK].concat()).await.unwrap();
        unread.push(stream);
    }
    let mut answer = String::new();
    ask(address, "/livez").await.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("ok\n"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_under_way_keeps_its_admin_connection() {
    let mut tasks = JoinSet::new();
    let address = serve_pages(&mut tasks).await;
    let mut endless = ask(address, "/endless").await;
    let mut head = [0; 12];
    endless.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    tokio::time::sleep(5 * IDLE_TIMEOUT).await;
    let mut rest = [0; 4096];
    while let Ok(read) = endless.try_read(&mut rest) {
        assert_ne!(read, 0, "it was closed");
    }
}
