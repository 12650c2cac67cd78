use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener as StdListener;

use tempfile::TempDir;

use super::*;

/// A folder of mode 700 with a path short enough for sockets.
fn folder() -> TempDir {
    tempfile::Builder::new().prefix("h-").tempdir_in("/tmp").unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o777
}

#[tokio::test]
async fn a_socket_is_private_despite_umask_and_removed_on_drop() {
    let folder = folder();
    let path = folder.path().join("below/s.sock");
    let before = rustix::process::umask(Mode::empty());
    let socket = PrivateSocket::bind(&path).await;
    rustix::process::umask(before);
    let socket = socket.unwrap();
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    assert!(is_live(&path).await && socket.file().exists());
    drop(socket);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_socket_is_replaced_only_if_its_process_is_dead() {
    let folder = folder();
    let path = folder.path().join("s.sock");
    // Closing a socket leaves its file, as a killed process does.
    drop(StdListener::bind(&path).unwrap());
    assert!(path.exists() && !is_live(&path).await);
    let living = PrivateSocket::bind(&path).await.unwrap();
    let refused = PrivateSocket::bind(&path).await.unwrap_err();
    assert!(matches!(&refused, SocketError::InUse { path: taken } if *taken == path), "{refused}");
    assert!(living.file().exists() && is_live(&path).await);
}

#[tokio::test]
async fn a_file_that_replaced_a_socket_is_not_removed() {
    let folder = folder();
    let path = folder.path().join("s.sock");
    let first = PrivateSocket::bind(&path).await.unwrap();
    fs::remove_file(&path).unwrap();
    assert!(!first.file().exists());
    let second = PrivateSocket::bind(&path).await.unwrap();
    drop(first);
    assert!(second.file().exists() && is_live(&path).await);
}

#[tokio::test]
async fn a_folder_writable_by_others_is_refused() {
    let folder = folder();
    let open = folder.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).unwrap();
    let refused = PrivateSocket::bind(&open.join("s.sock")).await.unwrap_err().to_string();
    assert!(refused.contains("mode 1777") && refused.contains("folder of your own"), "{refused}");
    let own = folder.path().join("own");
    fs::create_dir(&own).unwrap();
    symlink(&own, folder.path().join("link")).unwrap();
    let refused = PrivateSocket::bind(&folder.path().join("link/s.sock")).await.unwrap_err();
    assert!(matches!(refused, SocketError::Other { .. }), "{refused}");
}

#[tokio::test]
async fn non_socket_files_and_overlong_paths_are_refused() {
    let folder = folder();
    let path = folder.path().join("notes");
    fs::write(&path, "mine").unwrap();
    let refused = PrivateSocket::bind(&path).await.unwrap_err().to_string();
    assert!(refused.contains("is no socket") && fs::read(&path).unwrap() == b"mine", "{refused}");
    let refused = PrivateSocket::bind(&folder.path().join("x".repeat(MAX_PATH_BYTES))).await.unwrap_err().to_string();
    assert!(refused.contains("too long") && refused.contains("107"), "{refused}");
}

#[test]
fn only_root_trusts_a_socket_of_another_user() {
    for (own, theirs, expected) in [(1000, 1000, true), (1000, 0, true), (0, 1000, true), (1000, 1001, false)] {
        assert_eq!(trusts(own, theirs), expected, "{own} {theirs}");
    }
}

#[test]
fn root_finds_the_socket_folders_of_their_own_users() {
    let place = tempfile::tempdir().unwrap();
    let (logins, shared) = (place.path().join("run"), place.path().join("tmp"));
    let own = geteuid().as_raw();
    let folders = [logins.join(format!("{own}/hostler")), shared.join(format!("hostler-{own}"))];
    let foreign = [logins.join(format!("{}/hostler", own + 1)), shared.join(format!("hostler-{}", own + 1)), shared.join("hostler-x")];
    for folder in folders.iter().chain(&foreign) {
        fs::create_dir_all(folder).unwrap();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).unwrap();
    }
    assert_eq!(folders_of_all_users(&logins, &shared), folders);
    fs::set_permissions(&folders[1], fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(folders_of_all_users(&logins, &shared), folders[..1]);
}
