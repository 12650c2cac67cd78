//! A line of the access log, as text or JSON. Names have a fixed order; unknown values are left
//! out.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::Method;
use tokio::time::Instant;

use crate::client_text::cut;
use crate::config::AccessFormat;
use crate::outcome::AnswerOutcome;
use crate::resume_tier::ResumeTier;
use crate::sse::TokenUsage;
use crate::token_ledger::{TokenCounts, UsageHolder};
use crate::traces::RequestEnd;

#[derive(Debug)]
pub(super) struct AccessLine {
    pub(super) ended_at: SystemTime,
    pub(super) received_at: Instant,
    pub(super) method: Method,
    /// A copy: a slice would keep the request's whole head in memory.
    pub(super) path: Option<Box<str>>,
    pub(super) client_id: Option<Arc<str>>,
    pub(super) trace: Option<u128>,
    /// Whether the caller was let in, by its key or without keys.
    pub(super) has_caller: bool,
    pub(super) key: Arc<str>,
    pub(super) tenant: Arc<str>,
    /// 0 means none.
    pub(super) id: u64,
    pub(super) model: Option<Box<str>>,
    pub(super) replica: Option<Arc<str>>,
    pub(super) attempts: usize,
    pub(super) queued: Duration,
    /// `None` if no stream was requested.
    pub(super) resume: Option<ResumeTier>,
    /// How often the stream was resumed.
    pub(super) resumed: u32,
    pub(super) first_byte: Option<Duration>,
    pub(super) total: Duration,
    pub(super) usage: Option<TokenUsage>,
    /// The router's own count of an answer that does not say its usage.
    pub(super) counted: Option<TokenUsage>,
    /// `None` if no answer had begun.
    pub(super) outcome: Option<AnswerOutcome>,
    pub(super) cause: Option<&'static str>,
    /// `None` if the client left before there was an answer.
    pub(super) status: Option<u16>,
    pub(super) bytes: u64,
}

impl AccessLine {
    pub(super) fn new(begun: Instant) -> Self {
        Self {
            ended_at: SystemTime::UNIX_EPOCH,
            received_at: begun,
            method: Method::default(),
            path: None,
            client_id: None,
            trace: None,
            has_caller: false,
            key: Arc::default(),
            tenant: Arc::default(),
            id: 0,
            model: None,
            replica: None,
            attempts: 0,
            queued: Duration::ZERO,
            resume: None,
            resumed: 0,
            first_byte: None,
            total: Duration::ZERO,
            usage: None,
            counted: None,
            outcome: None,
            cause: None,
            status: None,
            bytes: 0,
        }
    }

    fn outcome(&self) -> &'static str {
        match (self.outcome, self.status) {
            (Some(outcome), _) => outcome.as_str(),
            (None, None) => AnswerOutcome::ClientLeft.as_str(),
            (None, Some(status)) if self.cause.is_some() || status >= 400 => "refused",
            (None, Some(_)) => AnswerOutcome::Complete.as_str(),
        }
    }

    pub(super) fn cause(&self) -> Option<&'static str> {
        let of_status = |status: u16| match status {
            // An engine's own refusal is an answer.
            _ if self.outcome.is_some() => "engine",
            404 | 405 => "no_route",
            408 => "slow_body",
            413 => "too_large",
            415 => "media_type",
            429 => "limited",
            403 => "forbidden",
            400..=499 => "malformed",
            _ => "not_ready",
        };
        self.cause.or_else(|| self.status.filter(|status| *status >= 400).map(of_status))
    }

    /// What the request adds to the usage of its key, tenant and model.
    pub(super) fn usage_row(&self) -> (UsageHolder, TokenCounts) {
        let is_complete = self.outcome() == AnswerOutcome::Complete.as_str();
        let model = self.model.as_deref().unwrap_or_default().into();
        (
            UsageHolder { key: (&*self.key).into(), tenant: (&*self.tenant).into(), model },
            TokenCounts::of_request(self.usage.or(self.counted), !is_complete),
        )
    }

    /// The end of the request, for its trace.
    pub(super) fn request_end(&self) -> RequestEnd<'_> {
        RequestEnd {
            method: &self.method,
            path: self.path.as_deref(),
            id: self.id,
            client_id: self.client_id.as_deref(),
            model: self.model.as_deref(),
            key: &self.key,
            tenant: &self.tenant,
            status: self.status,
            outcome: self.outcome(),
            cause: self.cause(),
            is_answered: self.outcome.is_some(),
            usage: self.usage,
            resumed: self.resumed,
            bytes: self.bytes,
            total: self.total,
        }
    }

    /// Appends the line, newline included.
    pub(super) fn write(&self, format: AccessFormat, out: &mut String) {
        let mut fields = LineFormatter { json: format == AccessFormat::Json, out };
        fields.begin(self.ended_at);
        fields.word("id", (self.id != 0).then_some(Hex(self.id.into(), 16)));
        fields.number("status", self.status);
        fields.word("outcome", Some(self.outcome()));
        fields.word("cause", self.cause());
        fields.text("method", Some(self.method.as_str()));
        fields.text("path", self.path.as_deref());
        fields.text("model", self.model.as_deref());
        fields.text("key", Some(&*self.key).filter(|key| !key.is_empty()));
        fields.text("tenant", Some(&*self.tenant).filter(|tenant| !tenant.is_empty()));
        fields.text("replica", self.replica.as_deref());
        fields.number("attempts", Some(self.attempts).filter(|attempts| *attempts > 0));
        fields.word("resume", self.resume);
        fields.number("resumed", Some(self.resumed).filter(|resumed| *resumed > 0));
        let usage = self.usage.or(self.counted);
        fields.number("tokens_in", usage.map(|usage| usage.prompt_tokens));
        fields.number("tokens_out", usage.map(|usage| usage.completion_tokens));
        fields.word("tokens_by", self.counted.filter(|_| self.usage.is_none()).map(|_| "router"));
        fields.number("tokens_cached", self.usage.and_then(|usage| usage.cached_tokens));
        fields.seconds("queued", self.replica.is_some().then_some(self.queued));
        fields.seconds("first", self.first_byte);
        fields.seconds("total", Some(self.total));
        fields.number("bytes", Some(self.bytes));
        fields.text("client_id", self.client_id.as_deref());
        fields.word("trace", self.trace.map(|trace| Hex(trace, 32)));
        fields.end();
    }
}

/// A number, and how many hexadecimal digits to write.
struct Hex(u128, usize);

impl fmt::Display for Hex {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:0width$x}", self.0, width = self.1)
    }
}

/// A duration written to a tenth of a millisecond, without floating point.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{:04}", self.0.as_secs(), self.0.subsec_micros() / 100)
    }
}

/// Writes names and values in one of the two forms. Nothing here can fail: the sink is a string.
struct LineFormatter<'a> {
    json: bool,
    out: &'a mut String,
}

impl LineFormatter<'_> {
    fn begin(&mut self, at: SystemTime) {
        let at = humantime::format_rfc3339_millis(at);
        let _ = if self.json { write!(self.out, "{{\"time\":\"{at}\"") } else { write!(self.out, "{at}") };
    }

    fn end(&mut self) {
        self.out.push_str(if self.json { "}\n" } else { "\n" });
    }

    fn name(&mut self, name: &str) {
        let _ = if self.json { write!(self.out, ",\"{name}\":") } else { write!(self.out, " {name}=") };
    }

    fn number(&mut self, name: &str, value: Option<impl fmt::Display>) {
        if let Some(value) = value {
            self.name(name);
            let _ = write!(self.out, "{value}");
        }
    }

    fn seconds(&mut self, name: &str, value: Option<Duration>) {
        self.number(name, value.map(Seconds));
    }

    /// Writes one of our own values, which needs no escape.
    fn word(&mut self, name: &str, value: Option<impl fmt::Display>) {
        let Some(value) = value else { return };
        self.name(name);
        let _ = if self.json { write!(self.out, "\"{value}\"") } else { write!(self.out, "{value}") };
    }

    /// Writes a client's text. It is cut, and everything is escaped that could end the value or the
    /// line, or control a terminal.
    fn text(&mut self, name: &str, value: Option<&str>) {
        let Some(value) = value else { return };
        self.name(name);
        let value = cut(value);
        let is_plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b'=');
        if !self.json && !value.is_empty() && value.bytes().all(is_plain) {
            self.out.push_str(value);
            return;
        }
        self.out.push('"');
        for char in value.chars() {
            match char {
                '"' | '\\' => self.out.extend(['\\', char]),
                ' '..='~' => self.out.push(char),
                _ => char.encode_utf16(&mut [0; 2]).iter().for_each(|unit| {
                    let _ = write!(self.out, "\\u{unit:04x}");
                }),
            }
        }
        self.out.push('"');
    }
}
