//! Faults built into the router to test the simulation, which must find each of them. They exist
//! only in test builds, in the thread that sets them.

use std::cell::Cell;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// A resumed stream gives its last token twice.
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
