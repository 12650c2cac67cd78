//! Lines cut anywhere, and engines that print without end.

use super::*;

fn tail_of(chunks: &[&[u8]]) -> (LogTail, Vec<String>) {
    let mut tail = LogTail::default();
    let mut seen = Vec::new();
    for chunk in chunks {
        tail.push_output(chunk, &mut |line: &str| seen.push(line.to_owned()));
    }
    (tail, seen)
}

#[test]
fn lines_stay_whole_however_the_bytes_are_cut() {
    let (mut tail, seen) = tail_of(&[b"on", b"e\ntw", b"o\r\n\nthr", b"ee"]);
    assert_eq!(seen, ["one", "two"]);
    tail.finish_line();
    assert_eq!(tail.last_lines(10), ["one", "two", "three"]);
    assert_eq!(tail.last_lines(1), ["three"]);
}

#[test]
fn every_state_of_a_progress_bar_is_seen() {
    let (mut tail, seen) = tail_of(&[b"\rgraphs:  0%\rgraphs:", b" 50%\r", b"graphs: 100%\ndone\r", b"\n"]);
    assert_eq!(seen, ["graphs:  0%", "graphs: 50%", "graphs: 100%", "done"]);
    tail.finish_line();
    assert_eq!(tail.last_lines(10), ["graphs: 100%", "done"]);
}

#[test]
fn an_endless_line_takes_bounded_memory() {
    let mut tail = LogTail::default();
    for _ in 0..1_000 {
        tail.push_output(&[b'x'; 1_000], &mut |_: &str| panic!("no line ended"));
    }
    assert_eq!(tail.unfinished.len(), MAX_LINE_BYTES);
}

#[test]
fn only_the_last_lines_are_kept() {
    let text: String = (0..2_000).map(|n| format!("line {n}\n")).collect();
    let (tail, seen) = tail_of(&[text.as_bytes()]);
    assert_eq!(seen.len(), 2_000);
    assert_eq!(tail.lines.len(), TAIL_LINES);
    assert_eq!(tail.last_lines(1), ["line 1999"]);
    assert_eq!(tail.lines_ever[&HEAD], 2_000, "a reader sees how many it has missed");
}

#[test]
fn the_signs_of_loading_are_vllms_own_words() {
    assert!(is_loading_marker("(EngineCore pid=7) INFO [core.py:12] Initializing a V1 LLM engine (v0.32.0)"));
    assert!(!is_loading_marker("INFO non-default args: {}"));
}

#[test]
fn the_agents_own_lines_separate_lives() {
    let log = EngineLog::default();
    log.begin_life("first life");
    let mut seen = Vec::new();
    log.push_output(b"one\ntwo", &mut |line: &str| seen.push(line.to_owned()));
    log.finish_line();
    assert_eq!(seen, ["one"]);
    assert_eq!(log.last_lines_of_life(9), ["one", "two"]);
    assert_eq!(log.last_lines(9, None), (["first life", "one", "two"].map(str::to_owned).to_vec(), 3));
    log.note("a remark");
    assert_eq!(log.last_lines_of_life(9), ["one", "two", "a remark"]);
    log.begin_life("second life");
    assert_eq!(log.last_lines_of_life(9), Vec::<String>::new());
}

#[test]
fn each_nodes_lines_are_found_and_counted_alone() {
    let log = EngineLog::default();
    log.note("head 1");
    (1..=3).for_each(|line| log.note_of(1, &format!("far {line}")));
    log.note("head 2");
    let of = |member, count| log.last_lines(count, member);
    assert_eq!(of(Some(1), 2), (["far 2", "far 3"].map(str::to_owned).to_vec(), 3));
    assert_eq!(of(Some(0), 9), (["head 1", "head 2"].map(str::to_owned).to_vec(), 2));
    assert_eq!(of(Some(2), 9), (Vec::new(), 0));
    assert_eq!((of(None, 9).0.len(), of(None, 9).1), (5, 5));
}
