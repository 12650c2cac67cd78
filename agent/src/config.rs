//! The agent's settings: one field each, documented here and nowhere else.

mod file_cache;
mod host_cache;

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::file_cache::FileCacheSetting;
pub use self::host_cache::HostCacheSetting;

/// See `AgentConfig::probe_interval`.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);

/// See `AgentConfig::job_interval`.
const JOB_INTERVAL: Duration = Duration::from_secs(60);

/// See `AgentConfig::member_lease`.
///
/// Networks that were down for 25 s and hosts that stood still for 40 s went on without a loss, and
/// a new start takes minutes.
const MEMBER_LEASE: Duration = Duration::from_secs(60);

/// What starts when the agent starts a replica.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// `vllm` when a model is given or vLLM is installed, otherwise the simulated engine.
    #[default]
    Auto,
    /// A real `vllm serve`.
    Vllm,
    /// The simulated engine inside this program: no GPU, no model, vLLM's surface.
    Simulated,
}

/// What an engine is tuned for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// The most tokens per second over all requests.
    #[default]
    Throughput,
    /// The shortest waits of each request, at fewer requests at once.
    Latency,
    /// The engine's own defaults with memory to spare: for models and hosts of which nothing is
    /// known.
    Conservative,
}

impl Profile {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::Latency => "latency",
            Self::Conservative => "conservative",
        }
    }
}

/// Which of vLLM's HTTP front-ends serves an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FrontEnd {
    /// The Rust one where the release has it and it starts, else the Python one.
    #[default]
    Auto,
    /// The Python one.
    Python,
    /// The Rust one; an engine where it does not start fails.
    Rust,
}

/// How vLLM's processes begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineStart {
    /// From a process that has imported vLLM before; one waits on each node for the next start.
    #[default]
    Spare,
    /// From a process that imports vLLM for the engine alone, and is forked.
    Fork,
    /// As `vllm serve` begins by itself.
    Plain,
}

/// What becomes of engines whose agent dies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IfAgentDies {
    /// `keep` as a systemd service, `kill` otherwise: in a batch job, in a terminal and under
    /// `hostler up`.
    #[default]
    Auto,
    /// Nothing of them survives it.
    Kill,
    /// They live on, and the next agent in the same run directory takes them over.
    Keep,
}

/// What an agent does whose engines all fail to start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IfEnginesFail {
    /// `end` in a batch job, and where every start would fail, as with a flag that the engine does
    /// not have; `retry` otherwise.
    #[default]
    Auto,
    /// It ends, and with it the job.
    End,
    /// It tries again for as long as it lives.
    Retry,
}

/// The `[agent]` section of the configuration.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AgentConfig {
    /// Routers to serve, each `HOST:PORT` of a router's agent port. A name that resolves to several
    /// addresses means one router at each.
    pub router: Vec<String>,
    /// Engines that run already, each `http://HOST:PORT` or `unix:PATH`, which the agent serves in
    /// place of starting some: vLLM, or whatever speaks OpenAI's API. Their processes, GPUs and
    /// flags are never touched.
    pub attach: Vec<String>,
    /// File with the API key that the engines of `attach` want (vLLM's `--api-key`). Each request
    /// to them carries it, so all of them must have the same one. Only its owner may be able to
    /// read the file.
    pub attach_key_file: PathBuf,
    /// File that says which router to serve, in place of `router`: the `endpoint.json` of a fleet
    /// of batch jobs. It is read again while no router has this agent, and every 15 s. Nobody but
    /// its owner may be able to change it.
    pub router_file: PathBuf,
    /// File with the join token of the routers' fleet, as `hostler token create` makes it; `-`
    /// means standard input. Only its owner may be able to read it. With it the agent speaks TLS;
    /// without it plain text, which is for routers on this host.
    pub join_token_file: PathBuf,
    /// Where the agent keeps its key and certificate, in a folder for each node's name; empty means
    /// `$XDG_STATE_HOME/hostler/identity`, or `~/.local/state/hostler/identity`.
    pub identity_dir: PathBuf,
    /// Whether the agent may speak plain text with routers on other hosts.
    pub allow_plain_text: bool,
    /// Name of this node in the fleet; empty means the host name, and in a batch job the host name
    /// and the job's number, such as `x3001.12`. Set it to run several agents on one host, or in
    /// one job on one host.
    pub node: String,
    /// Which engine to start: `auto`, `vllm` or `simulated`.
    pub engine: EngineKind,
    /// Model to serve: a local path or a Hugging Face id, passed to the engine as it is.
    pub model: String,
    /// Where the model is copied on this node before its engines start, once for all engines and
    /// jobs of the node: a folder, in which variables such as `$TMPDIR` are put in, or `auto`,
    /// which looks for a disk of the node with room where the model is on a file system that other
    /// hosts share. Empty copies nothing. vLLM compiles a model anew at another path, so a folder
    /// that all jobs have is better than one of each.
    pub stage: String,
    /// Bytes that copies of models may take in that folder; the least recently used go first, and
    /// never one in use. 0 means half of its file system.
    pub stage_bytes: u64,
    /// Number of engines on this node; 0 means one per GPU, or one where there is no GPU.
    pub replicas: u32,
    /// GPUs of one replica (tensor parallel); 0 decides by the model's size and the host's GPUs,
    /// see `hostler plan`.
    pub tp: u32,
    /// Nodes over which one engine is spread; 1 or 0 means that each node has replicas of its own.
    /// Each node has an agent with these same settings, and its own `member`. vLLM's ports between
    /// the nodes are open to whoever reaches them: see `docs/multinode.md`.
    pub nodes_per_replica: u32,
    /// Number of this node in a replica over several nodes; 0 is the head, which serves.
    pub member: u32,
    /// Where the agents of a replica over several nodes meet: `HOST:PORT` of node 0.
    pub head: String,
    /// File in place of `head`, on a file system of all nodes: node 0 writes its address there.
    /// Only its owner may be able to change it.
    pub head_file: PathBuf,
    /// Network interface for what the parts of an engine on several nodes say to each other, such
    /// as `hsn0`; empty means the one on which their agents meet.
    pub replica_interface: String,
    /// Keep a small second engine beside a node's only replica, on the same GPUs. It answers only
    /// while no other replica serves the model, so that streams go on at once when the engine dies.
    /// It takes memory from the other one: the weights again, and a cache for one context; see
    /// `hostler plan`.
    pub standby: bool,
    /// GPUs that engines may use, such as `0,1`: positions in PCI order, UUIDs or their beginnings.
    /// Empty means those that `CUDA_VISIBLE_DEVICES` names, else all. Where engines have no GPUs, a
    /// list is refused. `hostler plan --gpus` takes the same, or a description of GPUs that are not
    /// here.
    pub gpus: String,
    /// What the engines are tuned for: `throughput`, `latency` or `conservative`; `hostler plan`
    /// shows the flags of each.
    pub profile: Profile,
    /// vLLM's HTTP front-end: `auto`, `python` or `rust`.
    pub front_end: FrontEnd,
    /// How vLLM's processes begin: `spare`, where one process of each node has imported vLLM and
    /// waits for the next start (1.1 GB of memory), `fork`, where it is imported for each start but
    /// only once, or `plain`. The profile `conservative` starts plainly.
    pub engine_start: EngineStart,
    /// Bind each engine to the CPU cores next to its GPU, as far as this job may use them. Turn it
    /// off where something else binds.
    pub bind_cpus: bool,
    /// Another library in place of the NVIDIA driver's `libnvidia-ml.so.1`; empty means that one.
    /// Not in the file: `HOSTLER_NVML_LIB` names it.
    #[serde(skip)]
    pub nvml_lib: PathBuf,
    /// The `vllm` program, as a path or a name looked up on PATH.
    pub vllm_bin: PathBuf,
    /// Image of a container in which vLLM runs, and not the agent: a file of `apptainer build`, or
    /// a folder of `apptainer build --sandbox`. `vllm_bin` is then a program in the image. Empty
    /// means no container; simulated engines have none.
    pub image: PathBuf,
    /// The program that runs the image, as a path or a name looked up on PATH; empty means
    /// `apptainer`, else `singularity`.
    pub container: PathBuf,
    /// More arguments for every engine, after the agent's own.
    pub engine_args: Vec<String>,
    /// Where sockets live, on a local disk; empty means `/tmp/hostler-UID`. Keep it short: a Unix
    /// socket path holds 107 bytes.
    pub run_dir: PathBuf,
    /// Where engine logs are kept; empty means `$XDG_STATE_HOME/hostler/logs`, or
    /// `~/.local/state/hostler/logs`.
    pub log_dir: PathBuf,
    /// Address of the agent's own metrics and health pages; empty means the Unix socket
    /// `admin.sock` in the run directory, so that the agent opens no port.
    pub agent_admin: String,
    /// Ask vLLM to tell which blocks it has cached, so that requests go where their prompt is. Turn
    /// it off before vLLM 0.20 for a model with sliding-window attention: those releases give up
    /// their hybrid cache manager, and with it memory, while events are on.
    pub kv_events: bool,
    /// Host memory of each node for copies of what its engines have cached: `off`, `auto`, or a
    /// size such as `64GiB`, in equal parts for the engines. They load from it what has left their
    /// GPUs, where that is larger than the GPUs' own cache. `auto` takes half of the memory that
    /// the host, the job or the container has, and leaves 16 GiB at least; give a size on a host
    /// that others use too. See `docs/kv_tiers.md`.
    pub host_cache: HostCacheSetting,
    /// Files with what the engines of this host have cached: `off`, or a size such as `200GiB` for
    /// all of them together. Each finds there what another has computed, and what it had itself
    /// before it was started again. Needs `agent.host_cache`, through which files are written and
    /// read, and vLLM 0.33. See `docs/kv_tiers.md`.
    pub file_cache: FileCacheSetting,
    /// Where these files lie: in `/dev/shm`, which is memory, or on a fast disk of this host. The
    /// agent makes a folder there, keeps it within `agent.file_cache`, and removes it.
    pub file_cache_dir: PathBuf,
    /// What becomes of the engines when this agent is killed: `kill`, `keep`, or `auto`, which is
    /// `keep` as a systemd service and `kill` otherwise. It holds at once for engines that an agent
    /// before it has kept.
    pub if_agent_dies: IfAgentDies,
    /// How long kept engines wait for the next agent before they end.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub takeover_timeout: Duration,
    /// How long an engine with work may show no progress, at least, until it counts as hung and is
    /// replaced; longer where its tokens come slowly.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub stall_timeout: Duration,
    /// After this time without requests an engine is asked for one token, to see that it still can;
    /// `0s` turns it off.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub canary_interval: Duration,
    /// How long an engine may take from its start until it is ready. Large models on slow disks
    /// need more.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub startup_timeout: Duration,
    /// On shutdown or drain, how long running requests may take to finish.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub drain_timeout: Duration,
    /// How long an engine may take to exit after SIGTERM before its process group is killed; three
    /// seconds at most where no request runs.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub stop_grace: Duration,
    /// From SIGTERM until everything has ended, drain included: what a batch scheduler leaves
    /// before it kills. Empty means 6 s under PBS, 25 s under Slurm, and `drain_timeout` and
    /// `stop_grace` alone elsewhere; set, it holds everywhere, and SIGTERM counts as a scheduler's.
    #[serde(with = "hostler_boot::duration::optional")]
    #[schemars(with = "String")]
    pub leave_grace: Option<Duration>,
    /// An agent that has attached to no router for so long since its start ends with exit code 3,
    /// as does one that is refused for a minute. Empty means `5m` in a batch job and never
    /// elsewhere; `0s` means never.
    #[serde(with = "hostler_boot::duration::optional")]
    #[schemars(with = "String")]
    pub attach_timeout: Option<Duration>,
    /// An agent that no router has had for so long, after one had it, ends with exit code 3: its
    /// node serves nobody. Empty means `30m` in a batch job and never elsewhere; `0s` means never.
    #[serde(with = "hostler_boot::duration::optional")]
    #[schemars(with = "String")]
    pub router_timeout: Option<Duration>,
    /// What the agent does when none of its engines has ever been ready and each has failed to
    /// start three times: `end`, with exit code 4, `retry`, or `auto`. That is `end` in a batch
    /// job, so that it holds no GPU in vain, and in `hostler up`, so that who looks on learns why;
    /// and everywhere after one start that could never succeed, as with a flag that the engine does
    /// not have. Else it is `retry`.
    pub if_engines_fail: IfEnginesFail,
    /// How often a busy engine's load is read. A constant for users: only tests have other ones.
    #[serde(skip)]
    pub probe_interval: Duration,
    /// How often the scheduler is asked when the batch job ends. A constant for users: only tests
    /// have other ones, by `HOSTLER_JOB_INTERVAL_MS`.
    #[serde(skip)]
    pub job_interval: Duration,
    /// How long the agents of one replica do without a word of each other. A constant for users:
    /// only tests have other ones, by `HOSTLER_MEMBER_LEASE_MS`.
    #[serde(skip)]
    pub member_lease: Duration,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            router: vec!["127.0.0.1:8001".into()],
            attach: Vec::new(),
            attach_key_file: PathBuf::new(),
            router_file: PathBuf::new(),
            join_token_file: PathBuf::new(),
            identity_dir: PathBuf::new(),
            allow_plain_text: false,
            node: String::new(),
            engine: EngineKind::Auto,
            model: String::new(),
            stage: String::new(),
            stage_bytes: 0,
            replicas: 0,
            tp: 0,
            nodes_per_replica: 1,
            member: 0,
            head: String::new(),
            head_file: PathBuf::new(),
            replica_interface: String::new(),
            standby: false,
            gpus: String::new(),
            profile: Profile::Throughput,
            front_end: FrontEnd::Auto,
            engine_start: EngineStart::Spare,
            bind_cpus: true,
            nvml_lib: std::env::var_os("HOSTLER_NVML_LIB").unwrap_or_default().into(),
            vllm_bin: "vllm".into(),
            image: PathBuf::new(),
            container: PathBuf::new(),
            engine_args: Vec::new(),
            run_dir: PathBuf::new(),
            log_dir: PathBuf::new(),
            agent_admin: String::new(),
            kv_events: true,
            host_cache: HostCacheSetting::Off,
            file_cache: FileCacheSetting::Off,
            file_cache_dir: "/dev/shm".into(),
            if_agent_dies: IfAgentDies::Auto,
            takeover_timeout: Duration::from_secs(10 * 60),
            stall_timeout: Duration::from_secs(10),
            canary_interval: Duration::from_secs(30),
            startup_timeout: Duration::from_secs(30 * 60),
            drain_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(10),
            leave_grace: None,
            attach_timeout: None,
            router_timeout: None,
            if_engines_fail: IfEnginesFail::Auto,
            probe_interval: PROBE_INTERVAL,
            job_interval: job_interval(|name| std::env::var(name).ok()),
            member_lease: member_lease(|name| std::env::var(name).ok()),
        }
    }
}

fn member_lease(variable: impl Fn(&str) -> Option<String>) -> Duration {
    let lease = variable("HOSTLER_MEMBER_LEASE_MS").and_then(|text| text.parse().ok());
    lease.map_or(MEMBER_LEASE, Duration::from_millis)
}

fn job_interval(variable: impl Fn(&str) -> Option<String>) -> Duration {
    let interval = variable("HOSTLER_JOB_INTERVAL_MS").and_then(|text| text.parse().ok());
    interval.map_or(JOB_INTERVAL, Duration::from_millis)
}
