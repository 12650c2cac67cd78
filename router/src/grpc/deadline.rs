//! The client's deadline from `grpc-timeout`. It is kept here because nothing before reads that
//! header.

use std::future::Future;
use std::time::Duration;

use http::HeaderMap;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status};

use super::status;

/// Longest timeout; longer ones are cut to it. tokio's clock cannot hold the longest that can be
/// written.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// When the client stops waiting; `None` if never.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    /// The deadline of a request that came at `begun`. As in other implementations, a header that
    /// cannot be parsed is ignored.
    pub(super) fn from_headers(headers: &HeaderMap, begun: Instant) -> Self {
        let timeout = headers.get("grpc-timeout").and_then(|value| parse_timeout(value.to_str().ok()?));
        Self(timeout.map(|timeout| begun + timeout.min(MAX_TIMEOUT)))
    }

    pub(super) fn instant(self) -> Option<Instant> {
        self.0
    }

    /// Runs `future` until the client stops waiting. Then `future` is dropped, and with it its work
    /// in an engine.
    pub(super) async fn apply<T>(self, future: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        match self.0 {
            None => future.await,
            Some(moment) => timeout_at(moment, future).await.unwrap_or_else(|_| Err(exceeded())),
        }
    }
}

pub(super) fn exceeded() -> Status {
    status::with_reason(Code::DeadlineExceeded, "DEADLINE_PASSED", "the deadline that the request came with has passed", &[])
}

/// Parses at most eight digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=8).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    let count: u64 = digits.parse().ok().filter(|_| is_number)?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_digits_and_a_unit() {
        for (text, expected) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("99999999S", Some(Duration::from_secs(99_999_999))),
            ("200m", Some(Duration::from_millis(200))),
            ("7u", Some(Duration::from_micros(7))),
            ("0n", Some(Duration::ZERO)),
            ("", None),
            ("m", None),
            ("10", None),
            ("-1S", None),
            ("+1S", None),
            ("123456789m", None),
            ("1s", None),
            ("1é", None),
        ] {
            assert_eq!(parse_timeout(text), expected, "{text:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_beyond_its_deadline_is_dropped() {
        let begun = Instant::now();
        let headers = HeaderMap::from_iter([("grpc-timeout".parse().unwrap(), "200m".parse().unwrap())]);
        let deadline = Deadline::from_headers(&headers, begun);
        let fast = deadline.apply(async { Ok(1) }).await;
        assert_eq!(fast.unwrap(), 1);
        let slow = deadline.apply(std::future::pending::<Result<(), Status>>()).await;
        assert_eq!((slow.unwrap_err().code(), begun.elapsed()), (Code::DeadlineExceeded, Duration::from_millis(200)));
        let longest = HeaderMap::from_iter([("grpc-timeout".parse().unwrap(), "99999999H".parse().unwrap())]);
        assert_eq!(Deadline::from_headers(&longest, begun).instant(), Some(begun + MAX_TIMEOUT));
    }
}
