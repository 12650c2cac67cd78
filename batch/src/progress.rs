//! Display while a batch runs: a bar on a terminal, elsewhere a plain line now and then.
//!
//! The `drive` supplies the values.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Time of the first plain line, which reveals a missing target.
const FIRST_LINE: Duration = Duration::from_secs(2);

/// Interval between plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Time over which rates are computed. Answers of a batch are long, and come in waves.
const RATE_WINDOW: Duration = Duration::from_secs(60);

/// Progress of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    pub elapsed: Duration,
    pub answered: usize,
    pub failed: usize,
    pub total: usize,
    /// Tokens generated since this process began.
    pub tokens: u64,
    /// Requests that wait for another attempt.
    pub waiting: usize,
    /// Why the last of them had no answer.
    pub reason: String,
}

/// Writer of progress to standard error.
#[derive(Debug)]
pub struct ProgressWriter {
    look: Look,
    rates: RateWindow,
}

#[derive(Debug)]
enum Look {
    Quiet,
    Terminal(ProgressBar),
    Plain {
        /// Time of the next line.
        due: Duration,
    },
}

impl ProgressWriter {
    #[must_use]
    pub fn new(quiet: bool) -> Self {
        let look = match (quiet, io::stderr().is_terminal()) {
            (true, _) => Look::Quiet,
            (false, false) => Look::Plain { due: FIRST_LINE },
            (false, true) => {
                let style = ProgressStyle::with_template("{bar:10} {wide_msg}").expect("the template is sound");
                Look::Terminal(ProgressBar::new(0).with_style(style))
            }
        };
        Self { look, rates: RateWindow::default() }
    }

    /// Shows the progress, if it is due.
    pub(crate) fn show(&mut self, progress: &Progress) {
        self.rates.add(progress);
        match &mut self.look {
            Look::Quiet => {}
            Look::Terminal(bar) => {
                bar.set_length(progress.total as u64);
                bar.set_position(progress.answered as u64);
                bar.set_message(line(progress, &self.rates));
            }
            Look::Plain { due } if progress.elapsed >= *due => {
                *due = progress.elapsed + PLAIN_INTERVAL;
                say(&line(progress, &self.rates));
            }
            Look::Plain { .. } => {}
        }
    }

    /// Prints a sentence, even if progress is not shown.
    pub(crate) fn tell(&self, sentence: &str) {
        match &self.look {
            Look::Terminal(bar) => bar.suspend(|| say(sentence)),
            Look::Quiet | Look::Plain { .. } => say(sentence),
        }
    }

    /// Removes the bar at the end.
    pub(crate) fn end(&self) {
        if let Look::Terminal(bar) = &self.look {
            bar.finish_and_clear();
        }
    }
}

/// Prints a line. If nobody reads it any more, the batch still continues.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Counts at the times of the last minute.
#[derive(Debug, Default)]
struct RateWindow(VecDeque<(Duration, usize, u64)>);

impl RateWindow {
    fn add(&mut self, progress: &Progress) {
        // Keep one entry before the window, so that there is always a beginning.
        while self.0.get(1).is_some_and(|(time, ..)| *time + RATE_WINDOW <= progress.elapsed) {
            self.0.pop_front();
        }
        // Add at most ten a second, so the window holds no more than 600.
        if self.0.back().is_none_or(|(time, ..)| *time + Duration::from_millis(100) <= progress.elapsed) {
            self.0.push_back((progress.elapsed, progress.answered, progress.tokens));
        }
    }

    /// Requests and tokens a second, up to `progress`.
    #[expect(clippy::cast_precision_loss, reason = "rates for people")]
    fn per_second(&self, progress: &Progress) -> Option<(f64, f64)> {
        let (time, answered, tokens) = *self.0.front()?;
        let seconds = progress.elapsed.checked_sub(time).filter(|time| !time.is_zero())?.as_secs_f64();
        Some(((progress.answered - answered) as f64 / seconds, (progress.tokens - tokens) as f64 / seconds))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a time for people")]
fn line(progress: &Progress, rates: &RateWindow) -> String {
    let Progress { answered, failed, total, waiting, reason, .. } = progress;
    let mut line = format!("{answered} of {total} done, {failed} failed");
    if let Some((requests, tokens)) = rates.per_second(progress) {
        let _ = write!(line, ", {tokens:.0} tokens/s");
        let left = (total - answered) as f64 / requests;
        // There are no answers while the fleet is away.
        if left.is_finite() && left < 1e9 && answered < total {
            let _ = write!(line, ", {} left", humantime::format_duration(Duration::from_secs(left.ceil() as u64)));
        }
    }
    if *waiting > 0 {
        let _ = write!(line, "; {waiting} retry later: {reason}");
    }
    line
}

#[cfg(test)]
mod tests;
