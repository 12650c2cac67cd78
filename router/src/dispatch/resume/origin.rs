//! The properties that an engine must share with the one that began a stream, so that it can
//! continue it.

use crate::fleet::{EngineLaunch, Replica};
use crate::prompt::FilesHash;
use crate::resumption::{StreamApi, are_alike, check_engine, check_replaying_engine, have_alike_tokens};

/// The facts about the engine that began a stream.
#[derive(Debug, Clone)]
pub(super) struct StreamOrigin {
    /// The requested model, else the engine's first model name: a request without a model may not
    /// go on at another model.
    model: Option<String>,
    /// Hash of tokenizer and template.
    files: Option<FilesHash>,
    launch: EngineLaunch,
}

impl StreamOrigin {
    /// `None` if nobody knows how the engine was started.
    pub(super) fn new(requested_model: Option<&str>, replica: &Replica) -> Option<Self> {
        let first = || Some(replica.state.models.first()?.id.clone());
        let model = requested_model.map(str::to_owned).or_else(first);
        Some(Self { model, files: replica.state.files, launch: replica.state.launch.clone()? })
    }

    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Whether a replica can go on from the tokens.
    pub(super) fn may_continue_at(&self, replica: &Replica) -> bool {
        let launch = replica.state.launch.as_ref();
        let takes_tokens = check_engine(launch, StreamApi::Completions).is_ok();
        takes_tokens && self.is_same_model(replica) && launch.is_some_and(|launch| have_alike_tokens(launch, &self.launch))
    }

    /// Whether a replica gives the same answer to the same request.
    pub(super) fn may_replay_at(&self, replica: &Replica) -> bool {
        let launch = replica.state.launch.as_ref();
        let can_replay = check_replaying_engine(launch).is_ok();
        can_replay && self.is_same_model(replica) && launch.is_some_and(|launch| are_alike(launch, &self.launch))
    }

    fn is_same_model(&self, replica: &Replica) -> bool {
        // Agents report their engines' files a moment after the engines serve, and some cannot read
        // them.
        let have_same_files = self.files.zip(replica.state.files).is_none_or(|(one, other)| one == other);
        have_same_files && replica.serves(self.model())
    }
}
