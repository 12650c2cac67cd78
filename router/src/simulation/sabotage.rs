//! Faults that are built into the router for the test of the simulation: each must be found. They
//! exist in test builds alone, and in the thread that sets them.

use std::cell::Cell;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// A stream that is resumed gives its last token twice.
    TokenTwice,
    /// A stream that could go on elsewhere ends with an error.
    StreamGivenUp,
    /// A client that leaves takes its permit with it.
    PermitKept,
}

thread_local! {
    static PRESENT: Cell<Option<Sabotage>> = const { Cell::new(None) };
}

pub(super) fn set(sabotage: Option<Sabotage>) {
    PRESENT.set(sabotage);
}

pub(crate) fn is(sabotage: Sabotage) -> bool {
    PRESENT.get() == Some(sabotage)
}
