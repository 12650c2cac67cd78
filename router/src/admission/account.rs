//! What those who share limits have used of them, and whether one more request fits. Pure arithmetic: the time is an argument.

use super::Estimate;
use super::bucket::Bucket;
use super::rates::{Rate, Rates};
use super::window::Window;
use crate::keys::Limits;

/// A caller whose requests all run may try again after this: nobody knows when the first of them ends.
const BUSY_WAIT: u64 = 1000;

/// A limit of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// The router's own, of requests in flight.
    Router,
    /// Of requests in flight.
    InFlight,
    /// Of requests per minute.
    Requests,
    /// Of prompt tokens per minute.
    Input,
    /// Of generated tokens per minute.
    Output,
    /// Of prompt tokens per day.
    DailyInput,
    /// Of generated tokens per day.
    DailyOutput,
}

/// Use of the limits that a caller has; of those that it has not, nothing is counted.
#[derive(Debug, Default)]
pub(super) struct Account {
    in_flight: u32,
    requests: Bucket,
    input: Bucket,
    output: Bucket,
    daily_input: Option<Box<Window>>,
    daily_output: Option<Box<Window>>,
}

/// Use of prompt tokens and of generated ones within a day.
#[derive(Debug)]
pub(super) struct Day(Option<Box<Window>>, Option<Box<Window>>);

impl Account {
    /// Counts a request that is expected to use so much.
    ///
    /// # Errors
    /// When it does not fit: the limit that is in its way for longest, and for how many milliseconds.
    pub(super) fn enter(&mut self, limits: &Limits, asked: &Estimate, now: u64) -> Result<(), (Limit, u64)> {
        let (input, output) = (asked.input, asked.output);
        let waits = [
            (Limit::InFlight, limits.in_flight.map_or(0, |most| if self.in_flight < most { 0 } else { BUSY_WAIT })),
            (Limit::Requests, limits.requests_per_minute.map_or(0, |limit| self.requests.wait(limit, 1, now))),
            (Limit::Input, limits.input_per_minute.map_or(0, |limit| self.input.wait(limit, input, now))),
            (Limit::Output, limits.output_per_minute.map_or(0, |limit| self.output.wait(limit, output, now))),
            (Limit::DailyInput, limits.input_per_day.map_or(0, |limit| window(&mut self.daily_input).wait(limit, input, now))),
            (Limit::DailyOutput, limits.output_per_day.map_or(0, |limit| window(&mut self.daily_output).wait(limit, output, now))),
        ];
        if let Some(longest) = waits.into_iter().filter(|(_, wait)| *wait > 0).max_by_key(|(_, wait)| *wait) {
            return Err(longest);
        }
        self.in_flight += 1;
        limits.requests_per_minute.inspect(|limit| self.requests.add(*limit, 1, now));
        limits.input_per_minute.inspect(|limit| self.input.add(*limit, input, now));
        limits.output_per_minute.inspect(|limit| self.output.add(*limit, output, now));
        limits.input_per_day.inspect(|_| window(&mut self.daily_input).add(input, now));
        limits.output_per_day.inspect(|_| window(&mut self.daily_output).add(output, now));
        Ok(())
    }

    /// A request that entered `then` as `asked` has used so many tokens.
    pub(super) fn correct(&mut self, limits: &Limits, (asked, then): (&Estimate, u64), (input, output): (u64, u64), now: u64) {
        limits.input_per_minute.inspect(|limit| self.input.correct(*limit, asked.input, input, now));
        limits.output_per_minute.inspect(|limit| self.output.correct(*limit, asked.output, output, now));
        limits.input_per_day.inspect(|_| window(&mut self.daily_input).correct(then, asked.input, input, now));
        limits.output_per_day.inspect(|_| window(&mut self.daily_output).correct(then, asked.output, output, now));
    }

    /// Its use within the last day.
    pub(super) fn day(&self) -> Day {
        Day(self.daily_input.clone(), self.daily_output.clone())
    }

    /// The limits of somebody who had used so much were changed to these. Limits may be changed back, so what is known here already counts once.
    pub(super) fn carry_on(&mut self, day: Day, now: u64) {
        for (own, before) in [(&mut self.daily_input, day.0), (&mut self.daily_output, day.1)] {
            if let Some(before) = before {
                window(own).carry_on(&before, now);
            }
        }
    }

    /// A request has ended.
    pub(super) fn leave(&mut self) {
        self.in_flight -= 1;
    }

    /// How its caller stands: of its limits of tokens, the one of which the smallest share is left.
    pub(super) fn rates(&mut self, limits: &Limits, now: u64) -> Rates {
        let rate = |limit: u64, (left, reset): (u64, u64)| Rate { limit, left, reset };
        let tokens = [
            limits.input_per_minute.map(|limit| rate(limit, self.input.left(limit, now))),
            limits.output_per_minute.map(|limit| rate(limit, self.output.left(limit, now))),
            limits.input_per_day.map(|limit| rate(limit, window(&mut self.daily_input).left(limit, now))),
            limits.output_per_day.map(|limit| rate(limit, window(&mut self.daily_output).left(limit, now))),
        ];
        Rates {
            requests: limits.requests_per_minute.map(|limit| rate(limit, self.requests.left(limit, now))),
            tokens: tokens.into_iter().flatten().reduce(Rate::scarcer),
        }
    }

    /// Whether nothing would be lost by forgetting it.
    pub(super) fn is_idle(&mut self, limits: &Limits, now: u64) -> bool {
        self.in_flight == 0
            && limits.requests_per_minute.is_none_or(|limit| self.requests.is_empty(limit, now))
            && limits.input_per_minute.is_none_or(|limit| self.input.is_empty(limit, now))
            && limits.output_per_minute.is_none_or(|limit| self.output.is_empty(limit, now))
            && self.daily_input.as_mut().is_none_or(|window| window.is_empty(now))
            && self.daily_output.as_mut().is_none_or(|window| window.is_empty(now))
    }
}

fn window(window: &mut Option<Box<Window>>) -> &mut Window {
    window.get_or_insert_default()
}
