//! Checks a simulated controller's promises in each step, and measures a run.

use std::collections::VecDeque;
use std::fmt;
use std::ops::AddAssign;

use super::scheduler::{Ends, LEAVES_EARLY, SimulatedScheduler};
use super::{Climate, HOUR};
use crate::FleetSize;

/// A pause, a submission that is not listed, a lost memory and the steps between them.
const LONGEST_DELAY: u64 = 960 + 120 + 120 + 60;

/// Time after which a running job without an agent is given up.
const ABSENT_LIMIT: u64 = 1800;

/// How long a submission for a former size of the entry may stay out of the list.
const LISTED_WITHIN: u64 = 150;

#[derive(Debug)]
pub(super) struct Watch {
    pub(super) figures: Figures,
    /// The entry's largest size.
    pub(super) largest: u32,
    seed: u64,
    climate: Climate,
    /// Seconds without requests after which an elastic entry may have no jobs; `None` if it never
    /// may.
    idle_after: Option<u64>,
    desired: u32,
    sizes: VecDeque<(u64, u32)>,
    submissions: VecDeque<(u64, u32)>,
    /// The last event that could not be foreseen.
    excused: u64,
    requested: u64,
    /// Jobs that a controller without memory has taken for replacements.
    adopted: usize,
}

/// Node seconds, and counts.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Figures {
    seconds: u64,
    pub(super) desired: u64,
    /// Wanted and not ready.
    pub(super) gap: u64,
    /// Ready and not desired.
    overlap: u64,
    held: u64,
    /// As the controller's memory has them.
    pub(super) counted: f64,
    /// Held, and not ready or not desired.
    wasted: u64,
    pub(super) submissions: u64,
    most_submissions_an_hour: u32,
    pub(super) ends: u64,
    pub(super) deaths: u64,
    /// Beginnings and ends.
    pub(super) suspensions: u64,
    pub(super) controller_deaths: u64,
    pub(super) returns_from_zero: u64,
}

impl Watch {
    pub(super) fn new(seed: u64, climate: &Climate, size: FleetSize) -> Self {
        let (largest, idle_after) = match size {
            FleetSize::Fixed(nodes) => (nodes, None),
            FleetSize::Elastic { min, max, idle_after } => (max, (min == 0).then_some(idle_after.as_secs())),
        };
        Self {
            figures: Figures::default(),
            largest,
            seed,
            climate: climate.clone(),
            idle_after,
            desired: 0,
            sizes: VecDeque::new(),
            submissions: VecDeque::new(),
            excused: 0,
            requested: 0,
            adopted: 0,
        }
    }

    /// Requires the controller to know the nodes' time within this share of it.
    #[expect(clippy::cast_precision_loss, reason = "a run has some million seconds")]
    pub(super) fn assert_node_time(&self, share: f64) {
        let held = self.figures.held as f64;
        assert!((self.figures.counted - held).abs() <= share * held, "{self}: {held} s held, and {} counted", self.figures.counted);
    }

    /// Longest time until a job is ready.
    fn longest_arrival(&self) -> u64 {
        self.climate.queue_wait.end + self.climate.cold_start.end
    }

    /// Excuses a size below the desired one from this moment until the entry can have recovered.
    pub(super) fn excuse(&mut self, now: u64) {
        self.excused = self.excused.max(now);
    }

    /// Notes that nothing is submitted any more.
    pub(super) fn note_end_of_tries(&mut self, now: u64) {
        self.excuse(now);
    }

    pub(super) fn note_controller_death(&mut self, now: u64) {
        self.figures.controller_deaths += 1;
        self.excuse(now);
    }

    /// Notes that there is no controller. The next one does not know how long an agent has been
    /// away.
    pub(super) fn note_absence(&mut self, scheduler: &SimulatedScheduler, now: u64) {
        self.excuse(if scheduler.has_absent_agent(now) { now + ABSENT_LIMIT } else { now });
    }

    pub(super) fn note_request(&mut self, now: u64) {
        self.requested = now;
    }

    pub(super) fn note_ends(&mut self, ends: &Ends, now: u64) {
        self.figures.ends += ends.in_time;
        self.figures.deaths += ends.deaths;
        self.figures.suspensions += ends.suspensions;
        // A queue whose waits vary may be longer than any wait before, and some are longer than a
        // job.
        let varies = self.climate.queue_wait.clone().count() > 1;
        // A replacement is submitted when a quarter of a job's time is over, not before.
        let may_come_late = varies || self.longest_arrival() > self.climate.walltime / 4 * 3;
        if ends.deaths > 0 || (ends.in_time > 0 && may_come_late) {
            self.excuse(now);
        }
        if ends.absences > 0 {
            self.excuse(now + ABSENT_LIMIT);
        }
    }

    pub(super) fn note_submission(&mut self, parts: u32, now: u64) {
        self.submissions.push_back((now, parts));
        self.submissions.retain(|(at, _)| *at + HOUR > now);
        let within_an_hour = self.submissions.iter().map(|(_, parts)| parts).sum();
        self.figures.submissions += u64::from(parts);
        self.figures.most_submissions_an_hour = self.figures.most_submissions_an_hour.max(within_an_hour);
        // A job for each node and half walltime, two at least, plus four in each quarter of an
        // hour; an hour touches five of them.
        let per_node = u32::try_from(HOUR / 2 / self.climate.walltime).unwrap_or(u32::MAX).max(2);
        assert!(within_an_hour <= 5 * (per_node * self.largest + 4), "{self}: {within_an_hour} jobs were submitted within an hour");
    }

    /// Notes the size that a controller wants in this step.
    pub(super) fn note_size(&mut self, desired: u32, now: u64) {
        if desired > self.desired {
            self.excuse(now);
        }
        if self.desired == 0 && desired > 0 {
            self.figures.returns_from_zero += 1;
        }
        self.desired = desired;
        self.sizes.push_back((now, desired));
        while self.sizes.front().is_some_and(|(at, _)| at + LISTED_WITHIN < now) && self.sizes.len() > 2 {
            self.sizes.pop_front();
        }
    }

    /// Checks the jobs after all actions of a step.
    pub(super) fn check(&mut self, scheduler: &SimulatedScheduler, is_recovering: bool, now: u64) {
        let largest = self.sizes.iter().map(|(_, size)| *size).max().unwrap_or_default() as usize;
        // Until the first cold start is seen, the controller expects an hour in the queue and ten
        // minutes to start.
        let lead = self.climate.queue_wait.end.max(HOUR) + self.climate.cold_start.end.max(600) + 300;
        let (live, old) = (scheduler.live(now), scheduler.old(now, lead));
        let beyond = live.saturating_sub(largest + old);
        // If the entry shrank while its memory was lost, the jobs meant as replacements are
        // unknown.
        self.adopted = if is_recovering { beyond.min(scheduler.old(now, u64::MAX)) } else { self.adopted.min(beyond) };
        // A replacement submitted meanwhile may not be listed yet when the suspended job goes on.
        let away = scheduler.away(now, LISTED_WITHIN);
        assert!(
            beyond <= self.adopted + away,
            "{self}: {live} jobs for {largest} nodes, {old} that end soon, {} adopted and {away} away: {:#?}",
            self.adopted,
            scheduler.jobs
        );
    }

    /// Adds the last seconds to the figures.
    pub(super) fn measure(&mut self, scheduler: &SimulatedScheduler, now: u64, length: u64) {
        let ready = scheduler.ready(now);
        let figures = &mut self.figures;
        figures.seconds += length;
        figures.desired += length * u64::from(self.desired);
        figures.gap += length * u64::from(self.desired.saturating_sub(ready));
        figures.overlap += length * u64::from(ready.saturating_sub(self.desired));
        let running = scheduler.running(now);
        figures.held += length * u64::from(running);
        figures.wasted += length * u64::from(running.saturating_sub(ready.min(self.desired)));
        // After failures, one job first shows that jobs can start.
        let explained = self.excused + 2 * self.longest_arrival() + LONGEST_DELAY;
        assert!(
            ready >= self.desired || now < explained,
            "{self}: {ready} of {} nodes, without a cause: {:#?}",
            self.desired,
            scheduler.jobs
        );
        if let Some(idle_after) = self.idle_after {
            let gone = self.requested.max(self.excused) + self.longest_arrival() + 2 * idle_after + LONGEST_DELAY;
            assert!(now < gone || scheduler.jobs.is_empty(), "{self}: nobody asks, and jobs stay: {:#?}", scheduler.jobs);
        }
    }
}

impl fmt::Display for Watch {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "seed {} ({:?}) after {:.1} h", self.seed, self.climate, self.figures.hours())
    }
}

impl Figures {
    pub(super) fn hours(&self) -> f64 {
        hours(self.seconds)
    }

    /// Wasted node hours in percent of the desired ones.
    pub(super) fn wasted_share(&self) -> f64 {
        100.0 * hours(self.wasted) / hours(self.desired)
    }

    /// Wasted share of a scheduler that knows each wait and start in advance: each job holds its
    /// node while it starts and while it leaves.
    pub(super) fn perfect_waste_share(&self, climate: &Climate) -> f64 {
        let start = climate.cold_start.start.midpoint(climate.cold_start.end);
        let jobs = self.desired / (climate.walltime - start - LEAVES_EARLY) + 1 + self.deaths;
        100.0 * hours(jobs * (start + LEAVES_EARLY)) / hours(self.desired)
    }

    /// Difference from earlier figures of this run.
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            seconds: self.seconds - before.seconds,
            desired: self.desired - before.desired,
            gap: self.gap - before.gap,
            overlap: self.overlap - before.overlap,
            held: self.held - before.held,
            wasted: self.wasted - before.wasted,
            submissions: self.submissions - before.submissions,
            ends: self.ends - before.ends,
            deaths: self.deaths - before.deaths,
            ..*self
        }
    }
}

fn hours(seconds: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "thousands of hours")]
    let seconds = seconds as f64;
    seconds / 3600.0
}

impl AddAssign for Figures {
    fn add_assign(&mut self, other: Self) {
        self.seconds += other.seconds;
        self.desired += other.desired;
        self.gap += other.gap;
        self.overlap += other.overlap;
        self.held += other.held;
        self.wasted += other.wasted;
        self.submissions += other.submissions;
        self.most_submissions_an_hour = self.most_submissions_an_hour.max(other.most_submissions_an_hour);
        self.ends += other.ends;
        self.deaths += other.deaths;
        self.suspensions += other.suspensions;
        self.controller_deaths += other.controller_deaths;
        self.returns_from_zero += other.returns_from_zero;
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |part: u64| 100.0 * hours(part) / hours(self.desired).max(f64::MIN_POSITIVE);
        write!(
            out,
            "{:.0} h, {:.0} node hours wanted: {:.2} % gap, {:.2} % overlap, {:.1} % held, {:.1} % wasted; {} jobs, {} an hour at most; {} ends, {} deaths, \
             {} suspensions and continuations, {} controller deaths, {} returns from zero",
            self.hours(),
            hours(self.desired),
            share(self.gap),
            share(self.overlap),
            share(self.held),
            share(self.wasted),
            self.submissions,
            self.most_submissions_an_hour,
            self.ends,
            self.deaths,
            self.suspensions,
            self.controller_deaths,
            self.returns_from_zero
        )
    }
}
