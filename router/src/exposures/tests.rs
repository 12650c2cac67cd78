use super::*;

fn doors() -> Listeners {
    let at = |text: &str| text.parse().unwrap();
    Listeners {
        edge: at("127.0.0.1:8000"),
        agents: at("127.0.0.1:8001"),
        admin: at("127.0.0.1:8002"),
        has_keys: false,
        has_edge_tls: false,
        has_admin_tls: false,
        checks_agents: false,
    }
}

fn warnings(doors: &Listeners) -> Vec<(String, bool)> {
    let word = |opening: &Exposure| format!("{} {}", opening.setting, opening.description.split(':').next().unwrap());
    find_exposures(doors).iter().map(|opening| (word(opening), opening.is_remote())).collect()
}

#[test]
fn a_loopback_router_warns_about_users_of_its_host() {
    let expected = [("router.keys_file no keys", false), ("router.agents_listen no TLS", false)];
    assert_eq!(warnings(&doors()), expected.map(|(words, far)| (words.to_owned(), far)));
}

#[test]
fn a_reachable_router_warns_about_plain_text() {
    let everywhere: SocketAddr = "0.0.0.0:1".parse().unwrap();
    let doors = Listeners { edge: everywhere, agents: everywhere, admin: everywhere, has_keys: true, ..doors() };
    let expected = ["router.listen no TLS", "router.agents_listen no TLS", "router.admin_listen no TLS"];
    assert_eq!(warnings(&doors), expected.map(|words| (words.to_owned(), true)));
}

#[test]
fn a_router_with_keys_and_certificates_warns_about_nothing() {
    let far: SocketAddr = "192.0.2.1:1".parse().unwrap();
    let closed = Listeners { edge: far, agents: far, has_keys: true, has_edge_tls: true, checks_agents: true, ..doors() };
    assert_eq!(find_exposures(&closed), []);
}
