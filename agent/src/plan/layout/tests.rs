//! Layouts that a user may rightly expect, and invariants of every layout.

use proptest::prelude::*;

use super::super::described_gpus::parse_gpus;
use super::super::model::tests::fixture;
use super::*;
use crate::config::AgentConfig;
use crate::host::EngineProgram;
use crate::vllm::version::VllmVersion;

fn setup(arguments: &[&str]) -> EnginePlanSetup {
    let config = AgentConfig { engine_args: arguments.iter().map(|&argument| argument.to_owned()).collect(), ..AgentConfig::default() };
    EnginePlanSetup::new(&EngineProgram::Vllm { program: "/opt/vllm".into(), container: None }, Some(VllmVersion::new(0, 32)), &config)
}

/// A request in words: model, GPUs, NVLink domain, `--tp`, `--replicas`, engine arguments.
struct Case<'a> {
    model: &'a str,
    gpus: &'a str,
    nvlink: u32,
    tp: u32,
    replicas: u32,
    arguments: &'a [&'a str],
}

const PLAIN: Case<'_> = Case { model: "", gpus: "", nvlink: 0, tp: 0, replicas: 0, arguments: &[] };

fn answer(case: &Case<'_>) -> Result<GpuLayout, PlanError> {
    let described = parse_gpus(case.gpus, case.nvlink).unwrap();
    let model = match case.model {
        "" => ModelInfo::Unknown { because: "nobody knows".to_owned() },
        name => ModelInfo::Known(Box::new(fixture(name, case.arguments))),
    };
    let setup = setup(case.arguments);
    plan_layout(&LayoutRequest {
        model: &model,
        gpus: &described.gpus,
        links: &described.links,
        tp: case.tp,
        replicas: case.replicas,
        nodes: 1,
        setup: &setup,
    })
}

/// Layout in the form `2 x TP4 short pcie +1`, or the error.
fn summary(case: &Case<'_>) -> String {
    match answer(case) {
        Ok(layout) => {
            let share = |share: &GpuGroupLayout| {
                let short = if share.is_context_shortened { " short" } else { "" };
                let pcie = if share.over_pcie { " pcie" } else { "" };
                format!("{} x TP{}{short}{pcie}", share.replicas.len(), share.tp)
            };
            let spare = if layout.spare.is_empty() { String::new() } else { format!(" +{}", layout.spare.len()) };
            layout.shares.iter().map(share).collect::<Vec<_>>().join(", ") + &spare
        }
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_model_gets_as_many_smallest_replicas_as_fit() {
    let table: [(&str, &str, u32, &str); 19] = [
        ("gemma-2b", "4x24", 0, "4 x TP1"),
        ("gemma-2b", "4x24", 4, "4 x TP1"),
        ("llama-3.1-8b", "1x80", 0, "1 x TP1"),
        ("llama-3.1-8b", "8x140", 8, "8 x TP1"),
        ("llama-3.1-70b", "4x80", 4, "1 x TP4"),
        ("llama-3.1-70b", "8x80", 8, "2 x TP4"),
        ("llama-3.1-70b", "8x140.4", 8, "4 x TP2"),
        // Four of six make a replica; the others would need two more.
        ("llama-3.1-70b", "6x80", 8, "1 x TP4 +2"),
        // Bridges join only pairs, so four GPUs work over PCIe because nothing else holds the
        // model.
        ("llama-3.1-70b", "4x80", 2, "1 x TP4 pcie"),
        ("llama-3.1-70b", "4x80", 0, "1 x TP4 pcie"),
        ("llama-3.1-70b", "4x140.4", 2, "2 x TP2"),
        // A shorter context on one GPU comes before PCIe, and after NVLink.
        ("llama-3.1-8b", "2x24", 0, "2 x TP1 short"),
        ("llama-3.1-8b", "2x24", 2, "1 x TP2"),
        ("qwen2.5-32b-awq", "2x40", 0, "2 x TP1"),
        ("mixtral-8x7b", "2x80", 2, "1 x TP2"),
        ("deepseek-v3", "8x140.4", 8, "1 x TP8"),
        ("gpt-oss-20b", "2x24", 0, "2 x TP1"),
        // Each kind of GPU is laid out separately. If the model does not fit one kind, that kind
        // stays unused.
        ("llama-3.1-8b", "2x80,1x24", 0, "2 x TP1, 1 x TP1 short"),
        ("llama-3.1-70b", "4x80,2x24", 4, "1 x TP4 +2"),
    ];
    for (model, gpus, nvlink, expected) in table {
        assert_eq!(summary(&Case { model, gpus, nvlink, ..PLAIN }), expected, "{model} on {gpus}, NVLink {nvlink}");
    }
}

#[test]
fn a_mig_slice_holds_a_whole_replica_or_none() {
    assert_eq!(summary(&Case { model: "gemma-2b", gpus: "7x1g.10gb", ..PLAIN }), "7 x TP1");
    assert_eq!(summary(&Case { model: "llama-3.1-8b", gpus: "2x3g.40gb", ..PLAIN }), "2 x TP1");
    assert_eq!(summary(&Case { model: "llama-3.1-8b", gpus: "2x3g.40gb,1x1g.10gb", ..PLAIN }), "2 x TP1 +1");
    let small = summary(&Case { model: "llama-3.1-8b", gpus: "7x1g.10gb", ..PLAIN });
    assert!(small.starts_with("the model does not fit 7 MIG slices of 9.5 GiB"), "{small}");
    assert!(!small.contains("--tp"), "{small}");
    let together = summary(&Case { model: "gemma-2b", gpus: "2x3g.40gb", tp: 2, ..PLAIN });
    assert!(together.starts_with("--tp 2 cannot be: the GPUs are MIG slices"), "{together}");
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_arithmetic() {
    insta::assert_snapshot!(summary(&Case { model: "qwen2.5-32b", gpus: "2x40", nvlink: 2, ..PLAIN }));
    insta::assert_snapshot!(summary(&Case { model: "llama-3.1-70b", gpus: "2x80", nvlink: 2, ..PLAIN }));
    insta::assert_snapshot!(summary(&Case { model: "llama-3.1-70b", gpus: "1x24", ..PLAIN }));
    insta::assert_snapshot!(summary(&Case { model: "deepseek-v3", gpus: "8x80", nvlink: 8, ..PLAIN }));
    insta::assert_snapshot!(summary(&Case { model: "llama-3.1-8b", gpus: "7x1g.10gb", ..PLAIN }));
}

#[test]
fn the_users_layout_is_used_unless_it_cannot_fit() {
    let summarize = |model: &'static str, gpus: &'static str, tp, replicas, arguments: &'static [&'static str]| {
        summary(&Case { model, gpus, nvlink: 8, tp, replicas, arguments })
    };
    assert_eq!(summarize("gemma-2b", "4x24", 2, 0, &[]), "2 x TP2");
    assert_eq!(summarize("gemma-2b", "4x24", 0, 3, &[]), "3 x TP1 +1");
    assert_eq!(summarize("gemma-2b", "4x24", 1, 2, &[]), "2 x TP1 +2");
    // The cache size is an estimate, so a small cache is the user's own choice; weights are not.
    assert_eq!(summarize("qwen2.5-32b", "2x40", 2, 0, &[]), "1 x TP2");
    assert!(summarize("llama-3.1-70b", "4x80", 1, 0, &[]).starts_with("the model does not fit"));
    assert_eq!(summarize("llama-3.1-8b", "2x24", 0, 0, &["--max-model-len", "8192"]), "2 x TP1");
    assert_eq!(summarize("llama-3.1-8b", "2x24", 1, 0, &[]), "2 x TP1 short");
    let table = [
        (summarize("gemma-2b", "4x24", 3, 0, &[]), "possible are 1, 2, 4, 8"),
        (summarize("gemma-2b", "4x24", 0, 5, &[]), "5 replicas were asked for, but the number of GPUs is 4: use --replicas 4 or fewer"),
        (summarize("llama-3.1-70b", "4x80", 0, 2, &[]), "of which a replica takes 4 that reach each other: use --replicas 1 or fewer"),
        (summarize("gemma-2b", "4x24", 8, 0, &[]), "of which a replica takes 8 that reach each other: use a smaller --tp"),
    ];
    for (got, part) in table {
        assert!(got.contains(part), "{got}");
    }
}

#[test]
fn the_users_own_context_is_never_shortened() {
    let text = summary(&Case { model: "llama-3.1-8b", gpus: "1x24", arguments: &["--max-model-len", "128k"], ..PLAIN });
    assert!(text.contains("tokens of a context of 128000"), "{text}");
}

#[test]
fn an_unknown_model_gets_one_gpu_for_each_replica() {
    assert_eq!(summary(&Case { gpus: "4x80", ..PLAIN }), "4 x TP1");
    assert_eq!(summary(&Case { gpus: "4x80", tp: 2, nvlink: 4, ..PLAIN }), "2 x TP2");
    let mut described = parse_gpus("2x80", 0).unwrap();
    described.gpus.iter_mut().for_each(|gpu| gpu.memory_bytes = 0);
    let model = ModelInfo::Known(Box::new(fixture("llama-3.1-70b", &[])));
    let setup = setup(&[]);
    let question =
        LayoutRequest { model: &model, gpus: &described.gpus, links: &described.links, tp: 0, replicas: 0, nodes: 1, setup: &setup };
    assert_eq!(plan_layout(&question).unwrap().shares[0].why, SizeReason::Unknown);
}

#[test]
fn a_smaller_cache_format_holds_more_tokens() {
    let tokens = |arguments: &'static [&'static str]| {
        let layout = answer(&Case { model: "llama-3.1-8b", gpus: "1x80", arguments, ..PLAIN }).unwrap();
        layout.shares[0].memory.as_ref().unwrap().tokens_in(131_072).unwrap()
    };
    let (plain, half) = (tokens(&[]), tokens(&["--kv-cache-dtype", "fp8"]));
    assert!(half.abs_diff(2 * plain) <= 2, "{plain} {half}");
}

proptest! {
    #[test]
    fn every_layout_fits_its_memory_and_uses_no_gpu_twice(
        model in prop::sample::select(vec!["gemma-2b", "llama-3.1-8b", "llama-3.1-70b", "qwen2.5-32b", "mixtral-8x7b", "gpt-oss-20b", "qwen3-next-80b", "deepseek-v3"]),
        kinds in prop::collection::vec((1_u32..9, 8_u32..200), 1..4),
        nvlink in prop::sample::select(vec![0_u32, 2, 4, 8]),
        tp in prop::sample::select(vec![0_u32, 0, 0, 1, 2, 4]),
        replicas in 0_u32..6,
    ) {
        let gpus = kinds.iter().map(|(number, gib)| format!("{number}x{gib}")).collect::<Vec<_>>().join(",");
        let described = parse_gpus(&gpus, nvlink).unwrap();
        let case = Case { model, gpus: &gpus, nvlink, tp, replicas, arguments: &[] };
        if let Ok(layout) = answer(&case) {
            let mut used: Vec<String> = layout.shares.iter().flat_map(|share| share.replicas.iter().flatten()).map(|gpu| gpu.uuid.clone()).collect();
            used.extend(layout.spare.iter().map(|spare| spare.gpu.uuid.clone()));
            used.sort();
            let mut all: Vec<String> = described.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            all.sort();
            prop_assert_eq!(used, all, "each GPU is in one replica or spare");
            if replicas > 0 {
                prop_assert_eq!(layout.shares.iter().map(|share| share.replicas.len()).sum::<usize>(), replicas as usize);
            }
            for share in &layout.shares {
                let memory = share.memory.as_ref().unwrap();
                prop_assert!(memory.weights <= memory.usable);
                prop_assert!(share.replicas.iter().all(|set| set.len() == share.tp as usize));
                prop_assert!(share.over_pcie || share.replicas.iter().all(|set| described.links.is_one_domain(set)));
                if tp == 0 {
                    prop_assert_eq!(memory.missing, 0);
                    prop_assert!(memory.context_bytes(u64::from(share.context.unwrap())) <= memory.cache);
                    prop_assert!(memory.weights + memory.runtime + memory.activations + memory.cache <= memory.usable);
                }
            }
        }
    }
}

#[test]
fn weights_offloaded_by_the_user_take_no_gpu_memory() {
    let case = Case { model: "qwen2.5-32b", gpus: "1x40", ..PLAIN };
    assert!(matches!(answer(&case), Err(PlanError::DoesNotFit(_))));
    let layout = answer(&Case { arguments: &["--cpu_offload_gb=40"], ..case }).unwrap();
    let memory = layout.shares[0].memory.as_ref().unwrap();
    assert_eq!(memory.weights >> 30, 21);
}
