//! How subcommands call a router's admin listener: where it is, with which key, and for how long they wait.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use hostler_router::keys::{Secret, read_private};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::output::complain;

/// How long the router may take to accept, and to answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long the router may take to answer what is answered when it is done. It gives up a little earlier, with a better sentence.
const DONE_DEADLINE: Duration = Duration::from_secs(31 * 60);

/// The key itself, for programs that have no file for it. It is not a flag's variable: clap would print its value.
const KEY_VARIABLE: &str = "HOSTLER_ADMIN_KEY";

/// Which router is asked.
#[derive(Debug, Args)]
pub(crate) struct AdminArgs {
    /// Admin address of the router.
    #[arg(long, env = "HOSTLER_ADMIN", default_value = "127.0.0.1:8002", value_name = "HOST:PORT")]
    pub(crate) admin: String,
    /// File with an admin key and nothing else, mode 0600, for a router whose operators need one; HOSTLER_ADMIN_KEY can hold the key itself.
    #[arg(long, env = "HOSTLER_ADMIN_KEY_FILE", value_name = "FILE")]
    admin_key_file: Option<PathBuf>,
}

/// A client of a router that shows its key with every call.
pub(crate) type Calls = FleetClient<InterceptedService<Channel, Shown>>;

/// What is shown: `Bearer` and the key, or nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shown(Option<MetadataValue<Ascii>>);

impl Shown {
    fn new(key: &Secret) -> Self {
        let value = MetadataValue::try_from(format!("Bearer {}", key.reveal()));
        let mut value = value.expect("a key is made of letters and digits");
        value.set_sensitive(true);
        Self(Some(value))
    }
}

impl Interceptor for Shown {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(key) = &self.0 {
            request.metadata_mut().insert("authorization", key.clone());
        }
        Ok(request)
    }
}

/// A client of the router that the arguments name, with or without `http://`.
pub(crate) async fn connect(args: &AdminArgs) -> anyhow::Result<Calls> {
    connect_within(&args.admin, key(args)?.as_ref(), DEADLINE).await
}

/// As `connect`, for calls that are answered when they are done.
pub(crate) async fn connect_patiently(args: &AdminArgs) -> anyhow::Result<Calls> {
    connect_within(&args.admin, key(args)?.as_ref(), DONE_DEADLINE).await
}

/// A client of a router whose address and key are known.
pub(crate) async fn connect_with(address: &str, key: &Secret) -> anyhow::Result<Calls> {
    connect_within(address, Some(key), DEADLINE).await
}

/// The key that the arguments or the environment give.
fn key(args: &AdminArgs) -> anyhow::Result<Option<Secret>> {
    let key = match (&args.admin_key_file, std::env::var(KEY_VARIABLE)) {
        (Some(file), _) => Some(of_file(file)?),
        (None, Ok(text)) if !text.trim().is_empty() => Some(text.trim().parse().with_context(|| format!("{KEY_VARIABLE} holds no key"))?),
        (None, _) => None,
    };
    if key.is_some() && !is_loopback(&args.admin) {
        complain(&format!(
            "the admin key travels to {} in plain text; a tunnel such as `ssh -L 8002:127.0.0.1:8002 HOST` hides it",
            args.admin
        ));
    }
    Ok(key)
}

fn of_file(file: &Path) -> anyhow::Result<Secret> {
    let text = read_private(file)?;
    text.trim().parse().with_context(|| format!("{} holds no key", file.display()))
}

/// Whether an address names this host, as it is written.
fn is_loopback(address: &str) -> bool {
    let address = address.strip_prefix("http://").unwrap_or(address);
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

async fn connect_within(address: &str, key: Option<&Secret>, answer: Duration) -> anyhow::Result<Calls> {
    let address = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
    let endpoint = Endpoint::from_shared(format!("http://{address}")).with_context(|| format!("{address:?} is not HOST:PORT"))?;
    let channel = endpoint.connect_timeout(DEADLINE).timeout(answer).connect().await;
    let channel = channel.with_context(|| {
        format!("cannot reach a router's admin listener at {address}; is the router running? name another with --admin HOST:PORT")
    })?;
    Ok(FleetClient::with_interceptor(channel, key.map(Shown::new).unwrap_or_default()))
}

/// The router's own sentence, without gRPC around it.
pub(crate) fn said(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_is_known_however_it_is_written() {
        for here in ["127.0.0.1:8002", "localhost:1", "[::1]:8002", "http://127.9.9.9:1"] {
            assert!(is_loopback(here), "{here}");
        }
        for there in ["10.0.0.1:8002", "router:8002", "localhost.example.org:8002", "0.0.0.0:8002"] {
            assert!(!is_loopback(there), "{there}");
        }
    }

    #[test]
    fn a_key_that_is_shown_is_not_printed() {
        let key = Secret::random().unwrap();
        let printed = format!("{:?} {:?}", Shown::new(&key), key);
        assert!(!printed.contains(key.reveal().rsplit('_').next().unwrap()), "{printed}");
    }
}
