//! Bounds the lines that one agent can have written to the router's log. The fleet's writer and the
//! agents' sessions ask it before they write.

use std::time::Duration;

use tokio::time::Instant;

/// Most lines about one agent in a minute. A node of 64 replicas writes 192 while it starts.
pub(super) const MAX_LINES_PER_MINUTE: u32 = 240;

const WINDOW: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct LogLines {
    /// When the present minute began, and the number of lines requested in it.
    window: Option<(Instant, u32)>,
}

impl LogLines {
    /// Whether there is room for a line now. The line counts either way.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        let (_, count) = self.window.get_or_insert((now, 0));
        *count = count.saturating_add(1);
        *count <= MAX_LINES_PER_MINUTE
    }

    /// Ends a minute that is over. Returns how many of its lines were left out, if any were.
    pub(super) fn close_window(&mut self, now: Instant) -> Option<u32> {
        let (_, count) = self.window.take_if(|(began, _)| now.saturating_duration_since(*began) >= WINDOW)?;
        count.checked_sub(MAX_LINES_PER_MINUTE).filter(|left_out| *left_out > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_a_minutes_bound_are_counted() {
        let (begin, mut lines) = (Instant::now(), LogLines::default());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let written = |lines: &mut LogLines, moment| (0..1000).filter(|_| lines.take(moment)).count();
        assert_eq!(written(&mut lines, at(0)), 240);
        assert_eq!((lines.close_window(at(59)), written(&mut lines, at(59))), (None, 0));
        assert_eq!((lines.close_window(at(60)), lines.close_window(at(60))), (Some(1760), None));
        assert_eq!(written(&mut lines, at(61)), 240);
        assert!(lines.close_window(at(121)).is_some() && lines.take(at(121)));
        assert_eq!(lines.close_window(at(181)), None, "few enough were asked for");
    }
}
