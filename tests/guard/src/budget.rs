//! Budget of each case, in a file under version control.
//!
//! A person who accepts a new figure changes it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::cases::Case;

/// How far a figure may be from its budget.
///
/// Equal programs differ by much less than a per cent, builds that differ elsewhere by up to two.
pub(crate) const TOLERANCE: f64 = 0.05;

/// Tolerance for system calls and readings of the clock.
///
/// How many bytes a read of a socket finds is a matter of chance, even here.
const CALLS_TOLERANCE: f64 = 0.2;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct OperationCost {
    /// Instructions outside of the kernel.
    pub(crate) instructions: f64,
    pub(crate) calls: f64,
    /// Readings of the clock, which need no system call on most machines.
    pub(crate) clock: f64,
}

/// Relation of a figure to its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BudgetVerdict {
    /// There is no budget yet.
    New,
    Kept,
    Over,
    /// The figure is cheaper, which is worth accepting, so that the gain is not lost again.
    Under,
}

impl OperationCost {
    /// Share of each of this many operations.
    #[must_use]
    pub(crate) fn each(self, operations: f64) -> Self {
        Self { instructions: self.instructions / operations, calls: self.calls / operations, clock: self.clock / operations }
    }

    /// Compares these figures with `budget`. A dearer one counts before any cheaper one.
    #[must_use]
    pub(crate) fn standing(self, budget: Option<Self>) -> BudgetVerdict {
        let Some(budget) = budget else { return BudgetVerdict::New };
        // Calls and readings are few. One timer more or less must not matter if there is hardly one
        // per operation.
        let parts = [
            (self.instructions - budget.instructions, TOLERANCE * budget.instructions),
            (self.calls - budget.calls, CALLS_TOLERANCE * budget.calls.max(1.0)),
            (self.clock - budget.clock, CALLS_TOLERANCE * budget.clock.max(1.0)),
        ];
        if parts.iter().any(|(more, bound)| more > bound) {
            BudgetVerdict::Over
        } else if parts.iter().any(|(more, bound)| *more < -bound) {
            BudgetVerdict::Under
        } else {
            BudgetVerdict::Kept
        }
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Budget(BTreeMap<String, OperationCost>);

/// First lines of the file.
const HEAD: &str = "# What one operation of each case may cost, within 5 % of instructions and 20 % of calls. Written by `make guard ARGS=--accept`; see tests/guard/src/cases.\n\n";

impl Budget {
    /// Reads the file; a missing one is empty.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        match fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text).with_context(|| format!("{} is not a budget", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = format!("{HEAD}{}", toml::to_string(self)?);
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    #[must_use]
    pub(crate) fn of(&self, case: Case) -> Option<OperationCost> {
        self.0.get(case.name()).copied()
    }

    /// Accepts figures, rounded to a meaningful precision.
    pub(crate) fn set(&mut self, case: Case, figures: OperationCost) {
        let OperationCost { instructions, calls, clock } = figures;
        let hundredths = |figure: f64| (figure * 100.0).round() / 100.0;
        let rounded = OperationCost { instructions: instructions.round(), calls: hundredths(calls), clock: hundredths(clock) };
        self.0.insert(case.name().to_owned(), rounded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(instructions: f64, calls: f64) -> OperationCost {
        OperationCost { instructions, calls, clock: 3.0 }
    }

    #[test]
    fn a_figure_is_over_budget_when_any_part_is() {
        let budget = Some(figures(1000.0, 2.0));
        let standing = |instructions, calls| figures(instructions, calls).standing(budget);
        assert_eq!(standing(1040.0, 2.05), BudgetVerdict::Kept);
        assert_eq!(standing(1060.0, 2.0), BudgetVerdict::Over);
        assert_eq!(standing(900.0, 2.5), BudgetVerdict::Over);
        assert_eq!(standing(900.0, 2.0), BudgetVerdict::Under);
        assert_eq!(OperationCost { clock: 4.0, ..figures(1000.0, 2.0) }.standing(budget), BudgetVerdict::Over);
        assert_eq!(figures(1.0, 0.0).standing(None), BudgetVerdict::New);
        assert_eq!(figures(1000.0, 0.04).standing(Some(figures(1000.0, 0.0))), BudgetVerdict::Kept);
    }

    #[test]
    fn a_budget_is_read_as_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budget.toml");
        assert_eq!(Budget::read(&path).unwrap().of(Case::all().next().unwrap()), None);
        let mut budget = Budget::default();
        Case::all().for_each(|case| budget.set(case, figures(12.4, 0.123)));
        budget.write(&path).unwrap();
        let read = Budget::read(&path).unwrap();
        assert!(Case::all().all(|case| read.of(case) == Some(figures(12.0, 0.12))));
    }
}
