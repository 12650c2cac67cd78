//! The exact command line for each vLLM release that changed it.

use super::*;
use crate::gpu::{Gpu, MigSlice, NvlinkTopology};
use crate::plan::{HostResources, Plan, PlanInput, make_plan};
use crate::vllm::EngineTraces;
use crate::vllm::parsers::InstalledParsers;

fn config(engine_args: &[&str]) -> AgentConfig {
    AgentConfig {
        model: "org/model".to_owned(),
        engine_args: engine_args.iter().map(|&argument| argument.to_owned()).collect(),
        ..AgentConfig::default()
    }
}

fn on_gpu() -> ReplicaPlan {
    ReplicaPlan { index: 1, gpus: vec![Gpu { index: 3, uuid: "GPU-50794351".to_owned(), ..Gpu::default() }], is_standby: false }
}

fn on_cpu() -> ReplicaPlan {
    ReplicaPlan { index: 1, gpus: Vec::new(), is_standby: false }
}

fn vllm() -> EngineProgram {
    EngineProgram::Vllm { program: "/opt/vllm".into(), container: None }
}

fn planned(engine: &EngineProgram, version: Option<VllmVersion>, replica: &ReplicaPlan, config: &AgentConfig) -> Plan {
    let ground = PlanInput {
        parsers: &InstalledParsers::Assumed,
        rust_parsers: &InstalledParsers::Assumed,
        engine,
        version,
        rust_front_end: None,
        gpus: &replica.gpus,
        links: &NvlinkTopology::default(),
        resources: HostResources { cpus: 4, shared_bytes: 0, ..HostResources::unlimited() },
        transport: &crate::plan::NcclTransport::Unknown,
        traces: &EngineTraces::Unasked,
        downloads: Path::new("/nonexistent"),
    };
    let config = AgentConfig { tp: u32::try_from(replica.gpus.len()).unwrap(), ..config.clone() };
    make_plan(&ground, &config).unwrap()
}

/// Base for the tests to change: an engine of the newest release that is alone on its host, without
/// flags of the plan.
fn launch<'a>(engine: &'a EngineProgram, replica: &'a ReplicaPlan, config: &'a AgentConfig) -> LaunchContext<'a> {
    LaunchContext {
        engine,
        version: Some(VllmVersion::new(0, 32)),
        replica,
        cores: None,
        kv_cache_gib: None,
        directory: Path::new("/run/h/ab/e1"),
        config,
        choices: &[],
        front_end: FrontEndInUse::Python,
        python_path: OsStr::new(""),
        bytecode_cache: None,
    }
}

fn line(
    engine: &EngineProgram,
    version: Option<VllmVersion>,
    replica: &ReplicaPlan,
    config: &AgentConfig,
) -> Result<CommandLine, HostError> {
    command_line(&LaunchContext {
        version,
        cores: Some(4),
        kv_cache_gib: replica.gpus.is_empty().then_some(2),
        choices: &planned(engine, version, replica, config).choices(replica, FrontEndInUse::Python),
        ..launch(engine, replica, config)
    })
}

/// Formats a command line as a shell would show it, one word per part.
fn shown(line: &CommandLine) -> String {
    let mut shown = String::new();
    for (name, value) in &line.set {
        shown.push_str(&format!("{name}={} ", value.display()));
    }
    shown.push_str(&line.program.display().to_string());
    for argument in &line.arguments {
        shown.push_str(&format!(" {}", argument.display()));
    }
    shown
}

const COMMON: &str = "VLLM_RPC_BASE_PATH=/run/h/ab/e1 TMPDIR=/run/h/ab/e1/tmp VLLM_HTTP_TIMEOUT_KEEP_ALIVE=3600 VLLM_NO_USAGE_STATS=1";
const PYTHON: &str = "VLLM_USE_RUST_FRONTEND=0";
const SERVE: &str = "/opt/vllm serve org/model --uds /run/h/ab/e1/engine.sock";

const FLAGS: &str = " --disable-uvicorn-access-log --enable-prompt-tokens-details --enable-request-id-headers";

const EVENTS: &str = concat!(
    r#" --kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"ipc:///run/h/ab/e1/kv.sock","#,
    r#""replay_endpoint":"ipc:///run/h/ab/e1/replay.sock","topic":"","buffer_steps":10000}"#
);

#[test]
fn a_release_gets_the_flags_and_gpu_names_it_understands() {
    let by_number = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=3";
    let by_uuid = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=GPU-50794351";
    let table = [
        (None, by_number, ""),
        (Some(VllmVersion::new(0, 10)), by_number, ""),
        (Some(VllmVersion::new(0, 11)), by_number, ""),
        (Some(VllmVersion::new(0, 18)), by_number, " --shutdown-timeout 30"),
        (Some(VllmVersion::new(0, 24)), by_uuid, " --shutdown-timeout 30"),
        (Some(VllmVersion::new(0, 32)), by_uuid, " --shutdown-timeout 30 --max-num-queued-reqs 256"),
    ];
    for (version, gpu, timeout) in table {
        let line = line(&vllm(), version, &on_gpu(), &config(&["--max-num-seqs", "8"])).unwrap();
        let events = if version >= Some(VllmVersion::new(0, 11)) { EVENTS } else { "" };
        let expected = format!("{COMMON} {gpu} {PYTHON} {SERVE}{timeout}{FLAGS}{events} --max-num-seqs 8");
        assert_eq!(shown(&line), expected);
    }
}

#[test]
fn cpu_engines_share_cores_and_memory_and_get_no_cuda() {
    let line = line(&vllm(), None, &on_cpu(), &config(&[])).unwrap();
    let threads = "OMP_NUM_THREADS=4 VLLM_CPU_OMP_THREADS_BIND=nobind";
    assert_eq!(shown(&line), format!("{COMMON} {threads} VLLM_CPU_KVCACHE_SPACE=2 {PYTHON} {SERVE} --enforce-eager{FLAGS}"));
    assert_eq!(line.unset, NOT_INHERITED);
}

#[test]
fn a_memory_share_chosen_by_the_user_is_kept() {
    let line = line(&vllm(), None, &on_cpu(), &config(&["--gpu-memory-utilization", "0.3"])).unwrap();
    assert!(!shown(&line).contains("VLLM_CPU_KVCACHE_SPACE"), "{}", shown(&line));
}

#[test]
fn the_simulated_engine_is_this_program_with_the_same_socket() {
    let engine = EngineProgram::Simulated { program: "/opt/hostler".into() };
    for (model, expected) in [("", SIMULATED_MODEL), ("org/model", "org/model")] {
        let config = AgentConfig { model: model.to_owned(), ..config(&["--step", "5ms"]) };
        let line = line(&engine, None, &on_cpu(), &config).unwrap();
        let parser = "--enable-auto-tool-choice --tool-call-parser hermes";
        let serve = format!("/opt/hostler sim engine {expected} --uds /run/h/ab/e1/engine.sock {parser}{FLAGS}{EVENTS} --step 5ms");
        assert!(shown(&line).ends_with(&serve), "{}", shown(&line));
    }
}

#[test]
fn a_flag_of_the_user_is_not_repeated() {
    for given in ["--enable-request-id-headers", "--enable_request_id_headers", "--no-enable-request-id-headers"] {
        let line = line(&vllm(), None, &on_cpu(), &config(&[given])).unwrap();
        let count = shown(&line).matches("request").count();
        assert_eq!(count, 1, "{}", shown(&line));
    }
    let config = config(&["--shutdown-timeout=60"]);
    let line = line(&vllm(), Some(VllmVersion::new(0, 32)), &on_cpu(), &config).unwrap();
    assert_eq!(shown(&line).matches("--shutdown-timeout").count(), 1);
}

#[test]
fn an_argument_that_hostler_reserves_is_refused() {
    for (given, refused) in [
        ("--uds=/tmp/x", true),
        ("--api_key", true),
        ("--grpc", true),
        ("-tp", true),
        ("--tensor_parallel_size=2", true),
        ("-pp", true),
        ("--device-ids", true),
        ("--grpc-port", false),
        ("--uds-mode", false),
        ("uds", false),
    ] {
        let outcome = line(&vllm(), None, &on_cpu(), &config(&[given]));
        assert_eq!(outcome.is_err(), refused, "{given}");
    }
}

#[test]
fn tensor_parallelism_after_the_dashes_is_refused_with_the_option() {
    let error = line(&vllm(), None, &on_cpu(), &config(&["--tensor-parallel-size", "2"])).unwrap_err().to_string();
    assert!(error.contains("use --tp"), "{error}");
}

#[test]
fn a_replica_of_several_gpus_sees_all_of_them() {
    let replica = ReplicaPlan {
        index: 0,
        gpus: [3, 5].map(|index| Gpu { index, uuid: format!("GPU-{index}"), ..Gpu::default() }).to_vec(),
        is_standby: false,
    };
    let of = |minor| shown(&line(&vllm(), Some(VllmVersion::new(0, minor)), &replica, &config(&[])).unwrap());
    let (old, new) = (of(23), of(24));
    assert!(old.contains("CUDA_VISIBLE_DEVICES=3,5 ") && new.contains("CUDA_VISIBLE_DEVICES=GPU-3,GPU-5 "), "{old} {new}");
    assert!(old.contains("--tensor-parallel-size 2 ") && new.contains("--tensor-parallel-size 2 "), "{old} {new}");
}

#[test]
fn a_gpu_slice_is_passed_by_uuid_or_refused() {
    let slice =
        Gpu { index: 0, uuid: "MIG-1".to_owned(), slice: Some(MigSlice { parent: "GPU-0".to_owned(), position: 0 }), ..Gpu::default() };
    let replica = ReplicaPlan { index: 0, gpus: vec![slice], is_standby: false };
    let new = shown(&line(&vllm(), Some(VllmVersion::new(0, 24)), &replica, &config(&[])).unwrap());
    assert!(new.contains("CUDA_VISIBLE_DEVICES=MIG-1 "), "{new}");
    let old = line(&vllm(), Some(VllmVersion::new(0, 23)), &replica, &config(&[])).unwrap_err().to_string();
    assert!(old.contains("0.24"), "{old}");
}

#[test]
fn a_variable_turns_the_rust_front_end_on() {
    let (engine, replica, config) = (vllm(), on_gpu(), config(&[]));
    let launch = launch(&engine, &replica, &config);
    let rust = command_line(&LaunchContext { front_end: FrontEndInUse::Rust, ..launch }).unwrap();
    assert!(shown(&rust).contains("VLLM_USE_RUST_FRONTEND=1 "));
    assert_eq!(rust.front_end(), FrontEndInUse::Rust);
    let python = command_line(&launch).unwrap();
    assert_eq!(python.front_end(), FrontEndInUse::Python);
}

#[test]
fn missing_cache_events_have_a_reason() {
    let sockets_or_reason = |version, config: &AgentConfig| {
        let (engine, replica) = (vllm(), on_cpu());
        let launch = LaunchContext { version, ..launch(&engine, &replica, config) };
        let enabled = shown(&command_line(&launch).unwrap()).contains("enable_kv_cache_events");
        match cache_source(&launch) {
            KvEventSource::Sockets { live, replay } => {
                assert!(enabled);
                format!("{} {}", live.display(), replay.display())
            }
            KvEventSource::Nothing { because } => {
                assert!(!enabled);
                because
            }
        }
    };
    let new = Some(VllmVersion::new(0, 32));
    assert_eq!(sockets_or_reason(new, &config(&[])), "/run/h/ab/e1/kv.sock /run/h/ab/e1/replay.sock");
    assert_eq!(sockets_or_reason(new, &config(&["--enable-prefix-caching"])), "/run/h/ab/e1/kv.sock /run/h/ab/e1/replay.sock");
    assert!(sockets_or_reason(None, &config(&[])).contains("version of vLLM is unknown"));
    assert!(sockets_or_reason(Some(VllmVersion::new(0, 10)), &config(&[])).starts_with("vLLM 0.10.0 has no cache events"));
    assert!(sockets_or_reason(new, &AgentConfig { kv_events: false, ..config(&[]) }).contains("agent.kv_events"));
    for (given, because) in [
        ("--kv-events-config={}", "--kv-events-config of their own"),
        ("--kv_events_config", "--kv-events-config of their own"),
        ("--no-enable-prefix-caching", "keeps no cache"),
        ("--no_enable_prefix_caching", "keeps no cache"),
    ] {
        assert!(sockets_or_reason(new, &config(&[given])).contains(because), "{given}");
    }
}

#[test]
fn switch_intervals_are_shortened_only_where_the_core_sends_events() {
    const TURNS: &str = " PYTHONPATH=/run/h/ab/e1/python HOSTLER_SWITCH_INTERVAL=0.0005 /opt/vllm ";
    let two = ReplicaPlan { index: 1, gpus: [3, 5].map(|index| Gpu { index, ..Gpu::default() }).to_vec(), is_standby: false };
    let takes_turns = |replica: &ReplicaPlan, config: &AgentConfig| {
        let shown = shown(&line(&vllm(), Some(VllmVersion::new(0, 23)), replica, config).unwrap());
        assert_eq!(shown.contains(TURNS), shown.contains("HOSTLER_SWITCH_INTERVAL"), "{shown}");
        shown.contains(TURNS)
    };
    let mp = config(&["--distributed-executor-backend", "mp"]);
    assert!(takes_turns(&on_gpu(), &mp));
    assert!(takes_turns(&two, &config(&[])));
    assert!(takes_turns(&on_cpu(), &config(&[])));
    assert!(!takes_turns(&on_gpu(), &config(&[])), "the model runs in the core's process");
    for off in [AgentConfig { kv_events: false, ..mp.clone() }, AgentConfig { profile: Profile::Conservative, ..mp.clone() }] {
        assert!(!takes_turns(&on_gpu(), &off), "{off:?}");
    }
    let simulated = EngineProgram::Simulated { program: "/opt/hostler".into() };
    assert!(!shown(&line(&simulated, None, &on_cpu(), &mp).unwrap()).contains("PYTHONPATH"));
}

#[test]
fn a_worker_process_chosen_by_the_plan_counts_as_one() {
    let (engine, replica, config) = (vllm(), on_gpu(), config(&[]));
    let choices = [FlagChoice { flag: EXECUTOR_FLAG, value: "mp".to_owned(), origin: FlagOrigin::Hostler, because: String::new() }];
    let launch = LaunchContext { choices: &choices, python_path: OsStr::new("/site"), ..launch(&engine, &replica, &config) };
    assert!(shown(&command_line(&launch).unwrap()).contains(" PYTHONPATH=/run/h/ab/e1/python:/site "));
}

#[test]
fn reserved_arguments_in_the_engines_config_file_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("engine.yaml");
    std::fs::write(&file, "tensor-parallel-size: 4\n").unwrap();
    let config = config(&["--config", file.to_str().unwrap()]);
    let refused = line(&vllm(), Some(VllmVersion::new(0, 32)), &on_gpu(), &config).unwrap_err();
    assert!(matches!(&refused, HostError::ReservedArgument { argument, .. } if argument == "--tensor-parallel-size"), "{refused}");
}

#[test]
fn routes_that_the_agent_opened_are_for_routers_alone() {
    let (engine, replica, config) = (vllm(), on_cpu(), config(&[]));
    let withheld = |origin| {
        let choices = [FlagChoice { flag: SCALE_OUT_FLAG, value: String::new(), origin, because: String::new() }];
        command_line(&LaunchContext { choices: &choices, ..launch(&engine, &replica, &config) }).unwrap().withheld_routes
    };
    assert_eq!(withheld(FlagOrigin::Hostler), SCALE_OUT_ROUTES);
    assert!(withheld(FlagOrigin::User).is_empty(), "the user has opened them for clients");
}

#[test]
fn a_tracing_engine_is_named_vllm_and_samples_by_parent() {
    let (engine, replica, config) = (vllm(), on_gpu(), config(&[]));
    let set = |origin| {
        let choices = [FlagChoice { flag: TRACES_FLAG, value: "http://c:4317".to_owned(), origin, because: String::new() }];
        let line = command_line(&LaunchContext { choices: &choices, ..launch(&engine, &replica, &config) }).unwrap();
        TRACES_ENVIRONMENT.iter().filter(|(name, value)| line.set_variable(name) == Some(OsStr::new(value))).count()
    };
    assert_eq!((set(FlagOrigin::Hostler), set(FlagOrigin::User)), (2, 0), "a person's own flag comes with a person's own variables");
}

#[test]
fn bytecode_that_is_missing_is_kept_in_a_cache() {
    let (engine, replica, config) = (vllm(), on_cpu(), AgentConfig::default());
    let launch = LaunchContext { bytecode_cache: Some(Path::new("/cache/pycache")), ..launch(&engine, &replica, &config) };
    let line = command_line(&launch).unwrap();
    assert_eq!(line.set_variable("PYTHONPYCACHEPREFIX"), Some(OsStr::new("/cache/pycache")));
    assert_eq!(line.set_variable("PYTHONDONTWRITEBYTECODE"), Some(OsStr::new("")));
}

#[test]
fn an_engine_in_a_container_has_the_same_command_behind_the_runtimes_words() {
    let place = tempfile::tempdir().unwrap();
    let runtime = place.path().join("apptainer");
    std::os::unix::fs::symlink("/bin/sh", &runtime).unwrap();
    let config = AgentConfig { image: place.path().into(), container: runtime.clone(), ..config(&[]) };
    let container = Container::of(&config).unwrap();
    let words = container.as_ref().unwrap().words();
    let (host, contained) = (vllm(), EngineProgram::Vllm { program: "/opt/vllm".into(), container });
    let replica = on_gpu();
    let on = |engine| LaunchContext { python_path: OsStr::new("/of/the/host"), ..launch(engine, &replica, &config) };
    let (outside, inside) = (command_line(&on(&host)).unwrap(), command_line(&on(&contained)).unwrap());
    assert_eq!((&inside.program, &inside.arguments), (&outside.program, &outside.arguments));
    assert_eq!((outside.container.len(), &inside.container), (0, &words));
    assert_eq!((words.first(), words.last()), (Some(&runtime.into()), Some(&place.path().into())));
    let more: Vec<_> = inside.set.iter().filter(|set| !outside.set.contains(set)).collect();
    assert_eq!(more, [&("PYTHONNOUSERSITE", OsString::from("1"))]);
    assert!(inside.unset.contains(&"PYTHONPATH") && inside.unset.contains(&"LD_PRELOAD") && !outside.unset.contains(&"PYTHONPATH"));
    let simulated = EngineProgram::Simulated { program: "/opt/hostler".into() };
    assert!(command_line(&on(&simulated)).unwrap().container.is_empty());
}

#[test]
fn the_plugins_folder_is_all_of_the_python_path_in_a_container() {
    let place = tempfile::tempdir().unwrap();
    let config = AgentConfig { image: place.path().into(), container: "/bin/sh".into(), ..config(&[]) };
    let contained = EngineProgram::Vllm { program: "vllm".into(), container: Container::of(&config).unwrap() };
    let replica = on_cpu();
    let line = command_line(&LaunchContext { python_path: OsStr::new("/of/the/host"), ..launch(&contained, &replica, &config) }).unwrap();
    assert!(line.has_plugin());
    assert_eq!(line.set_variable("PYTHONPATH"), Some(OsStr::new("/run/h/ab/e1/python")));
}
