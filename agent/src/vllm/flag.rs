//! One flag of an engine: its value, who decided about it, and why.

/// Whether the model of an engine on one GPU runs in its core's process (`uni`) or in one of its
/// own (`mp`).
pub(crate) const EXECUTOR_FLAG: &str = "--distributed-executor-backend";

/// Who decided.
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

/// One flag, who decided about it, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlagChoice {
    /// With its dashes.
    pub flag: &'static str,
    /// Several values are separated by spaces; empty for a flag without a value.
    pub value: String,
    pub origin: FlagOrigin,
    pub because: String,
}

impl FlagChoice {
    /// The flag for display: of many values the first and the last.
    #[must_use]
    pub fn display_short(&self) -> String {
        let shown = match *self.value.split(' ').collect::<Vec<_>>() {
            [first, second, third, _, _, .., last] => format!("{} {first} {second} {third} … {last}", self.flag),
            _ => format!("{} {}", self.flag, self.value),
        };
        shown.trim_end().to_owned()
    }

    /// The words on the command line; none for what the agent does not give.
    pub fn to_arguments(&self) -> impl Iterator<Item = &str> {
        let given = self.origin == FlagOrigin::Hostler;
        std::iter::once(self.flag).chain(self.value.split(' ')).filter(move |word| given && !word.is_empty())
    }
}
