use std::time::Duration;

use super::*;
use crate::fleet::Fleet;
use crate::fleet::tests::{attach, attach_node, fleet, ready, report_job};

/// Why an answer was lost on the replica of node `n`, as it was when the answer began, after so many seconds.
fn loss(fleet: &Fleet, placed: &Replica, seconds: u64) -> String {
    explain_loss(&fleet.view(), placed, Instant::now() + Duration::from_secs(seconds), "the connection was lost".into())
}

#[tokio::test(start_paused = true)]
async fn a_loss_names_the_job_and_at_its_end_the_deadline() {
    let fleet = fleet();
    let _lane = attach(&fleet, 1, vec![ready(0)]).await;
    assert_eq!(loss(&fleet, &fleet.view().replicas[0], 99), "the connection was lost", "it is in no job");
    report_job(&fleet, 1, (20, 30)).await;
    let placed = fleet.view().replicas[0].clone();
    assert_eq!(loss(&fleet, &placed, 10), "the connection was lost (job 12.head on node n)", "long before its end");
    assert_eq!(loss(&fleet, &placed, 24), "the job 12.head on node n has its deadline in 5 s: the connection was lost");
    assert_eq!(loss(&fleet, &placed, 40), "the job 12.head on node n reached its deadline: the connection was lost");
}

#[tokio::test(start_paused = true)]
async fn the_end_that_counts_is_the_one_that_was_told_last() {
    let fleet = fleet();
    let _lane = attach(&fleet, 1, vec![ready(0)]).await;
    report_job(&fleet, 1, (1000, 1010)).await;
    let placed = fleet.view().replicas[0].clone();
    report_job(&fleet, 1, (20, 30)).await;
    assert_eq!(loss(&fleet, &placed, 40), "the job 12.head on node n reached its deadline: the connection was lost");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_nobody_remembers_had_the_job_that_it_had() {
    let fleet = fleet();
    let _lane = attach(&fleet, 1, vec![ready(0)]).await;
    report_job(&fleet, 1, (20, 30)).await;
    let placed = fleet.view().replicas[0].clone();
    let other = crate::fleet::tests::fleet();
    let _lane = attach_node(&other, 1, "other", vec![ready(0)]).await;
    assert_eq!(loss(&other, &placed, 40), "the job 12.head on node n reached its deadline: the connection was lost");
}
