//! One conversation: its questions one after another.
//!
//! Each answer is recorded, and appended if a further question follows.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, Method};
use parking_lot::Mutex;

use super::body::{RequestOptions, body};
use crate::client::{Answer, Call, Client, ReadOptions};
use crate::record::Recorder;
use crate::sample::{Outcome, Sample};
use crate::session::Session;
use crate::target::Target;

/// Pause of a closed loop's client after a failure.
///
/// Without it, a target that refuses at once would get a million requests a second.
const FAILED_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) name: String,
    pub(super) target: Target,
    pub(super) key: Option<HeaderValue>,
    pub(super) form: RequestOptions,
    pub(super) request_timeout: Duration,
    pub(super) metrics: Option<Target>,
}

/// State shared by the conversations of one load.
pub(super) struct LoadContext {
    pub(super) endpoint: std::sync::Arc<Endpoint>,
    pub(super) recorder: Recorder,
    /// When counting begins.
    pub(super) counted_from: Instant,
    /// End of the time in which requests are sent.
    pub(super) until: Option<Instant>,
    /// Counted requests that may still begin.
    pub(super) left: Option<AtomicU64>,
    /// Clients whose connection is open and unused.
    pub(super) idle: Mutex<Vec<Client>>,
}

impl LoadContext {
    /// Whether no request may begin any more.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now >= until) || self.is_exhausted()
    }

    /// Whether all requested requests have begun.
    pub(super) fn is_exhausted(&self) -> bool {
        self.left.as_ref().is_some_and(|left| left.load(Ordering::Relaxed) == 0)
    }

    /// Takes one of the remaining requests; requests of the warm-up do not count.
    fn take(&self, due: Instant) -> bool {
        let Some(left) = self.left.as_ref().filter(|_| due >= self.counted_from) else { return true };
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    /// Runs a conversation. Its first question is due at the session's time, or now.
    pub(super) async fn run_conversation(&self, session: Session, due: Option<Instant>) {
        let mut client = self.idle.lock().pop().unwrap_or_else(|| Client::new(self.endpoint.target.place.clone()));
        let mut answers = Vec::new();
        let mut due = due;
        for number in 0..session.turns.len() {
            let pause = session.turns[number].pause;
            if number > 0 && !pause.is_zero() {
                let next = Instant::now() + pause;
                if self.is_over(next) {
                    break;
                }
                tokio::time::sleep_until(next.into()).await;
                due = Some(next);
            }
            if !self.take(due.unwrap_or_else(Instant::now)) {
                break;
            }
            let answer = self.turn(&mut client, &session, &answers, due.take()).await;
            if answer.outcome != Outcome::Complete {
                if session.begins.is_none() {
                    tokio::time::sleep(FAILED_PAUSE).await;
                }
                break;
            }
            answers.push(answer.text);
        }
        self.idle.lock().push(client);
    }

    async fn turn(&self, client: &mut Client, session: &Session, answers: &[String], due: Option<Instant>) -> Answer {
        let Endpoint { target, key, form, request_timeout, .. } = &*self.endpoint;
        let call = Call {
            method: Method::POST,
            path: format!("{}{}", target.path, form.api.path()),
            key: key.clone(),
            headers: Vec::new(),
            body: Bytes::from(body(form, session, answers.len(), answers)),
        };
        let reading = ReadOptions { stream: form.stream, keep_text: answers.len() + 1 < session.turns.len(), timeout: *request_timeout };
        let live = &self.recorder.live;
        let in_flight = live.begin();
        let sent = Instant::now();
        let due = due.unwrap_or(sent);
        let arrived = |events: u32, first: bool| {
            live.tokens.fetch_add(u64::from(events), Ordering::Relaxed);
            if first {
                live.first_token(due.elapsed());
            }
        };
        let answer = client.ask(call, reading, arrived).await;
        let whole = due.elapsed();
        drop(in_flight);
        let sample = sample(session.kind, &answer, RequestTimes { due, sent, whole });
        self.recorder.record(due, sample, &client.gaps);
        answer
    }

    /// Records a request that was due and could not begin within the time for one.
    pub(super) fn record_unsent(&self, session: &Session, due: Instant) {
        if self.take(due) {
            let whole = due.elapsed();
            let never = Answer { outcome: Outcome::TooLate, first: None, events: 0, usage: None, text: String::new() };
            let sent = due + whole;
            self.recorder.record(due, sample(session.kind, &never, RequestTimes { due, sent, whole }), &[]);
        }
    }
}

struct RequestTimes {
    due: Instant,
    sent: Instant,
    whole: Duration,
}

fn sample(kind: &'static str, answer: &Answer, times: RequestTimes) -> Sample {
    let RequestTimes { due, sent, whole } = times;
    let usage = answer.usage.unwrap_or_default();
    Sample {
        kind,
        late: sent.saturating_duration_since(due),
        first: answer.first.map(|first| first.saturating_duration_since(due)),
        whole,
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: answer.usage.and_then(|usage| usage.cached_tokens()),
        output_tokens: answer.usage.map_or(u64::from(answer.events), |usage| usage.completion_tokens),
        outcome: answer.outcome,
    }
}
