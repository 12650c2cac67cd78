//! Replicas over nodes: how they are divided, how many nodes a model needs, and what holds for all.

use proptest::prelude::*;

use super::super::described_gpus::parse_gpus;
use super::super::layout::plan_layout;
use super::super::model::ModelInfo;
use super::super::model::tests::fixture;
use super::super::setup::EnginePlanSetup;
use super::super::weights;
use super::*;
use crate::config::AgentConfig;
use crate::host::EngineProgram;
use crate::vllm::version::VllmVersion;

/// A request in words: model, GPUs of a node, NVLink domain, nodes, `--tp`, engine arguments.
#[derive(Clone, Copy)]
struct Case<'a> {
    model: &'a str,
    gpus: &'a str,
    nvlink: u32,
    nodes: u32,
    tp: u32,
    arguments: &'a [&'a str],
}

const PLAIN: Case<'_> = Case { model: "", gpus: "4x40", nvlink: 8, nodes: 2, tp: 0, arguments: &[] };

fn with_question<T>(case: &Case<'_>, ask: impl FnOnce(&LayoutRequest<'_>) -> T) -> T {
    let described = parse_gpus(case.gpus, case.nvlink).unwrap();
    let model = match case.model {
        "" => ModelInfo::Unknown { because: "nobody knows".to_owned() },
        name => ModelInfo::Known(Box::new(fixture(name, case.arguments))),
    };
    let engine_args = case.arguments.iter().map(|&argument| argument.to_owned()).collect();
    let config = AgentConfig { engine_args, ..AgentConfig::default() };
    let setup =
        EnginePlanSetup::new(&EngineProgram::Vllm { program: "/opt/vllm".into(), container: None }, Some(VllmVersion::new(0, 33)), &config);
    let (gpus, links) = (&described.gpus, &described.links);
    ask(&LayoutRequest { model: &model, gpus, links, tp: case.tp, replicas: 0, nodes: case.nodes, setup: &setup })
}

fn answer(case: &Case<'_>) -> Result<(ReplicaSpread, GpuGroupLayout), PlanError> {
    with_question(case, plan_spread).map(|(spread, layout)| (spread, layout.shares[0].clone()))
}

/// Division as `TP4 x 2`, or the error.
fn division(case: &Case<'_>) -> String {
    match answer(case) {
        Ok((spread, share)) => format!("TP{} x {}{}", spread.tp, spread.stages, if share.over_pcie { " pcie" } else { "" }),
        Err(error) => error.to_string(),
    }
}

#[test]
fn layers_are_shared_within_a_node_and_stages_lie_on_the_nodes() {
    let of = |gpus, nvlink, tp| division(&Case { model: "llama-3.1-70b", gpus, nvlink, tp, ..PLAIN });
    assert_eq!(of("4x40", 4, 0), "TP4 x 2");
    assert_eq!(of("4x40", 4, 2), "TP2 x 4", "two stages on each node");
    assert_eq!(of("4x40", 4, 8), "TP8 x 1", "layers are shared over the network on request");
    assert_eq!(of("4x40", 2, 0), "TP2 x 4", "bridges join pairs");
    assert_eq!(of("4x40", 0, 0), "TP4 x 2 pcie");
    assert_eq!(of("1x80", 0, 0), "TP1 x 2");
    assert_eq!(of("6x80", 8, 0), "TP2 x 6", "six do not divide 64 heads");
    assert_eq!(division(&Case { model: "", ..PLAIN }), "TP4 x 2", "nothing is known of the model");
    assert_eq!(divide(3, 1, 1).map(|spread| (spread.tp, spread.stages)), Ok((1, 3)), "a CPU is one rank");
}

#[test]
fn divisions_that_vllm_would_not_start_are_refused() {
    let refused = |case: Case<'_>, words: &[&str]| {
        let said = division(&case);
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    };
    let large = Case { model: "llama-3.1-70b", ..PLAIN };
    refused(Case { tp: 3, ..large }, &["--tp 3", "64 attention heads", "possible are 1, 2, 4, 8"]);
    refused(Case { tp: 16, ..large }, &["--tp 16", "8 GPUs in all"]);
    refused(Case { gpus: "2x3g.40gb", ..large }, &["MIG slices", "--nodes-per-replica"]);
    refused(Case { model: "gemma-2b", gpus: "4x24", tp: 1, nodes: 5, ..PLAIN }, &["20 stages", "18 layers"]);
}

#[test]
fn ranks_of_one_stage_are_joined_gpus_side_by_side() {
    let mut described = parse_gpus("4x40", 0).unwrap();
    described.links = crate::gpu::NvlinkTopology::between([("GPU-0", "GPU-2"), ("GPU-1", "GPU-3")].map(|(a, b)| (a.into(), b.into())));
    let case = Case { model: "llama-3.1-70b", ..PLAIN };
    let order = with_question(&case, |question| {
        let question = LayoutRequest { gpus: &described.gpus, links: &described.links, ..*question };
        let (_, layout) = plan_spread(&question).unwrap();
        layout.shares[0].replicas[0].iter().map(|gpu| gpu.index).collect::<Vec<_>>()
    });
    assert_eq!(order, [0, 2, 1, 3]);
}

#[test]
fn only_the_gpus_of_one_kind_make_a_replica() {
    let (spread, layout) = with_question(&Case { model: "llama-3.1-70b", gpus: "1x24,4x80", ..PLAIN }, plan_spread).unwrap();
    assert_eq!((spread.ranks_per_node, layout.spare.len()), (4, 1));
}

/// The end of the refusal on one node, with the number of nodes that would do.
fn proposal(case: &Case<'_>) -> String {
    let error = with_question(&Case { nodes: 1, ..*case }, |question| {
        plan_layout(question).map_err(|error| with_proposal(error, question)).map(|layout| layout.shares[0].tp)
    });
    match error {
        Ok(tp) => format!("one node, TP{tp}"),
        Err(error) => error.to_string().split("--nodes-per-replica").nth(1).unwrap_or("none").trim().to_owned(),
    }
}

#[test]
fn a_model_that_fits_no_node_is_told_the_smallest_number_of_nodes() {
    let mut lines = Vec::new();
    for model in ["llama-3.1-70b", "llama-3.1-405b", "deepseek-v3"] {
        for gpus in ["4x40", "4x80", "8x80"] {
            lines.push(format!("{model} on {gpus}: {}", proposal(&Case { model, gpus, ..PLAIN })));
        }
    }
    insta::assert_snapshot!(lines.join("\n"));
    assert_eq!(proposal(&Case { model: "llama-3.1-70b", gpus: "2x3g.40gb", ..PLAIN }), "none");
}

#[test]
fn the_proposed_number_of_nodes_is_what_the_plan_takes() {
    for (model, gpus) in [("llama-3.1-70b", "4x40"), ("llama-3.1-405b", "4x80"), ("deepseek-v3", "8x80"), ("llama-3.1-70b", "1x80")] {
        let case = Case { model, gpus, ..PLAIN };
        let nodes: u32 = proposal(&case).split(':').next().unwrap().parse().unwrap();
        let share = answer(&Case { nodes, ..case }).unwrap().1;
        assert_eq!((share.why, share.enough_nodes), (SizeReason::Smallest, None), "{model} on {gpus}");
        let more = answer(&Case { nodes: 2 * nodes, ..case }).unwrap().1;
        assert!(more.why == SizeReason::Smallest || more.enough_nodes.is_some(), "{model} on {gpus}");
    }
}

#[test]
fn too_few_nodes_are_refused_with_how_many_would_do() {
    insta::assert_snapshot!(division(&Case { model: "llama-3.1-405b", ..PLAIN }));
}

#[test]
fn latent_caches_are_divided_by_stages_and_not_by_gpus() {
    let token_bytes = |nodes, tp| {
        let case = Case { model: "deepseek-v3", gpus: "8x80", nodes, tp, ..PLAIN };
        answer(&case).unwrap().1.memory.unwrap().token_bytes()
    };
    assert_eq!(token_bytes(2, 16), 61 * 576 * 2, "one stage: each GPU has the whole cache of a token");
    assert!([31 * 576 * 2, 30 * 576 * 2].contains(&token_bytes(2, 8)));
    assert!([31 * 576 * 2, 30 * 576 * 2].contains(&token_bytes(4, 16)), "as many stages");
}

#[test]
fn a_longer_context_than_fits_is_shortened_unless_the_user_set_it() {
    let case = Case { model: "llama-3.1-70b", gpus: "1x48", nodes: 4, ..PLAIN };
    let share = answer(&case).unwrap().1;
    assert!(share.is_context_shortened && share.context.unwrap() >= 8_192, "{:?}", share.context);
    let given = answer(&Case { arguments: &["--max-model-len", "131072"], ..case }).unwrap().1;
    assert!(!given.is_context_shortened && given.context == Some(131_072));
}

#[test]
fn one_node_has_the_budget_of_a_model_that_is_not_divided() {
    for model in ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "gemma-3-27b", "qwen3-next-80b"] {
        with_question(&Case { model, gpus: "8x80", ..PLAIN }, |question| {
            let facts = question.model.facts().unwrap();
            let spread = divide(1, 8, 8).unwrap();
            let divided = MemoryBudget::of_fullest_stage(facts, &question.gpus[0], spread, question.setup);
            assert_eq!(divided, MemoryBudget::new(facts, &question.gpus[0], 8, question.setup), "{model}");
        });
    }
}

#[test]
fn hostile_shapes_end_in_a_plan_or_a_reason() {
    for (layers, dense) in [(0, 0), (1, u32::MAX), (u32::MAX, 7), (u32::MAX, u32::MAX)] {
        let mut facts = fixture("deepseek-v3", &[]);
        facts.shape.layers = layers;
        facts.counts = weights::ParameterCounts { dense_layers: dense, embeddings: u64::MAX, ..facts.counts };
        let model = ModelInfo::Known(Box::new(facts));
        with_question(&Case { model: "deepseek-v3", nodes: 64, ..PLAIN }, |question| {
            let _ = plan_spread(&LayoutRequest { model: &model, ..*question });
        });
    }
}

proptest! {
    #[test]
    fn budgets_are_within_memory_and_more_nodes_hold_no_less(
        model in prop::sample::select(vec!["gemma-2b", "llama-3.1-70b", "llama-3.1-405b", "mixtral-8x7b", "gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b", "deepseek-v3"]),
        gpus in prop::sample::select(vec![1_u32, 2, 4, 8]),
        gib in 16_u32..200,
        nvlink in prop::sample::select(vec![0_u32, 2, 8]),
        nodes in 2_u32..9,
        more in 1_u32..4,
    ) {
        let gpus = format!("{gpus}x{gib}");
        let case = Case { model, gpus: &gpus, nvlink, nodes, ..PLAIN };
        let Ok((spread, share)) = answer(&case) else { return Ok(()) };
        let memory = share.memory.as_ref().unwrap();
        prop_assert_eq!(spread.tp * spread.stages, spread.ranks_per_node * nodes);
        prop_assert!(!spread.crosses_nodes_in_layers());
        if memory.missing == 0 {
            prop_assert!(memory.weights + memory.runtime + memory.activations + memory.cache <= memory.usable);
        }
        if share.is_context_shortened || share.why == SizeReason::Smallest {
            prop_assert!(memory.context_bytes(u64::from(share.context.unwrap())) <= memory.cache);
        }
        let Ok((_, larger)) = answer(&Case { nodes: nodes + more, ..case }) else { return Ok(()) };
        let context = fixture(model, &[]).context;
        let held = |share: &GpuGroupLayout| share.memory.as_ref().unwrap().max_request_tokens(context);
        prop_assert!(held(&larger) >= held(&share), "{} and {}", held(&share), held(&larger));
        let is_held = share.context.is_some_and(|context| held(&share) >= context);
        prop_assert!(!is_held || larger.context >= share.context, "{:?} and {:?}", share.context, larger.context);
    }
}
