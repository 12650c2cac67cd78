use super::*;

#[test]
fn a_replica_may_get_at_most_twice_its_share() {
    let streams = FLEETS[0];
    let passed = streams.judge(&[2, 3, 2]);
    assert!(passed.passed && !streams.judge(&[2, 4, 2]).passed);
    let text = "20 streams on 12 replicas after an overload: at most 3 on one of 3 seeds, at most 3 of a share of 1.7";
    assert_eq!(passed.text, text);
}

#[test]
fn streams_after_an_overload_do_not_gather_on_one_replica() {
    let streams = EvenLoad { seeds: 2, ..FLEETS[0] };
    let counts = streams.counts();
    assert!(streams.judge(&counts).passed, "{counts:?}");
}
