use super::*;

fn files() -> UserFiles {
    UserFiles::locate("/home/me/.config/hostler/hostler.toml".into(), &RouterConfig::default())
}

#[test]
fn files_not_named_by_settings_lie_beside_them() {
    let UserFiles { authority, keys, user_key, certificate, .. } = files();
    assert_eq!(authority, Path::new("/home/me/.config/hostler/fleet"));
    assert_eq!(certificate, Path::new("/home/me/.config/hostler/edge.pem"));
    assert_eq!((keys, user_key), ("/home/me/.config/hostler/keys.toml".into(), "/home/me/.config/hostler/user.key".into()));
    let named = RouterConfig { keys_file: "/srv/keys/all.toml".into(), tls_dir: "/srv/fleet".into(), ..RouterConfig::default() };
    let UserFiles { authority, user_key, .. } = UserFiles::locate("/home/me/hostler.toml".into(), &named);
    assert_eq!((authority, user_key), ("/srv/fleet".into(), "/srv/keys/user.key".into()));
}

#[test]
fn new_settings_read_back_correctly_in_any_folder() {
    let place = tempfile::Builder::new().prefix("a \"b\" \\é ").tempdir().unwrap();
    let files = UserFiles::locate(place.path().join("hostler.toml"), &RouterConfig::default());
    write_new(&files.settings, settings_text(&files, Some(7443), Some(&sites::read("polaris").unwrap())).as_bytes()).unwrap();
    assert!(std::fs::read_to_string(&files.settings).unwrap().starts_with("#:schema ./hostler.schema.json\n"));
    let router = settings::router_config(Some(&files.settings)).unwrap();
    assert_eq!((router.tls_dir, router.keys_file), (files.authority.clone(), files.keys.clone()));
    assert_eq!(router.listen, "0.0.0.0:7443");
    assert_eq!(settings::cluster_config(Some(&files.settings)).unwrap().queue, "preemptable");
    assert!(write_new(&files.settings, b"").is_err(), "what is there stays");
}

#[test]
fn only_lines_missing_from_an_existing_file_are_suggested() {
    let set = RouterConfig { keys_file: "/k".into(), tls_dir: "/t".into(), ..RouterConfig::default() };
    let (none, cluster) = (ClusterConfig::default(), ClusterConfig { queue: "q".into(), ..ClusterConfig::default() });
    assert_eq!(missing_lines(&files(), (&set, None), &none, None), "");
    assert_eq!(missing_lines(&files(), (&set, None), &cluster, Some("[cluster]\n")), "");
    let half = RouterConfig { tls_dir: "/t".into(), ..RouterConfig::default() };
    let lines = missing_lines(&files(), (&half, None), &none, Some("[cluster]\n"));
    assert_eq!(lines, "[router]\nkeys_file = \"/home/me/.config/hostler/keys.toml\"\n\n[cluster]\n");
    assert_eq!(missing_lines(&files(), (&set, Some(8443)), &none, None), "[router]\nlisten = \"0.0.0.0:8443\"\n");
    let shared = RouterConfig { listen: "0.0.0.0:8443".into(), ..set };
    assert_eq!(missing_lines(&files(), (&shared, Some(8443)), &none, None), "");
}

#[test]
fn an_edge_certificate_covers_the_hosts_valid_names() {
    let names = |given: &[&str]| certified_names(&given.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).join(" ");
    assert_eq!(names(&["login1", "login1.example.org"]), "localhost 127.0.0.1 ::1 login1 login1.example.org");
    assert_eq!(names(&["localhost", "", "(none)", "a b"]), "localhost 127.0.0.1 ::1");
}
