use super::*;

fn doors() -> Doors {
    let at = |text: &str| text.parse().unwrap();
    Doors {
        edge: at("127.0.0.1:8000"),
        agents: at("127.0.0.1:8001"),
        admin: at("127.0.0.1:8002"),
        keys: false,
        key_file: false,
        edge_tls: false,
        agents_tls: false,
    }
}

fn said(doors: &Doors) -> Vec<(String, bool)> {
    let word = |opening: &Opening| format!("{} {}", opening.setting, opening.what.split(':').next().unwrap());
    openings(doors).iter().map(|opening| (word(opening), opening.is_beyond_host())).collect()
}

#[test]
fn a_router_on_loopback_says_what_users_of_its_host_may_do() {
    let expected = [("router.keys_file no keys", false), ("router.agents_listen no TLS", false)];
    assert_eq!(said(&doors()), expected.map(|(words, far)| (words.to_owned(), far)));
}

#[test]
fn a_router_that_others_reach_says_what_travels_in_plain_text() {
    let everywhere: SocketAddr = "0.0.0.0:1".parse().unwrap();
    let doors = Doors { edge: everywhere, agents: everywhere, admin: everywhere, keys: true, key_file: true, ..doors() };
    let expected = ["router.listen no TLS", "router.agents_listen no TLS", "router.admin_listen no TLS"];
    assert_eq!(said(&doors), expected.map(|words| (words.to_owned(), true)));
}

#[test]
fn a_router_with_keys_and_certificates_leaves_nothing_open() {
    let far: SocketAddr = "192.0.2.1:1".parse().unwrap();
    let closed = Doors { edge: far, agents: far, keys: true, key_file: true, edge_tls: true, agents_tls: true, ..doors() };
    assert_eq!(openings(&closed), []);
}
