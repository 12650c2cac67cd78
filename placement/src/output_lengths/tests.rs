use proptest::prelude::*;

use super::*;

fn lengths(of: impl IntoIterator<Item = u32>) -> OutputLengths {
    let mut lengths = OutputLengths::default();
    of.into_iter().for_each(|tokens| lengths.observe(tokens));
    lengths
}

#[test]
fn a_long_answer_is_the_95th_percentile() {
    assert_eq!(lengths(1..=100).long(), 95.0);
    assert_eq!(lengths((1..=100).rev()).long(), 95.0, "in any order");
    let mixed = lengths((0..200).map(|number| if number % 10 == 0 { 4000 } else { 20 }));
    assert_eq!(mixed.long(), 4000.0, "where one in ten is long, long ones are to be expected");
    let rarely = lengths((0..200).map(|number| if number % 50 == 0 { 4000 } else { 20 }));
    assert_eq!(rarely.long(), 20.0, "where one in fifty is long, they are not");
}

#[test]
fn few_answers_do_not_lower_the_expected_length() {
    assert_eq!((lengths([]).mean(), lengths([]).long()), (256.0, 1024.0));
    assert_eq!(lengths([10; 19]).long(), 1024.0);
    assert_eq!(lengths([10, 5000]).long(), 5000.0);
    assert_eq!(lengths([10; 20]).long(), 10.0);
}

#[test]
fn old_answer_lengths_are_forgotten() {
    let later = lengths([[9000; 300], [100; 300]].concat());
    assert_eq!(later.long(), 100.0);
    assert!((100.0..130.0).contains(&later.mean()), "{}", later.mean());
}

proptest! {
    #[test]
    fn only_the_latest_answers_count_in_order(of in prop::collection::vec(0..50_u32, 0..600)) {
        let known = lengths(of.iter().copied());
        let mut latest = of[of.len().saturating_sub(MAX_ANSWERS)..].to_vec();
        prop_assert!(known.latest.iter().eq(&latest));
        latest.sort_unstable();
        prop_assert_eq!(latest, known.sorted);
    }
}
