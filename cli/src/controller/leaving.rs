//! When the router of an ended controller drains, and how long that may take.
//!
//! A router in a batch job first serves on for a moment beside the next one, and then finishes its
//! answers until the job ends.

use std::time::{Duration, SystemTime};

use hostler_boot::Shutdown;
use hostler_controller::ControllerEnd;
use hostler_router::RouterPlace;
use tokio::time::sleep;

/// Longest time in which both routers take requests. Agents find the new one within 15 s, and
/// `hostler connect` follows; other clients have the old address.
const OVERLAP: Duration = Duration::from_secs(60);

/// If the job ends soon, both take requests for 1/`OVERLAP_PARTS` of the time left.
const OVERLAP_PARTS: u32 = 3;

/// Time before the job's end at which clients of unfinished answers are told. Clocks differ by a
/// second or two, and a busy host takes another.
const END_MARGIN: Duration = Duration::from_secs(5);

/// Returns when the router must drain.
pub(super) async fn wait_to_drain(end: ControllerEnd, place: &RouterPlace, shutdown: &Shutdown) {
    match end {
        ControllerEnd::NothingLeft => place.give_up(),
        ControllerEnd::Left => {}
        ControllerEnd::LeftItsJob { ends_at } => place.finish_within(serve_on(ends_at, shutdown).await),
    }
}

/// Returns when the router of a job must drain, with the time that this may take.
async fn serve_on(ends: SystemTime, shutdown: &Shutdown) -> Duration {
    tokio::select! {
        () = sleep(overlap(left(ends))) => {}
        () = shutdown.wait_drain() => {}
    }
    left(ends).saturating_sub(END_MARGIN)
}

fn overlap(left: Duration) -> Duration {
    OVERLAP.min(left / OVERLAP_PARTS)
}

fn left(ends: SystemTime) -> Duration {
    ends.duration_since(SystemTime::now()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_router_in_a_job_finishes_before_that_ends() {
        let shutdown = Shutdown::new();
        let time = async |left: u64| serve_on(SystemTime::now() + Duration::from_secs(left), &shutdown).await.as_secs();
        assert_eq!(overlap(Duration::from_secs(3600)), OVERLAP);
        assert_eq!(overlap(Duration::from_secs(30)), Duration::from_secs(10));
        assert!((3593..=3595).contains(&time(3600).await) && time(3).await == 0);
        assert_eq!(serve_on(SystemTime::UNIX_EPOCH, &shutdown).await, Duration::ZERO);
    }
}
