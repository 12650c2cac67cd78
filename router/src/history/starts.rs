//! How soon streams have begun, and how fast they went on, by the step in which they were sent.

use std::sync::Arc;

use hostler_proto::fleet::v1::FirstTokens;
use rustc_hash::FxHashMap;

use super::{Hour, OPEN_STEPS};

/// A stream that has begun.
#[derive(Debug, Clone)]
pub(crate) struct StreamStart {
    /// When it was sent, in milliseconds since 1970.
    pub(crate) sent_at: u64,
    pub(crate) replica: Arc<str>,
    /// Seconds until its first token.
    pub(crate) first_token: f64,
    /// Seconds between two of its tokens, once it is complete.
    pub(crate) between_tokens: Option<f64>,
}

impl Hour {
    /// Updates the latest steps, in which streams were sent that have begun since.
    pub(super) fn look_at_starts(&mut self, starts: &[StreamStart]) {
        let open = self.fleet.len().saturating_sub(OPEN_STEPS);
        for index in open..self.fleet.len() {
            let from = index.checked_sub(1).map_or(0, |before| self.fleet[before].at);
            let window = from..self.fleet[index].at;
            let sent: Vec<&StreamStart> = starts.iter().filter(|start| window.contains(&start.sent_at)).collect();
            let Some(first_tokens) = first_token_quantiles(sent.iter().map(|start| start.first_token).collect()) else { continue };
            let step = &mut self.fleet[index];
            // If the router has meanwhile forgotten some of these streams, its earlier figures knew
            // more.
            if step.first_tokens.is_some_and(|known| known.streams > first_tokens.streams) {
                continue;
            }
            step.first_tokens = Some(first_tokens);
            step.between_tokens = median(sent.iter().filter_map(|start| start.between_tokens).collect());
            let mut by_replica: FxHashMap<&str, Vec<&StreamStart>> = FxHashMap::default();
            sent.iter().for_each(|start| by_replica.entry(&start.replica).or_default().push(start));
            for (replica, sent) in by_replica {
                let Some(step) = self.replicas.step_mut(replica, self.fleet.len() - 1 - index) else { continue };
                step.first_token = narrow(median(sent.iter().map(|start| start.first_token).collect()));
                step.between_tokens = narrow(median(sent.iter().filter_map(|start| start.between_tokens).collect()));
            }
        }
    }
}

#[allow(clippy::cast_possible_truncation, reason = "seconds for a chart")]
fn narrow(seconds: Option<f64>) -> f32 {
    seconds.map_or(f32::NAN, |seconds| seconds as f32)
}

fn median(times: Vec<f64>) -> Option<f64> {
    first_token_quantiles(times).map(|of| of.p50)
}

/// Quantiles by nearest rank: each one is a time that was measured.
pub(crate) fn first_token_quantiles(mut times: Vec<f64>) -> Option<FirstTokens> {
    times.sort_by(f64::total_cmp);
    let streams = u32::try_from(times.len()).unwrap_or(u32::MAX);
    Some(FirstTokens { streams, p50: nearest_rank(&times, 50)?, p99: nearest_rank(&times, 99)? })
}

/// The least of these ascending values that so many percent do not exceed.
pub(crate) fn nearest_rank(sorted: &[f64], percent: usize) -> Option<f64> {
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied()
}
