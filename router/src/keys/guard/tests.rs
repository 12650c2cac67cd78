use std::net::IpAddr;
use std::time::SystemTime;

use axum::body::Body;
use axum::extract::ConnectInfo;

use super::*;
use crate::keys::KeyEntry;
use crate::keys::tests::keys;

const LIST: &str = "/hostler.fleet.v1.Fleet/List";
const DRAIN: &str = "/hostler.fleet.v1.Fleet/Drain";

struct Bench {
    keys: Keys,
    admin: Secret,
    user: Secret,
    own: Secret,
}

fn bench() -> Bench {
    let entry = |secret: &Secret, role| KeyEntry { role, ..KeyEntry::new(secret, "t", SystemTime::now()) };
    let [admin, user, own] = [(); 3].map(|()| Secret::random().unwrap());
    let keys = keys(vec![entry(&admin, Role::Admin), entry(&user, Role::Use)]);
    Bench { keys, admin, user, own }
}

impl Bench {
    fn guard(&self, metrics: NeedKey, listens: &str) -> AdminGuard {
        let config = RouterConfig { metrics_need_key: metrics, admin_listen: "router-1:8002".into(), ..RouterConfig::default() };
        let socket = Path::new("/run/me/router-8002.sock");
        AdminGuard::new(&config, PageSessions::new(self.keys.clone()), &self.own, listens.parse::<IpAddr>().unwrap(), Some(socket))
    }
}

/// A call as `hostler` makes it.
fn call(path: &str, via: CallOrigin, key: Option<&Secret>) -> Request {
    let mut request = Request::post(path).version(Version::HTTP_2).header(CONTENT_TYPE, "application/grpc").body(Body::empty()).unwrap();
    request.extensions_mut().insert(ConnectInfo(via));
    if let Some(key) = key {
        request.headers_mut().insert("authorization", format!("Bearer {}", key.reveal()).parse().unwrap());
    }
    request
}

/// The request with another header.
fn with(mut request: Request, name: &'static str, value: &str) -> Request {
    request.headers_mut().insert(name, value.parse().unwrap());
    request
}

/// Whether such a call is let through.
fn passes(guard: &AdminGuard, path: &str, via: CallOrigin, key: Option<&Secret>) -> bool {
    guard.check(&call(path, via, key)).is_ok()
}

#[test]
fn operators_over_tcp_always_need_an_admin_key() {
    let bench = bench();
    for (listens, via) in [
        ("127.0.0.1", CallOrigin::Loopback),
        ("0.0.0.0", CallOrigin::Loopback),
        ("0.0.0.0", CallOrigin::Network),
        ("::", CallOrigin::Network),
    ] {
        let guard = bench.guard(NeedKey::Auto, listens);
        for path in [LIST, DRAIN, "/pages", "/livez/", "//metrics"] {
            assert!(!passes(&guard, path, via, None), "{path}");
            assert!(!passes(&guard, path, via, Some(&bench.user)), "{path}");
            assert!(!passes(&guard, path, via, Some(&Secret::random().unwrap())), "{path}");
            assert!(passes(&guard, path, via, Some(&bench.admin)), "{path}");
            assert!(passes(&guard, path, via, Some(&bench.own)), "{path}");
        }
        for path in ["/livez", "/readyz", "/grpc.health.v1.Health/Check"] {
            assert!(passes(&guard, path, via, None), "{path}");
        }
    }
}

#[test]
fn the_socket_needs_no_key() {
    let bench = bench();
    let guard = bench.guard(NeedKey::Always, "0.0.0.0");
    assert!([LIST, DRAIN, "/metrics", "/readyz"].iter().all(|path| passes(&guard, path, CallOrigin::Socket, None)));
}

#[test]
fn operators_without_a_key_file_are_sent_to_the_socket() {
    let bench = Bench { keys: Keys::default(), ..bench() };
    let guard = bench.guard(NeedKey::Auto, "127.0.0.1");
    for key in [None, Some(&bench.admin)] {
        let refused = guard.check(&call(DRAIN, CallOrigin::Loopback, key)).unwrap_err().to_string();
        assert!(refused.contains("router.keys_file") && refused.contains("/run/me/router-8002.sock"), "{refused}");
    }
    assert!(passes(&guard, DRAIN, CallOrigin::Loopback, Some(&bench.own)) && passes(&guard, DRAIN, CallOrigin::Socket, None));
    assert!(passes(&guard, "/metrics", CallOrigin::Network, None));
}

#[test]
fn the_metrics_page_needs_a_key_beyond_loopback_by_default() {
    let bench = bench();
    let needed = |metrics, listens| !passes(&bench.guard(metrics, listens), "/metrics", CallOrigin::Network, None);
    assert_eq!([needed(NeedKey::Auto, "0.0.0.0"), needed(NeedKey::Auto, "127.0.0.1")], [true, false]);
    assert_eq!([needed(NeedKey::Always, "127.0.0.1"), needed(NeedKey::Never, "0.0.0.0")], [true, false]);
}

#[test]
fn a_foreign_web_page_is_refused_even_with_a_key() {
    let bench = bench();
    let guard = bench.guard(NeedKey::Auto, "127.0.0.1");
    for via in [CallOrigin::Socket, CallOrigin::Loopback, CallOrigin::Network] {
        let sound = || call(DRAIN, via, Some(&bench.admin));
        assert!(guard.check(&sound()).is_ok() && guard.check(&with(sound(), "content-type", "application/grpc+proto")).is_ok());
        for kind in
            ["text/plain", "application/x-www-form-urlencoded", "application/grpc-web", "application/grpc-web+proto", "application/json"]
        {
            assert!(matches!(guard.check(&with(sound(), "content-type", kind)), Err(AdminRefusal::NotGrpc)), "{kind}");
        }
        for origin in ["https://evil.example", "null", "http://127.0.0.1:8002"] {
            assert!(matches!(guard.check(&with(sound(), "origin", origin)), Err(AdminRefusal::WebPage("origin"))), "{origin}");
        }
        for site in ["cross-site", "same-site", "same-origin"] {
            assert!(matches!(guard.check(&with(sound(), "sec-fetch-site", site)), Err(AdminRefusal::WebPage(_))), "{site}");
        }
        let mut old = sound();
        *old.version_mut() = Version::HTTP_11;
        assert!(matches!(guard.check(&old), Err(AdminRefusal::NotGrpc)));
    }
}

#[test]
fn the_routers_own_page_passes_the_origin_check() {
    let sent = |uri: &str, host: &'static str, origin: &'static str| {
        let request = Request::builder().method(Method::POST).uri(uri).header(ORIGIN, origin);
        let request = if host.is_empty() { request } else { request.header(HOST, host) };
        refuse_other_pages(&request.body(Body::empty()).unwrap())
    };
    assert!(sent("/page/session", "127.0.0.1:8002", "http://127.0.0.1:8002").is_ok());
    assert!(sent("https://node7:8002/page/session", "", "https://node7:8002").is_ok());
    for origin in ["http://127.0.0.1:8003", "https://evil.example", "null", "127.0.0.1:8002", ""] {
        assert!(matches!(sent("/page/session", "127.0.0.1:8002", origin), Err(AdminRefusal::OtherPage("origin"))), "{origin}");
    }
    assert!(sent("https://node7:8002/page/session", "", "https://node7:8003").is_err());
}

#[test]
fn a_keyless_page_is_shown_only_under_local_names() {
    let bench = bench();
    let guard = bench.guard(NeedKey::Auto, "127.0.0.1");
    let under = |path, via, host: &str| guard.check(&with(call(path, via, None), "host", host)).is_ok();
    for host in ["127.0.0.1:8002", "localhost:8002", "router-1:8002"] {
        assert!(under("/metrics", CallOrigin::Loopback, host), "{host}");
    }
    assert!(!under("/metrics", CallOrigin::Loopback, "evil.example:8002"), "DNS rebinding");
    // A remote scraper uses a name of its own network, a load balancer any name.
    assert!(under("/metrics", CallOrigin::Network, "router.cluster.local") && under("/readyz", CallOrigin::Loopback, "service"));
    let keyed = bench.guard(NeedKey::Always, "127.0.0.1");
    assert!(keyed.check(&with(call("/metrics", CallOrigin::Loopback, Some(&bench.admin)), "host", "router.cluster.local")).is_ok());
}

#[test]
fn a_refusal_has_the_form_of_its_caller() {
    let bench = bench();
    let guard = bench.guard(NeedKey::Auto, "0.0.0.0");
    let grpc = call(LIST, CallOrigin::Network, Some(&bench.user));
    let (missing, role) = (guard.check(&call(LIST, CallOrigin::Network, None)).unwrap_err(), guard.check(&grpc).unwrap_err());
    assert!(missing.to_string().contains("HOSTLER_ADMIN_KEY") && missing.to_string().contains("/run/me/"), "{missing}");
    assert!(role.to_string().contains("--role admin"), "{role}");
    let plain = refusal_response(&missing, false);
    assert_eq!((plain.status(), &plain.headers()[WWW_AUTHENTICATE]), (StatusCode::UNAUTHORIZED, &HeaderValue::from_static("Bearer")));
    assert_eq!(refusal_response(&role, false).status(), StatusCode::FORBIDDEN);
    let grpc = refusal_response(&role, true);
    assert_eq!((grpc.status(), &grpc.headers()["grpc-status"]), (StatusCode::OK, &HeaderValue::from_static("7")));
}
