//! Counted paths. Each case starts its parts, warms them, and counts some rounds.

mod agent;
mod blocks;
mod clients;
mod events;
mod pure;
mod requests;
mod scene;

use clap::ValueEnum;

use blocks::Counted;
pub(crate) use blocks::{removed_blocks, stored_blocks};
pub(crate) use clients::{ANSWER, EVENT, chunk};

/// A path that is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// An event at the router, of 256 streams that get one each in every step of their engine.
    RouterEvent,
    /// The same of streams that may be resumed.
    RouterEventResumed,
    /// The same of streams that may be replayed.
    RouterEventReplayed,
    /// An event at the router that comes by itself.
    RouterEventAlone,
    /// A tiny request and its plain answer at the router, one of 16 at once, with one replica.
    #[value(name = "router-request-of-1")]
    RouterRequestOf1,
    /// The same with 8 replicas.
    #[value(name = "router-request-of-8")]
    RouterRequestOf8,
    /// The same with 1,000 replicas.
    #[value(name = "router-request-of-1000")]
    RouterRequestOf1000,
    /// The same with 8 replicas, where one of a hundred requests has a trace.
    RouterRequestTraced,
    /// A request with 100 kB of prompt at the router, with 8 replicas, placed by its text.
    RouterLongRequest,
    /// An event at the agent, of 256 streams that get one each in every step of their engine.
    AgentEvent,
    /// A tiny request and its plain answer at the agent, one of 16 at once.
    AgentRequest,
    /// A long prompt's blocks that an engine has stored, at the agent.
    AgentBlocksStored,
    /// The same blocks removed.
    AgentBlocksRemoved,
    /// A long prompt's blocks that an engine has stored, at the router.
    RouterBlocksStored,
    /// The same blocks removed.
    RouterBlocksRemoved,
    /// The scanner over one event.
    Scanner,
    /// The choice among 8 replicas.
    #[value(name = "place-among-8")]
    PlaceAmong8,
    /// The choice among 1,000 replicas.
    #[value(name = "place-among-1000")]
    PlaceAmong1000,
    /// Keys of 1,000 tokens.
    TokenKeys,
    /// Keys of a kilobyte of text.
    TextKeys,
}

impl Case {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Self::value_variants().iter().copied()
    }

    /// Name on the command line and in the budget.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        // Clap's own value owns its name, so it cannot be returned here.
        match self {
            Self::RouterEvent => "router-event",
            Self::RouterEventResumed => "router-event-resumed",
            Self::RouterEventReplayed => "router-event-replayed",
            Self::RouterEventAlone => "router-event-alone",
            Self::RouterRequestOf1 => "router-request-of-1",
            Self::RouterRequestOf8 => "router-request-of-8",
            Self::RouterRequestOf1000 => "router-request-of-1000",
            Self::RouterRequestTraced => "router-request-traced",
            Self::RouterLongRequest => "router-long-request",
            Self::AgentEvent => "agent-event",
            Self::AgentRequest => "agent-request",
            Self::AgentBlocksStored => "agent-blocks-stored",
            Self::AgentBlocksRemoved => "agent-blocks-removed",
            Self::RouterBlocksStored => "router-blocks-stored",
            Self::RouterBlocksRemoved => "router-blocks-removed",
            Self::Scanner => "scanner",
            Self::PlaceAmong8 => "place-among-8",
            Self::PlaceAmong1000 => "place-among-1000",
            Self::TokenKeys => "token-keys",
            Self::TextKeys => "text-keys",
        }
    }

    /// Number of counted operations.
    #[must_use]
    pub(crate) fn operations(self) -> u32 {
        match self {
            Self::RouterEvent | Self::RouterEventResumed | Self::RouterEventReplayed => events::STREAMS * events::STEPS,
            Self::RouterEventAlone => events::ALONE,
            Self::RouterRequestOf1 | Self::RouterRequestOf8 | Self::RouterRequestOf1000 | Self::RouterRequestTraced => {
                requests::AT_ONCE * requests::ROUNDS
            }
            Self::RouterLongRequest => requests::LONG,
            Self::AgentEvent => agent::STREAMS * agent::STEPS,
            Self::AgentRequest => agent::AT_ONCE * agent::ROUNDS,
            Self::AgentBlocksStored | Self::AgentBlocksRemoved | Self::RouterBlocksStored | Self::RouterBlocksRemoved => blocks::PROMPTS,
            Self::Scanner | Self::PlaceAmong8 | Self::PlaceAmong1000 | Self::TokenKeys | Self::TextKeys => pure::TIMES,
        }
    }

    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::RouterEvent => events::streams(events::NOT_RESUMED, events::STREAMS, events::STEPS),
            Self::RouterEventResumed => events::streams(events::RESUMED, events::STREAMS, events::STEPS),
            Self::RouterEventReplayed => events::streams(events::REPLAYED, events::STREAMS, events::STEPS),
            Self::RouterEventAlone => events::streams(events::NOT_RESUMED, 1, events::ALONE),
            Self::RouterRequestOf1 => requests::tiny(1),
            Self::RouterRequestOf8 => requests::tiny(8),
            Self::RouterRequestOf1000 => requests::tiny(1000),
            Self::RouterRequestTraced => requests::traced(),
            Self::RouterLongRequest => requests::long(),
            Self::AgentEvent => agent::events(),
            Self::AgentRequest => agent::requests(),
            Self::AgentBlocksStored => blocks::at_agent(Counted::Stored),
            Self::AgentBlocksRemoved => blocks::at_agent(Counted::Removed),
            Self::RouterBlocksStored => blocks::at_router(Counted::Stored),
            Self::RouterBlocksRemoved => blocks::at_router(Counted::Removed),
            Self::Scanner => pure::scanner(),
            Self::PlaceAmong8 => pure::place_among(8),
            Self::PlaceAmong1000 => pure::place_among(1000),
            Self::TokenKeys => pure::token_keys(),
            Self::TextKeys => pure::text_keys(),
        }
        .map_err(|error| error.context(self.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_found_by_its_name() {
        assert!(Case::all().all(|case| Case::from_str(case.name(), false) == Ok(case)));
    }
}
