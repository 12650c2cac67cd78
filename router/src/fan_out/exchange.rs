//! The exchange of one answer, or of several that are merged as they come.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use hostler_proto::lane::{RequestHead, ResponseHead, StreamFault};
use parking_lot::Mutex;

use super::FanOut;
use super::merge::{MergedAnswer, MergedEvent, PartPosition};
use crate::direct_writing::AnswerPipeline;
use crate::lanes::{Exchange, Lanes};
use crate::sse::LineBuffer;

/// Most bytes of the parts' whole answers together.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;

/// Longest event of a part. The largest come with log probabilities, and have about ten kilobytes.
const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// A request at an engine, and its answer. Dropping it before the answer has ended cancels the
/// request.
#[derive(Debug)]
pub(crate) enum AnswerExchange {
    Single(Exchange),
    Merged(Box<Mutex<MergedExchange>>),
}

impl AnswerExchange {
    /// Sends a request, as several if there is a `fan_out`.
    ///
    /// # Errors
    /// If there is no lane, or it was lost just now.
    pub(crate) fn open(lanes: &Lanes, head: RequestHead, body: Bytes, fan_out: Option<&FanOut>) -> Result<Self, StreamFault> {
        let Some(fan_out) = fan_out else { return lanes.open(head, body).map(Self::Single) };
        let parts = fan_out.bodies.iter().enumerate().map(|(index, body)| {
            let exchange = lanes.open(head_of_part(&head, index, body), body.clone())?;
            let position = PartPosition { index, counts_prompt: index % fan_out.choices == 0 };
            Ok(RequestPart { exchange, position, head: None, lines: LineBuffer::default(), whole: BytesMut::new(), has_ended: false })
        });
        let parts = parts.collect::<Result<_, StreamFault>>()?;
        Ok(Self::Merged(Box::new(Mutex::new(MergedExchange { parts, form: None, merged: MergedAnswer::default() }))))
    }

    /// The answer's head; `Err` if it will never come.
    pub(crate) fn poll_head(&self, context: &Context<'_>) -> Poll<Result<ResponseHead, StreamFault>> {
        match self {
            Self::Single(exchange) => exchange.poll_head(context),
            Self::Merged(merged) => merged.lock().poll_head(context),
        }
    }

    /// The next bytes of the answer's body, `None` at its end.
    pub(crate) fn poll_body(&self, context: &Context<'_>) -> Poll<Result<Option<Bytes>, StreamFault>> {
        match self {
            Self::Single(exchange) => exchange.poll_body(context),
            Self::Merged(merged) => merged.lock().poll_body(context),
        }
    }

    /// Whether the answer is complete and all of it has been read.
    pub(crate) fn is_finished(&self) -> bool {
        match self {
            Self::Single(exchange) => exchange.is_finished(),
            Self::Merged(merged) => merged.lock().form == Some(MergedForm::Ended),
        }
    }

    /// Lets `pipeline` take the body's pieces while none waits to be read, until `detach`. Pieces
    /// of merged answers are always read.
    pub(crate) fn attach(&self, pipeline: &Arc<AnswerPipeline>) {
        if let Self::Single(exchange) = self {
            exchange.attach(pipeline.clone());
        }
    }

    /// See [`Self::attach`].
    pub(crate) fn detach(&self) {
        if let Self::Single(exchange) = self {
            exchange.detach();
        }
    }
}

/// The head of a part's request. The first part stands for all in the agent's estimates, and has
/// the client's id: two requests with the same id have crashed engines (vllm#15041).
fn head_of_part(head: &RequestHead, index: usize, body: &Bytes) -> RequestHead {
    let mut own = RequestHead { body_bytes: body.len() as u64, ..head.clone() };
    if index > 0 {
        own.headers.retain(|header| !header.name.eq_ignore_ascii_case(b"x-request-id"));
        (own.prompt_tokens, own.uncached_tokens) = (0, 0);
    }
    own
}

/// The answers of a request's parts, merged into one.
#[derive(Debug)]
pub(crate) struct MergedExchange {
    parts: Vec<RequestPart>,
    /// `None` until the heads have come.
    form: Option<MergedForm>,
    merged: MergedAnswer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MergedForm {
    Stream,
    Whole,
    /// The answer is that of this part, which the engine refuses.
    Refused(usize),
    Ended,
}

#[derive(Debug)]
struct RequestPart {
    exchange: Exchange,
    position: PartPosition,
    head: Option<ResponseHead>,
    lines: LineBuffer,
    /// An answer that is no stream, so far.
    whole: BytesMut,
    has_ended: bool,
}

impl MergedExchange {
    /// The first part's head once all parts are accepted, or that of the first that is refused.
    fn poll_head(&mut self, context: &Context<'_>) -> Poll<Result<ResponseHead, StreamFault>> {
        for (index, part) in self.parts.iter_mut().enumerate() {
            if part.head.is_some() {
                continue;
            }
            if let Poll::Ready(head) = part.exchange.poll_head(context) {
                let head = head?;
                if head.status != 200 {
                    self.form = Some(MergedForm::Refused(index));
                    return Poll::Ready(Ok(head));
                }
                part.head = Some(head);
            }
        }
        if self.parts.iter().any(|part| part.head.is_none()) {
            return Poll::Pending;
        }
        let Some(mut head) = self.parts[0].head.clone() else { return Poll::Pending };
        let form = if head.has_content_type(b"text/event-stream") { MergedForm::Stream } else { MergedForm::Whole };
        self.form = Some(form);
        head.headers.retain(|header| !header.name.eq_ignore_ascii_case(b"content-length"));
        Poll::Ready(Ok(head))
    }

    fn poll_body(&mut self, context: &Context<'_>) -> Poll<Result<Option<Bytes>, StreamFault>> {
        match self.form {
            Some(MergedForm::Refused(index)) => self.parts[index].exchange.poll_body(context),
            Some(MergedForm::Stream) => self.poll_stream(context),
            Some(MergedForm::Whole) => self.poll_whole(context),
            Some(MergedForm::Ended) | None => Poll::Ready(Ok(None)),
        }
    }

    fn poll_whole(&mut self, context: &Context<'_>) -> Poll<Result<Option<Bytes>, StreamFault>> {
        let mut bytes = self.parts.iter().map(|part| part.whole.len()).sum::<usize>();
        for part in self.parts.iter_mut().filter(|part| !part.has_ended) {
            while let Poll::Ready(piece) = part.exchange.poll_body(context) {
                let Some(piece) = piece? else {
                    part.has_ended = true;
                    break;
                };
                bytes += piece.len();
                if bytes > MAX_ANSWER_BYTES {
                    return Poll::Ready(Err(StreamFault::protocol("the answer is too large: ask for less at once")));
                }
                part.whole.extend_from_slice(&piece);
            }
        }
        if self.parts.iter().any(|part| !part.has_ended) {
            return Poll::Pending;
        }
        self.form = Some(MergedForm::Ended);
        let answers: Vec<(PartPosition, Bytes)> = self.parts.iter_mut().map(|part| (part.position, part.whole.split().freeze())).collect();
        Poll::Ready(MergedAnswer::merge_answers(&answers).map(Some).map_err(|message| StreamFault::protocol(&message)))
    }

    fn poll_stream(&mut self, context: &Context<'_>) -> Poll<Result<Option<Bytes>, StreamFault>> {
        let mut output = BytesMut::new();
        for part in self.parts.iter_mut().filter(|part| !part.has_ended) {
            while let Poll::Ready(piece) = part.exchange.poll_body(context) {
                let Some(piece) = piece? else {
                    part.has_ended = true;
                    break;
                };
                if part.merge_piece(&piece, &mut self.merged, &mut output).map_err(|message| StreamFault::protocol(&message))? {
                    self.form = Some(MergedForm::Ended);
                    return Poll::Ready(Ok(Some(output.freeze())));
                }
            }
        }
        if self.parts.iter().all(|part| part.has_ended) {
            self.form = Some(MergedForm::Ended);
            if let Some(usage) = self.merged.usage_event() {
                write_event(&usage, &mut output);
            }
            write_event(b"[DONE]", &mut output);
        }
        if output.is_empty() { Poll::Pending } else { Poll::Ready(Ok(Some(output.freeze()))) }
    }
}

impl RequestPart {
    /// Merges the lines that are whole now. Returns whether an error ends the answer.
    fn merge_piece(&mut self, piece: &[u8], merged: &mut MergedAnswer, output: &mut BytesMut) -> Result<bool, String> {
        let (position, mut has_failed) = (self.position, false);
        self.lines.push(piece, |line| {
            if !has_failed {
                has_failed = merge_line(line, position, merged, output)?;
            }
            Ok::<_, String>(())
        })?;
        if self.lines.len() > MAX_EVENT_BYTES { Err("the engine sent an event that is too large".to_owned()) } else { Ok(has_failed) }
    }
}

/// Merges one line. Returns whether it is an error.
fn merge_line(line: &[u8], position: PartPosition, merged: &mut MergedAnswer, output: &mut BytesMut) -> Result<bool, String> {
    if line.starts_with(b":") {
        output.extend_from_slice(line);
        output.extend_from_slice(b"\n\n");
    }
    let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return Ok(false) };
    if data.is_empty() || data == b"[DONE]" {
        return Ok(false);
    }
    let Some(MergedEvent { data, is_error }) = merged.merge_event(position, data)? else { return Ok(false) };
    write_event(&data, output);
    Ok(is_error)
}

fn write_event(data: &[u8], output: &mut BytesMut) {
    output.extend_from_slice(b"data: ");
    output.extend_from_slice(data);
    output.extend_from_slice(b"\n\n");
}

#[cfg(test)]
mod tests;
