//! Stops an engine's processes while its agent is stopped, and resumes them with it.
//!
//! A batch system suspends a job by stopping every process of its session, but the engine is in
//! another session.

use rustix::process::{Pid, Signal, kill_process};

use crate::process::table;

/// Consecutive passes that must find nothing to stop.
///
/// One pass is not enough: while the kernel's list is read, a process may be created by one that is
/// stopped before the list reaches it.
const QUIET_LOOKS: u8 = 2;

/// Whether the descendants of a process are stopped.
#[derive(Debug, Default)]
pub(super) enum Suspension {
    #[default]
    Off,
    /// The processes are being stopped, and some may still run.
    Stopping { quiet_looks: u8 },
    /// No process can run, so none can be created either.
    Stopped,
}

impl Suspension {
    pub(super) fn is_on(&self) -> bool {
        !matches!(self, Self::Off)
    }

    /// Stops every running descendant of `root`.
    ///
    /// The caller repeats this while the suspension lasts: it costs nothing once all are stopped.
    pub(super) fn enforce(&mut self, root: i32) {
        let quiet_looks = match self {
            Self::Off => 0,
            Self::Stopping { quiet_looks } => *quiet_looks,
            Self::Stopped => return,
        };
        let running: Vec<_> = table::descendants(root).into_iter().filter(|process| !process.is_stopped).collect();
        for process in &running {
            signal(process.pid, Signal::STOP);
        }
        *self = match quiet_looks + 1 {
            _ if !running.is_empty() => Self::Stopping { quiet_looks: 0 },
            QUIET_LOOKS.. => Self::Stopped,
            quiet_looks => Self::Stopping { quiet_looks },
        };
    }

    /// Resumes all descendants of `root`, even those that somebody else had stopped: a batch
    /// system's resumption does the same.
    pub(super) fn end(&mut self, root: i32) {
        if self.is_on() {
            table::descendants(root).iter().for_each(|process| signal(process.pid, Signal::CONT));
            *self = Self::Off;
        }
    }
}

fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        // A process that is already gone is fine.
        let _ = kill_process(pid, signal);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command, Stdio};

    use rustix::process::kill_process_group;

    use super::*;

    /// A shell with a child, and one in its own session.
    struct Family(Child);

    impl Family {
        fn start() -> Self {
            let script = "sleep 600 & setsid sleep 600 & wait";
            let family = Self(Command::new("/bin/sh").args(["-c", script]).process_group(0).stdout(Stdio::null()).spawn().unwrap());
            while table::descendants(family.root()).iter().filter(|process| process.session == process.pid).count() < 1
                || family.count() < 2
            {
                std::thread::yield_now();
            }
            family
        }

        fn root(&self) -> i32 {
            self.0.id().cast_signed()
        }

        fn count(&self) -> usize {
            table::descendants(self.root()).len()
        }

        fn stopped(&self) -> usize {
            table::descendants(self.root()).iter().filter(|process| process.is_stopped).count()
        }
    }

    impl Drop for Family {
        fn drop(&mut self) {
            for process in table::descendants(self.root()) {
                signal(process.pid, Signal::KILL);
            }
            kill_process_group(Pid::from_child(&self.0), Signal::KILL).unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    fn all_descendants_are_suspended_and_continued_in_whatever_session() {
        let family = Family::start();
        let mut suspension = Suspension::default();
        while !matches!(suspension, Suspension::Stopped) {
            suspension.enforce(family.root());
            assert!(suspension.is_on());
        }
        assert_eq!((family.count(), family.stopped()), (2, 2));
        suspension.end(family.root());
        assert!(!suspension.is_on());
        while family.stopped() > 0 {
            std::thread::yield_now();
        }
        assert_eq!(family.count(), 2, "it harms none");
    }

    #[test]
    fn a_process_stopped_by_others_is_not_continued() {
        let family = Family::start();
        let child = table::descendants(family.root())[0].pid;
        signal(child, Signal::STOP);
        while family.stopped() == 0 {
            std::thread::yield_now();
        }
        Suspension::default().end(family.root());
        assert_eq!(family.stopped(), 1, "somebody else has stopped it");
    }
}
