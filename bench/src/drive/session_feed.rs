//! Thread that begins sessions: it makes them one after another and hands each over when it is due.
//!
//! A runtime's timers are a millisecond coarse, which would add to the load generator's own
//! lateness, and long prompts take time to write. So it is a separate thread.

use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::session::Session;

/// Sessions that are ready before a client takes them.
///
/// Further ones wait in the thread and are late, which the figures show.
const READY_CAPACITY: usize = 256;

/// How long the thread sleeps between checks whether the receiver still exists.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Begins sessions from `start` on; those due at `until` or later do not begin.
///
/// Ends when the receiver is dropped.
pub(super) fn feed_sessions(
    sessions: impl Iterator<Item = Session> + Send + 'static,
    start: Instant,
    until: Option<Instant>,
) -> std::io::Result<mpsc::Receiver<Session>> {
    let (sender, receiver) = mpsc::channel(READY_CAPACITY);
    thread::Builder::new().name("sessions".to_owned()).spawn(move || {
        for session in sessions {
            if let Some(begins) = session.begins {
                // A time that the clock cannot represent is after any end.
                let Some(due) = start.checked_add(begins).filter(|due| until.is_none_or(|until| *due < until)) else { return };
                if !wait(due, || sender.is_closed()) {
                    return;
                }
            }
            if sender.blocking_send(session).is_err() {
                return;
            }
        }
    })?;
    Ok(receiver)
}

/// Sleeps until then; `false` if it was called off.
fn wait(due: Instant, called_off: impl Fn() -> bool) -> bool {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        if called_off() {
            return false;
        }
        thread::park_timeout(left.min(CHECK_INTERVAL));
    }
}
