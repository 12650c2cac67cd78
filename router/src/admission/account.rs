//! Tracks the use of shared limits, and decides whether one more request fits. Pure arithmetic,
//! with time as an argument.

use serde::{Deserialize, Serialize};

use super::UsageEstimate;
use super::bucket::LeakyBucket;
use super::daily_window::DailyWindow;
use super::rate_limits::{RateLimit, RateLimits};
use crate::keys::KeyLimits;

/// When a caller at its limit of requests in flight may retry. Nobody knows when the first of them
/// ends.
const IN_FLIGHT_RETRY_MS: u64 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LimitKind {
    /// The router's own limit of requests in flight.
    Router,
    /// The caller's requests in flight.
    InFlight,
    /// Requests per minute.
    Requests,
    /// Prompt tokens per minute.
    Input,
    /// Generated tokens per minute.
    Output,
    /// Prompt tokens per day.
    DailyInput,
    /// Generated tokens per day.
    DailyOutput,
}

impl LimitKind {
    /// The limits that keys have.
    pub(super) const OF_CALLERS: [Self; 6] =
        [Self::InFlight, Self::Requests, Self::Input, Self::Output, Self::DailyInput, Self::DailyOutput];

    /// The name of the limit in the key file.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::InFlight => "in_flight",
            Self::Requests => "requests_per_minute",
            Self::Input => "input_per_minute",
            Self::Output => "output_per_minute",
            Self::DailyInput => "input_per_day",
            Self::DailyOutput => "output_per_day",
        }
    }
}

/// A limit that a request does not fit into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LimitHit {
    pub(super) limit: LimitKind,
    /// Milliseconds until the request fits, during which requests in flight may return part of
    /// their reservations. `None` if it never fits.
    pub(super) wait_ms: Option<u64>,
    /// The rest of a daily budget.
    pub(super) left: u64,
    /// The part of a daily budget that requests in flight have reserved.
    pub(super) reserved: u64,
}

impl LimitHit {
    /// Whether too little of a daily budget is left, even if requests in flight return all that
    /// they have reserved.
    pub(super) fn is_quota(&self, amount: u64) -> bool {
        matches!(self.limit, LimitKind::DailyInput | LimitKind::DailyOutput) && amount > self.left.saturating_add(self.reserved)
    }
}

/// A caller's use of its limits. Nothing else is counted.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Account {
    in_flight: u32,
    requests: LeakyBucket,
    input: LeakyBucket,
    output: LeakyBucket,
    daily_input: Option<Box<DailyWindow>>,
    daily_output: Option<Box<DailyWindow>>,
}

/// Prompt tokens and generated tokens of the last day.
#[derive(Debug)]
pub(super) struct DailyUsage(Option<Box<DailyWindow>>, Option<Box<DailyWindow>>);

impl Account {
    /// Counts a request with this expected usage.
    ///
    /// # Errors
    /// If the request does not fit: the limit that blocks it for longest.
    pub(super) fn reserve(&mut self, limits: &KeyLimits, estimate: &UsageEstimate, now: u64) -> Result<(), LimitHit> {
        let (input, output, most_output) = (estimate.prompt_tokens, estimate.output_tokens, estimate.most_output_tokens());
        let hit = |(limit, wait)| (wait > 0).then_some(LimitHit { limit, wait_ms: Some(wait), left: 0, reserved: 0 });
        let rates = [
            (LimitKind::InFlight, limits.in_flight.map_or(0, |most| if self.in_flight < most { 0 } else { IN_FLIGHT_RETRY_MS })),
            (LimitKind::Requests, limits.requests_per_minute.map_or(0, |limit| self.requests.wait_ms(limit, 1, now))),
            (LimitKind::Input, limits.input_per_minute.map_or(0, |limit| self.input.wait_ms(limit, input, now))),
            (LimitKind::Output, limits.output_per_minute.map_or(0, |limit| self.output.wait_ms(limit, output, now))),
        ];
        let days = [
            (LimitKind::DailyInput, limits.input_per_day, &mut self.daily_input, input),
            (LimitKind::DailyOutput, limits.output_per_day, &mut self.daily_output, most_output),
        ];
        let daily_hit =
            |(kind, limit, window, amount): (_, Option<u64>, _, _)| check_day(kind, limit?, window_or_default(window), amount, now);
        let hits = rates.into_iter().filter_map(hit).chain(days.into_iter().filter_map(daily_hit));
        if let Some(longest) = hits.max_by_key(|hit| hit.wait_ms.unwrap_or(u64::MAX)) {
            return Err(longest);
        }
        self.add(limits, estimate, now);
        Ok(())
    }

    /// Counts a request whether it fits or not.
    pub(super) fn add(&mut self, limits: &KeyLimits, estimate: &UsageEstimate, now: u64) {
        let (input, output, most_output) = (estimate.prompt_tokens, estimate.output_tokens, estimate.most_output_tokens());
        self.in_flight = self.in_flight.saturating_add(1);
        limits.requests_per_minute.inspect(|limit| self.requests.add(*limit, 1, now));
        limits.input_per_minute.inspect(|limit| self.input.add(*limit, input, now));
        limits.output_per_minute.inspect(|limit| self.output.add(*limit, output, now));
        limits.input_per_day.inspect(|_| window_or_default(&mut self.daily_input).reserve(input, now));
        limits.output_per_day.inspect(|_| window_or_default(&mut self.daily_output).reserve(most_output, now));
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Replaces the estimate of a request that entered at `then` by its actual tokens.
    pub(super) fn reconcile(&mut self, limits: &KeyLimits, (estimate, then): (&UsageEstimate, u64), (input, output): (u64, u64), now: u64) {
        limits.input_per_minute.inspect(|limit| self.input.reconcile(*limit, estimate.prompt_tokens, input, now));
        limits.output_per_minute.inspect(|limit| self.output.reconcile(*limit, estimate.output_tokens, output, now));
        limits.input_per_day.inspect(|_| window_or_default(&mut self.daily_input).reconcile(then, estimate.prompt_tokens, input, now));
        limits
            .output_per_day
            .inspect(|_| window_or_default(&mut self.daily_output).reconcile(then, estimate.most_output_tokens(), output, now));
    }

    pub(super) fn daily_usage(&self) -> DailyUsage {
        DailyUsage(self.daily_input.clone(), self.daily_output.clone())
    }

    /// Carries use over when a caller's limits change. They may change back, so use that is already
    /// known here counts once.
    pub(super) fn carry_over(&mut self, day: DailyUsage, now: u64) {
        for (own, before) in [(&mut self.daily_input, day.0), (&mut self.daily_output, day.1)] {
            if let Some(before) = before {
                window_or_default(own).merge(&before, now);
            }
        }
    }

    /// Releases a request that has ended and was last counted as `estimate`.
    pub(super) fn release(&mut self, estimate: &UsageEstimate) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.daily_input.iter_mut().for_each(|window| window.release(estimate.prompt_tokens));
        self.daily_output.iter_mut().for_each(|window| window.release(estimate.most_output_tokens()));
    }

    /// The caller's rate limits. Of its token limits, the one with the smallest share left.
    pub(super) fn rate_limits(&mut self, limits: &KeyLimits, now: u64) -> RateLimits {
        let rate = |limit: u64, (remaining, reset_ms): (u64, u64)| RateLimit { limit, remaining, reset_ms };
        let tokens = [
            limits.input_per_minute.map(|limit| rate(limit, self.input.remaining(limit, now))),
            limits.output_per_minute.map(|limit| rate(limit, self.output.remaining(limit, now))),
            limits.input_per_day.map(|limit| rate(limit, window_or_default(&mut self.daily_input).remaining(limit, now))),
            limits.output_per_day.map(|limit| rate(limit, window_or_default(&mut self.daily_output).remaining(limit, now))),
        ];
        RateLimits {
            requests: limits.requests_per_minute.map(|limit| rate(limit, self.requests.remaining(limit, now))),
            tokens: tokens.into_iter().flatten().reduce(RateLimit::min_by_share),
        }
    }

    /// Whether forgetting the account would lose nothing.
    pub(super) fn is_idle(&mut self, limits: &KeyLimits, now: u64) -> bool {
        self.in_flight == 0
            && limits.requests_per_minute.is_none_or(|limit| self.requests.is_empty(limit, now))
            && limits.input_per_minute.is_none_or(|limit| self.input.is_empty(limit, now))
            && limits.output_per_minute.is_none_or(|limit| self.output.is_empty(limit, now))
            && self.daily_input.as_mut().is_none_or(|window| window.is_empty(now))
            && self.daily_output.as_mut().is_none_or(|window| window.is_empty(now))
    }
}

/// Why `amount` does not fit into a daily budget, if it does not.
fn check_day(kind: LimitKind, limit: u64, window: &mut DailyWindow, amount: u64, now: u64) -> Option<LimitHit> {
    let wait = window.wait_ms(limit, amount, now);
    let (left, _) = window.remaining(limit, now);
    let hit = LimitHit { limit: kind, wait_ms: (amount <= limit).then_some(wait), left, reserved: window.reserved() };
    match wait {
        0 => None,
        _ if hit.is_quota(amount) => Some(hit),
        _ => Some(LimitHit { wait_ms: Some(IN_FLIGHT_RETRY_MS), ..hit }),
    }
}

fn window_or_default(window: &mut Option<Box<DailyWindow>>) -> &mut DailyWindow {
    window.get_or_insert_default()
}
