//! Whole plans, as they are printed.

use super::described_gpus::parse_gpus;
use super::model::tests::fixture;
use super::*;
use crate::config::{FrontEnd, Profile};
use crate::vllm::version::VllmVersion;

pub(super) struct Case<'a> {
    pub(super) model: &'a str,
    pub(super) gpus: &'a str,
    pub(super) nvlink: u32,
    pub(super) minor: u32,
    pub(super) config: AgentConfig,
}

fn vllm() -> EngineProgram {
    EngineProgram::Vllm { program: "/opt/vllm".into(), container: None }
}

pub(super) fn config(profile: Profile, line: &str) -> AgentConfig {
    AgentConfig {
        profile,
        model: "org/model".to_owned(),
        engine_args: line.split_whitespace().map(str::to_owned).collect(),
        ..AgentConfig::default()
    }
}

fn planned(case: &Case<'_>) -> Result<Plan, PlanError> {
    planned_in(case, HostResources::unlimited())
}

pub(super) fn planned_in(case: &Case<'_>, room: HostResources) -> Result<Plan, PlanError> {
    let described = if case.gpus.is_empty() { None } else { Some(parse_gpus(case.gpus, case.nvlink).unwrap()) };
    let (gpus, links) = described.map(|described| (described.gpus, described.links)).unwrap_or_default();
    let (engine, version) = (vllm(), Some(VllmVersion::new(0, case.minor)));
    let ground = PlanInput {
        parsers: &InstalledParsers::Assumed,
        rust_parsers: &InstalledParsers::Assumed,
        engine: &engine,
        version,
        rust_front_end: (case.minor >= 22 && !gpus.is_empty()).then_some(Path::new("/opt/vllm-rs")),
        gpus: &gpus,
        links: &links,
        resources: room,
        transport: &NcclTransport::Unknown,
        traces: &EngineTraces::Unasked,
        downloads: Path::new("/nonexistent"),
    };
    let model = ModelInfo::Known(Box::new(fixture(case.model, &[])));
    plan_for_model(&ground, &case.config, EnginePlanSetup::new(&engine, version, &case.config), model)
}

#[test]
fn only_models_of_code_templates_have_their_engines_render_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let planned = |architecture: &str| {
        let config = serde_json::json!({ "architectures": [architecture], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 64 });
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        let engine = vllm();
        let ground = PlanInput {
            parsers: &InstalledParsers::Assumed,
            rust_parsers: &InstalledParsers::Assumed,
            engine: &engine,
            version: Some(VllmVersion::new(0, 32)),
            rust_front_end: None,
            gpus: &[],
            links: &NvlinkTopology::default(),
            resources: HostResources::unlimited(),
            transport: &NcclTransport::Unknown,
            traces: &EngineTraces::Unasked,
            downloads: Path::new("/nonexistent"),
        };
        let config = AgentConfig { model: folder.path().to_str().unwrap().to_owned(), ..AgentConfig::default() };
        let plan = make_plan(&ground, &config).unwrap();
        plan.choices(&plan.replicas[0], FrontEndInUse::Python).iter().any(|choice| choice.flag == "--enable-scale-out")
    };
    assert!(planned("DeepseekV32ForCausalLM") && planned("GptOssForCausalLM") && !planned("Qwen3ForCausalLM"));
}

#[test]
fn the_plan_shows_a_small_model_on_pcie_gpus() {
    let case = Case { model: "gemma-2b", gpus: "4x24", nvlink: 0, minor: 32, config: config(Profile::Throughput, "--enforce-eager") };
    insta::assert_snapshot!(planned(&case).unwrap().page());
}

#[test]
fn the_plan_shows_a_large_model_over_nvlink_with_python() {
    let config = AgentConfig { front_end: FrontEnd::Python, ..config(Profile::Latency, "") };
    let plan = planned(&Case { model: "llama-3.1-70b", gpus: "8x80", nvlink: 8, minor: 33, config }).unwrap();
    insta::assert_snapshot!(plan.page());
    insta::assert_snapshot!(plan.summary());
}

#[test]
fn the_plan_shows_a_context_that_does_not_fit() {
    let case = Case { model: "llama-3.1-8b", gpus: "2x80,1x24", nvlink: 0, minor: 20, config: config(Profile::Throughput, "") };
    insta::assert_snapshot!(planned(&case).unwrap().page());
}

#[test]
fn the_plan_shows_a_stateful_model_on_an_old_release() {
    let case = Case { model: "qwen3-next-80b", gpus: "4x80", nvlink: 4, minor: 11, config: config(Profile::Conservative, "") };
    insta::assert_snapshot!(planned(&case).unwrap().page());
}

fn over_nodes(model: &'static str, gpus: &'static str, nodes_per_replica: u32) -> Plan {
    let config = AgentConfig { nodes_per_replica, front_end: FrontEnd::Python, ..config(Profile::Throughput, "") };
    planned(&Case { model, gpus, nvlink: 8, minor: 33, config }).unwrap()
}

/// Page without the flags that every plan has.
fn page_without_flags(plan: &Plan) -> String {
    let is_of_nodes = |line: &&str| !line.starts_with("  ") || ["-parallel-size", "--async", "-len"].iter().any(|part| line.contains(part));
    let page = plan.page();
    page.lines().filter(|line| line.starts_with("           ") || is_of_nodes(line)).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_plan_shows_a_replica_over_nodes_and_why() {
    let plan = over_nodes("llama-3.1-70b", "4x40", 2);
    insta::assert_snapshot!(page_without_flags(&plan));
    insta::assert_snapshot!(plan.summary());
    insta::assert_snapshot!(serde_json::to_string_pretty(&plan.json()["nodes"]).unwrap());
    insta::assert_snapshot!(page_without_flags(&over_nodes("llama-3.1-405b", "4x80", 4)));
    insta::assert_snapshot!(page_without_flags(&over_nodes("deepseek-v3", "8x80", 2)));
}

#[test]
fn the_plan_warns_of_more_nodes_than_a_model_needs() {
    insta::assert_snapshot!(over_nodes("llama-3.1-70b", "8x80", 3).warnings.join("\n"));
}

#[test]
fn the_plan_says_which_network_the_nodes_use() {
    let config = AgentConfig { nodes_per_replica: 2, tp: 8, replica_interface: "hsn0".to_owned(), ..config(Profile::Throughput, "") };
    let case = Case { model: "llama-3.1-70b", gpus: "4x40", nvlink: 4, minor: 33, config };
    let plan = Plan { transport: NcclTransport::Sockets("none is here".to_owned()), ..planned(&case).unwrap() };
    let says = |plan: &Plan, words: &[&str]| {
        let said = format!("{}\n{}", plan.page(), text::warnings(plan).join("\n"));
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    };
    says(&plan, &["hsn0, as agent.replica_interface says", "plain sockets between the nodes (none is here)", "runs code as you"]);
    says(&plan, &["--tp 8 is more than the GPUs of a node", "which share layers over the network"]);
    let fast = Plan { transport: NcclTransport::Fast("it has mlx5_0".to_owned()), ..plan };
    says(&fast, &["NCCL finds more than plain sockets on this host: it has mlx5_0"]);
    assert!(!text::warnings(&fast).iter().any(|warning| warning.contains("plain sockets")));
}

#[test]
fn one_node_has_the_plan_that_it_had_without_the_setting() {
    for (model, gpus, nvlink) in [("llama-3.1-8b", "2x80,1x24", 0), ("llama-3.1-70b", "8x80", 8), ("gemma-2b", "", 0)] {
        let page = |nodes_per_replica| {
            let config = AgentConfig { nodes_per_replica, ..config(Profile::Throughput, "") };
            planned(&Case { model, gpus, nvlink, minor: 33, config }).unwrap().page()
        };
        assert_eq!(page(0), page(1));
        assert!(!page(1).contains("node"), "{}", page(1));
    }
}

#[test]
fn the_plan_is_printed_as_json_for_programs() {
    let case = Case { model: "gemma-2b", gpus: "1x24", nvlink: 0, minor: 32, config: config(Profile::Throughput, "") };
    insta::assert_snapshot!(serde_json::to_string_pretty(&planned(&case).unwrap().json()).unwrap());
}

#[test]
fn engines_get_worker_processes_only_where_all_have_room() {
    let case = Case { model: "gemma-2b", gpus: "4x80", nvlink: 0, minor: 32, config: config(Profile::Throughput, "") };
    let has_workers = |cpus| {
        let plan = planned_in(&case, HostResources { cpus, shared_bytes: 8 << 30, ..HostResources::unlimited() }).unwrap();
        let of =
            |replica| plan.choices(replica, plan.front_end.in_use).iter().any(|choice| choice.flag == "--distributed-executor-backend");
        plan.replicas.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(has_workers(32), [true; 4]);
    assert_eq!(has_workers(31), [false; 4]);
}

#[test]
fn a_host_without_gpus_serves_on_the_cpu() {
    let cpu = |config| planned(&Case { model: "gemma-2b", gpus: "", nvlink: 0, minor: 32, config });
    assert_eq!(cpu(config(Profile::Throughput, "")).unwrap().replicas.len(), 1);
    assert_eq!(cpu(AgentConfig { replicas: 3, ..config(Profile::Throughput, "") }).unwrap().replicas.len(), 3);
    let refused = cpu(AgentConfig { tp: 2, ..config(Profile::Throughput, "") }).unwrap_err().to_string();
    assert!(refused.contains("this host has no GPU"), "{refused}");
}

#[test]
fn the_simulated_engine_has_two_replicas_or_one_per_gpu() {
    let engine = EngineProgram::Simulated { program: "/opt/hostler".into() };
    let replicas = |gpus: &str, config: &AgentConfig| {
        let gpus = if gpus.is_empty() { Vec::new() } else { parse_gpus(gpus, 0).unwrap().gpus };
        let ground = PlanInput {
            parsers: &InstalledParsers::Assumed,
            rust_parsers: &InstalledParsers::Assumed,
            engine: &engine,
            version: None,
            rust_front_end: None,
            gpus: &gpus,
            links: &NvlinkTopology::default(),
            resources: HostResources::unlimited(),
            transport: &NcclTransport::Unknown,
            traces: &EngineTraces::Unasked,
            downloads: Path::new("/nonexistent"),
        };
        make_plan(&ground, config).map(|plan| plan.replicas.iter().map(|replica| replica.gpus.len()).collect::<Vec<_>>())
    };
    assert_eq!(replicas("", &AgentConfig::default()).unwrap(), [0, 0]);
    assert_eq!(replicas("", &AgentConfig { replicas: 5, ..AgentConfig::default() }).unwrap(), [0; 5]);
    assert_eq!(replicas("4x80", &AgentConfig::default()).unwrap(), [1; 4]);
    assert_eq!(replicas("4x80", &AgentConfig { tp: 2, ..AgentConfig::default() }).unwrap(), [2, 2]);
    assert!(replicas("1x80", &AgentConfig { replicas: 5, ..AgentConfig::default() }).is_err());
}

#[test]
fn the_python_plan_has_the_limit_that_rust_lacks() {
    let case = Case { model: "llama-3.1-8b", gpus: "1x80", nvlink: 0, minor: 32, config: config(Profile::Throughput, "") };
    let plan = planned(&case).unwrap();
    let has_limit = |front_end| plan.choices(&plan.replicas[0], front_end).iter().any(|choice| choice.flag == "--max-num-queued-reqs");
    assert_eq!(plan.front_end.in_use, FrontEndInUse::Rust);
    assert!(!has_limit(FrontEndInUse::Rust) && has_limit(FrontEndInUse::Python));
}

fn with_standby(model: &'static str, gpus: &'static str, line: &str) -> Result<Plan, PlanError> {
    let config = AgentConfig { standby: true, ..config(Profile::Throughput, line) };
    planned(&Case { model, gpus, nvlink: 2, minor: 33, config })
}

#[test]
fn the_plan_divides_the_memory_between_an_engine_and_its_standby() {
    let plan = with_standby("llama-3.1-8b", "1x80", "").unwrap();
    insta::assert_snapshot!(plan.page());
    let both: f64 = plan.replicas.iter().map(|replica| plan.utilization(replica)).sum();
    assert!((both - plan.setup.utilization()).abs() < 1e-9, "together they take what one engine would: {both}");
}

#[test]
fn the_context_is_shortened_where_a_standby_leaves_too_little_room() {
    let plan = with_standby("llama-3.1-8b", "1x48", "").unwrap();
    let context = plan.layout.as_ref().unwrap().shares[0].context.unwrap();
    assert!((MIN_SHORTENED..131_072).contains(&context), "{context}");
    let flags = plan.choices(&plan.replicas[0], FrontEndInUse::Python);
    let length = flags.iter().find(|choice| choice.flag == "--max-model-len").map(|choice| choice.value.clone());
    assert_eq!(length, Some(context.to_string()));
}

const MIN_SHORTENED: u32 = 32_768;

#[test]
fn a_standby_that_does_not_fit_is_refused_with_its_arithmetic() {
    insta::assert_snapshot!(with_standby("llama-3.1-8b", "1x24", "").unwrap_err().to_string());
    let given = with_standby("gemma-2b", "1x80", "--gpu-memory-utilization 0.8");
    assert_eq!(given.unwrap_err(), PlanError::StandbyBesideFlag { flag: "--gpu-memory-utilization" });
}

#[test]
fn replicas_of_one_node_stand_in_for_each_other() {
    let plan = with_standby("llama-3.1-8b", "2x80", "").unwrap();
    assert!(plan.replicas.len() == 2 && plan.replicas.iter().all(|replica| !replica.is_standby), "{:?}", plan.replicas);
    assert!(plan.warnings.iter().any(|warning| warning.contains("no standby is started")), "{:?}", plan.warnings);
}
