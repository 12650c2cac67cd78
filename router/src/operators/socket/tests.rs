use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use axum::routing::get;
use hostler_boot::socket::is_live;
use tempfile::TempDir;

use super::*;

/// A folder whose path is short enough for sockets.
fn folder() -> TempDir {
    tempfile::Builder::new().prefix("h-").tempdir_in("/tmp").unwrap()
}

#[tokio::test]
async fn live_routers_sockets_are_found_in_every_folder() {
    let folders = [folder(), folder()];
    let paths = folders.each_ref().map(|folder| folder.path().to_owned());
    let usual = |port: u16| OperatorsSocket { configured: PathBuf::new(), port }.paths(&paths);
    let (first, second) = (PrivateSocket::bind(&usual(8002)[0]).await.unwrap(), PrivateSocket::bind(&usual(9002)[1]).await.unwrap());
    // A killed router left this socket, and other files are no sockets.
    drop(UnixListener::bind(&usual(7002)[0]).unwrap());
    let _others = ["admin.sock", "router-x.sock"].map(|name| UnixListener::bind(paths[0].join(name)).unwrap());
    let mut expected = vec![usual(8002)[0].clone(), usual(9002)[1].clone()];
    expected.sort();
    assert_eq!(find_private_sockets(&paths).await, expected);
    drop(first);
    assert_eq!(find_private_sockets(&paths).await, [second.file().path()]);
    assert!(find_private_sockets(&[paths[0].join("nowhere")]).await.is_empty());
    // Another user may have made the folder before.
    fs::set_permissions(&paths[1], fs::Permissions::from_mode(0o777)).unwrap();
    assert!(find_private_sockets(&paths).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_removed_socket_is_recreated() {
    let folder = folder();
    let place = OperatorsSocket { configured: folder.path().join("below/s.sock"), port: 1 };
    let (path, end) = (place.configured.clone(), CancellationToken::new());
    let first = place.open(false).await.unwrap();
    let serving = tokio::spawn(place.serve(first, Router::new().route("/", get(|| async { "here" })), end.clone()));
    assert!(is_live(&path).await);
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
    while !is_live(&path).await {
        sleep(RETRY_INTERVAL).await;
    }
    end.cancel();
    serving.await.unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn an_unusable_configured_socket_path_is_an_error() {
    let folder = folder();
    let place = OperatorsSocket { configured: folder.path().join("s.sock"), port: 1 };
    let living = place.open(false).await.unwrap();
    let refused = place.open(false).await.unwrap_err().to_string();
    assert!(living.is_some() && refused.contains("in use"), "{refused}");
}
