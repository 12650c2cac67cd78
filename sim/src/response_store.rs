//! Responses that the engine keeps for `/v1/responses`: found by id, and ended while they run in
//! the background.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::task::AbortHandle;

/// Most responses that are kept. vLLM keeps all there ever were.
const MAX_RESPONSES: usize = 1024;

/// All kept responses. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResponseStore(Arc<Mutex<VecDeque<StoredResponse>>>);

#[derive(Debug)]
struct StoredResponse {
    id: String,
    json: String,
    /// Task that computes the response.
    running: Option<AbortHandle>,
}

/// Why a response is not cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CancelError {
    Missing,
    /// The response does not run in the background, or it is complete.
    Complete,
}

impl ResponseStore {
    /// Keeps a complete response, unless it was cancelled before.
    pub(crate) fn complete(&self, id: &str, json: String) {
        let mut kept = self.0.lock();
        match kept.iter_mut().find(|kept| kept.id == id) {
            Some(StoredResponse { running: None, json, .. }) if json.contains(CANCELLED) => {}
            Some(kept) => (kept.json, kept.running) = (json, None),
            None => push(&mut kept, StoredResponse { id: id.to_owned(), json, running: None }),
        }
    }

    /// Keeps a response that is being computed in the background.
    pub(crate) fn begin(&self, id: &str, json: String) {
        push(&mut self.0.lock(), StoredResponse { id: id.to_owned(), json, running: None });
    }

    /// Sets the task that computes a response; no effect if it is complete by now.
    pub(crate) fn set_task(&self, id: &str, task: AbortHandle) {
        if let Some(kept) = self.0.lock().iter_mut().find(|kept| kept.id == id && kept.json.contains(QUEUED)) {
            kept.running = Some(task);
        }
    }

    pub(crate) fn get(&self, id: &str) -> Option<String> {
        self.0.lock().iter().find(|kept| kept.id == id).map(|kept| kept.json.clone())
    }

    /// Cancels a response that runs in the background, and returns its final state.
    pub(crate) fn cancel(&self, id: &str) -> Result<String, CancelError> {
        let mut kept = self.0.lock();
        let kept = kept.iter_mut().find(|kept| kept.id == id).ok_or(CancelError::Missing)?;
        let running = kept.running.take().ok_or(CancelError::Complete)?;
        running.abort();
        kept.json = kept.json.replace(QUEUED, CANCELLED);
        Ok(kept.json.clone())
    }
}

/// Field of a response that waits or runs in the background.
pub(crate) const QUEUED: &str = r#""status":"queued""#;

const CANCELLED: &str = r#""status":"cancelled""#;

fn push(kept: &mut VecDeque<StoredResponse>, new: StoredResponse) {
    if kept.len() == MAX_RESPONSES {
        kept.pop_front();
    }
    kept.push_back(new);
}
