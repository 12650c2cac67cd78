//! Files that fill up, and disks that cannot be written.

use std::time::Duration;

use super::*;

#[test]
fn a_full_file_is_set_aside_and_few_are_kept() {
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

    let mut reopened = LogFile::new(path, 10);
    reopened.write(b"e").unwrap();
    assert_eq!(read("e0.log"), "dddddddde");
}

#[tokio::test]
async fn a_file_that_cannot_be_written_is_told_once_and_the_output_goes_on() {
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
