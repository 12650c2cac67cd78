//! Why a router cannot have its address: a `hostler up` of this user has it.

use hostler_boot::ListenError;
use hostler_router::StartError;

use super::{LocalFleet, find_local_fleets};

/// Says what is up here already, if that is why the address is in use, and this advice.
pub(crate) async fn explain_conflict(error: StartError, advice: &str) -> anyhow::Error {
    let taken = match &error {
        StartError::Listen(ListenError::InUse { address, setting, .. })
        | StartError::Replaceable(ListenError::InUse { address, setting, .. }) => format!("{address} (setting {setting}) is in use"),
        _ => return error.into(),
    };
    match find_local_fleets().await.iter().map(LocalFleet::describe).collect::<Vec<_>>() {
        up if up.is_empty() => error.into(),
        up => anyhow::anyhow!("{taken}, and up here already is {}; {advice}", up.join(", ")),
    }
}
