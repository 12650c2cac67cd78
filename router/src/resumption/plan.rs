//! How another engine goes on with a stream: what is kept of its request until it ends.

use super::{ReplayPlan, Sampling};
use crate::resume_tier::NotResumed;

#[derive(Debug)]
pub(crate) enum ResumePlan {
    /// From the tokens that have come, with the request's own parameters. Its body asks for tokens.
    Continue(Box<Sampling>),
    /// The request is sent again, and its answer compared with what the client has.
    Replay(Box<ReplayPlan>),
    None(NotResumed),
}
