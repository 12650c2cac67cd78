//! Body of a streamed answer.
//!
//! It takes tokens from the mailbox and hands one event at a time to the server, which sends each
//! as one HTTP chunk. The writers of each API decide the format of the events.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::task::{Context, Poll, ready};

use bytes::Bytes;

use crate::engine::Generation;
use crate::mailbox::{Delta, Finish};

/// Last event of a stream.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";

/// Event that vLLM sends, with Python's spacing, when the engine fails under a stream.
const ENGINE_FAILED: &[u8] = b"data: {\"error\": {\"message\": \"EngineCore encountered an issue. See stack trace (above) for the root cause.\", \"type\": \"InternalServerError\", \"param\": null, \"code\": 500}}\n\n";

/// Converter of tokens into the events of one API.
pub(crate) trait WriteEvents: Debug + Send {
    /// Writes the events for one choice's new tokens, and for its end.
    fn write(&mut self, delta: &Delta, cached_tokens: usize, events: &mut VecDeque<Bytes>);

    /// Writes the events after the end of all choices.
    ///
    /// There are none if the last choice's end is also the stream's.
    fn end(&mut self, _cached_tokens: usize, _events: &mut VecDeque<Bytes>) {}

    /// Writes the events after a failure of the engine.
    fn fail(&mut self, events: &mut VecDeque<Bytes>) {
        events.extend([ENGINE_FAILED, DONE].map(Bytes::from_static));
    }
}

/// A streamed answer. Dropping it ends the generation.
#[derive(Debug)]
pub(crate) struct EventStream {
    generation: Generation,
    writer: Box<dyn WriteEvents>,
    ready: VecDeque<Bytes>,
    deltas: Vec<Delta>,
    unfinished: usize,
}

impl EventStream {
    pub(crate) fn new(generation: Generation, writer: impl WriteEvents + 'static) -> Self {
        let unfinished = generation.choices;
        Self { generation, writer: Box::new(writer), ready: VecDeque::new(), deltas: Vec::new(), unfinished }
    }

    pub(crate) fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(event));
            }
            if self.unfinished == 0 {
                return Poll::Ready(None);
            }
            ready!(self.generation.mailbox.poll_deltas(context, &mut self.deltas));
            self.write_deltas();
        }
    }

    fn write_deltas(&mut self) {
        let cached_tokens = self.generation.mailbox.cached_tokens();
        for delta in &self.deltas {
            if delta.finish == Some(Finish::Error) {
                self.writer.fail(&mut self.ready);
                self.unfinished = 0;
                return;
            }
            self.unfinished -= usize::from(delta.finish.is_some());
            self.writer.write(delta, cached_tokens, &mut self.ready);
        }
        if self.unfinished == 0 {
            self.writer.end(cached_tokens, &mut self.ready);
        }
    }
}
