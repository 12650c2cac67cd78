//! Calls of subcommands to a router as its operators: on its socket or its admin listener, with a
//! key and within a deadline.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hostler_boot::socket::is_trusted_user;
use hostler_controller::FleetFolder;
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use hostler_proto::fleet::v1::{ListRequest, ListResponse};
use hostler_router::find_operators_sockets;
use hostler_router::keys::{Secret, read_private};
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tower::service_fn;

use crate::fleet_connection::open_admin;
use crate::fleet_state::{describe_absence, find_router};
use crate::host_names::this_host;
use crate::output::complain;
use crate::settings::{cluster_config, operators_socket};
use crate::suspension::describe_suspension;
use crate::up_record::{UpRecord, find_records};

/// How long the router may take to accept, and to answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Deadline of calls that are answered only when the work is done. The router gives up a little
/// earlier, with a better error.
const LONG_CALL_TIMEOUT: Duration = Duration::from_secs(31 * 60);

/// Variable that holds the key itself, for programs that have no file for it. It is not clap's
/// variable for a flag, because clap would print its value.
const KEY_VARIABLE: &str = "HOSTLER_ADMIN_KEY";

/// Value of `--admin` for the router of the user's fleet of batch jobs.
const FLEET: &str = "fleet";

/// Which router is asked.
#[derive(Debug, Args)]
pub(crate) struct AdminArgs {
    /// The router's operators' socket, or its admin address, where an admin key is needed, or
    /// `fleet`: that of your fleet of batch jobs. Without it your fleet's where one runs, else your
    /// own router on this host.
    #[arg(long, env = "HOSTLER_ADMIN", value_name = "SOCKET|HOST:PORT|fleet")]
    pub(crate) admin: Option<String>,
    /// File with an admin key and nothing else, mode 0600, for --admin HOST:PORT; HOSTLER_ADMIN_KEY
    /// can hold the key itself.
    #[arg(long, env = "HOSTLER_ADMIN_KEY_FILE", value_name = "FILE")]
    admin_key_file: Option<PathBuf>,
    /// The configuration file, where the router's socket may be set.
    #[arg(skip)]
    pub(crate) config: Option<PathBuf>,
}

#[cfg(test)]
impl AdminArgs {
    /// Arguments without flags, and with this settings file.
    pub(crate) fn of_settings(file: &Path) -> Self {
        Self { admin: None, admin_key_file: None, config: Some(file.to_owned()) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AdminEndpoint {
    /// The router's operators' socket.
    Socket(PathBuf),
    /// The router's admin listener, as `HOST:PORT`.
    Address(String),
    /// Router of this folder's fleet, whose controller runs in a batch job. It is called only over
    /// TLS.
    Fleet(FleetFolder),
}

impl AdminEndpoint {
    /// Parses the value of `--admin`: `unix:PATH`, a path (with a slash, or without a port), or an
    /// address with or without `http://`.
    fn parse(text: &str) -> Self {
        if let Some(path) = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")) {
            return Self::Socket(path.into());
        }
        let Some(address) = text.strip_prefix("http://").or_else(|| text.contains(':').then_some(text)) else {
            return Self::Socket(text.into());
        };
        let address = address.trim_end_matches('/');
        if address.contains('/') { Self::Socket(text.into()) } else { Self::Address(address.to_owned()) }
    }

    /// Whether this may be the router with that operators' socket. Without arguments it is the
    /// user's own router.
    pub(crate) fn may_be(args: &AdminArgs, socket: &Path) -> bool {
        args.admin.as_ref().is_none_or(|named| named == FLEET || Self::parse(named) == Self::Socket(socket.to_owned()))
    }

    /// Finds the router that the arguments name.
    ///
    /// Without arguments, that is the router of the settings' fleet, else the one whose socket the
    /// settings name, else this user's only router on this host.
    pub(crate) async fn find(args: &AdminArgs) -> anyhow::Result<Self> {
        let config = args.config.as_deref();
        match &args.admin {
            Some(named) if named == FLEET => {
                return match find_fleet(config).await? {
                    Some(fleet) => fleet.endpoint(),
                    None => bail!(describe_absence(FleetFolder::find(&cluster_config(config)?)?.as_ref())?),
                };
            }
            Some(named) => return Ok(Self::parse(named)),
            None => {}
        }
        let configured = operators_socket(config)?;
        let is_configured = !configured.as_os_str().is_empty();
        let sockets = if is_configured { vec![configured] } else { find_operators_sockets().await };
        let fleet = match find_fleet(config).await {
            // An unreadable folder is no reason to ignore a router that is there.
            Err(_) if !sockets.is_empty() => None,
            found => found?,
        };
        match fleet {
            Some(fleet) if !is_configured || !fleet.is_here() => fleet.endpoint(),
            None if sockets.is_empty() => {
                let folder = cluster_config(config).ok().and_then(|cluster| FleetFolder::find(&cluster).ok().flatten());
                bail!(
                    "no router of yours runs on this host: `hostler up MODEL` starts one; {}; {OTHERS_ROUTER}",
                    describe_absence(folder.as_ref())?
                )
            }
            _ => {
                let records = if sockets.len() > 1 { find_records().await } else { Vec::new() };
                single_socket(sockets, &records).map(Self::Socket)
            }
        }
    }
}

/// The user's fleet of batch jobs, whose controller lives.
struct RunningFleet {
    folder: FleetFolder,
    controller: hostler_controller::Endpoint,
}

impl RunningFleet {
    /// Whether the fleet's router is on this host.
    fn is_here(&self) -> bool {
        self.controller.host == this_host()
    }

    /// How to call the fleet's router from this host.
    fn endpoint(self) -> anyhow::Result<AdminEndpoint> {
        let Self { folder, controller } = self;
        match controller.job {
            Some(_) => Ok(AdminEndpoint::Fleet(folder)),
            None if controller.host == this_host() => Ok(AdminEndpoint::Socket(controller.operators_socket)),
            None => bail!("the fleet's router runs on {0}, and is asked there alone: log in to {0}", controller.host),
        }
    }
}

/// The fleet of the settings, if its controller lives.
async fn find_fleet(config: Option<&Path>) -> anyhow::Result<Option<RunningFleet>> {
    let Some(folder) = FleetFolder::find(&cluster_config(config)?)? else { return Ok(None) };
    Ok(find_router(&folder).await?.map(|controller| RunningFleet { folder, controller }))
}

/// Advice for calling a router that is not the caller's own.
const OTHERS_ROUTER: &str =
    "one of another user or host is asked at its admin address, with an admin key: --admin HOST:PORT --admin-key-file FILE";

/// The only one of these sockets, or an error that names them, and what `hostler up` serves there.
fn single_socket(mut sockets: Vec<PathBuf>, records: &[UpRecord]) -> anyhow::Result<PathBuf> {
    match &sockets[..] {
        [_] => Ok(sockets.remove(0)),
        [] => bail!("no router of yours runs on this host: `hostler up MODEL` starts one; {OTHERS_ROUTER}"),
        several => {
            let choices: Vec<String> = several.iter().map(|socket| describe_choice(socket, records)).collect();
            bail!("{} routers of yours run on this host; choose one: {}", several.len(), choices.join(", or "))
        }
    }
}

/// Such as `--admin /run/router-8002.sock (http://127.0.0.1:8000/v1 with tiny and chat)`.
fn describe_choice(socket: &Path, records: &[UpRecord]) -> String {
    let here: Vec<&UpRecord> = records.iter().filter(|record| record.router.operators_socket == socket).collect();
    let names: Vec<&str> = here.iter().map(|record| record.name.as_str()).filter(|name| !name.is_empty()).collect();
    let with = if names.is_empty() { String::new() } else { format!(" with {}", names.join(" and ")) };
    let known = here.first().map(|record| format!(" ({}{with})", record.router.base_url)).unwrap_or_default();
    format!("--admin {}{known}", socket.display())
}

/// A client of a router that shows its key with every call.
pub(crate) type AdminClient = FleetClient<InterceptedService<Channel, BearerAuth>>;

/// Value of the `authorization` header: `Bearer` and the key, or nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct BearerAuth(Option<MetadataValue<Ascii>>);

impl BearerAuth {
    fn new(key: &Secret) -> Self {
        let value = MetadataValue::try_from(format!("Bearer {}", key.reveal()));
        let mut value = value.expect("a key is made of letters and digits");
        value.set_sensitive(true);
        Self(Some(value))
    }
}

impl Interceptor for BearerAuth {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(key) = &self.0 {
            request.metadata_mut().insert("authorization", key.clone());
        }
        Ok(request)
    }
}

/// Connects to the router that the arguments name.
pub(crate) async fn connect(args: &AdminArgs) -> anyhow::Result<AdminClient> {
    connect_to(args, CALL_TIMEOUT).await
}

/// Like `connect`, for calls that are answered only when the work is done.
pub(crate) async fn connect_for_long_call(args: &AdminArgs) -> anyhow::Result<AdminClient> {
    connect_to(args, LONG_CALL_TIMEOUT).await
}

/// Connects to a router whose admin address and key are known.
pub(crate) async fn connect_with(address: &str, key: &Secret) -> anyhow::Result<AdminClient> {
    connect_within(&AdminEndpoint::parse(address), Some(key), CALL_TIMEOUT).await
}

/// Connects to a router whose operators' socket is known.
pub(crate) async fn connect_to_socket(path: &Path) -> anyhow::Result<AdminClient> {
    connect_within(&AdminEndpoint::Socket(path.to_owned()), None, CALL_TIMEOUT).await
}

/// Connects to the router that has the fleet of this folder: in a batch job, or on this host.
pub(crate) async fn connect_to_fleet(folder: &FleetFolder, endpoint: &hostler_controller::Endpoint) -> anyhow::Result<AdminClient> {
    match endpoint.job {
        Some(_) => connect_within(&AdminEndpoint::Fleet(folder.clone()), None, CALL_TIMEOUT).await,
        None => connect_to_socket(&endpoint.operators_socket).await,
    }
}

async fn connect_to(args: &AdminArgs, answer: Duration) -> anyhow::Result<AdminClient> {
    let way = AdminEndpoint::find(args).await?;
    connect_within(&way, admin_key(args, &way)?.as_ref(), answer).await
}

/// A router for repeated connections, which keeps what was found once: its endpoint and the key for
/// it.
#[derive(Debug)]
pub(crate) struct RouterAddress {
    way: AdminEndpoint,
    key: Option<Secret>,
}

impl RouterAddress {
    pub(crate) async fn find(args: &AdminArgs) -> anyhow::Result<Self> {
        let way = AdminEndpoint::find(args).await?;
        Ok(Self { key: admin_key(args, &way)?, way })
    }

    pub(crate) fn endpoint(&self) -> &AdminEndpoint {
        &self.way
    }

    pub(crate) async fn connect(&self) -> anyhow::Result<AdminClient> {
        connect_within(&self.way, self.key.as_ref(), CALL_TIMEOUT).await
    }
}

impl fmt::Display for RouterAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.way {
            AdminEndpoint::Socket(path) => path.display().fmt(formatter),
            AdminEndpoint::Address(address) => address.fmt(formatter),
            AdminEndpoint::Fleet(folder) => write!(formatter, "the fleet of {}", folder.path().display()),
        }
    }
}

/// Reads the key from the arguments or the environment. A socket gets none, because it could be
/// anybody's; there the kernel identifies the caller.
pub(crate) fn admin_key(args: &AdminArgs, way: &AdminEndpoint) -> anyhow::Result<Option<Secret>> {
    let address = match way {
        AdminEndpoint::Address(address) => address,
        AdminEndpoint::Fleet(folder) => return read_key_file(&folder.operator_key()).map(Some),
        AdminEndpoint::Socket(_) => return Ok(None),
    };
    let key = match (&args.admin_key_file, std::env::var(KEY_VARIABLE)) {
        (Some(file), _) => Some(read_key_file(file)?),
        (None, Ok(text)) if !text.trim().is_empty() => Some(text.trim().parse().with_context(|| format!("{KEY_VARIABLE} holds no key"))?),
        (None, _) => None,
    };
    if key.is_some() && !is_loopback(address) {
        complain(&format!("the admin key travels to {address} in plain text; a tunnel such as `ssh -L 8002:127.0.0.1:8002 HOST` hides it"));
    }
    Ok(key)
}

fn read_key_file(file: &Path) -> anyhow::Result<Secret> {
    let text = read_private(file)?;
    text.trim().parse().with_context(|| format!("{} holds no key", file.display()))
}

/// Whether an address names this host literally.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

async fn connect_within(way: &AdminEndpoint, key: Option<&Secret>, answer: Duration) -> anyhow::Result<AdminClient> {
    let target = match way {
        AdminEndpoint::Fleet(folder) => return connect_secured(folder, answer).await,
        AdminEndpoint::Socket(path) => {
            check_socket(path).await?;
            format!("unix:{}", std::path::absolute(path)?.display())
        }
        AdminEndpoint::Address(address) => format!("http://{address}"),
    };
    let endpoint = Endpoint::from_shared(target).with_context(|| format!("{way:?} is no socket and not HOST:PORT"))?;
    let channel = endpoint.connect_timeout(CALL_TIMEOUT).timeout(answer).connect().await;
    let channel = channel.with_context(|| match way {
        AdminEndpoint::Socket(path) => format!("cannot reach a router at {}", path.display()),
        AdminEndpoint::Fleet(folder) => format!("cannot reach the router of the fleet of {}", folder.path().display()),
        AdminEndpoint::Address(address) => {
            format!("cannot reach a router's admin listener at {address}; is the router running? name another with --admin HOST:PORT")
        }
    })?;
    let key = key.filter(|_| matches!(way, AdminEndpoint::Address(_)));
    Ok(FleetClient::with_interceptor(channel, key.map(BearerAuth::new).unwrap_or_default()))
}

/// A client over such a connection. The fleet's key is read each time, because another controller
/// has another key.
async fn connect_secured(folder: &FleetFolder, answer: Duration) -> anyhow::Result<AdminClient> {
    let key = read_key_file(&folder.operator_key())?;
    let mut stream = Some(open_admin(folder, b"h2").await?);
    // The connection is already open, so the address does not matter.
    let target = Endpoint::from_static("http://fleet").timeout(answer);
    let channel = target.connect_with_connector(service_fn(move |_: Uri| {
        let stream = stream.take();
        async move { stream.map(TokioIo::new).ok_or_else(|| io::Error::from(ErrorKind::ConnectionAborted)) }
    }));
    let channel = channel.await.with_context(|| format!("cannot reach the router of the fleet of {}", folder.path().display()))?;
    Ok(FleetClient::with_interceptor(channel, BearerAuth::new(&key)))
}

/// Checks whether this user can connect to a socket at all; the error says what to do.
async fn check_socket(path: &Path) -> anyhow::Result<()> {
    let connected =
        tokio::time::timeout(CALL_TIMEOUT, UnixStream::connect(path)).await.context("the router does not take the connection")?;
    let shown = path.display();
    let error = match connected {
        Ok(stream) => {
            let peer = stream.peer_cred()?;
            let theirs = peer.uid();
            if !is_trusted_user(theirs) {
                bail!(
                    "the socket {shown} is answered by user {theirs}, not by a router of yours: choose one in a folder that is yours alone"
                );
            }
            if let Some(silence) = peer.pid().and_then(describe_suspension) {
                bail!("the router at {shown} does not answer: {silence}");
            }
            return Ok(());
        }
        Err(error) => error,
    };
    let sentence = match error.kind() {
        ErrorKind::NotFound => format!("there is no socket {shown}: is the router running, and does it say this path at its start?"),
        ErrorKind::ConnectionRefused => format!("nobody answers at {shown}: is the router running?"),
        ErrorKind::PermissionDenied => format!(
            "the socket {shown} is its user's alone: others ask the router at its admin address, with an admin key: \
             --admin HOST:PORT --admin-key-file FILE"
        ),
        _ => format!("cannot connect to {shown}"),
    };
    Err(error).context(sentence)
}

/// The fleet in the router's view.
pub(crate) async fn list_fleet(fleet: &mut AdminClient) -> anyhow::Result<ListResponse> {
    Ok(fleet.list(ListRequest {}).await.map_err(status_error)?.into_inner())
}

pub(crate) fn status_error(status: tonic::Status) -> anyhow::Error {
    match (status.code(), status.message()) {
        (Code::Unimplemented, "") => anyhow::anyhow!(
            "what answers there does not know this call: it may be a router's edge, whose admin address is another (the router says it at its \
             start), or a router of another release"
        ),
        // The words of tonic for a deadline of this side.
        (Code::Cancelled, "Timeout expired") => anyhow::anyhow!(
            "the router takes connections, but has not answered in time: its log may say why; `hostler down` ends a router of `hostler up` that stays so"
        ),
        (code, "") => anyhow::anyhow!("the router answered without a word: {}", code.description()),
        (_, message) => anyhow::anyhow!("{}", message.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::tests::endpoint;
    use crate::up_record;

    #[test]
    fn an_admin_endpoint_is_a_socket_or_an_address() {
        for (text, socket) in [
            ("/run/user/1/hostler/router-8002.sock", "/run/user/1/hostler/router-8002.sock"),
            ("unix:/tmp/s", "/tmp/s"),
            ("unix:///tmp/s", "/tmp/s"),
            ("./s.sock", "./s.sock"),
            ("op.sock", "op.sock"),
            ("unix:s.sock", "s.sock"),
        ] {
            assert_eq!(AdminEndpoint::parse(text), AdminEndpoint::Socket(socket.into()), "{text}");
        }
        for text in ["router:8002", "http://router:8002", "http://router:8002/"] {
            assert_eq!(AdminEndpoint::parse(text), AdminEndpoint::Address("router:8002".into()), "{text}");
        }
    }

    #[test]
    fn a_single_router_is_chosen_and_several_need_a_choice() {
        let [a, b] = ["/r/router-1.sock", "/r/router-2.sock"].map(PathBuf::from);
        assert_eq!(single_socket(vec![a.clone()], &[]).unwrap(), a);
        let none = single_socket(Vec::new(), &[]).unwrap_err().to_string();
        assert!(none.contains("--admin HOST:PORT --admin-key-file FILE"), "{none}");
        let [mut tiny, mut chat] = [7, 8].map(|pid| up_record::tests::record(pid, &b));
        (tiny.name, chat.name) = ("tiny".into(), "chat".into());
        let several = single_socket(vec![a, b], &[tiny, chat]).unwrap_err().to_string();
        let choices = "--admin /r/router-1.sock, or --admin /r/router-2.sock (http://127.0.0.1:7/v1 with tiny and chat)";
        assert!(several.ends_with(choices), "{several}");
    }

    #[tokio::test]
    async fn the_fleet_of_the_settings_is_asked_where_it_runs() {
        let place = tempfile::tempdir().unwrap();
        let (settings, state) = (place.path().join("hostler.toml"), place.path().join("fleet"));
        std::fs::write(&settings, format!("[cluster]\nstate_dir = \"{}\"\n", state.display())).unwrap();
        let (args, named) =
            (AdminArgs::of_settings(&settings), AdminArgs { admin: Some(FLEET.into()), ..AdminArgs::of_settings(&settings) });
        let none = AdminEndpoint::find(&named).await.unwrap_err().to_string();
        assert!(none.contains("no fleet of yours runs: `hostler up"), "{none}");

        let folder = FleetFolder::at(&state).unwrap();
        let status = hostler_controller::FleetStatus { at: std::time::SystemTime::now(), entries: Vec::new(), trouble: String::new() };
        folder.write_status(&status).unwrap();
        let socket = place.path().join("router.sock");
        let _router = tokio::net::UnixListener::bind(&socket).unwrap();
        let here = hostler_controller::Endpoint { operators_socket: socket.clone(), ..endpoint(&this_host(), 1) };
        folder.write_endpoint(&here).unwrap();
        for args in [&args, &named] {
            assert_eq!(AdminEndpoint::find(args).await.unwrap(), AdminEndpoint::Socket(socket.clone()));
        }
        let in_job = hostler_controller::Endpoint { job: Some("11.head".into()), host: "x1".into(), ..here.clone() };
        folder.write_endpoint(&in_job).unwrap();
        assert_eq!(AdminEndpoint::find(&args).await.unwrap(), AdminEndpoint::Fleet(folder.clone()));
        folder.write_endpoint(&hostler_controller::Endpoint { host: "login2".into(), ..here }).unwrap();
        let elsewhere = AdminEndpoint::find(&args).await.unwrap_err().to_string();
        assert!(elsewhere.contains("log in to login2"), "{elsewhere}");
    }

    #[test]
    fn an_admin_socket_needs_no_key() {
        let args = AdminArgs { admin: None, admin_key_file: Some("/nowhere/admin.key".into()), config: None };
        assert!(admin_key(&args, &AdminEndpoint::Socket("/tmp/s".into())).unwrap().is_none());
        assert!(admin_key(&args, &AdminEndpoint::Address("127.0.0.1:8002".into())).is_err());
    }

    #[test]
    fn a_loopback_address_is_recognized_in_every_form() {
        for here in ["127.0.0.1:8002", "localhost:1", "[::1]:8002", "127.9.9.9:1"] {
            assert!(is_loopback(here), "{here}");
        }
        for there in ["10.0.0.1:8002", "router:8002", "localhost.example.org:8002", "0.0.0.0:8002"] {
            assert!(!is_loopback(there), "{there}");
        }
    }

    #[test]
    fn a_key_in_use_is_never_printed() {
        let key = Secret::random().unwrap();
        let printed = format!("{:?} {:?}", BearerAuth::new(&key), key);
        assert!(!printed.contains(key.reveal().rsplit('_').next().unwrap()), "{printed}");
    }
}
