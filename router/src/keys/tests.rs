use std::time::Duration;

use super::*;

fn key(change: impl FnOnce(&mut KeyEntry)) -> (Secret, KeyEntry) {
    let secret = Secret::random().unwrap();
    let mut entry = KeyEntry { name: "name".into(), ..KeyEntry::new(&secret, "tenant", SystemTime::now()) };
    change(&mut entry);
    (secret, entry)
}

/// Keys of these entries, which no file holds.
pub(super) fn keys(entries: Vec<KeyEntry>) -> Keys {
    Keys::with_entries(Path::new("/nowhere"), None, entries)
}

pub(super) fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (HeaderName::try_from(*name).unwrap(), HeaderValue::from_str(value).unwrap())).collect()
}

#[test]
fn a_router_without_keys_allows_everything_to_anybody() {
    let caller = Keys::default().authenticate(&headers(&[("authorization", "Bearer whatever")])).unwrap();
    assert_eq!((&*caller.key, &*caller.tenant, caller.role), ("", "", Role::Admin));
    assert!(!Keys::default().are_required());
    assert!(!Keys::open(Path::new("")).unwrap().are_required());
}

#[test]
fn a_key_is_recognized_however_sdks_send_it() {
    let (secret, entry) = key(|_| {});
    let keys = keys(vec![entry]);
    let text = secret.reveal();
    let ways: &[&[(&str, &str)]] = &[
        &[("authorization", &format!("Bearer {text}"))],
        &[("authorization", &format!("bEARER   {text} "))],
        &[("x-api-key", text)],
        &[("x-api-key", text), ("authorization", &format!("Bearer {text}"))],
        &[("x-api-key", text), ("authorization", "Basic dXNlcjpwYXNz")],
        &[("x-api-key", text), ("authorization", "Bearer ")],
    ];
    for way in ways {
        let caller = keys.authenticate(&headers(way)).unwrap_or_else(|error| panic!("{error}: {way:?}"));
        assert_eq!((&*caller.key, &*caller.tenant), (secret.id(), "tenant"));
    }
}

#[test]
fn only_admins_see_caches_that_tenants_share() {
    let owned = |tenant: &'static str, role: Role| key(move |entry| (entry.tenant, entry.role) = (tenant.into(), role));
    let sees = |entries: &[(Secret, KeyEntry)]| -> Vec<bool> {
        let keys = keys(entries.iter().map(|(_, entry)| entry.clone()).collect());
        entries.iter().map(|(secret, _)| keys.find_caller(secret.reveal()).unwrap().sees_caches).collect()
    };
    let alone = [owned("a", Role::Use), owned("a", Role::Use)];
    assert_eq!(sees(&alone), [true, true]);
    assert_eq!(sees(&[owned("a", Role::Use), owned("b", Role::Use), owned("ops", Role::Admin)]), [false, false, true]);
    assert_eq!(sees(&[owned("", Role::Use), owned("", Role::Use)]), [false, false], "keys without a tenant are one each");
    assert!(Caller::anonymous("".into()).sees_caches);
}

#[test]
fn a_request_without_a_valid_key_is_refused() {
    let (secret, entry) = key(|_| {});
    let (other, _) = key(|_| {});
    let keys = keys(vec![entry]);
    let text = secret.reveal();
    let swapped = format!("hk_{}_{}", secret.id(), other.reveal().rsplit('_').next().unwrap());
    let cases: &[(&[(&str, &str)], Unauthenticated)] = &[
        (&[], Unauthenticated::Missing),
        (&[("authorization", text)], Unauthenticated::Missing),
        (&[("authorization", &format!("Basic {text}"))], Unauthenticated::Missing),
        (&[("x-api-key", "")], Unauthenticated::Missing),
        (&[("x-api-key", other.reveal())], Unauthenticated::Unknown),
        (&[("x-api-key", &swapped)], Unauthenticated::Unknown),
        (&[("x-api-key", secret.id())], Unauthenticated::Unknown),
        (&[("x-api-key", "EMPTY")], Unauthenticated::Unknown),
        (&[("x-api-key", text), ("x-api-key", other.reveal())], Unauthenticated::Conflicting),
        (&[("x-api-key", text), ("authorization", "Bearer other")], Unauthenticated::Conflicting),
    ];
    for (shown, expected) in cases {
        assert_eq!(keys.authenticate(&headers(shown)).unwrap_err(), *expected, "{shown:?}");
    }
    let bytes = HeaderValue::from_bytes(b"Bearer \xff\xfe").unwrap();
    let shown = HeaderMap::from_iter([(AUTHORIZATION, bytes)]);
    assert_eq!(keys.authenticate(&shown).unwrap_err(), Unauthenticated::Missing);
}

#[test]
fn an_expired_key_says_so_only_to_its_owner() {
    let past = Some(Timestamp::of(SystemTime::now() - Duration::from_secs(10)));
    let future = Some(Timestamp::of(SystemTime::now() + Duration::from_secs(1000)));
    let (expired, first) = key(|entry| entry.expires = past);
    let (revoked, second) = key(|entry| (entry.revoked, entry.expires) = (past, past));
    let (leaving, third) = key(|entry| (entry.revoked, entry.expires) = (future, future));
    let keys = keys(vec![first, second, third]);
    let ask = |secret: &Secret| keys.authenticate(&headers(&[("x-api-key", secret.reveal())])).map(|caller| caller.key);
    assert_eq!(ask(&expired), Err(Unauthenticated::Expired(expired.id().into())));
    assert_eq!(ask(&revoked), Err(Unauthenticated::Revoked(revoked.id().into())));
    assert_eq!(ask(&leaving).as_deref(), Ok(leaving.id()));
    let guess = format!("hk_{}_{}", expired.id(), "a".repeat(52));
    assert_eq!(keys.authenticate(&headers(&[("x-api-key", &guess)])).unwrap_err(), Unauthenticated::Unknown);
}

#[test]
fn a_caller_may_use_only_its_keys_models() {
    let (secret, entry) = key(|entry| entry.models = Some(vec!["base".into(), "poet".into()]));
    let caller = keys(vec![entry]).authenticate(&headers(&[("x-api-key", secret.reveal())])).unwrap();
    let (post, get, chat) = (Method::POST, Method::GET, "/v1/chat/completions");
    for model in ["base", "poet"] {
        assert_eq!(caller.check_permission(&post, chat, Some(model)), Ok(()));
    }
    for model in ["", "Base", "base ", "other"] {
        assert!(caller.check_permission(&post, chat, Some(model)).unwrap_err().contains("may not use"), "{model:?}");
    }
    // An engine would answer with its default model, whichever that is.
    for path in [chat, "/v1/audio/transcriptions", "/tokenize", "/v1/responses", "/v1/chat/completions/cancel"] {
        assert!(caller.check_permission(&post, path, None).unwrap_err().contains("say which"), "{path}");
    }
    assert_eq!(caller.check_permission(&get, "/version", None), Ok(()));
    assert_eq!(caller.check_permission(&get, "/v1/responses/resp_1", None), Ok(()));
    assert_eq!(caller.check_permission(&post, "/v1/responses/resp_1/cancel", None), Ok(()));
    assert_eq!(Caller::anonymous("".into()).check_permission(&post, chat, None), Ok(()));
}

#[test]
fn keys_in_headers_are_not_printed() {
    let mut shown = headers(&[("authorization", "Bearer canary-one"), ("x-api-key", "canary-two"), ("x-other", "seen")]);
    mark_sensitive(&mut shown);
    let printed = format!("{shown:?}");
    assert!(!printed.contains("canary") && printed.contains("seen"), "{printed}");
    assert_eq!(bearer(&shown[AUTHORIZATION]), Some("canary-one"));
}
