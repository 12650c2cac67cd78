//! Decides how a stream continues if its engine is lost, from the body and the fleet's engines,
//! before the request is placed.

use std::ops::Range;

use hostler_api::Route;
use http::uri::PathAndQuery;

use super::edge::Edge;
use super::peek::Peek;
use crate::fleet::EngineLaunch;
use crate::placement::PlacementRequest;
use crate::resume_tier::NotResumed;
use crate::resumption::{
    ReplayApi, ReplayPlan, ResumePlan, Sampling, StreamApi, check_engine, check_message_request, check_replaying_engine,
};

/// How the stream of a request goes on if its engine is lost.
pub(super) enum ResumeChoice {
    /// The stream continues from its tokens.
    Continue(Box<Sampling>),
    /// The request is sent again.
    Replay(ReplayApi),
    /// The stream does not continue, for this reason.
    None(NotResumed),
}

impl ResumeChoice {
    /// The plan for another engine, made of the request as it is placed.
    pub(super) fn into_plan(self, request: &PlacementRequest, prompt_parts: Vec<Range<usize>>) -> ResumePlan {
        match self {
            Self::Continue(mut sampling) => {
                sampling.cache_salt.clone_from(&request.cache_salt);
                ResumePlan::Continue(sampling)
            }
            Self::Replay(api) => ResumePlan::Replay(Box::new(ReplayPlan::new(api, request, prompt_parts))),
            Self::None(reason) => ResumePlan::None(reason),
        }
    }
}

impl Edge {
    /// Chooses for a request, whose body is JSON if it `is_json`.
    pub(super) fn choose_resumption(&self, path: &PathAndQuery, (body, is_json): (&[u8], bool), peek: &Peek) -> ResumeChoice {
        if !peek.is_stream || !is_json {
            return ResumeChoice::None(NotResumed::NoStream);
        }
        if !self.config.resume_streams {
            return ResumeChoice::None(NotResumed::Off);
        }
        let route = Route::of(path.path());
        let Some(api) = ReplayApi::for_route(route).filter(|_| path.query().is_none()) else {
            return ResumeChoice::None(NotResumed::Route);
        };
        let model = peek.model.as_deref();
        let can_replay = || self.check_engines(model, check_replaying_engine);
        let Some(continued_api) = StreamApi::for_route(route) else {
            let checked = can_replay().and_then(|()| check_message_request(body));
            return checked.map_or_else(ResumeChoice::None, |()| ResumeChoice::Replay(api));
        };
        // Tokens are asked for if there is a replica whose streams can be continued.
        let engines = self.check_engines(model, |launch| check_engine(launch, continued_api));
        if let Err(reason) = engines
            && can_replay().is_err()
        {
            return ResumeChoice::None(reason);
        }
        let (reason, may_be_replayed) = match (engines, Sampling::parse(continued_api, body)) {
            (Ok(()), Ok(sampling)) => return ResumeChoice::Continue(Box::new(sampling)),
            (Err(reason), Ok(sampling)) => (reason, sampling.is_determined()),
            (_, Err(unfit)) => (unfit.reason, unfit.may_be_replayed),
        };
        let checked = if may_be_replayed { can_replay() } else { Err(reason) };
        checked.map_or_else(ResumeChoice::None, |()| ResumeChoice::Replay(api))
    }

    /// Whether `check` holds for some replica; else the reason why not.
    fn check_engines(
        &self,
        model: Option<&str>,
        check: impl Fn(Option<&EngineLaunch>) -> Result<(), NotResumed>,
    ) -> Result<(), NotResumed> {
        let view = self.dispatch.fleet.view();
        let eligible = view.replicas.iter().filter(|replica| replica.accepts(model));
        let mut checks = eligible.map(|replica| check(replica.state.launch.as_ref()));
        match checks.next().ok_or(NotResumed::Engine)? {
            Err(_) if checks.any(|check| check.is_ok()) => Ok(()),
            first => first,
        }
    }
}
