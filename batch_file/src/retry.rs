//! Consequence of an attempt: whether its answer holds or the request is sent again, and when.
//!
//! Pure: chance is an argument.

use std::time::Duration;

use http::{HeaderMap, StatusCode, header};

use crate::output_line::{Answer, Outcome, error_message, is_aborted, is_unknown_model};

/// How often a request is sent if the target answers with a failure.
///
/// Another engine may answer it, but a request that fails everywhere would be tried until its
/// deadline.
const MAX_SERVER_ERRORS: u32 = 3;

/// Pause after the first attempt. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest pause if the target does not name one.
///
/// A fleet that is back is busy again within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Attempts of one request so far.
#[derive(Debug, Default)]
pub struct Attempts {
    made: u32,
    server_errors: u32,
}

/// What follows from an attempt.
#[derive(Debug)]
pub enum Judgement {
    Ended(Outcome),
    /// The target refused the key, with these words.
    KeyRefused(String),
    /// The request is sent again after the pause, because of the reason.
    Again {
        pause: Duration,
        reason: String,
    },
}

impl Attempts {
    /// Attempts that were made.
    #[must_use]
    pub fn made(&self) -> u32 {
        self.made
    }

    /// Judges an answer, or the words for its absence.
    ///
    /// `has_served` says whether the request's model has served before: it is away if it is
    /// unknown now, while a model that never did may be misspelled. `chance` is from 0 to 1.
    pub fn judge(&mut self, answer: Result<Answer, String>, has_served: bool, chance: f64) -> Judgement {
        self.made += 1;
        let answer = match answer {
            Ok(answer) => answer,
            Err(reason) => return Judgement::Again { pause: pause(self.made, None, chance), reason },
        };
        let is_aborted = is_aborted(&answer);
        self.server_errors += u32::from(is_aborted || answer.status.is_server_error());
        let retry_after = match judge(answer.status, is_aborted, self.server_errors) {
            Verdict::Final if has_served && is_unknown_model(&answer) => None,
            Verdict::Final if is_aborted => return Judgement::Ended(aborted()),
            Verdict::Final => return Judgement::Ended(Outcome::Answered(answer)),
            Verdict::KeyRefused => return Judgement::KeyRefused(error_message(&answer.body)),
            Verdict::Retry => retry_after(&answer.headers),
        };
        Judgement::Again { pause: pause(self.made, retry_after, chance), reason: describe(&answer, is_aborted) }
    }
}

fn aborted() -> Outcome {
    Outcome::Failed { code: "answer_aborted", message: "engines gave the answer up again and again before its end".to_owned() }
}

fn describe(answer: &Answer, is_aborted: bool) -> String {
    if is_aborted {
        return "an engine gave the answer up before its end".to_owned();
    }
    format!("{}: {}", answer.status, error_message(&answer.body))
}

/// Consequence of an answer for its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The answer holds.
    Final,
    /// The target cannot answer now.
    Retry,
    /// No request of this batch will be answered.
    KeyRefused,
}

/// Judges an answer.
///
/// Its engine may have given it up although the status says 200. `server_errors` counts such
/// answers and errors of servers, including this one.
fn judge(status: StatusCode, is_aborted: bool, server_errors: u32) -> Verdict {
    match status.as_u16() {
        401 => Verdict::KeyRefused,
        408 | 429 | 502..=504 => Verdict::Retry,
        code if (code >= 500 || is_aborted) && server_errors < MAX_SERVER_ERRORS => Verdict::Retry,
        _ => Verdict::Final,
    }
}

/// Pause before the next attempt.
///
/// `attempts` have been made. `chance` is from 0 to 1, and prevents requests that failed together
/// from coming together.
fn pause(attempts: u32, retry_after: Option<Duration>, chance: f64) -> Duration {
    match retry_after {
        Some(time) => time.max(FIRST_PAUSE).mul_f64(1.0 + chance / 2.0),
        None => FIRST_PAUSE.saturating_mul(1 << attempts.saturating_sub(1).min(10)).min(LONGEST_PAUSE).mul_f64(0.5 + chance / 2.0),
    }
}

/// When the target wants to be asked again, in whole seconds; a date is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    // More than a day exceeds any request's wait, and could overflow.
    let seconds: u32 = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds.min(86_400).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_statuses_are_retried_forever_and_client_errors_are_final() {
        let verdict = |status: u16, server_errors| judge(StatusCode::from_u16(status).unwrap(), false, server_errors);
        for status in [408, 429, 502, 503, 504] {
            assert_eq!(verdict(status, 1_000), Verdict::Retry, "{status}");
        }
        for status in [200, 204, 302, 400, 403, 404, 413, 422] {
            assert_eq!(verdict(status, 0), Verdict::Final, "{status}");
        }
        assert_eq!(verdict(401, 0), Verdict::KeyRefused);
    }

    #[test]
    fn a_request_failing_with_a_server_error_is_tried_thrice() {
        for (status, is_aborted) in [(StatusCode::INTERNAL_SERVER_ERROR, false), (StatusCode::OK, true)] {
            let verdicts: Vec<Verdict> = (1..=3).map(|errors| judge(status, is_aborted, errors)).collect();
            assert_eq!(verdicts, [Verdict::Retry, Verdict::Retry, Verdict::Final], "{status}");
        }
    }

    #[test]
    fn pauses_grow_to_a_minute_and_respect_retry_after() {
        let seconds = |attempts, chance| pause(attempts, None, chance).as_secs_f64();
        assert_eq!([1, 2, 3, 7, 1_000_000].map(|attempts| seconds(attempts, 1.0)), [1.0, 2.0, 4.0, 60.0, 60.0]);
        assert_eq!(seconds(7, 0.0), 30.0);
        let given = Some(Duration::from_secs(10));
        assert_eq!([0.0, 1.0].map(|chance| pause(9, given, chance).as_secs()), [10, 15]);
        assert_eq!(pause(1, Some(Duration::ZERO), 0.0), FIRST_PAUSE);
    }

    #[test]
    fn a_retry_after_is_read_in_seconds() {
        let read = |value: &'static str| retry_after(&HeaderMap::from_iter([(header::RETRY_AFTER, value.parse().unwrap())]));
        assert_eq!(read("7"), Some(Duration::from_secs(7)));
        assert_eq!(read("4000000000"), Some(Duration::from_secs(86_400)));
        assert_eq!([read("-1"), read("Fri, 31 Dec 1999 23:59:59 GMT"), retry_after(&HeaderMap::new())], [None; 3]);
    }
}
