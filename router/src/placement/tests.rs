use proptest::prelude::*;

use super::*;

fn candidate(replica: usize, own: u32, others: u32, engine: u32) -> Candidate {
    Candidate { replica, own, others, engine, doubtful: false }
}

#[test]
fn the_replica_with_the_least_work_is_chosen() {
    let placement =
        place(&[candidate(0, 3, 0, 3), candidate(1, 1, 0, 1), candidate(2, 0, 4, 4)], &mut fastrand::Rng::with_seed(1)).unwrap();
    assert_eq!(placement, Placement { replica: 1, reason: Reason { work: 1, candidates: 3, tied: 1, last_resort: false } });
}

#[test]
fn an_engine_that_reports_nothing_while_we_wait_for_it_does_not_look_idle() {
    let hung = candidate(0, 9, 0, 0);
    assert_eq!(place(&[hung, candidate(1, 4, 0, 4)], &mut fastrand::Rng::with_seed(1)).unwrap().replica, 1);
}

#[test]
fn a_doubtful_replica_is_used_only_when_nothing_else_is_left() {
    let doubtful = Candidate { doubtful: true, ..candidate(0, 0, 0, 0) };
    let mut random = fastrand::Rng::with_seed(1);
    assert_eq!(place(&[doubtful, candidate(1, 50, 0, 50)], &mut random).unwrap().replica, 1);
    assert!(place(&[doubtful], &mut random).unwrap().reason.last_resort);
}

#[test]
fn no_candidate_means_no_placement() {
    assert_eq!(place(&[], &mut fastrand::Rng::with_seed(1)), None);
}

proptest! {
    #[test]
    fn the_choice_has_least_work_among_the_undoubted_and_repeats_by_seed(
        drawn in prop::collection::vec((0..5u32, 0..5u32, 0..9u32, any::<bool>()), 1..20), seed: u64,
    ) {
        let candidates: Vec<Candidate> = drawn.iter().enumerate()
            .map(|(replica, &(own, others, engine, doubtful))| Candidate { replica, own, others, engine, doubtful }).collect();
        let placement = place(&candidates, &mut fastrand::Rng::with_seed(seed)).unwrap();
        let chosen = candidates[placement.replica];
        prop_assert!(candidates.iter().all(|other| (chosen.doubtful, chosen.work()) <= (other.doubtful, other.work())));
        prop_assert_eq!(placement, place(&candidates, &mut fastrand::Rng::with_seed(seed)).unwrap());
    }

    #[test]
    fn equals_share_evenly(seed: u64) {
        let equals: Vec<Candidate> = (0..4).map(|replica| candidate(replica, 2, 0, 2)).collect();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut counts = [0; 4];
        (0..4000).for_each(|_| counts[place(&equals, &mut random).unwrap().replica] += 1);
        prop_assert!(counts.iter().all(|&count| (800..1200).contains(&count)), "{:?}", counts);
    }
}
