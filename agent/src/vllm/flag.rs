//! One flag of an engine: its value, its origin, and the reason.

use hostler_api::Route;

/// Flag for whether the model of an engine on one GPU runs in its core's process (`uni`) or in a
/// separate one (`mp`).
pub(crate) const EXECUTOR_FLAG: &str = "--distributed-executor-backend";

/// Flag that turns on vLLM's routes for engines without a front-end of their own, of which routers
/// use those that render prompts.
pub(crate) const SCALE_OUT_FLAG: &str = "--enable-scale-out";

/// The routes of [`SCALE_OUT_FLAG`] in vLLM 0.32, each with all below it, but for one that no
/// router passes on.
pub(crate) const SCALE_OUT_ROUTES: [&str; 7] = [
    Route::ChatRender.path(),
    Route::CompletionRender.path(),
    Route::Generate.path(),
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
];

/// Origin of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlagOrigin {
    /// The agent: the flag is on the command line.
    Hostler,
    /// The engine: it is the release's default.
    Engine,
    /// The user, after `--`.
    User,
}

impl FlagOrigin {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hostler => "hostler",
            Self::Engine => "engine default",
            Self::User => "yours",
        }
    }
}

/// One flag with its origin and reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlagChoice {
    /// Name with its dashes.
    pub flag: &'static str,
    /// Value, empty for a flag without one. Several values are separated by spaces.
    pub value: String,
    pub origin: FlagOrigin,
    pub because: String,
}

impl FlagChoice {
    /// The flag for display; of many values only the first and the last.
    #[must_use]
    pub fn display_short(&self) -> String {
        let shown = match *self.value.split(' ').collect::<Vec<_>>() {
            [first, second, third, _, _, .., last] => format!("{} {first} {second} {third} … {last}", self.flag),
            _ => format!("{} {}", self.flag, self.value),
        };
        shown.trim_end().to_owned()
    }

    /// Words on the command line; empty for a flag that the agent does not give.
    pub fn to_arguments(&self) -> impl Iterator<Item = &str> {
        let given = self.origin == FlagOrigin::Hostler;
        std::iter::once(self.flag).chain(self.value.split(' ')).filter(move |word| given && !word.is_empty())
    }
}
