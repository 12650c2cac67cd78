//! Reads the id of a response from its answer, whole or streamed, before the client has it.

use std::sync::{Arc, LazyLock};

use memchr::memmem::Finder;
use tokio::time::Instant;

use super::{MAX_ID_BYTES, ResponseAffinity};
use crate::engine_life::EngineLife;
use crate::fleet::Replica;

/// The key of an id. Engines write it first: it is the first key of vLLM's whole answers, and in
/// streams the first key of the first event's `response`.
static ID_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"id\":"));

/// Bytes of an answer that are searched for its id. An answer with a later id is not remembered.
const MAX_SEARCHED_BYTES: usize = 4096;

/// Records which replica keeps the response that an answer creates.
#[derive(Debug, Clone)]
pub(crate) struct ResponseRecorder {
    pub affinity: ResponseAffinity,
    pub tenant: Arc<str>,
}

/// Finds a response's id at the beginning of an answer.
#[derive(Debug)]
pub(crate) struct ResponseIdReader {
    recorder: ResponseRecorder,
    life: EngineLife,
    /// The bytes so far, until the id is complete.
    buffer: Vec<u8>,
}

impl ResponseRecorder {
    #[must_use]
    pub(crate) fn id_reader(self, replica: &Replica) -> ResponseIdReader {
        ResponseIdReader::new(self, replica.engine_life())
    }
}

impl ResponseIdReader {
    pub(super) fn new(keep: ResponseRecorder, life: EngineLife) -> Self {
        Self { recorder: keep, life, buffer: Vec::new() }
    }

    /// Reads a piece of the answer. Returns `true` once no more is needed.
    pub(crate) fn push(&mut self, piece: &[u8]) -> bool {
        let room = MAX_SEARCHED_BYTES - self.buffer.len();
        self.buffer.extend_from_slice(&piece[..piece.len().min(room)]);
        if let Some(id) = parse_id(&self.buffer) {
            self.recorder.affinity.record(&id, self.life.clone(), &self.recorder.tenant, Instant::now());
            return true;
        }
        self.buffer.len() >= MAX_SEARCHED_BYTES
    }
}

/// The value of the first key `id`, once it is complete.
fn parse_id(json: &[u8]) -> Option<String> {
    let value = json[ID_KEY.find(json)? + ID_KEY.needle().len()..].trim_ascii_start();
    let mut values = serde_json::Deserializer::from_slice(value.get(..value.len().min(MAX_ID_BYTES * 6))?).into_iter::<String>();
    values.next()?.ok()
}
