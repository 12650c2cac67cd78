//! What a placement's outcome teaches: how fast the replica is, how long answers are, how good the prediction was. Follows one placed
//! request until its answer has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hostler_placement::affinity::Seat;
use hostler_placement::keys::Key;
use hostler_placement::rates::FirstToken;
use tokio::time::Instant;

use super::{Placer, Prompt, Record};
use crate::dispatch::Usage;
use crate::fleet::{InFlight, Own};

/// Tokens of an answer of which nothing is known.
const USUAL_OUTPUT: f64 = 256.0;

/// How much one answer moves the mean length.
const OUTPUT_WEIGHT: f64 = 0.02;

/// The mean length of answers.
#[derive(Debug)]
pub(super) struct Outputs(AtomicU64);

impl Default for Outputs {
    fn default() -> Self {
        Self(AtomicU64::new(USUAL_OUTPUT.to_bits()))
    }
}

impl Outputs {
    /// Tokens that an answer of at most `most` is expected to have.
    #[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
    pub(super) fn expected(&self, most: Option<u64>) -> f64 {
        let mean = f64::from_bits(self.0.load(Ordering::Relaxed));
        most.map_or(mean, |most| mean.min(most as f64))
    }

    /// An answer had this many tokens. Two at the same moment may count as one.
    fn seen(&self, tokens: f64) {
        let mean = f64::from_bits(self.0.load(Ordering::Relaxed));
        self.0.store((mean + OUTPUT_WEIGHT * (tokens - mean)).to_bits(), Ordering::Relaxed);
    }
}

/// A placed request, from its dispatch to the end of its answer.
#[derive(Debug)]
pub struct Placed {
    placer: Arc<Placer>,
    record: Arc<Record>,
    own: Arc<Own>,
    /// Where its text was noted, if its tokens are not known.
    guessed: Option<(Seat, Arc<[Key]>)>,
    sent: Instant,
    first: Option<Instant>,
    /// Sequences and their tokens when the answer began.
    among: (u32, u64),
    streams: bool,
    /// Its tokens are known well enough to learn from.
    teaches: bool,
    /// Tokens that its answer may have.
    most_output: Option<u64>,
}

impl Placed {
    /// Follows the request of `record`, which was just counted by `in_flight`; `guessed` is where its text was noted.
    #[must_use]
    pub fn new(placer: &Arc<Placer>, prompt: &Prompt, record: Arc<Record>, in_flight: &InFlight, guessed: Option<Seat>) -> Self {
        Self {
            placer: placer.clone(),
            record,
            own: in_flight.own().clone(),
            guessed: guessed.map(|seat| (seat, prompt.text_keys().clone())),
            sent: Instant::now(),
            first: None,
            among: (0, 0),
            streams: prompt.streams(),
            teaches: !prompt.is_estimate(),
            most_output: prompt.most_output(),
        }
    }

    /// The first byte of a good answer's body has come.
    pub fn began(&mut self) {
        let now = Instant::now();
        self.first = Some(now);
        let took = now.duration_since(self.sent).as_secs_f64();
        self.among = (self.own.in_flight(), self.own.context());
        // A plain answer begins when it is complete.
        if !self.streams {
            return;
        }
        let choice = self.record.decision.choice();
        if self.teaches {
            self.own.learn_first_token(&FirstToken {
                predicted: choice.terms.first_token(),
                took,
                uncached: choice.uncached,
                matched: choice.candidate.matched,
                pending: choice.candidate.pending,
                in_flight: choice.candidate.in_flight,
            });
        }
        self.placer.metrics.first_token(choice.terms.first_token(), took);
        self.record.outcome.lock().first_token = Some(took);
    }

    /// What was generated has ended whole, after `events` of a stream, of an engine that takes so long a `context`. All callers share what is
    /// learned of lengths, so only `one` answer teaches, and no more than it could have.
    #[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
    pub fn ended(&self, usage: Option<Usage>, events: u64, context: u64, one: bool) {
        let completion = usage.map_or(events, |usage| usage.completion);
        let seen = completion.min(context).min(self.most_output.unwrap_or(u64::MAX));
        if seen > 0 && one {
            self.placer.outputs.seen(seen as f64);
        }
        if let Some(first) = self.first.filter(|_| self.streams && completion > 2) {
            let interval = first.elapsed().as_secs_f64() / (completion - 1) as f64;
            let sequences = u32::midpoint(self.among.0, self.own.in_flight()).max(1);
            self.own.learn_interval(sequences, u64::midpoint(self.among.1, self.own.context()), interval);
        }
        let Some(cached) = usage.and_then(|usage| usage.cached) else { return };
        let cached_tokens = u32::try_from(cached).unwrap_or(u32::MAX);
        let predicted = self.record.decision.choice().candidate.matched;
        self.placer.metrics.cached(self.record.level, predicted, cached_tokens);
        if let Some((seat, keys)) = &self.guessed {
            // In the unit of the guess, whose tokens are only estimated.
            let cached = scaled(self.record.tokens, cached, usage.map_or(1, |usage| usage.prompt));
            self.placer.correct_guess(*seat, keys, predicted, cached);
        }
        self.record.outcome.lock().cached = Some(cached_tokens);
    }
}

/// The part of `tokens` that `cached` is of `prompt`, which is an engine's word.
fn scaled(tokens: u32, cached: u64, prompt: u64) -> u32 {
    let part = u128::from(tokens) * u128::from(cached) / u128::from(prompt.max(1));
    u32::try_from(part).map_or(tokens, |part| part.min(tokens))
}

#[cfg(test)]
mod tests;
