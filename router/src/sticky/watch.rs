//! Reads the id of a response from its answer, whole or streamed, before the client has it.

use std::sync::{Arc, LazyLock};

use memchr::memmem::Finder;
use tokio::time::Instant;

use super::{Home, ID_BYTES, Sticky};
use crate::fleet::Replica;

/// Engines write the id first: in vLLM's whole answers it is the first key, in streams the first of the first event's `response`.
static ID: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"id\":"));

/// An answer whose id is not among its first bytes is not remembered.
const LOOKED_AT: usize = 4096;

/// Whose response an answer will be.
#[derive(Debug, Clone)]
pub struct Keep {
    /// Where it is to be remembered.
    pub sticky: Sticky,
    /// Whose it is.
    pub tenant: Arc<str>,
}

/// One answer's beginning.
#[derive(Debug)]
pub struct Watch {
    keep: Keep,
    home: Home,
    /// What came so far, until the id is whole.
    read: Vec<u8>,
}

impl Keep {
    /// Watches an answer of this replica.
    #[must_use]
    pub fn watch(self, replica: &Replica) -> Watch {
        Watch::new(self, Home::of(replica))
    }
}

impl Watch {
    pub(super) fn new(keep: Keep, home: Home) -> Self {
        Self { keep, home, read: Vec::new() }
    }

    /// Takes in a piece of the answer; whether it is done.
    pub fn look(&mut self, piece: &[u8]) -> bool {
        let room = LOOKED_AT - self.read.len();
        self.read.extend_from_slice(&piece[..piece.len().min(room)]);
        if let Some(id) = id(&self.read) {
            self.keep.sticky.learn(&id, self.home.clone(), &self.keep.tenant, Instant::now());
            return true;
        }
        self.read.len() >= LOOKED_AT
    }
}

/// The value of the first key `id`, once all of it is there.
fn id(json: &[u8]) -> Option<String> {
    let value = json[ID.find(json)? + ID.needle().len()..].trim_ascii_start();
    let mut values = serde_json::Deserializer::from_slice(value.get(..value.len().min(ID_BYTES * 6))?).into_iter::<String>();
    values.next()?.ok()
}
