//! Workload of a target: a scenario's conversations, one after another, each decided only by a seed
//! and its number.
//!
//! So every target meets the same load, and a load can be repeated. The `drive` takes conversations
//! from here as they are due, or as clients become free.

mod draw;
mod scenario;
mod text;
mod trace;

use std::sync::Arc;
use std::time::Duration;

use draw::{Draw, Purpose, Zipf};
pub use hostler_simulate::TraceError;
use scenario::Lengths;
pub use scenario::{Description, Scenario, Shape};
use trace::{Trace, prompt};

use crate::session::{Session, Turn};

/// Seed of everything random.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seed {
    /// Seed of when conversations begin, how long they are, and their groups.
    ///
    /// It is equal for all targets that are compared.
    pub shape: u64,
    /// Seed of the words.
    ///
    /// Loads of the same shape with other words share nothing in a cache. So no target profits from
    /// blocks that another target over the same engines, or its own last round, has left there.
    pub words: u64,
}

/// Conversations of a scenario, in the order in which they begin. Endless, except for a trace.
///
/// # Errors
/// When a trace cannot be read.
pub fn sessions(scenario: &Scenario, shape: &Shape, seed: Seed) -> Result<Sessions, TraceError> {
    let lengths = scenario.lengths(shape);
    let kind = match *scenario {
        Scenario::Burst { size, every } => Kind::Burst { size: size.max(1), every },
        Scenario::Sustained | Scenario::Sweep { .. } => Kind::Alike(scenario.name()),
        Scenario::Mixed => Kind::Mixed,
        Scenario::Chat { turns, think } => Kind::Chat { turns: turns.max(1), think },
        Scenario::Prefix { groups, prefix_tokens, skew } => {
            Kind::Prefix { tokens: prefix_tokens, zipf: Zipf::new(groups, skew), systems: vec![None; groups.max(1) as usize] }
        }
        Scenario::Trace { ref file, speed } => Kind::Trace { trace: Trace::read(file)?, speed: (!shape.closed).then_some(speed) },
    };
    let rate = shape.rate.filter(|_| !matches!(scenario, Scenario::Sweep { .. }));
    Ok(Sessions { kind, lengths, rate, seed, number: 0, clock: 0.0 })
}

#[derive(Debug, Clone)]
pub struct Sessions {
    kind: Kind,
    lengths: Lengths,
    rate: Option<f64>,
    seed: Seed,
    /// Number of the next session.
    number: u64,
    /// When the last session of an open loop began, in seconds.
    clock: f64,
}

#[derive(Debug, Clone)]
enum Kind {
    Burst {
        size: u32,
        every: Duration,
    },
    /// All sessions of one kind, with this name.
    Alike(&'static str),
    Mixed,
    Chat {
        turns: u32,
        think: Duration,
    },
    Prefix {
        tokens: u32,
        zipf: Zipf,
        /// System prompts used so far. They are long, so each is made once and only when needed.
        systems: Vec<Option<Arc<str>>>,
    },
    Trace {
        trace: Trace,
        speed: Option<f64>,
    },
}

impl Iterator for Sessions {
    type Item = Session;

    fn next(&mut self) -> Option<Session> {
        let Self { lengths, seed, number, .. } = *self;
        self.number += 1;
        let begins = self.begins(number);
        let mut shape = Draw::new(seed.shape, Purpose::Shape, number);
        let mut words = Draw::new(seed.words, Purpose::Words, number);
        let mut ask =
            |input, most_tokens| Turn { says: text::own(seed.words, number, &mut words, input), most_tokens, pause: Duration::ZERO };
        let session = |kind, turns| Session { kind, begins, system: None, turns };
        Some(match &mut self.kind {
            Kind::Burst { .. } => session("burst", vec![ask(lengths.input, answer(lengths, &mut shape))]),
            Kind::Alike(kind) => session(*kind, vec![ask(lengths.input, answer(lengths, &mut shape))]),
            Kind::Mixed => {
                let (kind, input, output) = mixed(lengths, &mut shape);
                session(kind, vec![ask(input, output)])
            }
            Kind::Chat { turns, think } => {
                let mut turns: Vec<Turn> = (0..*turns).map(|_| ask(lengths.input, answer(lengths, &mut shape))).collect();
                for turn in &mut turns[1..] {
                    turn.pause = think.mul_f64(0.5 + shape.unit());
                }
                session("chat", turns)
            }
            Kind::Prefix { tokens, zipf, systems } => {
                let group = zipf.pick(shape.unit());
                let system = systems[group].get_or_insert_with(|| {
                    let mut draw = Draw::new(seed.words, Purpose::System, group as u64);
                    text::own(seed.words, group as u64, &mut draw, *tokens)
                });
                let system = Some(system.clone());
                Session { system, ..session("prefix", vec![ask(lengths.input, answer(lengths, &mut shape))]) }
            }
            Kind::Trace { trace, .. } => {
                let request = trace.request(number)?;
                let says = prompt(request, seed.words);
                session("trace", vec![Turn { says, most_tokens: request.output, pause: Duration::ZERO }])
            }
        })
    }
}

impl Sessions {
    fn begins(&mut self, number: u64) -> Option<Duration> {
        match &self.kind {
            Kind::Burst { size, every } => {
                let burst = u32::try_from(number / u64::from(*size)).unwrap_or(u32::MAX);
                Some(every.saturating_mul(burst))
            }
            Kind::Trace { trace, speed } => Some(seconds(trace.request(number)?.timestamp / 1000.0 / (*speed)?)),
            Kind::Alike(_) | Kind::Mixed | Kind::Chat { .. } | Kind::Prefix { .. } => {
                self.clock += Draw::new(self.seed.shape, Purpose::Gap, number).exponential(1.0 / self.rate?);
                Some(seconds(self.clock))
            }
        }
    }
}

/// Limit of an answer in tokens, evenly spread.
///
/// With one limit for all, the clients of a closed loop would begin and end in step, as no users
/// do, and the engines' steps would be less mixed than in real work.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part, from 0 to 1, of a u32")]
fn answer(lengths: Lengths, shape: &mut Draw) -> u32 {
    let off = (f64::from(lengths.output) * lengths.spread) as u32;
    shape.between(lengths.output - off, lengths.output.saturating_add(off)).max(1)
}

/// Kind, tokens of the prompt and tokens of the answer. See [`Scenario::Mixed`] for the shares.
fn mixed(longest: Lengths, shape: &mut Draw) -> (&'static str, u32, u32) {
    let Lengths { input, output, .. } = longest;
    let short_prompt = shape.between(input / 80, input / 25).max(1);
    let short_answer = shape.between(output / 20, output / 6).max(1);
    match shape.unit() {
        part if part < 0.7 => ("short chat", short_prompt, short_answer),
        part if part < 0.9 => ("long context", shape.between(input / 2, input), short_answer),
        _ => ("long answer", short_prompt, shape.between(output / 2, output).max(1)),
    }
}

/// Converts seconds to a duration.
///
/// A time that the clock cannot represent becomes the largest; the load ends long before.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests;
