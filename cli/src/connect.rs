//! `hostler connect`: reaches the fleet on a login node from another machine.
//!
//! It asks for the fleet's address and key over ssh, and forwards a local port over the same
//! connection, so people log in once. All of it ends with ssh, and ssh ends with it.

use std::fs::Permissions;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hostler_boot::Shutdown;
use hostler_boot::shutdown::SignalSource;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::env::{ClientAccess, OperatorAccess, Shell, say_exports};
use crate::output::{complain, say};
use crate::trust::{bundle_of, write_bundle};

/// Time for the login: a person may have to find a one-time password first.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(180);

/// Time to forward a port, which an open connection does at once.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(20);

/// How long ssh may take to close a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Most lines read for the answer, which follows the login shell's own output.
const MAX_LINES: usize = 1000;

/// Remote command in a login shell, because no other shell has ~/.local/bin on its PATH. It runs
/// until this side closes the connection, and reports where the fleet is whenever that changes.
const REMOTE_COMMAND: &str = "exec bash -lc 'exec hostler env --json --follow'";

#[derive(Debug, Args)]
pub(crate) struct ConnectArgs {
    /// The host on which the fleet was started, as `ssh` takes it. What else ssh needs to know
    /// stands in ~/.ssh/config.
    #[arg(value_name = "USER@HOST", value_parser = parse_destination)]
    destination: String,
    /// The port on this machine's loopback; without it a free one.
    #[arg(long)]
    port: Option<u16>,
}

fn parse_destination(text: &str) -> Result<String, &'static str> {
    // ssh would take it for an option.
    if text.is_empty() || text.starts_with('-') { Err("a host, or USER@HOST, was expected") } else { Ok(text.to_owned()) }
}

/// An open connection, whose socket takes further orders.
struct SshConnection<'a> {
    destination: &'a str,
    /// Folder of the socket, out of others' reach.
    folder: TempDir,
    master: Child,
    /// Input of the remote command, which ends when this closes. It is kept apart from `master`,
    /// because waiting for a child closes its input.
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Prints how to reach the fleet, and forwards until ssh ends or somebody ends this.
pub(crate) async fn connect(args: &ConnectArgs) -> anyhow::Result<()> {
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(SignalSource::Operators)?;
    let mut connection = SshConnection::open(&args.destination)?;
    tokio::select! {
        forwarded = connection.serve(args) => forwarded?,
        () = shutdown.wait_drain() => connection.close().await,
    }
    Ok(())
}

/// What operators' commands of this machine reach the fleet by.
struct ForwardedOperators {
    /// Out of others' reach.
    socket: PathBuf,
    /// Whether links to the page are good on this machine.
    has_page: bool,
    /// In ssh's form.
    forwardings: Vec<String>,
}

/// Which commands of operators work on this machine.
fn describe_operators(operators: Option<&ForwardedOperators>) -> String {
    match operators {
        Some(ForwardedOperators { has_page: true, .. }) => {
            "with HOSTLER_ADMIN set, `hostler ps`, `top`, `explain` and the like show it here, and `hostler page` its page".to_owned()
        }
        Some(_) => {
            "with HOSTLER_ADMIN set, `hostler ps`, `top`, `explain` and the like show it here; its page has a port that another program has here"
                .to_owned()
        }
        None => "`hostler ps`, `top` and the page work on that host alone".to_owned(),
    }
}

impl<'a> SshConnection<'a> {
    fn open(destination: &'a str) -> anyhow::Result<Self> {
        // The kernel's limit for socket paths leaves no room for a longer folder.
        let builder = tempfile::Builder::new().prefix("hostler-").permissions(Permissions::from_mode(0o700)).tempdir_in("/tmp");
        let folder = builder.context("cannot make a folder for ssh's socket in /tmp")?;
        let mut command = ssh(folder.path());
        // A connection that is silent for a minute is dead.
        command.args([
            "-T",
            "-o",
            "ControlMaster=yes",
            "-o",
            "ControlPersist=no",
            "-o",
            "ServerAliveInterval=20",
            "-o",
            "ServerAliveCountMax=3",
        ]);
        command.args(["--", destination, REMOTE_COMMAND]).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut master = command.spawn().context("cannot run ssh")?;
        let lines = BufReader::new(master.stdout.take().expect("standard output was piped")).lines();
        Ok(Self { destination, folder, input: master.stdin.take(), master, lines })
    }

    async fn serve(&mut self, args: &ConnectArgs) -> anyhow::Result<()> {
        let answer = timeout(LOGIN_TIMEOUT, self.read_access()).await;
        let access = answer.with_context(|| format!("{} did not answer within {} s", args.destination, LOGIN_TIMEOUT.as_secs()))??;
        let port = find_port(args.port)?;
        let (local, mut forwarding) = self.forward(&access, port).await?;
        let mut operators = self.forward_operators(access.operators.as_ref()).await?;
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let bundle = local.authority.as_ref().map(|authority| write_bundle(bundle_of(&args.destination)?, authority, variable));
        say_exports(Shell::Sh, &local, bundle.transpose()?.as_ref(), variable);
        if let Some(ForwardedOperators { socket, .. }) = &operators {
            say(&Shell::Sh.export("HOSTLER_ADMIN", &socket.display().to_string()));
        }
        complain(&format!("{} is the fleet on {}, until this command ends (Ctrl-C)", local.base_url, access.host));
        complain(&describe_operators(operators.as_ref()));
        while let Some(line) = self.lines.next_line().await? {
            let Ok(moved) = serde_json::from_str::<ClientAccess>(&line) else { continue };
            self.order("cancel", &forwarding).await?;
            forwarding = self.forward(&moved, port).await?.1;
            for forwarding in operators.iter().flat_map(|former| &former.forwardings) {
                self.order("cancel", forwarding).await?;
            }
            operators = self.forward_operators(moved.operators.as_ref()).await?;
            complain(&format!("the fleet is on {} now; {} is good as before", moved.host, local.base_url));
        }
        let ended = self.master.wait().await?;
        bail!("the connection to {} has ended (ssh: {ended})", args.destination)
    }

    /// Reads how to reach the fleet, as its host reports it.
    async fn read_access(&mut self) -> anyhow::Result<ClientAccess> {
        for _ in 0..MAX_LINES {
            let Some(line) = self.lines.next_line().await? else { break };
            if let Ok(access) = serde_json::from_str(&line) {
                return Ok(access);
            }
        }
        self.input = None;
        let ended = timeout(CLOSE_TIMEOUT, self.master.wait()).await;
        bail!(explain_silence(self.destination, ended.ok().and_then(Result::ok)))
    }

    /// Forwards a port of this machine to the fleet's edge. Also returns the forwarding in ssh's
    /// form.
    async fn forward(&self, access: &ClientAccess, port: u16) -> anyhow::Result<(ClientAccess, String)> {
        let (scheme, target) = split_base(&access.base_url).with_context(|| format!("{} is no address of an edge", access.base_url))?;
        let forwarding = format!("localhost:{port}:{target}");
        if !self.order("forward", &forwarding).await? {
            bail!("ssh cannot forward port {port} of this machine: choose another one with --port");
        }
        // The fleet's certificate has the name `localhost`, too.
        Ok((ClientAccess { base_url: format!("{scheme}://localhost:{port}/v1"), ..access.clone() }, forwarding))
    }

    /// Forwards a socket of this folder to that of the fleet's operators, and a port to its page.
    /// `None` where the fleet says of none, as that of a controller in a job.
    async fn forward_operators(&self, access: Option<&OperatorAccess>) -> anyhow::Result<Option<ForwardedOperators>> {
        let Some(access) = access else { return Ok(None) };
        let socket = self.folder.path().join("operators.sock");
        // A forwarding that was cancelled leaves its socket.
        let _ = std::fs::remove_file(&socket);
        let to_socket = format!("{}:{}", socket.display(), access.socket.display());
        if !self.order("forward", &to_socket).await? {
            return Ok(None);
        }
        // The page's links name the port that it has there.
        let page = access.page.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).filter(|port| find_port(Some(*port)).is_ok());
        let mut forwardings = vec![to_socket];
        if let Some(port) = page {
            let to_page = format!("localhost:{port}:{}", access.page);
            if self.order("forward", &to_page).await? {
                forwardings.push(to_page);
            }
        }
        let has_page = forwardings.len() > 1;
        Ok(Some(ForwardedOperators { socket, has_page, forwardings }))
    }

    /// Makes the connection begin or end a forwarding; `false` if it does not.
    async fn order(&self, order: &str, forwarding: &str) -> anyhow::Result<bool> {
        let mut command = ssh(self.folder.path());
        command.args(["-O", order, "-L", forwarding, "--", self.destination]);
        command.stdin(Stdio::null()).kill_on_drop(true);
        let obeyed = timeout(FORWARD_TIMEOUT, command.status()).await.context("ssh did not forward a port in time")?;
        Ok(obeyed.context("cannot run ssh")?.success())
    }

    async fn close(&mut self) {
        self.input = None;
        if timeout(CLOSE_TIMEOUT, self.master.wait()).await.is_err() {
            let _ = self.master.start_kill();
        }
    }
}

/// ssh with the connection of this folder. It asks for passwords on the terminal, so it stays in
/// this process's group.
fn ssh(folder: &Path) -> Command {
    let mut command = Command::new("ssh");
    command.arg("-o").arg(format!("ControlPath={}/s", folder.display()));
    command
}

/// Finds a port that is free under all addresses of `localhost`: ssh is content with one address,
/// and a client with the key may use another.
fn find_port(requested: Option<u16>) -> anyhow::Result<u16> {
    let taken = |port: u16| format!("another program has port {port} of this machine: choose another one with --port");
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, requested.unwrap_or(0))).with_context(|| taken(requested.unwrap_or(0)))?;
    let port = listener.local_addr()?.port();
    match TcpListener::bind((Ipv6Addr::LOCALHOST, port)) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => bail!(taken(port)),
        // A host without IPv6 has no such address.
        _ => Ok(port),
    }
}

/// Scheme and `HOST:PORT` of an edge, as its host reaches it.
fn split_base(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once("://").filter(|(scheme, _)| ["http", "https"].contains(scheme))?;
    Some((scheme, rest.split('/').next()?))
}

/// Explains why a host did not report a fleet. Messages of the host or of ssh are on standard
/// error.
fn explain_silence(destination: &str, ended: Option<ExitStatus>) -> String {
    match ended.and_then(|status| status.code()) {
        Some(255) => format!("ssh cannot connect to {destination}"),
        Some(127) => format!("{destination} has no `hostler` on the PATH of a login shell: put it into ~/.local/bin there"),
        _ => format!("{destination} does not say how to reach a fleet: try `ssh {destination} hostler env`"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn an_edge_keeps_its_scheme() {
        assert_eq!(split_base("https://127.0.0.1:41237/v1"), Some(("https", "127.0.0.1:41237")));
        assert_eq!(split_base("http://localhost:8000/v1"), Some(("http", "localhost:8000")));
        assert!(["ftp://127.0.0.1:41237/v1", "localhost:1", ""].into_iter().all(|url| split_base(url).is_none()));
    }

    #[test]
    fn a_destination_that_looks_like_an_option_is_refused() {
        assert!(parse_destination("-oProxyCommand=x").is_err() && parse_destination("").is_err());
        assert_eq!(parse_destination("me@login").as_deref(), Ok("me@login"));
    }

    #[test]
    fn a_port_in_use_is_not_forwarded() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = other.local_addr().unwrap().port();
        assert!(find_port(Some(port)).unwrap_err().to_string().contains(&format!("has port {port}")));
        assert_ne!(find_port(None).unwrap(), port);
    }

    #[test]
    fn a_silent_host_is_explained_by_sshs_exit_code() {
        let ended = |code: i32| explain_silence("me@login", Some(ExitStatus::from_raw(code << 8)));
        assert!(ended(255).contains("cannot connect to me@login"));
        assert!(ended(127).contains("no `hostler` on the PATH"));
        assert!(ended(1).contains("ssh me@login hostler env"));
    }
}
