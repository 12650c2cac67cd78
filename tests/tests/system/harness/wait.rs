//! Waiting for a condition, never for a time.
//!
//! Each wait has a deadline, and reports its last observation when that passes.

use std::time::Duration;

use tokio::time::Instant;

/// How long anything in a test may take.
pub(crate) const DEADLINE: Duration = Duration::from_secs(90);

/// How often a condition is checked.
const PAUSE: Duration = Duration::from_millis(10);

/// Calls `probe` until it gives `Ok`; fails with its last `Err` at the deadline.
pub(crate) async fn until<T>(what: &str, mut probe: impl AsyncFnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    let mut state = "it was never looked at".to_owned();
    while begun.elapsed() < DEADLINE {
        match tokio::time::timeout(DEADLINE, probe()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(seen)) => state = seen,
            Err(_) => break,
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("waited {DEADLINE:?} for this: {what}\nlast seen: {state}");
}

/// Result of a future that must end within the deadline.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("this did not end within {DEADLINE:?}: {what}"),
    }
}
