use super::*;

#[test]
fn no_seed_may_give_a_replica_more_than_twice_its_share() {
    let streams = FLEETS[0];
    let passed = streams.judge(&[2, 3, 2]);
    assert!(passed.passed && !streams.judge(&[2, 4, 2]).passed);
    let text = "20 streams on 12 replicas after an overload: at most 3 on one of 3 seeds, at most 3 of a share of 1.7";
    assert_eq!(passed.text, text);
}

#[test]
fn what_equal_replicas_learned_in_an_overload_does_not_gather_the_streams_after_it() {
    let streams = EvenLoad { seeds: 2, ..FLEETS[0] };
    let counts = streams.counts();
    assert!(streams.judge(&counts).passed, "{counts:?}");
}
