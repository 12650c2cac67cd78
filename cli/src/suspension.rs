//! Whether a signal has suspended a process, as Ctrl-Z and `kill -STOP` do. Such a process takes
//! connections, because the kernel does that, and answers nothing.

use std::fs;

/// What is wrong with a suspended process and what to do; `None` if it is not suspended, or
/// unknown.
pub(crate) fn describe_suspension(pid: i32) -> Option<String> {
    is_suspended(pid).then(|| {
        format!("process {pid} is suspended (state T, as after Ctrl-Z): `kill -CONT {pid}` lets it go on, and `hostler down` ends what `hostler up` serves")
    })
}

/// Whether the kernel shows it as suspended.
pub(crate) fn is_suspended(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| state(&stat) == Some("T"))
}

/// The third field (proc(5)); the second is a name in brackets, which may hold anything.
fn state(stat: &str) -> Option<&str> {
    stat.rsplit(')').next()?.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_found_behind_any_name() {
        assert_eq!(state("7 (a) T (b)) T 1 7"), Some("T"));
        assert_eq!(state("7 (hostler) S 1 7"), Some("S"));
        assert!(!is_suspended(i32::try_from(std::process::id()).unwrap()));
    }
}
