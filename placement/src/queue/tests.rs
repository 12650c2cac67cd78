use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn waiting(uncached: u32, since: f64) -> TurnFactors {
    TurnFactors { priority: 0, tenant: 0, weight: 1.0, uncached_tokens: uncached, output_tokens: 0, queued_at: since }
}

/// A queue in which each request's value is its number.
fn queue(waiting: impl IntoIterator<Item = TurnFactors>) -> Queue<usize> {
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
fn short_requests_go_first_and_equal_ones_in_order() {
    let mut queue = queue([waiting(900, 0.0), waiting(100, 0.0), waiting(500, 0.0), waiting(100, 0.0)]);
    assert_eq!(order(&mut queue, 0.0), [1, 3, 2, 0]);
}

#[test]
fn a_long_wait_outweighs_a_long_prompt() {
    // After 12 s a request weighs ten times as much.
    let mut queue = queue([waiting(1_000, 0.0), waiting(110, 12.0), waiting(90, 12.0)]);
    assert_eq!(order(&mut queue, 12.0), [2, 0, 1]);
}

#[test]
fn a_blocked_request_keeps_its_turn_and_holds_up_nobody() {
    let mut queue = queue([waiting(300, 0.0), waiting(100, 0.0), waiting(200, 0.0)]);
    let mut taken = Vec::new();
    let gone = queue.pop_where(0.0, 2, |_, number| {
        taken.push(*number);
        *number == 2
    });
    assert_eq!((gone.map(|(_, number)| number), taken), (Some(2), vec![1, 2]));
    assert!(queue.pop_where(0.0, 1, |_, number| *number == 0).is_none(), "only the first one is looked at");
    assert_eq!(order(&mut queue, 0.0), [1, 0]);
}

#[test]
fn the_order_follows_corrections_made_while_requests_wait() {
    let mut queue = queue([waiting(300, 0.0), waiting(100, 0.0)]);
    let none = queue.pop_where(0.0, 10, |waiting, number| {
        waiting.uncached_tokens = if *number == 0 { 50 } else { 60 };
        false
    });
    assert!(none.is_none());
    assert_eq!(order(&mut queue, 0.0), [0, 1]);
}

#[test]
fn a_more_urgent_band_always_goes_first() {
    let first = TurnFactors { priority: -1, ..waiting(100_000, 50.0) };
    let mut queue = queue([waiting(1, 0.0), first]);
    assert_eq!(order(&mut queue, 50.0), [1, 0]);
}

#[test]
fn tenants_share_by_tokens_rather_than_requests() {
    let busy = (0..20).map(|_| TurnFactors { tenant: 1, ..waiting(100, 0.0) });
    let mut queue = queue(busy.chain((0..4).map(|_| TurnFactors { tenant: 2, ..waiting(500, 0.0) })));
    let mut released = FxHashMap::from_iter([(1, 0_u32), (2, 0)]);
    for _ in 0..12 {
        let (waiting, _) = queue.pop(0.0).unwrap();
        *released.get_mut(&waiting.tenant).unwrap() += waiting.uncached_tokens;
        assert!(released[&1].abs_diff(released[&2]) <= 500, "{released:?}");
    }
    assert_eq!(released[&1], released[&2]);
}

#[test]
fn a_tenants_past_use_is_forgotten_within_minutes() {
    let mut queue = queue([waiting(50_000, 0.0)]);
    queue.pop(0.0).unwrap();
    assert_eq!(queue.released.of_tenant(0, 0.0), 50_000.0);
    assert!((queue.released.of_tenant(0, 30.0) - 50_000.0 / std::f64::consts::E).abs() < 1e-6);
    queue.pop(400.0);
    assert_eq!(queue.released.tenants(), 0);
}

#[test]
fn a_full_queue_refuses_until_one_request_leaves() {
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
fn an_old_long_request_is_never_starved_by_short_ones() {
    let mut queue = queue(std::iter::once(waiting(100_000, 0.0)).chain((0..5).map(|_| waiting(500, 0.0))));
    // Each second a short request arrives and one is released: without aging, there would always be
    // a short one to take.
    let left = (1..200).find(|&second| {
        let now = f64::from(second);
        queue.push(waiting(500, now), 1).unwrap();
        queue.pop(now).unwrap().1 == 0
    });
    assert!(left.is_some_and(|second| second < 120), "{left:?}");
}

#[test]
fn the_tokens_ahead_count_bands_tenants_and_levels() {
    let other = |uncached| TurnFactors { tenant: 2, ..waiting(uncached, 0.0) };
    let mut queue = queue([TurnFactors { priority: -1, ..waiting(7, 0.0) }, TurnFactors { priority: 1, ..waiting(9, 0.0) }]);
    assert_eq!(queue.uncached_tokens_ahead(&waiting(100, 0.0), 0.0), 7);
    queue.push(waiting(40, 0.0), 2).unwrap();
    assert_eq!(queue.uncached_tokens_ahead(&waiting(100, 0.0), 0.0), 47);
    queue.push(other(1_000), 3).unwrap();
    assert_eq!(queue.uncached_tokens_ahead(&waiting(100, 0.0), 0.0), 87, "another tenant gets as much as ours meanwhile");
    assert_eq!(queue.uncached_tokens_ahead(&waiting(20, 0.0), 0.0), 7);
}

#[test]
fn nonsense_times_do_not_panic() {
    for now in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
        let mut queue = queue([waiting(0, f64::NAN), waiting(5, f64::INFINITY), waiting(5, 3.0)]);
        let _ = queue.uncached_tokens_ahead(&waiting(3, now), now);
        assert_eq!(order(&mut queue, now).len(), 3);
    }
}

#[derive(Debug, Clone)]
enum Act {
    Push(TurnFactors),
    Pop,
    Remove(usize),
}

fn any_waiting() -> impl Strategy<Value = TurnFactors> {
    (-1..2_i32, 0..3_u64, 0..2_000_u32, 0.0..50.0).prop_map(|(priority, tenant, uncached, since)| TurnFactors {
        priority,
        tenant,
        ..waiting(uncached, since)
    })
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![3 => any_waiting().prop_map(Act::Push), 1 => Just(Act::Pop), 1 => (0..40_usize).prop_map(Act::Remove)]
}

proptest! {
    #[test]
    fn every_pushed_request_leaves_exactly_once(acts in prop::collection::vec(act(), 0..120)) {
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
    fn the_tokens_ahead_are_those_that_leave_before(
        drawn in prop::collection::vec((1..2_000_u32, 0..40_000_u32), 1..20), chosen in 0..20_usize,
    ) {
        let all: Vec<TurnFactors> = drawn.iter().map(|&(uncached, since)| waiting(uncached, f64::from(since) / 1000.0)).collect();
        let chosen = chosen % all.len();
        let mut queue = queue(all.clone());
        let ahead = queue.uncached_tokens_ahead(&all[chosen], 50.0);
        let before: u64 = order(&mut queue, 50.0).iter().take_while(|&&number| number != chosen).map(|&number| u64::from(all[number].uncached_tokens)).sum();
        // Two requests that are equal in every respect are not ahead of each other.
        let twins = all.iter().filter(|other| other.uncached_tokens == all[chosen].uncached_tokens && other.queued_at == all[chosen].queued_at).count() as u64 - 1;
        prop_assert!(ahead <= before && before <= ahead + twins * u64::from(all[chosen].uncached_tokens), "{} instead of {}", ahead, before);
    }
}

#[test]
fn a_queues_band_is_that_of_its_most_urgent_request() {
    let mut queue = Queue::new(8);
    assert_eq!(queue.lowest_priority(), None);
    for priority in [3, -1, 0] {
        queue.push(TurnFactors { priority, ..waiting(1, 0.0) }, ()).unwrap();
    }
    assert_eq!(queue.lowest_priority(), Some(-1));
    queue.pop(0.0);
    assert_eq!(queue.lowest_priority(), Some(0));
}

#[test]
fn a_corrected_request_takes_its_new_place() {
    let mut queue = queue([waiting(100, 0.0), waiting(200, 0.0), waiting(300, 0.0), waiting(400, 0.0)]);
    let none = queue.pop_where(0.0, 3, |waiting, number| {
        if *number == 0 {
            waiting.uncached_tokens = 350;
        }
        false
    });
    assert!(none.is_none());
    assert_eq!(order(&mut queue, 0.0), [1, 2, 0, 3]);
}

#[test]
fn a_tenants_tokens_are_proportional_to_its_weight() {
    let of = |tenant, weight| (0..60).map(move |_| TurnFactors { tenant, weight, ..waiting(100, 0.0) });
    let mut queue = queue(of(1, 3.0).chain(of(2, 1.0)));
    let mut released = [0, 0];
    for _ in 0..60 {
        released[usize::from(queue.pop(0.0).unwrap().0.tenant == 2)] += 1;
    }
    assert_eq!(released, [45, 15]);
}

#[test]
fn a_tenant_is_charged_for_its_answers_too() {
    let of = |tenant, output| (0..40).map(move |_| TurnFactors { tenant, output_tokens: output, ..waiting(100, 0.0) });
    let mut queue = queue(of(1, 0).chain(of(2, 300)));
    let mut released = [0, 0];
    for _ in 0..40 {
        released[usize::from(queue.pop(0.0).unwrap().0.tenant == 2)] += 1;
    }
    assert_eq!(released, [32, 8]);
}

#[test]
fn a_tenant_is_charged_for_requests_that_never_waited() {
    let mut queue = queue([1, 2].map(|tenant| TurnFactors { tenant, ..waiting(100, 0.0) }));
    queue.record_unqueued(&TurnFactors { tenant: 1, ..waiting(5_000, 0.0) }, 0.0);
    assert_eq!(order(&mut queue, 0.0), [1, 0]);
}

#[test]
fn less_urgent_bands_always_get_a_tenth_of_the_tokens() {
    let urgent = (0..200).map(|_| TurnFactors { priority: -5, tenant: 1, ..waiting(100, 0.0) });
    let bands = (1..4).flat_map(|priority| (0..10).map(move |_| TurnFactors { priority, tenant: 1, ..waiting(100, 0.0) }));
    let mut queue = queue(urgent.chain(bands));
    let patient = (0..101).filter(|_| queue.pop(0.0).unwrap().0.priority > 0).count();
    assert_eq!(patient, 10);
}

#[test]
fn a_long_request_in_a_low_band_has_bounded_delay() {
    let long = TurnFactors { priority: 1, ..waiting(1_000_000, 0.0) };
    let mut queue = queue((0..90).map(|_| waiting(10_000, 0.0)).chain([long]));
    let order = order(&mut queue, 0.0);
    let turn = order.iter().position(|number| *number == 90);
    assert_eq!(turn, Some(59), "after 590,000 tokens, a ninth of which is more than is remembered");
}

#[test]
fn an_idle_band_accumulates_no_share() {
    let mut queue = queue((0..50).map(|_| waiting(1_000, 0.0)));
    for _ in 0..40 {
        queue.pop(0.0).unwrap();
    }
    queue.push(TurnFactors { priority: 1, ..waiting(100, 0.0) }, 99).unwrap();
    assert_eq!(queue.pop(0.0).unwrap().1, 40);
}

#[test]
fn one_tenants_blocked_requests_do_not_use_up_all_looks() {
    let flood = (0..100).map(|_| TurnFactors { tenant: 1, ..waiting(10, 0.0) });
    let mut queue = queue(flood.chain([TurnFactors { tenant: 2, ..waiting(900, 0.0) }]));
    let gone = queue.pop_where(0.0, 32, |_, number| *number == 100);
    assert_eq!(gone.map(|(_, number)| number), Some(100));
}

#[test]
fn a_flooding_tenant_leaves_room_for_others() {
    let mut places = SlotQuota::new(100, 1 << 20);
    let take = |places: &mut SlotQuota, tenant, weight| (0..1000).take_while(|_| places.reserve(tenant, weight, 1).is_ok()).count();
    assert_eq!(take(&mut places, 1, 1.0), 80, "four fifths");
    let second = take(&mut places, 2, 1.0);
    assert!((15..20).contains(&second), "{second}");
    assert_eq!(places.reserve(3, 1.0, 1), Ok(()), "who has none finds a place");
    assert_eq!(places.check(1, 1.0, 1), Err(QueueFull::Requests));
    for _ in 0..80 {
        places.release(1, 1);
    }
    assert!(take(&mut places, 2, 1.0) > 40, "what is free again is shared anew");
    assert!(places.queued() < 100);
}

#[test]
fn a_queue_bounds_bytes_as_well_as_requests() {
    let mut places = SlotQuota::new(100, 1_000);
    assert_eq!(places.reserve(1, 1.0, 1_001), Err(QueueFull::Bytes));
    assert_eq!(places.reserve(1, 1.0, 700), Ok(()));
    assert_eq!((places.check(1, 1.0, 301), places.check(2, 1.0, 300)), (Err(QueueFull::Bytes), Ok(())));
    places.release(1, 700);
    assert_eq!((places.queued_bytes(), places.queued()), (0, 0));
    assert_eq!(places.reserve(2, 1.0, 1_000), Ok(()));
}

proptest! {
    #[test]
    fn queue_slots_never_exceed_their_limit_and_all_return(
        acts in prop::collection::vec((0..6_u64, 0..40_u64, any::<bool>()), 0..300), most in 1..40_usize,
    ) {
        let mut places = SlotQuota::new(most, 500);
        let mut held: Vec<(u64, u64)> = Vec::new();
        for (tenant, bytes, comes) in acts {
            if comes {
                if places.reserve(tenant, 1.0, bytes).is_ok() {
                    held.push((tenant, bytes));
                } else if held.iter().all(|(of, _)| *of != tenant) {
                    let sum: u64 = held.iter().map(|(_, bytes)| bytes).sum();
                    prop_assert!(held.len() == most || sum + bytes > 500, "its first place was refused while one was free");
                }
            } else if let Some(at) = held.iter().position(|(of, _)| *of == tenant) {
                let (tenant, bytes) = held.swap_remove(at);
                places.release(tenant, bytes);
            }
            prop_assert_eq!(places.queued(), held.len() as u64);
            prop_assert_eq!(places.queued_bytes(), held.iter().map(|(_, bytes)| bytes).sum::<u64>());
            prop_assert!(held.len() <= most && places.queued_bytes() <= 500);
        }
    }

    #[test]
    fn waiting_tenants_stay_within_one_request_of_each_other(
        of in prop::collection::vec((0..4_usize, 1..500_u32, 0..200_u32), 40..160),
    ) {
        let mut queue = queue(of.iter().map(|&(tenant, uncached, output_tokens)| TurnFactors { tenant: tenant as u64, output_tokens, ..waiting(uncached, 0.0) }));
        let mut left = [0; 4];
        of.iter().for_each(|(tenant, ..)| left[*tenant] += 1);
        let mut released = [0.0_f64; 4];
        while left.iter().all(|count| *count > 0) {
            let (waiting, _) = queue.pop(0.0).unwrap();
            let tenant = usize::try_from(waiting.tenant).unwrap();
            left[tenant] -= 1;
            released[tenant] += waiting.tokens();
            let (least, most) = released.iter().fold((f64::MAX, 0.0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
            prop_assert!(most - least <= 700.0, "{:?}", released);
        }
    }
}
