use std::time::Duration;

use super::*;
use crate::fleet::Fleet;
use crate::fleet::tests::{attach, attach_node, fleet, ready, report_job};

const LOST: &str = "the connection was lost";

/// A fleet with one replica on node `n` in job `12.head`, which leaves and ends at these seconds.
async fn fleet_in_job(moments: (u64, u64)) -> (Fleet, Arc<Replica>, impl Sized) {
    let fleet = fleet();
    let lane = attach(&fleet, 1, vec![ready(0)]).await;
    report_job(&fleet, 1, moments).await;
    let placed = fleet.view().replicas[0].clone();
    (fleet, placed, lane)
}

/// The client's message for an answer lost after so many seconds. `placed` is the replica as it was
/// when the answer began.
fn loss(fleet: &Fleet, placed: &Replica, seconds: u64, message: &str) -> String {
    explain_loss(&fleet.view(), placed, Instant::now() + Duration::from_secs(seconds), message.into())
}

#[test]
fn a_job_counts_as_named_only_by_its_whole_id() {
    for (id, message, is_named) in [
        ("12", "the slurm job 12 is being ended by its scheduler", true),
        ("12", "node n leaves the slurm job 12: the answer was not complete", true),
        ("12", "its last words were of job 12", true),
        ("12", "the job 123 ended before the job 12 did", true),
        ("12", "no byte for 12 s", false),
        ("12", "the job 123 ended", false),
        ("12", "the job 12_3 ended", false),
        ("12", "the job 12.head ended", false),
        ("12[3].head", "the pbs job 12[3].head is being ended", true),
        ("12[3].head", "the pbs job 12[4].head is being ended", false),
    ] {
        assert_eq!(names(message, id), is_named, "{id} in {message:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_is_named_only_once() {
    let (fleet, placed, _lane) = fleet_in_job((20, 30)).await;
    for (seconds, message, expected) in [
        (10, "the pbs job 12.head is being ended", "the pbs job 12.head is being ended"),
        (10, "lost after 12.headers", "lost after 12.headers (job 12.head on node n)"),
        (24, "the pbs job 12.head is being ended", "the pbs job 12.head is being ended (the job has its deadline in 5 s)"),
        (40, "the pbs job 12.head is being ended", "the pbs job 12.head is being ended (the job reached its deadline)"),
        (40, "the job 12.header ended", "the job 12.head on node n reached its deadline: the job 12.header ended"),
    ] {
        assert_eq!(loss(&fleet, &placed, seconds, message), expected, "after {seconds} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_loss_names_its_job_and_the_deadline_it_reached() {
    let fleet = fleet();
    let _lane = attach(&fleet, 1, vec![ready(0)]).await;
    assert_eq!(loss(&fleet, &fleet.view().replicas[0], 99, LOST), "the connection was lost", "it is in no job");
    report_job(&fleet, 1, (20, 30)).await;
    let placed = fleet.view().replicas[0].clone();
    assert_eq!(loss(&fleet, &placed, 10, LOST), "the connection was lost (job 12.head on node n)", "long before its end");
    assert_eq!(loss(&fleet, &placed, 24, LOST), "the job 12.head on node n has its deadline in 5 s: the connection was lost");
    assert_eq!(loss(&fleet, &placed, 40, LOST), "the job 12.head on node n reached its deadline: the connection was lost");
}

#[tokio::test(start_paused = true)]
async fn the_last_reported_end_of_a_job_counts() {
    let (fleet, placed, _lane) = fleet_in_job((1000, 1010)).await;
    report_job(&fleet, 1, (20, 30)).await;
    assert_eq!(loss(&fleet, &placed, 40, LOST), "the job 12.head on node n reached its deadline: the connection was lost");
}

#[tokio::test(start_paused = true)]
async fn a_loss_on_a_forgotten_node_names_its_job() {
    let (_fleet, placed, _lane) = fleet_in_job((20, 30)).await;
    let other = crate::fleet::tests::fleet();
    let _lane = attach_node(&other, 1, "other", vec![ready(0)]).await;
    assert_eq!(loss(&other, &placed, 40, LOST), "the job 12.head on node n reached its deadline: the connection was lost");
}
