//! A recorded trace as conversations.
//!
//! Equal ids become equal words, so prompts share what they shared in the recording.

use std::path::Path;
use std::sync::Arc;

use hostler_simulate::TraceError;
use hostler_simulate::trace::{TraceRequest, read_requests};

use super::draw::{Draw, Purpose};
use super::text;

/// Most requests of a trace.
///
/// More would take gigabytes of memory; the published traces have some ten thousand.
const MOST_REQUESTS: usize = 2_000_000;

/// Recorded requests, in the order in which they came; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Trace(Arc<[TraceRequest]>);

impl Trace {
    /// Reads the trace in a file.
    ///
    /// Requests are put in the order of their times, and the first one's time becomes the
    /// beginning.
    ///
    /// # Errors
    /// When the file cannot be read or is not in the format.
    pub(super) fn read(file: &Path) -> Result<Self, TraceError> {
        let mut all: Vec<TraceRequest> = read_requests(file)?.take(MOST_REQUESTS + 1).collect::<Result<_, _>>()?;
        if all.len() > MOST_REQUESTS {
            return Err(TraceError::TooMany { file: file.to_owned(), most: MOST_REQUESTS });
        }
        all.sort_by(|one, other| one.timestamp.total_cmp(&other.timestamp));
        let Some(first) = all.first().map(|request| request.timestamp) else { return Err(TraceError::Empty(file.to_owned())) };
        for request in &mut all {
            request.timestamp -= first;
        }
        Ok(Self(all.into()))
    }

    /// Request of this number, if there are so many.
    pub(super) fn request(&self, number: u64) -> Option<&TraceRequest> {
        self.0.get(usize::try_from(number).ok()?)
    }
}

/// Prompt of a request: the words of each block, the last one cut where the prompt ends.
pub(super) fn prompt(request: &TraceRequest, seed: u64) -> Arc<str> {
    let mut prompt = String::with_capacity((request.input as usize + 1) * text::BYTES_PER_TOKEN);
    for (id, tokens) in request.blocks() {
        text::write(&mut prompt, &mut Draw::new(seed, Purpose::Block, id), tokens);
    }
    prompt.pop();
    prompt.into()
}
