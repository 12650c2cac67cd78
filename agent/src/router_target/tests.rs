use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use super::*;

/// Writes a file as a fleet's controller does.
fn write_file(path: &Path, agents: &str) {
    let draft = path.with_extension("draft");
    fs::write(&draft, format!(r#"{{"host": "login1", "pid": 7, "agents": "{agents}"}}"#)).unwrap();
    fs::set_permissions(&draft, Permissions::from_mode(0o600)).unwrap();
    fs::rename(draft, path).unwrap();
}

async fn refusal(target: &RouterTarget) -> String {
    target.resolve().await.unwrap_err().to_string()
}

#[test]
fn a_file_stands_in_place_of_all_names() {
    let named = AgentConfig { router: vec!["a:1".into(), "b:1".into()], ..AgentConfig::default() };
    assert_eq!(RouterTarget::of(&named), ["a:1", "b:1"].map(|name| RouterTarget::Name(name.into())));
    let with_file = AgentConfig { router_file: "/fleet/endpoint.json".into(), ..named };
    assert_eq!(RouterTarget::of(&with_file), [RouterTarget::File("/fleet/endpoint.json".into())]);
    assert_eq!(RouterTarget::of(&AgentConfig { router: Vec::new(), ..AgentConfig::default() }), []);
}

#[tokio::test]
async fn a_file_that_is_replaced_names_another_router_from_then_on() {
    let folder = tempfile::tempdir().unwrap();
    let target = RouterTarget::File(folder.path().join("endpoint.json"));
    for port in [4001, 4002] {
        write_file(&folder.path().join("endpoint.json"), &format!("localhost:{port}"));
        assert_eq!(target.resolve().await.unwrap(), [SocketAddr::from(([127, 0, 0, 1], port))]);
    }
}

#[tokio::test]
async fn a_file_that_is_missing_or_garbled_says_so_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("endpoint.json");
    let target = RouterTarget::File(path.clone());
    let missing = refusal(&target).await;
    assert!(missing.contains("agent.router_file") && missing.contains("controller writes it"), "{missing}");
    for garbled in ["", "{", r#"{"agents": 7}"#, r#"{"edge": "http://127.0.0.1:1"}"#] {
        fs::write(&path, garbled).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let said = refusal(&target).await;
        assert!(said.contains("does not say where the router is"), "{garbled}: {said}");
    }
    write_file(&path, "no port");
    assert!(refusal(&target).await.starts_with("no port: "));
}

#[tokio::test]
async fn a_file_that_others_may_change_is_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("endpoint.json");
    write_file(&path, "127.0.0.1:4001");
    for mode in [0o620, 0o602] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let said = refusal(&RouterTarget::File(path.clone())).await;
        assert!(said.contains(&format!("mode {mode:o}")) && said.contains("mode 600"), "{said}");
    }
}

#[tokio::test]
async fn a_pipe_in_place_of_the_file_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("endpoint.json");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(refusal(&RouterTarget::File(path)).await.contains("no plain file"));
}
