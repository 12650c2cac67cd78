//! Output of the guard.

use std::io::Write;

use crate::budget::{BudgetVerdict, OperationCost, TOLERANCE};
use crate::cases::Case;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) case: Case,
    pub(crate) budget: Option<OperationCost>,
    pub(crate) now: OperationCost,
}

impl Row {
    fn standing(&self) -> BudgetVerdict {
        self.now.standing(self.budget)
    }
}

/// Prints a row, and the column names before the first one.
pub(crate) fn show(row: &Row, is_first: bool) {
    if is_first {
        say(&format!("{:<24} {:>31}   {:>15}   {:>15}", "per operation", "instructions", "system calls", "clock readings"));
        say(&format!("{:<24} {:>11} {:>11} {:>7}   {:>7} {:>7}   {:>7} {:>7}", "", "budget", "now", "", "budget", "now", "budget", "now"));
    }
    let Row { case, budget, now } = row;
    let word = match row.standing() {
        BudgetVerdict::New => "new",
        BudgetVerdict::Kept => "",
        BudgetVerdict::Over => "over",
        BudgetVerdict::Under => "under",
    };
    let was = |text: fn(&OperationCost) -> String| budget.as_ref().map_or_else(|| "-".to_owned(), text);
    let (instructions, calls, clock) =
        (was(|of| format!("{:.0}", of.instructions)), was(|of| format!("{:.2}", of.calls)), was(|of| format!("{:.2}", of.clock)));
    let change = budget.map_or_else(String::new, |of| format!("{:+.1}%", 100.0 * (now.instructions / of.instructions - 1.0)));
    let OperationCost { instructions: now, calls: calls_now, clock: clock_now } = now;
    say(&format!(
        "{:<24} {instructions:>11} {now:>11.0} {change:>7}   {calls:>7} {calls_now:>7.2}   {clock:>7} {clock_now:>7.2}  {word}",
        case.name()
    ));
}

/// Prints the meaning of the rows and the next steps, and returns whether that is success.
pub(crate) fn verdict(rows: &[Row], accepted: bool) -> bool {
    let are = |standing| rows.iter().filter(|row| row.standing() == standing).count();
    let (over, under, new) = (are(BudgetVerdict::Over), are(BudgetVerdict::Under), are(BudgetVerdict::New));
    let percent = 100.0 * TOLERANCE;
    if accepted {
        say("\nThe budget is what was counted now. Say in the change why.");
        return true;
    }
    if over > 0 {
        say(&format!(
            "\n{over} over budget by more than {percent:.0} %. Find out why with --keep and callgrind_annotate, or accept it: make guard ARGS=--accept"
        ));
    }
    if under > 0 {
        say(&format!("\n{under} cheaper by more than {percent:.0} %. So that it stays so, accept it: make guard ARGS=--accept"));
    }
    if new > 0 {
        say(&format!("\n{new} without a budget. Accept what was counted: make guard ARGS=--accept"));
    }
    over == 0 && new == 0
}

fn say(line: &str) {
    // A closed output wants no more lines.
    let _ = writeln!(std::io::stdout(), "{line}");
}

pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
