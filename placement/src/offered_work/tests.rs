use proptest::prelude::*;

use super::*;

#[test]
fn a_steady_load_reads_as_its_share_of_the_fleet() {
    let offered = OfferedWork::new();
    // Half a second of work every tenth of a second keeps five replicas busy.
    (0..3_000).for_each(|arrival| offered.add_request(0.5, f64::from(arrival) * 0.1));
    assert!((offered.utilisation(10, 300.0) - 0.5).abs() < 0.01, "{}", offered.utilisation(10, 300.0));
    assert_eq!(offered.utilisation(5, 300.0), MAX_UTILISATION, "it is capped");
}

#[test]
fn utilisation_is_zero_without_requests_and_forgets_old_work() {
    let offered = OfferedWork::new();
    assert_eq!(offered.utilisation(4, 10.0), 0.0);
    offered.add_request(60.0, 10.0);
    let fresh = offered.utilisation(4, 10.0);
    let later = offered.utilisation(4, 40.0);
    assert!((later / fresh - (-1.0_f64).exp()).abs() < 1e-9, "{fresh} then {later}");
}

proptest! {
    #[test]
    fn utilisation_stays_between_zero_and_its_cap(
        requests in prop::collection::vec((any::<f64>(), any::<f64>()), 0..30), replicas in 0..5_usize, now: f64,
    ) {
        let offered = OfferedWork::new();
        requests.iter().for_each(|&(work, at)| offered.add_request(work, at));
        prop_assert!((0.0..=MAX_UTILISATION).contains(&offered.utilisation(replicas, now)));
    }
}
