use super::*;

fn cost(due: f64) -> InFlightCost {
    InFlightCost { sequences: 3, prompt_tokens: 100, uncached_tokens: 60, loaded_tokens: 30, read_tokens: 20, first_byte_due: due }
}

#[test]
fn a_request_is_pending_until_prefilled_and_in_flight_throughout() {
    let own = Arc::<LocalLoad>::default();
    let counts =
        || (own.in_flight(), own.sequences(), own.pending_tokens(), own.loading_tokens(), own.reading_tokens(), own.context_tokens());
    let mut request = own.start_request(cost(1.0), None);
    assert_eq!(counts(), (1, 3, 60, 30, 20, 100));
    request.finish_prefill();
    request.start_answer();
    assert_eq!(counts(), (1, 3, 0, 0, 0, 100));
    drop(request);
    assert_eq!(counts(), (0, 0, 0, 0, 0, 0));
}

#[test]
fn the_oldest_unanswered_request_decides_how_overdue_a_replica_is() {
    let own = Arc::<LocalLoad>::default();
    assert_eq!(own.overdue_seconds(100.0), 0.0);
    let late = own.start_request(cost(2.0), None);
    let mut later = own.start_request(cost(5.0), None);
    let same = own.start_request(cost(5.0), None);
    assert_eq!((own.overdue_seconds(1.0), own.overdue_seconds(4.0)), (0.0, 2.0));
    drop(late);
    assert_eq!(own.overdue_seconds(7.0), 2.0);
    later.start_answer();
    assert_eq!(own.overdue_seconds(7.0), 2.0, "another one is due at the same moment");
    drop(same);
    assert_eq!(own.overdue_seconds(7.0), 0.0);
}

#[test]
fn learned_rates_are_read_back() {
    let own = Arc::<LocalLoad>::default();
    for _ in 0..200 {
        own.learn_interval(4, 1000, 0.5, 7.0);
    }
    assert!(own.learned().rates.step > Rates::default().step, "{:?}", own.learned());
}

#[test]
fn a_stated_limit_counts_and_a_learned_one_expires() {
    let own = LocalLoad::default();
    assert_eq!((own.sequence_limit(0, 5.0), own.sequence_limit(16, 5.0)), (0, 16));
    own.learn_sequence_limit(12, 5.0);
    assert_eq!((own.sequence_limit(0, 6.0), own.sequence_limit(16, 6.0)), (12, 16));
    assert_eq!(own.sequence_limit(0, 5.0 + LEARNED_LIMIT_SECONDS), 0);
}
