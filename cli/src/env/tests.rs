use std::process::Command;

use proptest::prelude::*;

use super::*;

fn access() -> ClientAccess {
    ClientAccess {
        host: "login1".into(),
        base_url: "https://127.0.0.1:41237/v1".into(),
        api_key: "hk_abc".into(),
        socket: None,
        authority: None,
        operators: None,
    }
}

pub(crate) fn endpoint(host: &str, pid: u32) -> Endpoint {
    Endpoint {
        host: host.into(),
        instance: Endpoint::draw_instance(),
        pid,
        job: None,
        edge: "https://127.0.0.1:1".into(),
        edge_socket: None,
        operators_socket: "/tmp/s".into(),
        agents: "login1:2".into(),
        admin: "127.0.0.1:3".into(),
        key_file: "/home/me/user.key".into(),
        authority: None,
        program: None,
    }
}

#[test]
fn a_shell_gets_address_key_and_proxy_exceptions() {
    insta::assert_snapshot!(exports(Shell::Sh, &access(), None, |_| None).join("\n"), @r"
    export OPENAI_BASE_URL=https://127.0.0.1:41237/v1
    export OPENAI_API_KEY=hk_abc
    export NO_PROXY='localhost,127.0.0.1'
    export no_proxy='localhost,127.0.0.1'
    ");
}

#[test]
fn a_fleet_is_exported_with_its_certificates() {
    let fleet = ClientAccess { base_url: "https://x3001:41237/v1".into(), ..access() };
    let mut bundle = Bundle { file: "/home/me/fleet/ca-bundle.pem".into(), has_roots: true };
    insta::assert_snapshot!(exports(Shell::Sh, &fleet, Some(&bundle), |_| None).join("\n"), @r"
    export OPENAI_BASE_URL=https://x3001:41237/v1
    export OPENAI_API_KEY=hk_abc
    export NO_PROXY='localhost,127.0.0.1,x3001'
    export no_proxy='localhost,127.0.0.1,x3001'
    export SSL_CERT_FILE=/home/me/fleet/ca-bundle.pem
    export REQUESTS_CA_BUNDLE=/home/me/fleet/ca-bundle.pem
    export CURL_CA_BUNDLE=/home/me/fleet/ca-bundle.pem
    export NODE_EXTRA_CA_CERTS=/home/me/fleet/ca-bundle.pem
    ");
    bundle.has_roots = false;
    let lines = exports(Shell::Sh, &fleet, Some(&bundle), |_| None);
    assert_eq!(lines[4..], ["export NODE_EXTRA_CA_CERTS=/home/me/fleet/ca-bundle.pem"], "nothing is replaced by less");
}

#[test]
fn proxy_exceptions_gain_local_names_once() {
    assert_eq!(extend_no_proxy(".example.org, 10.0.0.1", "127.0.0.1"), ".example.org,10.0.0.1,localhost,127.0.0.1");
    let once = extend_no_proxy("a,localhost", "127.0.0.1");
    assert_eq!((once.as_str(), extend_no_proxy(&once, "127.0.0.1")), ("a,localhost,127.0.0.1", once.clone()));
    assert_eq!(extend_no_proxy("*", "127.0.0.1"), "*");
    let lower_alone = exports(Shell::Sh, &access(), None, |name| (name == "no_proxy").then(|| "a".to_owned()));
    assert_eq!(lower_alone[2..], ["export NO_PROXY='a,localhost,127.0.0.1'", "export no_proxy='a,localhost,127.0.0.1'"]);
}

#[test]
fn localhost_bypasses_a_proxy_by_name_or_star() {
    assert!(["localhost", "a, localhost", ".localhost", "*"].into_iter().all(bypasses_proxy));
    assert!(!["", "127.0.0.1", "localhost.example.org", "::1"].into_iter().any(bypasses_proxy));
}

#[test]
fn only_a_reachable_address_is_exported() {
    let own = std::process::id();
    check_reachable(&endpoint("login1", own), "login1").unwrap();
    let elsewhere = check_reachable(&endpoint("login2", own), "login1").unwrap_err().to_string();
    assert!(elsewhere.contains("runs on login2") && elsewhere.contains("hostler connect login2"), "{elsewhere}");
    let public = Endpoint { edge: "https://login2:8000".into(), ..endpoint("login2", 0) };
    check_reachable(&public, "login1").unwrap();
    // No process has these numbers: the kernel's limit is 2^22.
    for gone in [0, 1 << 30] {
        let ended = check_reachable(&endpoint("login1", gone), "login1").unwrap_err().to_string();
        assert!(ended.contains("has ended: `hostler wait`"), "{ended}");
    }
}

proptest! {
    // Each case starts a shell.
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_shell_evaluates_the_exports_to_exact_values(key in "[^\0]{0,40}", before in "[^\0]{0,40}") {
        let given = ClientAccess { api_key: key.clone(), ..access() };
        let lines = exports(Shell::Sh, &given, None, |name| (name == "NO_PROXY").then(|| before.clone())).join("\n");
        let script = "eval \"$1\"; printf '%s\\0%s' \"$OPENAI_API_KEY\" \"$NO_PROXY\"";
        let ended = Command::new("bash").args(["-c", script, "bash", &lines]).output().unwrap();
        prop_assert!(ended.stderr.is_empty(), "{}", String::from_utf8_lossy(&ended.stderr));
        let expected = format!("{key}\0{}", extend_no_proxy(&before, "127.0.0.1"));
        prop_assert_eq!(String::from_utf8(ended.stdout).unwrap(), expected);
    }
}

#[test]
fn other_shells_get_lines_of_their_own() {
    let first = |shell| exports(shell, &access(), None, |_| None)[0].clone();
    let base_url = access().base_url;
    assert_eq!(first(Shell::Csh), format!("setenv OPENAI_BASE_URL {base_url};"));
    assert_eq!(first(Shell::Fish), format!("set -gx OPENAI_BASE_URL {base_url};"));
    assert_eq!(Shell::Csh.export("NO_PROXY", "a b"), "setenv NO_PROXY 'a b';");
}

#[test]
fn an_invitation_has_an_address_with_tls_a_key_and_certificates_alone() {
    let place = tempfile::tempdir().unwrap();
    hostler_tls::Authority::create(&place.path().join("fleet"), "hostler").unwrap();
    let authority = std::fs::read_to_string(place.path().join("fleet/ca.crt")).unwrap();
    let key = Secret::random().unwrap().reveal().to_owned();
    let invitation = ClientAccess { base_url: "https://login1:8443/v1".into(), api_key: key, authority: Some(authority), ..access() };
    assert!(check_invitation(&invitation).is_ok());
    for base_url in ["", "http://login1:8443/v1", "javascript:alert(1)", "https:///v1", "https://a b/v1", "https://a\0b/v1"] {
        assert!(check_invitation(&ClientAccess { base_url: base_url.into(), ..invitation.clone() }).is_err(), "{base_url:?}");
    }
    assert!(check_invitation(&ClientAccess { api_key: "hk_\u{1b}[31m".into(), ..invitation.clone() }).is_err());
    for authority in [None, Some("not a cert".to_owned()), invitation.authority.clone().map(|text| text + "-----BEGIN PRIVATE KEY-----")] {
        assert!(check_invitation(&ClientAccess { authority, ..invitation.clone() }).is_err());
    }
}
