use super::*;

const SOON: Duration = Duration::from_secs(20);

fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]);
    command
}

#[test]
fn a_program_is_looked_up_by_path_or_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vllm");
    let search = directory.path().as_os_str();
    let name = Path::new("vllm");

    let missing = find_program(name, Some(search));
    assert_eq!(missing.found, None);
    assert!(missing.searched.contains(search.to_str().unwrap()));

    fs::write(&path, "").unwrap();
    assert_eq!(find_program(name, Some(search)).found, None, "not executable");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(find_program(name, Some(search)).found, Some(path.clone()));
    assert_eq!(find_program(&path, None).found, Some(path));
    assert_eq!(find_program(name, None).found, None);
}

#[tokio::test]
async fn a_program_gets_its_input_and_its_outputs_stay_separate() {
    // More data than a pipe holds, in both directions at once.
    let input = vec![b'x'; 1 << 20];
    let ended = run_to_end(shell("cat; echo words >&2; exit 3"), &input, SOON).await.unwrap().unwrap();
    assert_eq!((ended.status.code(), ended.stderr.as_slice()), (Some(3), b"words\n".as_slice()));
    assert!(ended.stdout == input);
    let deaf = run_to_end(shell("exec <&-; echo done"), &input, SOON).await.unwrap().unwrap();
    assert_eq!(deaf.stdout, b"done\n");
    let without = run_to_end(shell("cat"), b"", SOON).await.unwrap().unwrap();
    assert_eq!(without.stdout, b"");
}

#[tokio::test]
async fn an_overdue_program_is_killed_with_its_children() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    // Both shells hold the other end of the pipe until they are dead.
    let script = format!("(exec 3<>{0}; read line <&3) & exec 3<>{0}; read line <&3", fifo.display());
    assert!(run_to_end(shell(&script), b"", Duration::from_secs(1)).await.unwrap().is_none());
    let nobody_reads = || {
        let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
        matches!(rustix::fs::open(&fifo, flags, rustix::fs::Mode::empty()), Err(rustix::io::Errno::NXIO))
    };
    tokio::time::timeout(SOON, async {
        while !nobody_reads() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("all readers of the pipe are dead");
}
