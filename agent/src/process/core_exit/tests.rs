//! Real processes that end, under a parent that does not reap them.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{kill_process, kill_process_group};

use super::*;

/// A process group whose leader never reaps its child, which has the name of vLLM's core.
struct Group(Child);

impl Group {
    fn start(folder: &std::path::Path) -> Self {
        let core = folder.join("VLLM::EngineCore");
        let script = format!("ln -s \"$(command -v sleep)\" '{0}'; '{0}' 600 & exec sleep 600", core.display());
        let mut shell = Command::new("/bin/sh");
        Self(shell.args(["-c", &script]).process_group(0).stdout(Stdio::null()).spawn().unwrap())
    }

    async fn core(&self) -> Pid {
        loop {
            if let Some((pid, _)) = ProcessSnapshot::take(Some(self.0.id())).await.cores().first() {
                return Pid::from_raw(*pid).unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn the_signal_that_ended_a_core_is_seen() {
    for signal in [Signal::KILL, Signal::SEGV] {
        let folder = tempfile::tempdir().unwrap();
        let group = Group::start(folder.path());
        let core = group.core().await;
        let watch = CoreWatch::begin(group.0.id()).await;
        kill_process(core, signal).unwrap();
        assert_eq!(watch.first_exit().await.and_then(|status| status.signal()), Some(signal.as_raw()));
    }
}

#[tokio::test]
async fn an_engine_without_a_core_has_no_exit() {
    let exit = CoreWatch::begin(std::process::id()).await.first_exit();
    assert_eq!(futures_util::future::poll_immediate(Box::pin(exit)).await, None);
}

#[test]
fn the_status_of_another_process_is_not_read() {
    let line = |state: &str, status: &str| format!("7 (a (b) c) {state} 1 7 7 {} 555 {} {status} 0", "0 ".repeat(15), "0 ".repeat(29));
    let read = |state, status, started| ProcessEnd::parse(&line(state, status), started);
    let seen = |status| ProcessEnd::Seen(ExitStatus::from_raw(status));
    assert_eq!(read("Z", "9", 555), seen(9));
    assert_eq!(read("Z", "139", 555), seen(139), "with a core dump");
    assert_eq!(read("Z", "0", 555), ProcessEnd::Unknown);
    assert_eq!(read("Z", "9", 556), ProcessEnd::Unknown, "its id is another process's");
    assert_eq!(read("S", "0", 555), ProcessEnd::Lives);
    assert_eq!(ProcessEnd::parse("", 555), ProcessEnd::Unknown);
}
