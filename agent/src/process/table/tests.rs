//! Lines of `/proc` as the kernel writes them, and this process itself.

use super::*;

#[test]
fn a_process_name_with_spaces_and_parentheses_is_parsed() {
    let line = "42 (a) b (c) S 1 40 39 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 3 0 987654 1 2 3";
    let process = ProcessStat::parse(42, line).unwrap();
    assert_eq!((process.group, process.session, process.started, process.is_zombie), (40, 39, 987_654, false));
}

#[test]
fn only_a_zombie_without_further_threads_has_ended() {
    for (state, threads, ended) in [("Z", 1, true), ("Z", 2, false), ("D", 1, false)] {
        let line = format!("7 (x) {state} 1 7 7 0 -1 0 1 0 0 0 5 6 0 0 20 0 {threads} 0 9 1");
        assert_eq!(ProcessStat::parse(7, &line).unwrap().is_zombie, ended);
    }
    for (state, stopped) in [("T", true), ("t", false), ("S", false)] {
        let line = format!("7 (x) {state} 1 7 7 0 -1 0 1 0 0 0 5 6 0 0 20 0 1 0 9 1");
        assert_eq!(ProcessStat::parse(7, &line).unwrap().is_stopped, stopped);
    }
    assert_eq!(ProcessStat::parse(7, "7 (x) S 1"), None);
    assert_eq!(ProcessStat::parse(7, ""), None);
}

#[test]
fn the_process_table_contains_this_process() {
    let pid = i32::try_from(std::process::id()).unwrap();
    let process = ProcessStat::read(pid).unwrap();
    assert!(ProcessStat::all().iter().any(|other| other.pid == pid));
    assert!(session(process.session).iter().any(|other| other.pid == pid));
    let path = format!("PATH={}", std::env::var("PATH").unwrap());
    assert!(process.has_environment(&path));
    assert!(!process.has_environment("PATH"));
}
