//! Names of this host: its own, which a controller writes down, and those for the certificate that
//! a router's clients see.

use std::collections::BTreeSet;
use std::time::Duration;

use hostler_boot::program::run_to_end;
use tokio::process::Command;

pub(crate) use hostler_boot::this_host;

/// Deadline of `hostname`, which asks the network's name service.
const NAME_TIMEOUT: Duration = Duration::from_secs(5);

/// Names known to `hostname`: the kernel's, and the network's if there is one.
pub(crate) async fn find_host_names() -> Vec<String> {
    let mut names = vec![this_host()];
    let mut command = Command::new("hostname");
    command.arg("--fqdn");
    if let Ok(Some(ended)) = run_to_end(command, &[], NAME_TIMEOUT).await
        && ended.status.success()
    {
        names.push(String::from_utf8_lossy(&ended.stdout).trim().to_owned());
    }
    names
}

/// Names under which clients may reach the edge: this host's, and its short one. Names that a
/// certificate cannot hold are left out.
pub(crate) fn certified_names(host_names: &[String]) -> Vec<String> {
    let is_name = |name: &&str| {
        !name.is_empty()
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '.'))
            && !name.starts_with('.')
    };
    let short = host_names.iter().filter_map(|name| name.split('.').next());
    let names: BTreeSet<&str> = host_names.iter().map(String::as_str).chain(short).filter(is_name).collect();
    ["localhost", "127.0.0.1", "::1"].into_iter().chain(names.into_iter().filter(|name| *name != "localhost")).map(str::to_owned).collect()
}
