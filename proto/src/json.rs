//! The parts of the fleet's JSON that differ from its messages, as `build.rs` names them: units,
//! words for numbers, and `null` for what is not known.

use serde::{Serialize, Serializer};

use crate::agent::v1::{Model, Phase};

/// Writes milliseconds as whole seconds, rounded down.
pub(crate) fn seconds<S: Serializer>(ms: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    (ms / 1000).serialize(serializer)
}

/// Writes milliseconds as whole seconds, rounded down, and a missing time as `null`.
#[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
pub(crate) fn optional_seconds<S: Serializer>(ms: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    ms.map(|ms| ms / 1000).serialize(serializer)
}

/// Writes a phase as its word.
pub(crate) fn phase<S: Serializer>(number: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    Phase::try_from(*number).unwrap_or_default().as_str().serialize(serializer)
}

/// Writes models as the names that requests use.
pub(crate) fn model_ids<S: Serializer>(models: &[Model], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(models.iter().map(|model| &model.id))
}

/// Writes a number as `null` if it is 0, which stands for an unknown one.
pub(crate) fn known<N: Copy + Default + PartialEq + Serialize, S: Serializer>(number: &N, serializer: S) -> Result<S::Ok, S::Error> {
    Some(*number).filter(|number| *number != N::default()).serialize(serializer)
}

/// Writes a missing message as one whose fields all have their defaults, so that no name is absent.
#[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
pub(crate) fn whole<M: Clone + Default + Serialize, S: Serializer>(message: &Option<M>, serializer: S) -> Result<S::Ok, S::Error> {
    message.clone().unwrap_or_default().serialize(serializer)
}
