//! Who was in flight at which engine's death, and who is tried alone where: the rule of `poison` as a pure table, with time as an argument.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::time::Instant;

/// Deaths with which a request is refused.
const CONVICTED: usize = 2;

/// What this router alone has seen counts for so long. The agent's report of the same death follows within a fraction of a second and makes
/// it count for the whole time, though one whose core alone has died takes 2.4 to 5.1 s to exit (measured, vLLM 0.32). Where none follows, the
/// engine was restarted for a reason of its own, or has only dropped a connection.
pub(super) const UNCONFIRMED: Duration = Duration::from_secs(10);

/// A request on trial bars others from its replica for this long at most: longer than a hang takes to be noticed.
const LONGEST_TRIAL: Duration = Duration::from_secs(30);

/// And for this long at least: a request that kills mostly does so in its first steps.
const SHORTEST_TRIAL: Duration = Duration::from_secs(1);

/// Within these bounds, trials are so long that all who wait for one have had theirs after about this time: an engine may have died with
/// hundreds in flight, all of them innocent, and a small fleet has few places.
const ALL_TRIALS: Duration = Duration::from_secs(60);

/// One that was given up on trial, before its engine had answered anything, keeps its place for so long at most: the engine may hang, and who comes
/// next would be blamed for it. An agent notices a hang after 10 s, unless told otherwise.
const LINGERS: Duration = Duration::from_secs(15);

/// Requests that are remembered; further ones are not. A death leaves at most 4,096, and sixteen engines have died of late when this is full.
const MOST: usize = 65_536;

/// How long an engine that has died may look ready: its connections break first, its process ends up to 8 s later.
const SEEMS_ALIVE: Duration = Duration::from_secs(10);

/// How often what has lapsed is looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Names a request by its content.
pub type Fingerprint = u128;

/// One life of one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Life {
    /// The replica's id.
    pub(super) replica: Arc<str>,
    pub(super) epoch: u64,
}

/// What a death means for one of those that were there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It may have been the cause.
    Counts,
    /// It had its trial and ran on beside the next one, which was the cause.
    Spared,
    /// It was answered well since: it was not the cause, whoever says again that it was there.
    Acquitted,
}

#[derive(Debug)]
struct Death {
    life: Life,
    at: Instant,
    until: Instant,
    verdict: Verdict,
}

/// What is known of one request.
#[derive(Debug, Default)]
struct Record {
    deaths: Vec<Death>,
}

/// A request on trial.
#[derive(Debug)]
struct Seat {
    number: u64,
    life: Life,
    fingerprint: Fingerprint,
    /// Until when no other suspect may go there.
    alone_until: Instant,
    /// Until when the same request may go nowhere else.
    sole_until: Instant,
    /// Whoever had it has left.
    is_left: bool,
}

/// An engine that has died.
#[derive(Debug)]
struct Fallen {
    life: Life,
    /// When that became known.
    at: Instant,
    /// Who was alone on trial there then: no other suspect is blamed.
    culprit: Option<Fingerprint>,
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sentence {
    /// The replicas whose engines died, each with how long ago that was.
    pub deaths: Vec<(Arc<str>, Duration)>,
    /// For how much longer.
    pub remaining: Duration,
}

/// What may become of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    Clear,
    Suspect,
    Refused(Sentence),
}

/// Where no suspect may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::dispatch) struct Barred {
    pub(super) replica: Arc<str>,
    /// Only in this life.
    pub(super) epoch: Option<u64>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    /// How long a death counts.
    window: Duration,
    records: FxHashMap<Fingerprint, Record>,
    seats: Vec<Seat>,
    /// The engines that died within the window.
    fallen: Vec<Fallen>,
    next_seat: u64,
    /// Records with a death that counts.
    suspects: usize,
    swept: Instant,
}

impl Table {
    pub(super) fn new(window: Duration, now: Instant) -> Self {
        let (records, seats, fallen) = Default::default();
        Self { window, records, seats, fallen, next_seat: 0, suspects: 0, swept: now }
    }

    /// Requests with a death to their name.
    pub(super) fn suspects(&self) -> usize {
        self.suspects
    }

    pub(super) fn standing(&self, fingerprint: Fingerprint, now: Instant) -> Standing {
        self.records.get(&fingerprint).map_or(Standing::Clear, |record| record.standing(now))
    }

    /// An engine was lost to this request, which it was sent at `sent`. A sentence when it is refused from now on.
    pub(super) fn blame(&mut self, fingerprint: Fingerprint, life: &Life, sent: Instant, now: Instant) -> Option<Sentence> {
        // A request that came to a dead engine has not killed it.
        if self.fallen.iter().any(|fallen| fallen.life == *life && fallen.at <= sent) {
            return None;
        }
        let culprit = self.fall(life, now, now);
        let death = Death { life: life.clone(), at: now, until: now + UNCONFIRMED.min(self.window), verdict: Verdict::Counts };
        self.charge(fingerprint, death, culprit, now)
    }

    /// An agent says that an engine died at `at` with these requests in flight. Gives back those that are refused from now on.
    pub(super) fn reported(&mut self, life: &Life, requests: &[Fingerprint], at: Instant, now: Instant) -> Vec<(Fingerprint, Sentence)> {
        let until = at + self.window;
        if until <= now {
            return Vec::new();
        }
        let culprit = self.fall(life, at, now).filter(|culprit| requests.contains(culprit));
        let death = || Death { life: life.clone(), at, until, verdict: Verdict::Counts };
        requests.iter().filter_map(|request| Some((*request, self.charge(*request, death(), culprit, now)?))).collect()
    }

    /// The request was answered well; whether that changed anything.
    pub(super) fn clear(&mut self, fingerprint: Fingerprint, now: Instant) -> bool {
        let Some(record) = self.records.get_mut(&fingerprint).filter(|record| record.is_suspect()) else { return false };
        for death in &mut record.deaths {
            // Agents may tell it again for as long.
            (death.verdict, death.until) = (Verdict::Acquitted, now + self.window);
        }
        self.suspects -= 1;
        true
    }

    /// Replicas to which no further suspect may go now: another one is on trial there, or its engine has just died.
    pub(super) fn barred(&self, now: Instant) -> impl Iterator<Item = Barred> {
        let tried = self.tried(now).map(|seat| Barred { replica: seat.life.replica.clone(), epoch: None });
        let fallen = self.fallen.iter().filter(move |fallen| fallen.at + SEEMS_ALIVE > now);
        tried.chain(fallen.map(|Fallen { life, .. }| Barred { replica: life.replica.clone(), epoch: Some(life.epoch) }))
    }

    /// Those that are alone on trial.
    fn tried(&self, now: Instant) -> impl Iterator<Item = &Seat> {
        self.seats.iter().filter(move |seat| seat.alone_until > now)
    }

    /// Whether the same request runs on trial already.
    pub(super) fn is_tried(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        self.seats.iter().any(|seat| seat.fingerprint == fingerprint && seat.sole_until > now)
    }

    /// Lets a suspect go to this engine, unless another one is on trial there or it is on trial itself. `share` is the number of replicas
    /// for each suspect that waits.
    pub(super) fn sit(&mut self, fingerprint: Fingerprint, life: &Life, share: f64, now: Instant) -> Option<u64> {
        if self.is_tried(fingerprint, now) || self.tried(now).any(|seat| seat.life.replica == life.replica) {
            return None;
        }
        let alone_until = now + ALL_TRIALS.mul_f64(share.clamp(0.0, 1.0)).clamp(SHORTEST_TRIAL, LONGEST_TRIAL);
        self.next_seat += 1;
        let (number, life, sole_until) = (self.next_seat, life.clone(), now + LONGEST_TRIAL);
        self.seats.push(Seat { number, life, fingerprint, alone_until, sole_until, is_left: false });
        Some(number)
    }

    /// The trial has ended.
    pub(super) fn rise(&mut self, seat: u64) {
        self.seats.retain(|taken| taken.number != seat);
    }

    /// The trial was given up before there was an answer.
    pub(super) fn give_up(&mut self, seat: u64, now: Instant) {
        if let Some(seat) = self.seats.iter_mut().find(|taken| taken.number == seat) {
            seat.alone_until = seat.alone_until.min(now + LINGERS);
            (seat.sole_until, seat.is_left) = (seat.alone_until, true);
        }
    }

    /// Forgets what has lapsed; it looks every second at most.
    pub(super) fn sweep(&mut self, now: Instant) {
        if now < self.swept + SWEEP_INTERVAL {
            return;
        }
        self.swept = now;
        let remembered = self.window.max(SEEMS_ALIVE);
        self.fallen.retain(|fallen| fallen.at + remembered > now);
        self.seats.retain(|seat| !seat.is_left || seat.alone_until > now);
        self.records.retain(|_, record| {
            record.deaths.retain(|death| death.until > now);
            !record.deaths.is_empty()
        });
        self.suspects = self.records.values().filter(|record| record.is_suspect()).count();
    }

    /// Records and seats that are kept.
    #[cfg(test)]
    pub(super) fn lengths(&self) -> (usize, usize) {
        (self.records.len(), self.seats.len())
    }

    /// An engine has died; who is to blame before all others.
    fn fall(&mut self, life: &Life, at: Instant, now: Instant) -> Option<Fingerprint> {
        if let Some(fallen) = self.fallen.iter().find(|fallen| fallen.life == *life) {
            return fallen.culprit;
        }
        let culprit = self.tried(now).find(|seat| seat.life == *life).map(|seat| seat.fingerprint);
        self.fallen.push(Fallen { life: life.clone(), at, culprit });
        culprit
    }

    fn charge(&mut self, fingerprint: Fingerprint, mut death: Death, culprit: Option<Fingerprint>, now: Instant) -> Option<Sentence> {
        if !self.records.contains_key(&fingerprint) && self.records.len() >= MOST {
            return None;
        }
        let record = self.records.entry(fingerprint).or_default();
        let (was_suspect, before) = (record.is_suspect(), record.counted(now).count());
        match record.deaths.iter_mut().find(|known| known.life == death.life) {
            Some(known) => known.until = known.until.max(death.until),
            None => {
                // It is spared once, so that one which kills late kills three engines and not all.
                let may_be_spared = was_suspect && record.deaths.iter().all(|known| known.verdict != Verdict::Spared);
                if may_be_spared && culprit.is_some_and(|culprit| culprit != fingerprint) {
                    death.verdict = Verdict::Spared;
                }
                record.deaths.push(death);
            }
        }
        self.suspects += usize::from(!was_suspect && record.is_suspect());
        match record.standing(now) {
            Standing::Refused(sentence) if before < CONVICTED => Some(sentence),
            _ => None,
        }
    }
}

impl Record {
    fn is_suspect(&self) -> bool {
        self.deaths.iter().any(|death| death.verdict == Verdict::Counts)
    }

    fn counted(&self, now: Instant) -> impl Iterator<Item = &Death> {
        self.deaths.iter().filter(move |death| death.until > now && death.verdict == Verdict::Counts)
    }

    fn standing(&self, now: Instant) -> Standing {
        let mut ends: Vec<Instant> = self.counted(now).map(|death| death.until).collect();
        if ends.len() < CONVICTED {
            return if ends.is_empty() { Standing::Clear } else { Standing::Suspect };
        }
        // It may come again when too few deaths are left.
        ends.sort_unstable();
        let until = ends[ends.len() - CONVICTED];
        let deaths = self.counted(now).map(|death| (death.life.replica.clone(), now.saturating_duration_since(death.at))).collect();
        Standing::Refused(Sentence { deaths, remaining: until.saturating_duration_since(now) })
    }
}
