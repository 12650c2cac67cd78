//! The measured router: a separate process, and its cost.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use hostler_proto::fleet::v1::{ListRequest, OpenPageRequest};
use tempfile::TempDir;
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) edge: SocketAddr,
    pub(crate) agents: SocketAddr,
    pub(crate) admin: SocketAddr,
}

/// A running router. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Router {
    child: Child,
    pub(crate) addresses: Addresses,
    home: TempDir,
}

/// Socket for operators, in the router's home.
const SOCKET: &str = "o.sock";

const START: Duration = Duration::from_secs(10);

impl Router {
    /// Starts `program` at these addresses, or on free ports.
    pub(crate) async fn start(program: &Path, addresses: Option<Addresses>) -> anyhow::Result<Self> {
        let home = tempfile::tempdir()?;
        let output = home.path().join("out");
        let mut command = Command::new(program);
        command.arg("router");
        for (flag, address) in [
            ("--listen", addresses.map(|of| of.edge)),
            ("--agents-listen", addresses.map(|of| of.agents)),
            ("--admin-listen", addresses.map(|of| of.admin)),
        ] {
            command.args([flag, &address.map_or("127.0.0.1:0".to_owned(), |address| address.to_string())]);
        }
        command.arg("--operators-socket").arg(home.path().join(SOCKET));
        let log = File::create(home.path().join("log"))?;
        let child = command.env("HOME", home.path()).stdin(Stdio::null()).stdout(File::create(&output)?).stderr(log).spawn();
        let mut child = child.with_context(|| format!("cannot start {}: build it, or name another by HOSTLER_BIN", program.display()))?;
        for _ in 0..START.as_millis() {
            if let Some(addresses) = parse(&fs::read_to_string(&output)?) {
                return Ok(Self { child, addresses, home });
            }
            if let Some(status) = child.try_wait()? {
                bail!("the router has ended ({status}):\n{}", fs::read_to_string(home.path().join("log"))?);
            }
            sleep(Duration::from_millis(1)).await;
        }
        child.kill()?;
        bail!("the router does not say where it listens")
    }

    /// Kills the router, as the kernel would.
    pub(crate) fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Seconds of processor time that the router's threads have used.
    pub(crate) fn cpu(&self) -> anyhow::Result<f64> {
        let mut nanoseconds = 0;
        for thread in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            // A thread that has just ended has no figures.
            let line = fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
            nanoseconds += line.split(' ').next().and_then(|run| run.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(Duration::from_nanos(nanoseconds).as_secs_f64())
    }

    pub(crate) fn resident(&self) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        Ok(1024 * line.trim().trim_end_matches(" kB").parse::<u64>()?)
    }

    /// Number of ready replicas in an operator's list, and the size of that list in bytes.
    pub(crate) async fn list(&self) -> anyhow::Result<(usize, usize)> {
        let list = self.operate().await?.list(ListRequest {}).await?.into_inner();
        let bytes = prost::Message::encoded_len(&list);
        let replicas = list.nodes.into_iter().flat_map(|node| node.replicas);
        let is_ready = |replica: &hostler_proto::fleet::v1::Replica| {
            !replica.suspect && replica.state.as_ref().is_some_and(|state| state.phase() == Phase::Ready)
        };
        Ok((replicas.filter(is_ready).count(), bytes))
    }

    /// Token that lets one viewer in.
    pub(crate) async fn page_token(&self) -> anyhow::Result<String> {
        Ok(self.operate().await?.open_page(OpenPageRequest { watch_only: true }).await?.into_inner().token)
    }

    async fn operate(&self) -> anyhow::Result<FleetClient<Channel>> {
        let channel = Endpoint::from_shared(format!("unix:{}", self.home.path().join(SOCKET).display()))?.connect().await?;
        Ok(FleetClient::new(channel).max_decoding_message_size(64 << 20))
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        // The router may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Addresses, once all have been printed.
fn parse(output: &str) -> Option<Addresses> {
    let whole = output.rsplit_once('\n')?.0;
    let address = |word: &str| {
        let line = whole.lines().find_map(|line| line.strip_prefix(word))?.trim();
        line.trim_start_matches("http://").trim_end_matches("/v1").parse().ok()
    };
    Some(Addresses { edge: address("edge ")?, agents: address("agents ")?, admin: address("admin ")? })
}
