//! Names a request, and says whether it is a suspect.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A hash of a request's content and its tenant.
pub(crate) type Fingerprint = u128;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ban {
    /// The replicas whose engines crashed, each with how long ago that was.
    pub crashes: Vec<(Arc<str>, Duration)>,
    /// How much longer the ban lasts.
    pub remaining: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SuspectStanding {
    Clear,
    Suspect,
    Banned(Ban),
}

impl fmt::Display for Ban {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.crashes.len();
        write!(
            formatter,
            "this request is refused for another {} s: it was in flight when {count} engines crashed (",
            self.remaining.as_secs().max(1)
        )?;
        for (index, (replica, ago)) in self.crashes.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{replica} {} s ago", ago.as_secs())?;
        }
        formatter.write_str("). It is known by its exact content; do not send it again unchanged")
    }
}
