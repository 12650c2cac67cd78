//! The guard beside an engine in a container: when its keeper is gone, it ends all that is left in
//! the keeper's session.
//!
//! A keeper that leaves in order has ended its guard with the engine.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::process::{STUCK_AFTER, table};

const PAUSE: Duration = Duration::from_millis(10);

/// Waits for the end of standard input, which the keeper holds, and then kills.
#[expect(clippy::disallowed_methods, reason = "this process does nothing else")]
pub(super) fn run() -> io::Result<()> {
    io::stdin().read_to_end(&mut Vec::new())?;
    let (own, session) = (getpid(), table::own_session().ok_or(io::ErrorKind::NotFound)?);
    let deadline = Instant::now() + STUCK_AFTER;
    loop {
        let left = table::session(session);
        let others: Vec<_> = left.iter().filter_map(|process| Pid::from_raw(process.pid)).filter(|pid| *pid != own).collect();
        if others.is_empty() || Instant::now() >= deadline {
            return Ok(());
        }
        for pid in others {
            // A process that is already gone is fine.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(PAUSE);
    }
}
