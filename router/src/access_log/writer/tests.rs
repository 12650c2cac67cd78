use std::os::unix::fs::PermissionsExt;

use super::*;

fn line() -> AccessLine {
    AccessLine::new(tokio::time::Instant::now())
}

fn lines_in(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

#[tokio::test]
async fn lines_sent_before_shutdown_are_written_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let dropped = Counter::default();
    let (lines, writing) = start(AccessFormat::Text, &path, dropped.clone()).unwrap();
    for bytes in 0..1000 {
        lines.send(Box::new(AccessLine { bytes, ..line() }));
    }
    writing.flush().await;
    let text = std::fs::read_to_string(&path).unwrap();
    let written: Vec<usize> = text.lines().map(|line| line.rsplit_once("bytes=").unwrap().1.parse().unwrap()).collect();
    assert_eq!(written, (0..1000).collect::<Vec<_>>());
    assert_eq!(dropped.get(), 0);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o007, 0, "nobody else reads it");
}

#[test]
fn a_stuck_writer_drops_lines_without_blocking() {
    // Nobody takes anything out.
    let (sender, receiver) = sync_channel(2);
    let lines = LineSender { sender, dropped: Counter::default() };
    (0..5).for_each(|_| lines.send(Box::new(line())));
    assert_eq!(lines.dropped.get(), 3);
    drop(receiver);
    lines.send(Box::new(line()));
    assert_eq!(lines.dropped.get(), 4);
}

#[test]
fn a_log_file_moved_away_is_reopened() {
    let folder = tempfile::tempdir().unwrap();
    let (path, moved) = (folder.path().join("log"), folder.path().join("log.1"));
    let mut sink = LogSink::new(&path).unwrap();
    sink.write(&mut "1\n".to_owned());
    sink.reopen_if_moved();
    sink.write(&mut "2\n".to_owned());
    std::fs::rename(&path, &moved).unwrap();
    sink.write(&mut "3\n".to_owned());
    sink.reopen_if_moved();
    sink.write(&mut "4\n".to_owned());
    assert_eq!((lines_in(&moved), lines_in(&path)), (3, 1));
    // The path cannot be opened again: writing to the open file goes on.
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    sink.reopen_if_moved();
    sink.write(&mut "5\n".to_owned());
    assert!(!sink.is_failing);
}

#[test]
fn an_unopenable_log_file_is_named_with_its_setting() {
    let error = start(AccessFormat::Text, "/proc/no/log".as_ref(), Counter::default()).map(drop).unwrap_err().to_string();
    assert!(error.starts_with("router.access_log_file: cannot open /proc/no/log: "), "{error}");
}
