//! Lines cut anywhere, engines that print without end.

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
fn each_state_of_a_progress_bar_is_seen_and_the_last_one_is_kept() {
    let (mut tail, seen) = tail_of(&[b"\rgraphs:  0%\rgraphs:", b" 50%\r", b"graphs: 100%\ndone\r", b"\n"]);
    assert_eq!(seen, ["graphs:  0%", "graphs: 50%", "graphs: 100%", "done"]);
    tail.finish();
    assert_eq!(tail.last(10), ["graphs: 100%", "done"]);
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
    let text: String = (0..2_000).map(|n| format!("line {n}\n")).collect();
    let (tail, seen) = tail_of(&[text.as_bytes()]);
    assert_eq!(seen.len(), 2_000);
    assert_eq!(tail.lines.len(), TAIL_LINES);
    assert_eq!(tail.last(1), ["line 1999"]);
}

#[test]
fn the_signs_of_loading_are_vllms_own_words() {
    assert!(is_sign_of_loading("(EngineCore pid=7) INFO [core.py:12] Initializing a V1 LLM engine (v0.32.0)"));
    assert!(!is_sign_of_loading("INFO non-default args: {}"));
}

#[test]
fn lines_of_the_agents_own_divide_the_lives() {
    let log = Log::default();
    log.begin("first life");
    let mut seen = Vec::new();
    log.take(b"one\ntwo", &mut |line: &str| seen.push(line.to_owned()));
    log.end();
    assert_eq!(seen, ["one"]);
    assert_eq!(log.last_of_life(9), ["one", "two"]);
    assert_eq!(log.last(9), ["first life", "one", "two"]);
    log.note("a remark");
    assert_eq!(log.last_of_life(9), ["one", "two", "a remark"]);
    log.begin("second life");
    assert_eq!(log.last_of_life(9), Vec::<String>::new());
}
