use std::net::IpAddr;
use std::time::SystemTime;

use super::*;
use crate::keys::Entry;
use crate::keys::tests::{headers, keys};

const LIST: &str = "/hostler.fleet.v1.Fleet/List";

struct Bench {
    keys: Keys,
    admin: Secret,
    user: Secret,
    own: Secret,
}

fn bench() -> Bench {
    let entry = |secret: &Secret, role| Entry { role, ..Entry::new(secret, "t", SystemTime::now()) };
    let [admin, user, own] = [(); 3].map(|()| Secret::random().unwrap());
    let keys = keys(vec![entry(&admin, Role::Admin), entry(&user, Role::Use)]);
    Bench { keys, admin, user, own }
}

impl Bench {
    fn guard(&self, operators: NeedKey, metrics: NeedKey, listens: &str) -> Guard {
        let config = RouterConfig { operators_need_key: operators, metrics_need_key: metrics, ..RouterConfig::default() };
        Guard::new(&config, self.keys.clone(), &self.own, listens.parse::<IpAddr>().unwrap())
    }
}

/// Whether a call is let through, without a key and with this one.
fn passes(guard: &Guard, path: &str, key: Option<&Secret>) -> bool {
    let shown = key.map(|key| ("authorization", format!("Bearer {}", key.reveal())));
    let shown: Vec<(&str, &str)> = shown.iter().map(|(name, value)| (*name, value.as_str())).collect();
    guard.check(path, &headers(&shown)).is_ok()
}

#[test]
fn beyond_loopback_operators_need_an_admin_key_and_health_needs_none() {
    let bench = bench();
    for listens in ["0.0.0.0", "192.0.2.1", "::"] {
        let guard = bench.guard(NeedKey::Auto, NeedKey::Auto, listens);
        assert!(guard.wants_operators_key());
        for path in [LIST, "/metrics", "/hostler.fleet.v1.Fleet/Drain", "/", "/livez/", "//metrics"] {
            assert!(!passes(&guard, path, None), "{path}");
            assert!(!passes(&guard, path, Some(&bench.user)), "{path}");
            assert!(!passes(&guard, path, Some(&Secret::random().unwrap())), "{path}");
            assert!(passes(&guard, path, Some(&bench.admin)), "{path}");
            assert!(passes(&guard, path, Some(&bench.own)), "{path}");
        }
        for path in ["/livez", "/readyz", "/grpc.health.v1.Health/Check"] {
            assert!(passes(&guard, path, None), "{path}");
        }
    }
}

#[test]
fn on_loopback_no_key_is_needed_unless_a_setting_says_so() {
    let bench = bench();
    for listens in ["127.0.0.1", "::1"] {
        let open = bench.guard(NeedKey::Auto, NeedKey::Auto, listens);
        assert!(passes(&open, LIST, None) && passes(&open, "/metrics", None));
        let closed = bench.guard(NeedKey::Always, NeedKey::Auto, listens);
        assert!(!passes(&closed, LIST, None) && passes(&closed, LIST, Some(&bench.admin)) && passes(&closed, "/metrics", None));
    }
    let mixed = bench.guard(NeedKey::Never, NeedKey::Always, "0.0.0.0");
    assert!(passes(&mixed, LIST, None) && !passes(&mixed, "/metrics", None));
}

#[test]
fn without_keys_all_is_open() {
    let bench = Bench { keys: Keys::default(), ..bench() };
    let guard = bench.guard(NeedKey::Auto, NeedKey::Auto, "0.0.0.0");
    assert!(passes(&guard, LIST, None) && passes(&guard, "/metrics", None) && !guard.wants_operators_key());
}

#[test]
fn refusals_say_whom_they_are_for() {
    let bench = bench();
    let guard = bench.guard(NeedKey::Auto, NeedKey::Auto, "0.0.0.0");
    let shown = headers(&[("x-api-key", bench.user.reveal()), ("content-type", "application/grpc+proto")]);
    let (missing, role) = (guard.check(LIST, &HeaderMap::new()).unwrap_err(), guard.check(LIST, &shown).unwrap_err());
    assert!(missing.to_string().contains("HOSTLER_ADMIN_KEY"), "{missing}");
    assert!(role.to_string().contains("--role admin"), "{role}");
    let plain = answer(&missing, &HeaderMap::new());
    assert_eq!((plain.status(), &plain.headers()[WWW_AUTHENTICATE]), (StatusCode::UNAUTHORIZED, &HeaderValue::from_static("Bearer")));
    assert_eq!(answer(&role, &HeaderMap::new()).status(), StatusCode::FORBIDDEN);
    let grpc = answer(&role, &shown);
    assert_eq!((grpc.status(), &grpc.headers()["grpc-status"]), (StatusCode::OK, &HeaderValue::from_static("7")));
}
