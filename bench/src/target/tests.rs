//! Parsing of targets.

use super::*;

fn read(text: &str) -> (Place, String) {
    let target: Target = text.parse().unwrap();
    assert_eq!(target.to_string(), text);
    (target.place, target.path)
}

#[test]
fn a_target_has_a_port_and_a_path_even_where_none_is_written() {
    let tcp = |authority: &str| Place::Tcp(authority.to_owned());
    assert_eq!(read("http://127.0.0.1:8000"), (tcp("127.0.0.1:8000"), "/v1".to_owned()));
    assert_eq!(read("http://engine:8000/v1/"), (tcp("engine:8000"), "/v1".to_owned()));
    assert_eq!(read("http://engine/api/v3"), (tcp("engine:80"), "/api/v3".to_owned()));
    assert_eq!(read("http://[::1]:8000"), (tcp("[::1]:8000"), "/v1".to_owned()));
    assert_eq!(read("http://[::1]"), (tcp("[::1]:80"), "/v1".to_owned()));
    assert_eq!(read("unix:/run/engine.sock"), (Place::Unix("/run/engine.sock".into()), "/v1".to_owned()));
}

#[test]
fn what_is_no_target_is_refused_with_what_was_expected() {
    for text in [
        "engine:8000",
        "ftp://engine:1",
        "http://",
        "http://:8000",
        "http://engine:port",
        "http://me:key@engine:1",
        "unix:",
        "http://engine:1/v1?a=b",
    ] {
        assert!(text.parse::<Target>().is_err(), "{text}");
    }
}

#[test]
fn a_target_with_tls_is_reached_through_a_socket() {
    let target: Target = "https://engine:8000/v1".parse().unwrap();
    assert_eq!(target.secured_origin().as_deref(), Some("https://engine:8000"));
    let through = target.through("/run/relay.sock".into());
    assert_eq!((through.secured_origin(), through.to_string()), (None, "https://engine:8000/v1".to_owned()));
    assert_eq!((through.place, through.path), (Place::Unix("/run/relay.sock".into()), "/v1".to_owned()));
    assert_eq!("http://engine:1".parse::<Target>().unwrap().secured_origin(), None);
}

#[test]
fn metrics_stand_beside_the_api_or_where_they_are_named() {
    let target: Target = "http://engine:8000/v1".parse().unwrap();
    assert_eq!((target.metrics().to_string(), target.metrics().path), ("http://engine:8000/metrics".to_owned(), "/metrics".to_owned()));
    assert_eq!(Target::page("http://engine:9000").unwrap().path, "/metrics");
    assert_eq!(Target::page("http://engine:9000/all/metrics").unwrap().path, "/all/metrics");
}
