//! Tests which settings fit together, and what may be in plain text.

use super::*;

fn config(change: impl FnOnce(&mut RouterConfig)) -> RouterConfig {
    let mut config = RouterConfig::default();
    change(&mut config);
    config
}

fn refusal(change: impl FnOnce(&mut RouterConfig)) -> String {
    RouterTls::load(&config(change)).unwrap_err().to_string()
}

#[test]
fn half_a_tls_pair_is_refused_with_advice() {
    assert!(refusal(|config| config.tls_cert = "a.pem".into()).contains("belong together"));
    assert!(refusal(|config| config.tls_client_ca = "a.pem".into()).contains("takes TLS"));
    let missing = refusal(|config| config.tls_dir = "/nowhere/at/all".into());
    assert!(missing.contains("hostler init --dir /nowhere/at/all") && missing.contains("router.tls_dir"), "{missing}");
}

#[test]
fn plain_text_stays_on_this_host_unless_permitted() {
    let security = RouterTls::load(&RouterConfig::default()).unwrap();
    let (here, everywhere): (SocketAddr, SocketAddr) = ("127.0.0.1:1".parse().unwrap(), "0.0.0.0:2".parse().unwrap());
    let check = |allow: bool, edge, agents| security.check_plain_text(&config(|config| config.allow_plain_text = allow), edge, agents);
    check(false, here, here).unwrap();
    for (edge, agents, setting) in [(everywhere, here, "router.listen"), (here, everywhere, "router.agents_listen")] {
        let refused = check(false, edge, agents).unwrap_err().to_string();
        assert!(refused.starts_with(&format!("{setting} is 0.0.0.0:2")) && refused.contains("--allow-plain-text"), "{refused}");
        check(true, edge, agents).unwrap();
    }
}

#[test]
fn a_router_certifies_its_edge_and_for_other_hosts_all() {
    let folder = tempfile::tempdir().unwrap();
    Authority::create(folder.path(), "f").unwrap();
    let config = config(|config| config.tls_dir = folder.path().to_owned());
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let mut tls = RouterTls::load(&config).unwrap();
    tls.certify_edge(&names).unwrap();
    assert!(tls.edge.is_some() && tls.admin.is_none());
    let own = tls.edge.clone().unwrap();
    tls.certify_host(&names).unwrap();
    assert!(tls.admin.is_some() && Arc::ptr_eq(&own, tls.edge.as_ref().unwrap()), "a certificate that is there stays");
    let without = RouterTls::load(&RouterConfig::default()).unwrap().certify_edge(&names).unwrap_err();
    assert!(matches!(without, TlsSetupError::NoAuthority));
}

#[test]
fn an_authority_secures_only_the_agents_port() {
    let folder = tempfile::tempdir().unwrap();
    Authority::create(folder.path(), "f").unwrap();
    let config = config(|config| config.tls_dir = folder.path().to_owned());
    let security = RouterTls::load(&config).unwrap();
    let (here, everywhere): (SocketAddr, SocketAddr) = ("127.0.0.1:1".parse().unwrap(), "[::]:2".parse().unwrap());
    security.check_plain_text(&config, here, everywhere).unwrap();
    assert!(matches!(
        security.check_plain_text(&config, everywhere, everywhere),
        Err(TlsSetupError::PlainText { setting: "router.listen", .. })
    ));
}
