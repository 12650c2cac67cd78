use std::time::Duration;

use http::HeaderMap;
use proptest::prelude::*;
use tokio::time::advance;

use super::account::Account;
use super::bucket::LeakyBucket;
use super::daily_window::DailyWindow;
use super::limits_in_use::LimitsInUse;
use super::rate_limits::RateLimit;
use super::*;

const MINUTE: u64 = 60_000;
const DAY: u64 = 24 * 60 * MINUTE;

fn caller(key: &str, tenant: &str, limits: KeyLimits) -> Caller {
    Caller { key: key.into(), limits: Arc::new(limits), ..Caller::anonymous(tenant.into()) }
}

fn estimate(prompt_tokens: u64, output_tokens: u64) -> UsageEstimate {
    UsageEstimate { prompt_tokens, output_tokens, ..UsageEstimate::default() }
}

async fn pass(seconds: f64) {
    advance(Duration::from_secs_f64(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_full_router_admits_again_when_a_permit_is_dropped() {
    let admission = Admission::new(2);
    let admit = || admission.admit(&Caller::anonymous("".into()), UsageEstimate::default());
    let (first, _second) = (admit().unwrap(), admit().unwrap());
    assert_eq!(admit().unwrap_err().limit, LimitKind::Router);
    drop(first);
    assert!(admit().is_ok());
    assert_eq!(admission.in_flight(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_caller_without_limits_leaves_nothing_behind() {
    let admission = Admission::new(10);
    let _permit = admission.admit(&caller("k", "t", KeyLimits { weight: Some(2.0), ..KeyLimits::default() }), estimate(5, 5)).unwrap();
    assert!(admission.0.accounts.lock().by_owner.is_empty());
    assert_eq!(admission.rate_limits(&Caller::anonymous("".into())), None);
}

#[tokio::test(start_paused = true)]
async fn a_tenant_that_floods_leaves_others_places() {
    let admission = Admission::new(100);
    let admit = |tenant| admission.admit(&caller("k", tenant, KeyLimits::default()), UsageEstimate::default());
    let flood: Vec<Permit> = std::iter::from_fn(|| admit("flood").ok()).collect();
    let refused = admit("flood").unwrap_err();
    assert_eq!((flood.len(), refused.limit, refused.retry_after), (80, LimitKind::Router, Some(1)));
    assert!(refused.message.contains("`flood`") && refused.message.contains("router.max_in_flight"), "{refused}");
    let other = admit("other").unwrap();
    drop((flood, other));
    assert_eq!((admission.in_flight(), admission.0.places.taken()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn in_flight_requests_are_limited_until_their_permits_drop() {
    let admission = Admission::new(10);
    let caller = caller("k", "", KeyLimits { in_flight: Some(2), ..KeyLimits::default() });
    let (first, second) = (admission.admit(&caller, estimate(1, 1)).unwrap(), admission.admit(&caller, estimate(1, 1)).unwrap());
    let refused = admission.admit(&caller, estimate(1, 1)).unwrap_err();
    assert_eq!((refused.limit, refused.retry_after), (LimitKind::InFlight, Some(1)));
    assert!(refused.message.contains("the key `k` may use 2 requests at once"), "{refused}");
    assert_eq!(admission.in_flight(), 2, "what was refused takes no place of the router's");
    drop(first);
    assert!(admission.admit(&caller, estimate(1, 1)).is_ok());
    drop(second);
    assert_eq!(admission.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn operators_see_the_limit_with_the_least_remaining() {
    let admission = Admission::new(10);
    let limits = KeyLimits { in_flight: Some(8), requests_per_minute: Some(4), ..KeyLimits::default() };
    let _permit = admission.admit(&caller("k", "team", limits), estimate(1, 1)).unwrap();
    let _other = admission.admit(&Caller::anonymous("".into()), estimate(1, 1)).unwrap();
    let used = admission.limits_in_use();
    assert_eq!(used, [LimitsInUse { name: "team".into(), in_flight: 1, share_left: 0.75 }], "who has no limits is not counted");
}

#[tokio::test(start_paused = true)]
async fn requests_per_minute_are_refilled_one_by_one() {
    let admission = Admission::new(10);
    let caller = caller("k", "", KeyLimits { requests_per_minute: Some(3), ..KeyLimits::default() });
    let admit = || admission.admit(&caller, estimate(1, 1));
    for _ in 0..3 {
        admit().unwrap();
    }
    let refused = admit().unwrap_err();
    assert_eq!((refused.limit, refused.retry_after), (LimitKind::Requests, Some(20)), "a third of a minute");
    pass(19.999).await;
    assert_eq!(admit().unwrap_err().retry_after, Some(1));
    pass(0.001).await;
    admit().unwrap();
    assert!(admit().is_err(), "one had come back");
    pass(60.0).await;
    assert_eq!(admission.rate_limits(&caller).unwrap().requests, Some(RateLimit { limit: 3, remaining: 3, reset_ms: 0 }));
}

#[tokio::test(start_paused = true)]
async fn tokens_are_reserved_and_corrected_when_the_answer_ends() {
    let admission = Admission::new(10);
    let limits = KeyLimits { input_per_minute: Some(6000), output_per_minute: Some(600), ..KeyLimits::default() };
    let caller = caller("k", "t", limits);
    let mut first = admission.admit(&caller, estimate(1000, 500)).unwrap();
    let refused = admission.admit(&caller, estimate(1000, 200)).unwrap_err();
    assert_eq!((refused.limit, refused.retry_after), (LimitKind::Output, Some(10)), "100 of 600 are missing");
    first.reconcile_usage(ActualUsage { prompt_tokens: Some(1500), output_tokens: OutputTokens::Exact(20) });
    assert_eq!(admission.rate_limits(&caller).unwrap().tokens, Some(RateLimit { limit: 6000, remaining: 4500, reset_ms: 15_000 }));
    drop(first);
    let mut second = admission.admit(&caller, estimate(4500, 580)).unwrap();
    second.reconcile_usage(ActualUsage { prompt_tokens: None, output_tokens: OutputTokens::Exact(1780) });
    let refused = admission.admit(&caller, estimate(0, 1)).unwrap_err();
    assert_eq!((refused.limit, refused.retry_after), (LimitKind::Output, Some(121)), "what was used beyond the limit is paid for too");
    // Usage reported twice counts once.
    second.reconcile_usage(ActualUsage { prompt_tokens: None, output_tokens: OutputTokens::Exact(1780) });
    assert_eq!(admission.admit(&caller, estimate(0, 1)).unwrap_err().retry_after, Some(121));
}

#[tokio::test(start_paused = true)]
async fn an_unreconciled_reservation_stays_counted() {
    let admission = Admission::new(10);
    let caller = caller("k", "t", KeyLimits { output_per_minute: Some(600), ..KeyLimits::default() });
    drop(admission.admit(&caller, estimate(0, 300)).unwrap());
    assert_eq!(admission.rate_limits(&caller).unwrap().tokens, Some(RateLimit { limit: 600, remaining: 300, reset_ms: 30_000 }));
}

#[tokio::test(start_paused = true)]
async fn a_partly_seen_answer_costs_at_least_its_reservation() {
    let admission = Admission::new(10);
    let caller = caller("k", "t", KeyLimits { output_per_day: Some(1000), ..KeyLimits::default() });
    let left = || admission.rate_limits(&caller).unwrap().tokens.unwrap().remaining;
    let mut permit = admission.admit(&caller, estimate(0, 300)).unwrap();
    permit.reconcile_usage(ActualUsage { prompt_tokens: None, output_tokens: OutputTokens::AtLeast(7) });
    assert_eq!(left(), 700);
    permit.reconcile_usage(ActualUsage { prompt_tokens: None, output_tokens: OutputTokens::AtLeast(400) });
    assert_eq!(left(), 600);
}

#[tokio::test(start_paused = true)]
async fn a_request_above_a_minutes_limit_is_admitted_when_idle() {
    let admission = Admission::new(10);
    let caller = caller("k", "t", KeyLimits { input_per_minute: Some(100), ..KeyLimits::default() });
    drop(admission.admit(&caller, estimate(1, 0)).unwrap());
    assert_eq!(admission.admit(&caller, estimate(500, 0)).unwrap_err().retry_after, Some(1));
    pass(0.6).await;
    drop(admission.admit(&caller, estimate(500, 0)).unwrap());
    assert_eq!(admission.admit(&caller, estimate(1, 0)).unwrap_err().retry_after, Some(241));
}

#[tokio::test(start_paused = true)]
async fn a_daily_budget_is_not_refilled_before_its_time() {
    let admission = Admission::new(10);
    let caller = caller("k", "t", KeyLimits { output_per_day: Some(1000), ..KeyLimits::default() });
    let mut permit = admission.admit(&caller, estimate(0, 900)).unwrap();
    permit.reconcile_usage(ActualUsage { prompt_tokens: None, output_tokens: OutputTokens::Exact(1000) });
    drop(permit);
    pass(23.0 * 3600.0).await;
    let refused = admission.admit(&caller, estimate(0, 1)).unwrap_err();
    assert!(refused.is_quota && refused.message.contains("1000 generated tokens per day, which are used up"), "{refused}");
    assert_eq!(refused.retry_after, Some(3600));
    pass(3600.0).await;
    assert!(admission.admit(&caller, estimate(0, 1000)).is_ok());
}

/// A request whose answer is expected to have 200 tokens, or its limit if that is less.
fn capped(max_tokens: u64) -> UsageEstimate {
    UsageEstimate { max_output_tokens: Some(max_tokens), ..estimate(0, max_tokens.min(200)) }
}

#[tokio::test(start_paused = true)]
async fn a_daily_budget_reserves_the_longest_possible_answer() {
    let admission = Admission::new(10);
    let caller = caller("k", "t", KeyLimits { output_per_day: Some(1000), ..KeyLimits::default() });
    let mut first = admission.admit(&caller, capped(900)).unwrap();
    let left = || admission.rate_limits(&caller).unwrap().tokens.unwrap().remaining;
    assert_eq!(left(), 100);
    let soon = admission.admit(&caller, capped(101)).unwrap_err();
    assert_eq!((soon.is_quota, soon.retry_after), (false, Some(1)), "what the first one does not use comes back when it ends");
    assert!(soon.message.contains("of which 100 are left and 900 are reserved by requests in flight, and this reserves 101"), "{soon}");
    first.reconcile_usage(ActualUsage { prompt_tokens: None, output_tokens: OutputTokens::Exact(150) });
    drop(first);
    assert_eq!(left(), 850);

    let never = admission.admit(&caller, capped(2000)).unwrap_err();
    assert_eq!((never.limit, never.is_quota, never.retry_after), (LimitKind::DailyOutput, true, None), "{never}");
    assert!(
        never.message.ends_with(
            "`t` may use 1000 generated tokens per day, of which 850 are left, and this reserves 2000; a smaller `max_tokens` would do"
        ),
        "{never}"
    );
    let tomorrow = admission.admit(&caller, capped(900)).unwrap_err();
    assert_eq!((tomorrow.is_quota, tomorrow.retry_after), (true, Some(24 * 3600)));
    assert!(tomorrow.message.ends_with("a smaller `max_tokens` would do; try again in 86400 s"), "{tomorrow}");
    let _running = admission.admit(&caller, capped(850)).unwrap();
    assert_eq!(left(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_usage_costs_its_expected_length() {
    let admission = Admission::new(10);
    let caller = caller("k", "t", KeyLimits { output_per_day: Some(1000), ..KeyLimits::default() });
    let left = || admission.rate_limits(&caller).unwrap().tokens.unwrap().remaining;
    drop(admission.admit(&caller, capped(900)).unwrap());
    assert_eq!(left(), 800, "it was dropped");
    let mut seen = admission.admit(&caller, capped(700)).unwrap();
    seen.reconcile_usage(ActualUsage { prompt_tokens: None, output_tokens: OutputTokens::AtLeast(7) });
    assert_eq!(left(), 600);
    drop(seen);
    assert_eq!(left(), 600);
    let used_up = admission.admit(&caller, capped(700)).unwrap_err();
    assert!(used_up.is_quota && !used_up.message.contains("in flight"), "{used_up}");
}

#[tokio::test(start_paused = true)]
async fn a_tenants_keys_share_only_equal_limits() {
    let admission = Admission::new(10);
    let limits = || KeyLimits { requests_per_minute: Some(1), ..KeyLimits::default() };
    drop(admission.admit(&caller("old", "t", limits()), estimate(0, 0)).unwrap());
    assert!(admission.admit(&caller("new", "t", limits()), estimate(0, 0)).is_err(), "one budget for a key and its successor");
    assert!(admission.admit(&caller("old", "other", limits()), estimate(0, 0)).is_ok());
    let own = KeyLimits { requests_per_minute: Some(2), ..KeyLimits::default() };
    assert!(admission.admit(&caller("third", "t", own), estimate(0, 0)).is_ok());
    assert!(admission.admit(&caller("a", "", limits()), estimate(0, 0)).is_ok(), "without a tenant the key counts");
    assert!(admission.admit(&caller("b", "", limits()), estimate(0, 0)).is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_use_of_a_daily_budget_survives_changed_limits() {
    let admission = Admission::new(10);
    let daily = |most: u64, a_minute| {
        caller("k", "t", KeyLimits { output_per_day: Some(most), requests_per_minute: a_minute, ..KeyLimits::default() })
    };
    let left = |caller: &Caller| admission.rate_limits(caller).unwrap().tokens.unwrap().remaining;
    drop(admission.admit(&daily(1000, None), estimate(0, 400)).unwrap());
    pass(3600.0).await;
    assert_eq!(left(&daily(1500, None)), 1100);
    drop(admission.admit(&daily(1500, Some(60)), estimate(0, 300)).unwrap());
    assert_eq!(left(&daily(1500, None)), 800);
    assert_eq!(left(&daily(1000, None)), 300, "changed back, each counts once");
    drop(admission.admit(&caller("k", "t", KeyLimits { in_flight: Some(1), ..KeyLimits::default() }), estimate(0, 50)).unwrap());
    assert_eq!(left(&daily(900, None)), 200, "while there was no such limit nothing was counted, and nothing lost");
    assert!(admission.admit(&daily(600, None), estimate(0, 1)).unwrap_err().is_quota);
    assert_eq!(
        left(&caller("other", "t", KeyLimits { output_per_day: Some(20), ..KeyLimits::default() })),
        20,
        "another key's own limits are its own"
    );
    let own = caller("k", "t", KeyLimits { output_per_day: Some(2000), requests_per_minute: Some(7), ..KeyLimits::default() });
    assert_eq!(left(&own), 1300, "a key that gets limits of its own begins with what those who shared its former ones had used");
    let moved = |tenant| caller("k", tenant, KeyLimits { output_per_day: Some(900), ..KeyLimits::default() });
    assert_eq!(left(&moved("u")), 900, "a tenant does not pay for what another has used");
    pass(23.0 * 3600.0).await;
    assert_eq!(left(&daily(900, None)), 600, "the first hour is a day ago");
    pass(3600.0).await;
    assert_eq!(left(&daily(800, None)), 800);
}

#[tokio::test(start_paused = true)]
async fn idle_callers_are_forgotten_and_busy_ones_kept() {
    let admission = Admission::new(1000);
    let limits = || KeyLimits { requests_per_minute: Some(100), in_flight: Some(1), ..KeyLimits::default() };
    let stays = admission.admit(&caller("stays", "", limits()), estimate(0, 0)).unwrap();
    for number in 0..100 {
        drop(admission.admit(&caller(&format!("k{number}"), "", limits()), estimate(0, 0)).unwrap());
    }
    assert_eq!(admission.0.accounts.lock().by_owner.len(), 101);
    pass(61.0).await;
    drop(admission.admit(&caller("new", "", limits()), estimate(0, 0)).unwrap());
    assert_eq!(admission.0.accounts.lock().by_owner.len(), 2);
    assert!(admission.admit(&caller("stays", "", limits()), estimate(0, 0)).is_err(), "its request still runs");
    drop(stays);
    assert!(admission.admit(&caller("stays", "", limits()), estimate(0, 0)).is_ok());
}

#[test]
fn a_refusal_names_the_longest_of_several_waits() {
    let limits = KeyLimits { requests_per_minute: Some(60), input_per_minute: Some(60), input_per_day: Some(90), ..KeyLimits::default() };
    let mut account = Account::default();
    account.reserve(&limits, &estimate(60, 0), 0).unwrap();
    account.release(&estimate(60, 0));
    let mut hit = |tokens| account.reserve(&limits, &estimate(tokens, 0), 0).map_err(|hit| (hit.limit, hit.wait_ms));
    assert_eq!(hit(30), Err((LimitKind::Input, Some(MINUTE / 2))));
    assert_eq!(hit(31), Err((LimitKind::DailyInput, Some(DAY))));
    assert_eq!(hit(91), Err((LimitKind::DailyInput, None)), "which never fits");
    account.reserve(&limits, &estimate(30, 0), MINUTE / 2).unwrap();
}

#[test]
fn a_limit_of_zero_admits_nothing() {
    let mut account = Account::default();
    for limits in [
        KeyLimits { in_flight: Some(0), ..KeyLimits::default() },
        KeyLimits { requests_per_minute: Some(0), ..KeyLimits::default() },
        KeyLimits { input_per_minute: Some(0), ..KeyLimits::default() },
        KeyLimits { output_per_day: Some(0), ..KeyLimits::default() },
    ] {
        assert!(account.reserve(&limits, &estimate(1, 1), 5).is_err(), "{limits:?}");
        account.rate_limits(&limits, 5);
    }
}

#[test]
fn rate_limit_headers_match_openais() {
    let requests = RateLimit { limit: 60, remaining: 59, reset_ms: 1000 };
    let tokens = RateLimit { limit: 150_000, remaining: 149_984, reset_ms: 6 };
    let mut headers = HeaderMap::new();
    RateLimits { requests: Some(requests), tokens: Some(tokens) }.write_headers(&mut headers);
    let mut lines: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    lines.sort();
    assert_eq!(
        lines,
        [
            "x-ratelimit-limit-requests: 60",
            "x-ratelimit-limit-tokens: 150000",
            "x-ratelimit-remaining-requests: 59",
            "x-ratelimit-remaining-tokens: 149984",
            "x-ratelimit-reset-requests: 1s",
            "x-ratelimit-reset-tokens: 6ms",
        ]
    );
    let reset = |milliseconds| {
        let mut headers = HeaderMap::new();
        RateLimits { requests: Some(RateLimit { reset_ms: milliseconds, ..requests }), tokens: None }.write_headers(&mut headers);
        assert_eq!(headers.len(), 3);
        headers["x-ratelimit-reset-requests"].to_str().unwrap().to_owned()
    };
    assert_eq!([0, 999, 1500, 360_000, 3_600_000, 86_399_010].map(reset), ["0ms", "999ms", "1.5s", "6m0s", "1h0m0s", "23h59m59.01s"]);
}

#[test]
fn the_scarcest_token_limit_is_reported() {
    let limits = KeyLimits { input_per_minute: Some(1000), output_per_day: Some(1_000_000), ..KeyLimits::default() };
    let mut account = Account::default();
    account.reserve(&limits, &estimate(100, 50_000), 0).unwrap();
    assert_eq!(account.rate_limits(&limits, 0).tokens.unwrap().limit, 1000);
    account.reserve(&limits, &estimate(0, 100_000), 0).unwrap();
    assert_eq!(account.rate_limits(&limits, 0).tokens, Some(RateLimit { limit: 1_000_000, remaining: 850_000, reset_ms: DAY }));
}

proptest! {
    /// However requests come, a limit per minute admits at most the limit and the amount that
    /// drains meanwhile.
    #[test]
    fn a_bucket_admits_no_more_than_its_rate(limit in 1..500_u64, comes in prop::collection::vec((0..5000_u64, 1..60_u64), 1..200)) {
        let mut bucket = LeakyBucket::default();
        let mut let_in: Vec<(u64, u64)> = Vec::new();
        let mut now = 0;
        for (pause, amount) in comes {
            now += pause;
            let amount = amount.min(limit);
            let wait = bucket.wait_ms(limit, amount, now);
            if wait == 0 {
                bucket.add(limit, amount, now);
                let_in.push((now, amount));
            } else {
                prop_assert!(bucket.wait_ms(limit, amount, now + wait - 1) > 0 && bucket.wait_ms(limit, amount, now + wait) == 0);
                // Both checks drained the bucket up to `now + wait`.
                now += wait;
            }
        }
        for begin in 0..let_in.len() {
            let mut sum = 0;
            for &(at, amount) in &let_in[begin..] {
                sum += amount;
                prop_assert!(sum * MINUTE <= limit * (MINUTE + at - let_in[begin].0), "{} within {} ms", sum, at - let_in[begin].0);
            }
        }
    }

    /// A daily budget admits no more than that within any 23 3/4 hours.
    #[test]
    fn a_window_admits_no_more_than_its_daily_limit(
        limit in 1..500_u64, comes in prop::collection::vec((0..DAY / 6, 1..200_u64, 0..200_u64), 1..100),
    ) {
        let mut window = DailyWindow::default();
        let mut let_in: Vec<(u64, u64)> = Vec::new();
        let mut now = 0;
        for (pause, amount, used) in comes {
            now += pause;
            let wait = window.wait_ms(limit, amount, now);
            if wait == 0 {
                window.reserve(amount, now);
                let used = used.min(amount);
                window.reconcile(now, amount, used, now);
                window.release(used);
                let_in.push((now, used));
            } else {
                prop_assert!(amount > limit || wait < DAY);
            }
            let lately = |age: u64| let_in.iter().filter(|(at, _)| at + age > now).map(|(_, used)| used).sum::<u64>();
            prop_assert!(lately(DAY - DAY / 96) <= limit);
            let (left, _) = window.remaining(limit, now);
            prop_assert!(limit - left >= lately(DAY - DAY / 96) && limit - left <= lately(DAY + 1));
        }
        prop_assert!(window.is_empty(now + DAY));
        prop_assert_eq!(window.remaining(limit, now + DAY), (limit, 0));
    }
}
