//! Decides how a stream continues if its engine is lost, from the body and the fleet's engines,
//! before the request is placed.

use http::uri::PathAndQuery;

use super::edge::Edge;
use super::peek::Peek;
use crate::fleet::EngineLaunch;
use crate::resumption::{ReplayApi, Sampling, StreamApi, check_engine, check_message_request, check_replaying_engine};

pub(super) enum ResumePlan {
    /// The stream continues from its tokens.
    Continue(Box<Sampling>),
    /// The request is sent again.
    Replay(ReplayApi),
    /// The stream does not continue, for this reason.
    None(&'static str),
}

impl ResumePlan {
    /// The parameters for a continuation, or why there is none, and the API of a replayed stream.
    pub(super) fn into_parts(self) -> (Result<Box<Sampling>, &'static str>, Option<ReplayApi>) {
        match self {
            Self::Continue(sampling) => (Ok(sampling), None),
            Self::Replay(api) => (Err("replay"), Some(api)),
            Self::None(reason) => (Err(reason), None),
        }
    }
}

impl Edge {
    /// The plan for a streaming request with a JSON body.
    pub(super) fn resume_plan(&self, path: &PathAndQuery, body: &[u8], peek: &Peek<'_>) -> ResumePlan {
        if !self.config.resume_streams {
            return ResumePlan::None("off");
        }
        let Some(api) = ReplayApi::for_path(path.path()).filter(|_| path.query().is_none()) else { return ResumePlan::None("route") };
        let model = peek.model.as_deref();
        let can_replay = || self.check_engines(model, check_replaying_engine);
        let Some(continued_api) = StreamApi::for_path(path.path()) else {
            let checked = can_replay().and_then(|()| check_message_request(body));
            return checked.map_or_else(ResumePlan::None, |()| ResumePlan::Replay(api));
        };
        // Tokens are asked for if there is a replica whose streams can be continued.
        let engines = self.check_engines(model, |launch| check_engine(launch, continued_api));
        if let Err(reason) = engines
            && can_replay().is_err()
        {
            return ResumePlan::None(reason);
        }
        let (reason, may_be_replayed) = match (engines, Sampling::parse(continued_api, body)) {
            (Ok(()), Ok(sampling)) => return ResumePlan::Continue(Box::new(sampling)),
            (Err(reason), Ok(sampling)) => (reason, sampling.is_determined()),
            (_, Err(unfit)) => (unfit.reason, unfit.may_be_replayed),
        };
        let checked = if may_be_replayed { can_replay() } else { Err(reason) };
        checked.map_or_else(ResumePlan::None, |()| ResumePlan::Replay(api))
    }

    /// Whether `check` holds for some replica; else the reason why not.
    fn check_engines(
        &self,
        model: Option<&str>,
        check: impl Fn(Option<&EngineLaunch>) -> Result<(), &'static str>,
    ) -> Result<(), &'static str> {
        let view = self.dispatch.fleet.view();
        let eligible = view.replicas.iter().filter(|replica| replica.accepts(model));
        let mut checks = eligible.map(|replica| check(replica.state.launch.as_ref()));
        match checks.next().ok_or("engine")? {
            Err(_) if checks.any(|check| check.is_ok()) => Ok(()),
            first => first,
        }
    }
}
