//! Lines cut anywhere, files that fill up, engines that print without end.

use std::time::Duration;

use super::*;

fn tail_of(chunks: &[&[u8]]) -> (Tail, Vec<String>) {
    let mut tail = Tail::default();
    let mut seen = Vec::new();
    for chunk in chunks {
        tail.read(chunk, &mut |line: &str| seen.push(line.to_owned()));
    }
    (tail, seen)
}

#[test]
fn lines_are_whole_however_the_bytes_were_cut() {
    let (mut tail, seen) = tail_of(&[b"on", b"e\ntw", b"o\r\n\nthr", b"ee"]);
    assert_eq!(seen, ["one", "two"]);
    tail.finish();
    assert_eq!(tail.last(10), ["one", "two", "three"]);
    assert_eq!(tail.last(1), ["three"]);
}

#[test]
fn a_line_without_end_takes_bounded_memory() {
    let mut tail = Tail::default();
    for _ in 0..1_000 {
        tail.read(&[b'x'; 1_000], &mut |_: &str| panic!("no line ended"));
    }
    assert_eq!(tail.unfinished.len(), LINE_CAP);
}

#[test]
fn only_the_last_lines_are_kept() {
    let text: String = (0..1_000).map(|n| format!("line {n}\n")).collect();
    let (tail, seen) = tail_of(&[text.as_bytes()]);
    assert_eq!(seen.len(), 1_000);
    assert_eq!(tail.lines.len(), TAIL_LINES);
    assert_eq!(tail.last(1), ["line 999"]);
}

#[test]
fn the_signs_of_loading_are_vllms_own_words() {
    assert!(is_sign_of_loading("(EngineCore pid=7) INFO [core.py:12] Initializing a V1 LLM engine (v0.32.0)"));
    assert!(!is_sign_of_loading("INFO non-default args: {}"));
}

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
async fn output_reaches_the_tail_and_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("e0.log");
    let (log, written) = Log::open(path.clone());
    log.begin("first life");
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(b"one\ntwo").unwrap();
    drop(writer);
    let output = pipe::Receiver::from_owned_fd(reader.into()).unwrap();
    let mut seen = Vec::new();
    log.follow(output, |line| seen.push(line.to_owned())).await;
    assert_eq!(seen, ["one"]);
    assert_eq!(log.last_of_life(9), ["one", "two"]);
    assert_eq!(log.last(9), ["first life", "one", "two"]);
    log.begin("second life");
    assert_eq!(log.last_of_life(9), Vec::<String>::new());
    log.close();
    tokio::time::timeout(Duration::from_secs(10), written).await.unwrap().unwrap();
    let text = fs::read_to_string(path).unwrap();
    assert_eq!(text, "first life\none\ntwo\nsecond life\n");
}
