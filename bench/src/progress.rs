//! Display while a load runs: on a terminal one line that is rewritten, elsewhere a plain line
//! every few seconds, so that a log stays short.
//!
//! The `drive` supplies the values; nothing is measured here.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::Duration;

/// Interval between plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Columns of a terminal that does not report its width.
///
/// Everything but the time to the first token fits.
const USUAL_WIDTH: usize = 100;

const BAR: usize = 20;

/// Progress of a load.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    pub target: String,
    pub phase: Phase,
    pub elapsed: Duration,
    /// Duration of the phase, if it is given.
    pub most: Option<Duration>,
    pub in_flight: u32,
    pub complete: u64,
    pub failed: u64,
    /// Rate over the last second.
    pub tokens_per_second: f64,
    /// Median time to the first token so far, in milliseconds; 0 before the first one.
    pub ttft_p50_ms: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Warm-up, which is not counted.
    WarmUp,
    /// One round of several, from 1.
    Round {
        number: u32,
        /// Number of all rounds.
        of: u32,
    },
    /// A step of a sweep.
    Step { concurrency: u32 },
}

#[derive(Debug)]
pub struct ProgressWriter<W> {
    to: W,
    look: ProgressStyle,
    /// Progress that was shown last.
    last: Option<Progress>,
    /// When the next plain line of this phase is due.
    due: Duration,
}

/// Style of the progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressStyle {
    /// A line that is rewritten.
    Terminal {
        /// Characters of a line. More are cut off, because a wrapped line cannot be rewritten.
        width: usize,
    },
    /// Lines of a log.
    Plain,
    Quiet,
}

impl ProgressStyle {
    /// Chooses the style by where the output goes.
    ///
    /// `columns` is the shell's value for the terminal's width, if any.
    #[must_use]
    pub fn choose(quiet: bool, terminal: bool, columns: Option<&str>) -> Self {
        match (quiet, terminal) {
            (true, _) => Self::Quiet,
            (false, true) => Self::Terminal { width: columns.and_then(|columns| columns.parse().ok()).unwrap_or(USUAL_WIDTH) },
            (false, false) => Self::Plain,
        }
    }
}

impl<W: Write> ProgressWriter<W> {
    /// Creates a writer, which writes nothing before the first progress.
    pub fn new(to: W, look: ProgressStyle) -> Self {
        Self { to, look, last: None, due: Duration::ZERO }
    }

    /// Shows the progress, if it is due.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn show(&mut self, progress: &Progress) -> io::Result<()> {
        let next = self.last.as_ref().is_none_or(|last| last.phase != progress.phase || last.target != progress.target);
        match self.look {
            ProgressStyle::Quiet => {}
            ProgressStyle::Terminal { width } => {
                // A finished phase stays as the line above.
                if next && self.last.is_some() {
                    writeln!(self.to)?;
                }
                let line: String = line(progress, true).chars().take(width.saturating_sub(1)).collect();
                write!(self.to, "\r\x1b[K{line}")?;
                self.to.flush()?;
            }
            ProgressStyle::Plain => {
                if next {
                    self.due = Duration::ZERO;
                }
                if progress.elapsed >= self.due {
                    self.due = progress.elapsed + PLAIN_INTERVAL;
                    writeln!(self.to, "{}", line(progress, false))?;
                    self.to.flush()?;
                }
            }
        }
        self.last = Some(progress.clone());
        Ok(())
    }

    /// Leaves the line at the end.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn end(&mut self) -> io::Result<()> {
        match (self.look, self.last.take()) {
            (ProgressStyle::Terminal { .. }, Some(_)) => writeln!(self.to),
            _ => Ok(()),
        }
    }
}

fn line(progress: &Progress, has_bar: bool) -> String {
    let Progress { target, phase, elapsed, most, in_flight, complete, failed, tokens_per_second, ttft_p50_ms } = progress;
    let mut line = format!("{target:<12} {:<12}", phase.to_string());
    if let (true, Some(most)) = (has_bar, most) {
        let _ = write!(line, " {}", bar(*elapsed, *most));
    }
    let _ = match most {
        Some(most) => write!(line, " {:>4.0} of {:.0} s", elapsed.as_secs_f64(), most.as_secs_f64()),
        None => write!(line, " {:>4.0} s", elapsed.as_secs_f64()),
    };
    let _ = write!(line, "  {in_flight} in flight  {complete} done  {failed} failed  {tokens_per_second:.0} tokens/s");
    if *ttft_p50_ms > 0.0 {
        let _ = write!(line, "  TTFT p50 {ttft_p50_ms:.1} ms");
    }
    line
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a share of twenty characters")]
fn bar(elapsed: Duration, most: Duration) -> String {
    let share = if most.is_zero() { 1.0 } else { (elapsed.as_secs_f64() / most.as_secs_f64()).min(1.0) };
    let full = (share * BAR as f64) as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(BAR - full))
}

impl std::fmt::Display for Phase {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::WarmUp => to.write_str("warm-up"),
            Self::Round { number, of } => write!(to, "round {number}/{of}"),
            Self::Step { concurrency } => write!(to, "{concurrency} clients"),
        }
    }
}

#[cfg(test)]
mod tests;
