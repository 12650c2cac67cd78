//! The steps of many replicas or tenants, each from when it came to an hour after it has gone.

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::{FleetStep, MAX_STEPS};

/// Readings `R` whose differences are steps `S`.
#[derive(Debug)]
pub(super) struct SeriesTable<R, S> {
    /// Most names with steps.
    most: usize,
    /// Number of the last step.
    number: u64,
    series: FxHashMap<Arc<str>, Series<R, S>>,
}

#[derive(Debug)]
struct Series<R, S> {
    last_reading: R,
    /// Number of the step of that reading.
    last: u64,
    /// The steps up to `last`; `None` where the name was not there. Without any if there are more
    /// names than may have steps.
    steps: Option<VecDeque<Option<S>>>,
}

impl<R: Copy, S: Copy> SeriesTable<R, S> {
    pub(super) fn new(most: usize) -> Self {
        Self { most, number: 0, series: FxHashMap::default() }
    }

    /// Adds a step of those who are there, each from its last reading and the present one. Returns
    /// these steps. What a newcomer has counted before does not belong to its first step.
    pub(super) fn add(&mut self, readings: Vec<(Arc<str>, R)>, between: impl Fn(&R, &R) -> S) -> Vec<S> {
        self.number += 1;
        let mut added = Vec::with_capacity(readings.len());
        for (name, reading) in readings {
            let known = self.series.get(&name).filter(|series| series.last + 1 == self.number);
            let step = between(known.map_or(&reading, |series| &series.last_reading), &reading);
            added.push(step);
            if !self.series.contains_key(&name) {
                let steps = self.make_room().then(|| VecDeque::with_capacity(MAX_STEPS));
                self.series.insert(name.clone(), Series { last_reading: reading, last: self.number - 1, steps });
            }
            if let Some(series) = self.series.get_mut(&name) {
                series.push(self.number, reading, step);
            }
        }
        let number = self.number;
        self.series.retain(|_, series| series.last == number || (series.steps.is_some() && series.last + MAX_STEPS as u64 > number));
        added
    }

    /// Whether one more name may have steps. If there are too many, who has been gone for longest
    /// makes room.
    fn make_room(&mut self) -> bool {
        if self.series.values().filter(|series| series.steps.is_some()).count() < self.most {
            return true;
        }
        let is_gone = |series: &Series<R, S>| series.steps.is_some() && series.last + 1 < self.number;
        let gone = self.series.iter().filter(|(_, series)| is_gone(series)).min_by_key(|(_, series)| series.last);
        let Some(name) = gone.map(|(name, _)| name.clone()) else { return false };
        self.series.remove(&name).is_some()
    }

    /// The step of a name that ended so many steps ago.
    pub(super) fn step_mut(&mut self, name: &str, ago: usize) -> Option<&mut S> {
        let series = self.series.get_mut(name)?;
        let ago = ago.checked_sub(usize::try_from(self.number - series.last).ok()?)?;
        let steps = series.steps.as_mut()?;
        let at = steps.len().checked_sub(1 + ago)?;
        steps[at].as_mut()
    }

    /// The steps of a name beside the moments at which they end; none where it was not there.
    pub(super) fn steps(&self, name: &str, fleet: &[FleetStep]) -> Vec<(u64, Option<S>)> {
        let known = self.series.get(name).and_then(|series| Some((series, series.steps.as_ref()?)));
        let Some((series, steps)) = known else { return Vec::new() };
        let missing = usize::try_from(self.number - series.last).unwrap_or(usize::MAX);
        let of_last_first = std::iter::repeat_n(None, missing).chain(steps.iter().rev().copied()).chain(std::iter::repeat(None));
        let mut told: Vec<_> = fleet.iter().rev().map(|step| step.at).zip(of_last_first).collect();
        told.reverse();
        told
    }

    /// Bytes of all steps.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let capacities = self.series.values().filter_map(|series| Some(series.steps.as_ref()?.capacity()));
        let steps: usize = capacities.sum::<usize>() * size_of::<Option<S>>();
        steps + self.series.capacity() * (size_of::<(Arc<str>, Series<R, S>)>() + 1)
    }
}

impl<R, S: Copy> Series<R, S> {
    fn push(&mut self, number: u64, reading: R, step: S) {
        let gap = usize::try_from(number - self.last - 1).unwrap_or(usize::MAX).min(MAX_STEPS);
        (self.last_reading, self.last) = (reading, number);
        let Some(steps) = &mut self.steps else { return };
        for step in std::iter::repeat_n(None, gap).chain([Some(step)]) {
            if steps.len() >= MAX_STEPS {
                steps.pop_front();
            }
            steps.push_back(step);
        }
    }
}
