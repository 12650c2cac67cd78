//! One sequence: its tokens, how many are computed, and the blocks it holds.

use std::ops::Range;
use std::sync::Arc;

use crate::kv_events::Event;
use crate::mailbox::{Finish, Mailbox};
use crate::prefix_cache::BlockId;
use crate::tokens::{Continuation, hash_text, mix};

/// When a sequence ends, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    /// Number of generated tokens, at least 1.
    pub(crate) tokens: usize,
    /// Reason reported at the end.
    pub(crate) finish: Finish,
}

/// One prompt and the answer that grows behind it.
#[derive(Debug)]
pub(crate) struct Sequence {
    mailbox: Arc<Mailbox>,
    choice: usize,
    tokens: Vec<u32>,
    prompt_length: usize,
    limit: Limit,
    continuation: Continuation,
    /// The whole answer, if it is known in advance; otherwise empty.
    answer: Vec<u32>,
    salt: Option<String>,
    adapter: Option<String>,
    block_size: usize,
    /// Hashes of the full blocks, each depending on all earlier ones.
    hashes: Vec<u64>,
    /// Whether the sequence ran before, so that its cache query is counted once.
    started: bool,
    pub(super) blocks: Vec<BlockId>,
    /// Tokens whose results are in the blocks.
    pub(super) computed: usize,
    pub(super) scheduled: usize,
    /// Blocks that carry a hash.
    pub(super) stored: usize,
    /// Tokens that the next step loads from the host's memory.
    pub(super) loading: usize,
    /// Blocks that have been offered to the host's memory.
    pub(super) copied: usize,
}

impl Sequence {
    /// Creates a sequence that is choice `choice` of its request.
    pub(crate) fn new(mailbox: Arc<Mailbox>, choice: usize, prompt: Vec<u32>, limit: Limit, continuation: Continuation) -> Self {
        Self {
            mailbox,
            choice,
            prompt_length: prompt.len(),
            tokens: prompt,
            limit,
            continuation,
            answer: Vec::new(),
            salt: None,
            adapter: None,
            block_size: 1,
            hashes: Vec::new(),
            started: false,
            blocks: Vec::new(),
            computed: 0,
            scheduled: 0,
            stored: 0,
            loading: 0,
            copied: 0,
        }
    }

    /// Sets this answer, as far as the limit allows.
    pub(crate) fn with_answer(mut self, answer: Option<Vec<u32>>) -> Self {
        self.answer = answer.unwrap_or_default();
        if (1..=self.limit.tokens).contains(&self.answer.len()) {
            self.limit = Limit { tokens: self.answer.len(), finish: Finish::Stop };
        }
        self
    }

    /// Hashes the prompt's blocks. `salt` and `adapter` distinguish them from those of others.
    pub(crate) fn with_hashes(mut self, block_size: usize, salt: Option<String>, adapter: Option<String>) -> Self {
        self.block_size = block_size;
        (self.salt, self.adapter) = (salt, adapter);
        self.hash_full_blocks();
        self
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn prompt_length(&self) -> usize {
        self.prompt_length
    }

    pub(super) fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    pub(super) fn remaining(&self) -> usize {
        self.len() - self.computed
    }

    /// Whether only generated tokens are left to compute.
    pub(super) fn is_decoding(&self) -> bool {
        self.has_generated() && self.computed >= self.prompt_length
    }

    pub(super) fn has_generated(&self) -> bool {
        self.len() > self.prompt_length
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.mailbox.is_cancelled()
    }

    /// Begins to run, and returns whether it is the first time.
    pub(super) fn start(&mut self, cached: usize, scheduled: usize) -> bool {
        self.computed = cached;
        self.stored = cached / self.block_size;
        self.scheduled = scheduled;
        let first_time = !std::mem::replace(&mut self.started, true);
        if first_time {
            self.mailbox.add_cached_tokens(cached);
        }
        first_time
    }

    pub(super) fn restart(&mut self) {
        self.computed = 0;
        self.scheduled = 0;
        self.stored = 0;
        self.loading = 0;
    }

    pub(super) fn emit(&mut self) -> Option<Finish> {
        let known = self.answer.get(self.tokens.len() - self.prompt_length).copied();
        let token = known.unwrap_or_else(|| self.continuation.next_token());
        self.tokens.push(token);
        if self.tokens.len().is_multiple_of(self.block_size) {
            self.hash_full_blocks();
        }
        let generated = self.tokens.len() - self.prompt_length;
        let finish = (generated >= self.limit.tokens).then_some(self.limit.finish);
        self.mailbox.push(self.choice, token, generated == 1, finish);
        finish
    }

    /// Ends the sequence without another token.
    pub(super) fn end(&self, finish: Finish) {
        self.mailbox.end(self.choice, finish);
    }

    pub(super) fn stored_event(&self, blocks: Range<usize>) -> Event {
        let parent = blocks.start.checked_sub(1).map(|position| self.hashes[position]);
        let tokens = blocks.start * self.block_size..blocks.end * self.block_size;
        // vLLM mixes the salt into the first block of a prompt only, the adapter's name into all.
        let keys = blocks.clone().map(|position| {
            let salt = self.salt.as_ref().filter(|_| position == 0);
            let keys: Vec<String> = self.adapter.iter().chain(salt).cloned().collect();
            (!keys.is_empty()).then_some(keys)
        });
        let keys = keys.collect();
        Event::stored(self.hashes[blocks].to_vec(), parent, self.tokens[tokens].to_vec(), keys).of_adapter(self.adapter.clone())
    }

    /// Event of a block that was copied to the host's memory.
    pub(super) fn copied_event(&self, position: usize) -> Event {
        self.stored_event(position..position + 1).on_host()
    }

    fn hash_full_blocks(&mut self) {
        let full = self.tokens.len() / self.block_size;
        let salt = self.salt.as_deref().map_or(0, hash_text);
        let salt = self.adapter.as_deref().map_or(salt, |adapter| mix(salt, hash_text(adapter)));
        for position in self.hashes.len()..full {
            let parent = position.checked_sub(1).map_or(salt, |parent| self.hashes[parent]);
            let tokens = &self.tokens[position * self.block_size..][..self.block_size];
            self.hashes.push(tokens.iter().fold(parent, |hash, token| mix(hash, u64::from(*token))));
        }
    }
}
