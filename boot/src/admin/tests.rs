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
