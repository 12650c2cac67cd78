//! Files that fill up, and disks that cannot be written.

use std::time::Duration;

use super::*;

#[test]
fn a_full_log_file_is_rotated_and_few_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("e0.log");
    let mut file = LogFile::new(path.clone(), 10);
    for chunk in ["aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd"] {
        file.write(chunk.as_bytes()).unwrap();
    }
    let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
    assert_eq!(read("e0.log"), "dddddddd");
    assert_eq!(read("e0.log.1"), "cccccccc");
    assert_eq!(read("e0.log.2"), "bbbbbbbb");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3);

    drop(file);
    let mut reopened = LogFile::new(path, 10);
    reopened.write(b"e").unwrap();
    assert_eq!(read("e0.log"), "dddddddde");
}

#[tokio::test]
async fn an_unwritable_log_is_reported_once_and_output_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("missing").join("e0.log");
    let (mut output, mut thread) = LogFileWriter::open(path.clone()).unwrap();
    output.write(Bytes::from_static(b"one\n"));
    output.write(Bytes::from_static(b"two\n"));
    let complaint = tokio::time::timeout(Duration::from_secs(10), thread.errors.recv()).await.unwrap().unwrap();
    assert!(complaint.contains("cannot write the engine's log") && complaint.contains("e0.log"), "{complaint}");
    fs::create_dir(path.parent().unwrap()).unwrap();
    output.write(Bytes::from_static(b"three\n"));
    drop(output);
    tokio::time::timeout(Duration::from_secs(10), &mut thread.written).await.unwrap().unwrap();
    assert_eq!(thread.errors.recv().await, None);
    assert!(fs::read_to_string(path).unwrap().ends_with("three\n"));
}

#[test]
fn a_second_writer_of_a_log_takes_another_file_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("n0-e0.log");
    let open = || {
        let mut file = LogFile::new(path.clone(), 10);
        let chosen = file.choose_name(Duration::ZERO);
        (file, chosen)
    };
    let (mut first, chosen) = open();
    assert_eq!(chosen, Ok(()));
    let (mut second, chosen) = open();
    assert!(chosen.unwrap_err().contains("n0-e0.log"));
    for chunk in ["aaaaaaaa", "bbbbbbbb"] {
        first.write(chunk.as_bytes()).unwrap();
        second.write(chunk.to_uppercase().as_bytes()).unwrap();
    }
    let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
    assert_eq!((read("n0-e0.log"), read("n0-e0.log.1")), ("bbbbbbbb".to_owned(), "aaaaaaaa".to_owned()));
    assert_eq!((read("n0-e0-2.log"), read("n0-e0-2.log.1")), ("BBBBBBBB".to_owned(), "AAAAAAAA".to_owned()));
    drop(first);
    let (_third, chosen) = open();
    assert_eq!(chosen, Ok(()), "a name that is free again is used");
}

#[test]
fn the_next_life_waits_for_the_previous_ones_last_lines() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("n0-e0.log");
    let mut last = LogFile::new(path.clone(), 10);
    last.write(b"a").unwrap();
    let next = std::thread::spawn(move || {
        let mut next = LogFile::new(path, 10);
        let chosen = next.choose_name(Duration::from_secs(60));
        next.write(b"b").map(|()| chosen)
    });
    last.write(b"z").unwrap();
    drop(last);
    assert_eq!(next.join().unwrap().unwrap(), Ok(()));
    assert_eq!(fs::read_to_string(directory.path().join("n0-e0.log")).unwrap(), "azb");
}
