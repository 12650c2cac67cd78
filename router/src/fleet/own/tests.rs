use super::*;

fn booking(due: f64) -> Booking {
    Booking { tokens: 100, uncached: 60, due }
}

#[test]
fn a_request_is_ahead_of_others_until_its_prompt_is_computed_and_in_flight_until_its_end() {
    let own = Arc::<Own>::default();
    let mut request = own.enter(booking(1.0), None);
    assert_eq!((own.in_flight(), own.pending(), own.context()), (1, 60, 100));
    request.computed();
    request.answered();
    assert_eq!((own.in_flight(), own.pending(), own.context()), (1, 0, 100));
    drop(request);
    assert_eq!((own.in_flight(), own.pending(), own.context()), (0, 0, 0));
}

#[test]
fn the_oldest_unanswered_request_says_how_late_a_replica_is() {
    let own = Arc::<Own>::default();
    assert_eq!(own.overdue(100.0), 0.0);
    let late = own.enter(booking(2.0), None);
    let mut later = own.enter(booking(5.0), None);
    let same = own.enter(booking(5.0), None);
    assert_eq!((own.overdue(1.0), own.overdue(4.0)), (0.0, 2.0));
    drop(late);
    assert_eq!(own.overdue(7.0), 2.0);
    later.answered();
    assert_eq!(own.overdue(7.0), 2.0, "another one is due at the same moment");
    drop(same);
    assert_eq!(own.overdue(7.0), 0.0);
}

#[test]
fn what_was_learned_is_read_back() {
    let own = Arc::<Own>::default();
    for _ in 0..200 {
        own.learn_interval(4, 1000, 0.5);
    }
    assert!(own.learned().rates.step > Rates::default().step, "{:?}", own.learned());
}
