use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn waiting(uncached: u32, since: f64) -> Waiting {
    Waiting { priority: 0, tenant: 0, uncached, since }
}

/// A queue in which each request's value is its number.
fn queue(waiting: impl IntoIterator<Item = Waiting>) -> Queue<usize> {
    let mut queue = Queue::new(10_000);
    waiting.into_iter().enumerate().for_each(|(number, waiting)| {
        queue.push(waiting, number).unwrap();
    });
    queue
}

fn order(queue: &mut Queue<usize>, now: f64) -> Vec<usize> {
    std::iter::from_fn(|| queue.pop(now)).map(|(_, number)| number).collect()
}

#[test]
fn short_requests_go_first_and_equal_ones_in_the_order_in_which_they_came() {
    let mut queue = queue([waiting(900, 0.0), waiting(100, 0.0), waiting(500, 0.0), waiting(100, 0.0)]);
    assert_eq!(order(&mut queue, 0.0), [1, 3, 2, 0]);
}

#[test]
fn a_long_wait_outweighs_length() {
    // After 12 s a request weighs ten times what it did.
    let mut queue = queue([waiting(1_000, 0.0), waiting(110, 12.0), waiting(90, 12.0)]);
    assert_eq!(order(&mut queue, 12.0), [2, 0, 1]);
}

#[test]
fn a_request_that_may_not_go_yet_keeps_its_turn_and_holds_up_nobody() {
    let mut queue = queue([waiting(300, 0.0), waiting(100, 0.0), waiting(200, 0.0)]);
    let mut asked = Vec::new();
    let gone = queue.pop_where(0.0, 2, |_, number| {
        asked.push(*number);
        *number == 2
    });
    assert_eq!((gone.map(|(_, number)| number), asked), (Some(2), vec![1, 2]));
    assert!(queue.pop_where(0.0, 1, |_, number| *number == 0).is_none(), "only the first one is looked at");
    assert_eq!(order(&mut queue, 0.0), [1, 0]);
}

#[test]
fn what_decides_a_turn_can_be_corrected_while_a_request_waits() {
    let mut queue = queue([waiting(300, 0.0), waiting(100, 0.0)]);
    let none = queue.pop_where(0.0, 10, |waiting, number| {
        waiting.uncached = if *number == 0 { 50 } else { 60 };
        false
    });
    assert!(none.is_none());
    assert_eq!(order(&mut queue, 0.0), [0, 1]);
}

#[test]
fn a_lower_band_goes_first_whatever_else() {
    let first = Waiting { priority: -1, ..waiting(100_000, 50.0) };
    let mut queue = queue([waiting(1, 0.0), first]);
    assert_eq!(order(&mut queue, 50.0), [1, 0]);
}

#[test]
fn tenants_share_by_tokens_and_not_by_requests() {
    let busy = (0..20).map(|_| Waiting { tenant: 1, ..waiting(100, 0.0) });
    let mut queue = queue(busy.chain((0..4).map(|_| Waiting { tenant: 2, ..waiting(500, 0.0) })));
    let mut released = FxHashMap::from_iter([(1, 0_u32), (2, 0)]);
    for _ in 0..12 {
        let (waiting, _) = queue.pop(0.0).unwrap();
        *released.get_mut(&waiting.tenant).unwrap() += waiting.uncached;
        assert!(released[&1].abs_diff(released[&2]) <= 500, "{released:?}");
    }
    assert_eq!(released[&1], released[&2]);
}

#[test]
fn what_a_tenant_was_given_is_forgotten_after_some_minutes() {
    let mut queue = queue([waiting(50_000, 0.0)]);
    queue.pop(0.0).unwrap();
    assert_eq!(queue.released.of(0), 50_000.0);
    queue.pop(400.0);
    assert!(queue.released.tokens.is_empty());
}

#[test]
fn a_full_queue_refuses_and_has_room_again_after_one_left() {
    let mut queue = Queue::new(2);
    let first = queue.push(waiting(1, 0.0), "first").unwrap();
    queue.push(waiting(1, 0.0), "second").unwrap();
    assert_eq!(queue.push(waiting(1, 0.0), "third"), Err("third"));
    assert_eq!(queue.remove(first), Some("first"));
    assert_eq!(queue.remove(first), None);
    assert!(queue.push(waiting(1, 0.0), "third").is_ok());
    assert_eq!(queue.len(), 2);
}

#[test]
fn an_old_long_request_is_released_before_fresh_short_ones_starve_it() {
    let mut queue = queue(std::iter::once(waiting(100_000, 0.0)).chain((0..5).map(|_| waiting(500, 0.0))));
    // Each second a short request comes and one finds room: without aging, a short one would always be there to take it.
    let left = (1..200).find(|&second| {
        let now = f64::from(second);
        queue.push(waiting(500, now), 1).unwrap();
        queue.pop(now).unwrap().1 == 0
    });
    assert!(left.is_some_and(|second| second < 120), "{left:?}");
}

#[test]
fn what_is_ahead_counts_bands_the_own_tenant_and_others_up_to_the_own_level() {
    let other = |uncached| Waiting { tenant: 2, ..waiting(uncached, 0.0) };
    let mut queue = queue([Waiting { priority: -1, ..waiting(7, 0.0) }, Waiting { priority: 1, ..waiting(9, 0.0) }]);
    assert_eq!(queue.uncached_ahead(&waiting(100, 0.0), 0.0), 7);
    queue.push(waiting(40, 0.0), 2).unwrap();
    assert_eq!(queue.uncached_ahead(&waiting(100, 0.0), 0.0), 47);
    queue.push(other(1_000), 3).unwrap();
    assert_eq!(queue.uncached_ahead(&waiting(100, 0.0), 0.0), 87, "another tenant gets as much as ours meanwhile");
    assert_eq!(queue.uncached_ahead(&waiting(20, 0.0), 0.0), 7);
}

#[test]
fn nonsense_times_do_not_panic() {
    for now in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
        let mut queue = queue([waiting(0, f64::NAN), waiting(5, f64::INFINITY), waiting(5, 3.0)]);
        let _ = queue.uncached_ahead(&waiting(3, now), now);
        assert_eq!(order(&mut queue, now).len(), 3);
    }
}

#[derive(Debug, Clone)]
enum Act {
    Push(Waiting),
    Pop,
    Remove(usize),
}

fn any_waiting() -> impl Strategy<Value = Waiting> {
    (-1..2_i32, 0..3_u64, 0..2_000_u32, 0.0..50.0).prop_map(|(priority, tenant, uncached, since)| Waiting {
        priority,
        tenant,
        uncached,
        since,
    })
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![3 => any_waiting().prop_map(Act::Push), 1 => Just(Act::Pop), 1 => (0..40_usize).prop_map(Act::Remove)]
}

proptest! {
    #[test]
    fn everything_pushed_leaves_exactly_once(acts in prop::collection::vec(act(), 0..120)) {
        let mut queue = Queue::new(16);
        let (mut places, mut inside) = (Vec::new(), BTreeSet::new());
        for (number, act) in acts.into_iter().enumerate() {
            match act {
                Act::Push(waiting) => match queue.push(waiting, number) {
                    Ok(place) => {
                        places.push((place, number));
                        inside.insert(number);
                    }
                    Err(refused) => prop_assert!(refused == number && inside.len() == 16),
                },
                Act::Pop => match queue.pop(number as f64) {
                    Some((_, popped)) => prop_assert!(inside.remove(&popped)),
                    None => prop_assert!(inside.is_empty()),
                },
                Act::Remove(at) => if let Some(&(place, pushed)) = places.get(at) {
                    prop_assert_eq!(queue.remove(place), inside.remove(&pushed).then_some(pushed));
                },
            }
            prop_assert_eq!(queue.len(), inside.len());
        }
        while let Some((_, popped)) = queue.pop(200.0) {
            prop_assert!(inside.remove(&popped));
        }
        prop_assert!(inside.is_empty());
    }

    #[test]
    fn what_is_ahead_in_one_tenant_is_what_leaves_before(
        drawn in prop::collection::vec((1..2_000_u32, 0..40_000_u32), 1..20), asked in 0..20_usize,
    ) {
        let all: Vec<Waiting> = drawn.iter().map(|&(uncached, since)| waiting(uncached, f64::from(since) / 1000.0)).collect();
        let asked = asked % all.len();
        let mut queue = queue(all.clone());
        let ahead = queue.uncached_ahead(&all[asked], 50.0);
        let before: u64 = order(&mut queue, 50.0).iter().take_while(|&&number| number != asked).map(|&number| u64::from(all[number].uncached)).sum();
        // Two that are equal in all are not ahead of each other.
        let twins = all.iter().filter(|other| other.uncached == all[asked].uncached && other.since == all[asked].since).count() as u64 - 1;
        prop_assert!(ahead <= before && before <= ahead + twins * u64::from(all[asked].uncached), "{} instead of {}", ahead, before);
    }
}

#[test]
fn the_band_of_a_queue_is_that_of_its_most_urgent_request() {
    let mut queue = Queue::new(8);
    assert_eq!(queue.band(), None);
    for priority in [3, -1, 0] {
        queue.push(Waiting { priority, tenant: 0, uncached: 1, since: 0.0 }, ()).unwrap();
    }
    assert_eq!(queue.band(), Some(-1));
    queue.pop(0.0);
    assert_eq!(queue.band(), Some(0));
}
