//! Numbers between the bounds of a schema, for `document`.

use serde_json::{Map, Value};

use super::SchemaError;
use crate::tokens::Continuation;

/// Most numbers to choose from.
const SPREAD: usize = 100;

/// Bounds of a number.
pub(super) struct Range {
    low: Option<f64>,
    above: Option<f64>,
    high: Option<f64>,
    below: Option<f64>,
}

impl Range {
    pub(super) fn of(schema: &Map<String, Value>) -> Self {
        let bound = |key: &str| schema.get(key).and_then(Value::as_f64);
        Self { low: bound("minimum"), above: bound("exclusiveMinimum"), high: bound("maximum"), below: bound("exclusiveMaximum") }
    }

    fn has(&self, value: f64) -> bool {
        self.low.is_none_or(|low| value >= low)
            && self.above.is_none_or(|above| value > above)
            && self.high.is_none_or(|high| value <= high)
            && self.below.is_none_or(|below| value < below)
    }

    /// A multiple of `step` as near to zero as the range allows, or some more.
    pub(super) fn multiple(&self, step: f64, words: &mut Continuation) -> Option<f64> {
        let low = self.low.into_iter().chain(self.above).fold(f64::NEG_INFINITY, f64::max);
        let high = self.high.into_iter().chain(self.below).fold(f64::INFINITY, f64::min);
        let (start, end, step) =
            if high <= 0.0 { ((high / step).floor() * step, low, -step) } else { ((low.max(0.0) / step).ceil() * step, high, step) };
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the spread")]
        let room = ((end - start) / step).clamp(0.0, SPREAD as f64) as usize;
        #[expect(clippy::cast_precision_loss, reason = "the spread is small")]
        let possible = |count: usize| Some(start + step * count as f64).filter(|value| self.has(*value));
        // An exclusive bound forbids the first or the last number.
        possible(words.pick(room + 1)).or_else(|| possible(1)).or_else(|| possible(0))
    }

    pub(super) fn middle(&self) -> Option<f64> {
        let (low, high) = (self.low.or(self.above)?, self.high.or(self.below)?);
        Some(f64::midpoint(low, high)).filter(|value| self.has(*value))
    }

    pub(super) fn contradiction(&self) -> SchemaError {
        let shown = |bound: Option<f64>| bound.map_or("none".to_owned(), |bound| bound.to_string());
        let (low, high) = (shown(self.low.or(self.above)), shown(self.high.or(self.below)));
        SchemaError::unsatisfiable(&format!("minimum ({low}) is greater than maximum ({high})"))
    }
}
