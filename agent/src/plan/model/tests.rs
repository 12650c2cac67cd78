//! Shapes of known public models, and folders in the state that downloads leave.

use proptest::prelude::*;
use serde_json::json;

use super::super::memory::MemoryBudget;
use super::super::setup::EnginePlanSetup;
use super::super::stage::ReplicaSpread;
use super::*;
use crate::config::AgentConfig;
use crate::gpu::Gpu;
use crate::host::EngineProgram;

/// A model of the fixtures without files, so that everything is computed.
pub(in super::super) fn fixture(name: &str, arguments: &[&str]) -> ModelFacts {
    let text = match name {
        "gemma-2b" => include_str!("../fixtures/gemma-2b.json"),
        "llama-3.1-8b" => include_str!("../fixtures/llama-3.1-8b.json"),
        "llama-3.1-70b" => include_str!("../fixtures/llama-3.1-70b.json"),
        "llama-3.1-405b" => include_str!("../fixtures/llama-3.1-405b.json"),
        "qwen2.5-32b" => include_str!("../fixtures/qwen2.5-32b.json"),
        "qwen2.5-32b-awq" => include_str!("../fixtures/qwen2.5-32b-awq.json"),
        "mixtral-8x7b" => include_str!("../fixtures/mixtral-8x7b.json"),
        "deepseek-v3" => include_str!("../fixtures/deepseek-v3.json"),
        "gpt-oss-20b" => include_str!("../fixtures/gpt-oss-20b.json"),
        "gemma-3-27b" => include_str!("../fixtures/gemma-3-27b.json"),
        "qwen3-next-80b" => include_str!("../fixtures/qwen3-next-80b.json"),
        other => panic!("no fixture {other}"),
    };
    let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    ModelFacts::from_config(&serde_json::from_str(text).unwrap(), None, &arguments).unwrap()
}

#[test]
fn parameter_counts_from_shapes_match_known_models() {
    // Numbers in millions, from the models' own pages; the vision tower of Gemma 3 is not counted.
    let table = [
        ("gemma-2b", 2_506),
        ("llama-3.1-8b", 8_030),
        ("llama-3.1-70b", 70_554),
        ("llama-3.1-405b", 405_853),
        ("qwen2.5-32b", 32_764),
        ("mixtral-8x7b", 46_703),
        ("deepseek-v3", 671_026),
        ("gpt-oss-20b", 20_915),
        ("gemma-3-27b", 27_009),
        ("qwen3-next-80b", 80_000),
    ];
    for (name, millions) in table {
        let counted = fixture(name, &[]).parameters / 1_000_000;
        let apart = counted.abs_diff(millions) * 100;
        assert!(apart <= 2 * millions, "{name}: {counted} million counted, {millions} known");
    }
}

#[test]
fn stages_have_each_weight_once_and_a_tied_table_at_both_ends() {
    let stages = |name: &str, of| {
        let facts = fixture(name, &[]);
        PipelineStage::divide(facts.shape.layers, of).map(|stage| facts.stage_bytes(&stage)).collect::<Vec<_>>()
    };
    for (name, of) in [("llama-3.1-405b", 4), ("deepseek-v3", 3), ("gemma-3-27b", 2), ("gpt-oss-20b", 5)] {
        let facts = fixture(name, &[]);
        let twice = if facts.counts.is_tied { facts.counts.table() * facts.format.plain_bytes } else { 0 };
        let sum: u64 = stages(name, of).iter().sum();
        assert!(sum.abs_diff(facts.weight_bytes + twice) <= u64::from(of), "{name}: {sum}");
        assert_eq!(stages(name, 1), [facts.weight_bytes], "{name}");
    }
    // The first three layers of DeepSeek have no experts.
    let bytes = stages("deepseek-v3", 2);
    assert!(bytes[0] < bytes[1] / 20 * 19, "31 layers, three of them dense, and 30 with experts: {bytes:?}");
}

#[test]
fn quantized_weights_take_fewer_bytes() {
    let gib = |facts: &ModelFacts| facts.weight_bytes >> 30;
    let table: [(&str, &[&str], &str, u64); 8] = [
        ("qwen2.5-32b", &[], "bf16", 61),
        ("qwen2.5-32b-awq", &[], "awq", 18),
        ("qwen2.5-32b", &["--quantization", "fp8"], "fp8", 31),
        ("qwen2.5-32b", &["--dtype=float32"], "fp32", 122),
        ("qwen2.5-32b", &["--dtype", "half"], "fp16", 61),
        ("deepseek-v3", &[], "fp8", 626),
        ("gpt-oss-20b", &[], "mxfp4", 12),
        ("llama-3.1-8b", &[], "bf16", 14),
    ];
    for (name, arguments, format, expected) in table {
        let facts = fixture(name, arguments);
        assert_eq!((facts.format.name.as_str(), gib(&facts)), (format, expected), "{name} {arguments:?}");
    }
    let awq = fixture("qwen2.5-32b-awq", &[]);
    let plain = fixture("qwen2.5-32b", &[]);
    assert_eq!(awq.parameters, plain.parameters);
}

proptest! {
    #[test]
    fn absurd_numbers_of_a_config_end_in_facts_or_in_none(
        name in prop::sample::select(vec!["hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "kv_lora_rank", "q_lora_rank", "v_head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
            "first_k_dense_replace", "vocab_size", "max_position_embeddings", "sliding_window", "head_dim"]),
        other in prop::sample::select(vec!["hidden_size", "vocab_size", "num_hidden_layers", "n_routed_experts", "moe_intermediate_size"]),
        power in 0_u32..64,
        other_power in 0_u32..64,
        latent in any::<bool>(),
    ) {
        let text = if latent { include_str!("../fixtures/deepseek-v3.json") } else { include_str!("../fixtures/llama-3.1-70b.json") };
        let mut config: Value = serde_json::from_str(text).unwrap();
        config[name] = (1_u64 << power).into();
        config[other] = (1_u64 << other_power).into();
        let Some(facts) = ModelFacts::from_config(&config, None, &[]) else { return Ok(()) };
        let setup = EnginePlanSetup::new(&EngineProgram::Vllm { program: "/opt/vllm".into(), container: None }, None, &AgentConfig::default());
        let gpu = Gpu { memory_bytes: 80 << 30, ..Gpu::default() };
        for (tp, stages) in [(1, 1), (8, 2), (1, 64)] {
            let spread = ReplicaSpread { nodes: 1, ranks_per_node: 1, tp, stages };
            let budget = MemoryBudget::of_fullest_stage(&facts, &gpu, spread, &setup);
            let standby = budget.of_standby(&facts, setup.steps(Some(&gpu)), u32::MAX);
            let left = budget.beside(&standby);
            prop_assert!(left.max_request_tokens(u32::MAX) <= budget.max_request_tokens(u32::MAX));
        }
    }
}

#[test]
fn layers_are_classified_by_what_they_cache() {
    let kinds = |config: Value| {
        let shape = TextConfig(&config).shape().unwrap();
        (shape.full_layers, shape.windowed_layers, shape.recurrent_layers)
    };
    let with = |more: Value| {
        let mut config = json!({"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size": 100});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        kinds(config)
    };
    assert_eq!(with(json!({})), (12, 0, 0));
    assert_eq!(with(json!({"sliding_window": 4096})), (0, 12, 0));
    assert_eq!(with(json!({"sliding_window": null})), (12, 0, 0));
    assert_eq!(with(json!({"sliding_window": 4096, "use_sliding_window": false})), (12, 0, 0));
    assert_eq!(with(json!({"sliding_window": 4096, "model_type": "gemma2"})), (6, 6, 0));
    assert_eq!(with(json!({"sliding_window": 512, "sliding_window_pattern": 6})), (2, 10, 0));
    assert_eq!(with(json!({"hybrid_override_pattern": "M-M*M-M*M-M-"})), (2, 0, 10));
    assert_eq!(with(json!({"attn_layer_period": 4})), (3, 0, 9));
    assert_eq!(with(json!({"attn_layer_indices": [3, 9]})), (2, 0, 10));
    let named = json!({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention", "linear_attention", "mamba", "full_attention"]});
    assert_eq!(with(named), (9, 1, 2));
}

#[test]
fn latent_attention_caches_one_vector_per_token() {
    assert_eq!(fixture("deepseek-v3", &[]).shape.latent, Some(576));
    assert_eq!(fixture("llama-3.1-8b", &[]).shape.latent, None);
}

#[test]
fn the_context_length_matches_vllms() {
    let context = |config: Value| TextConfig(&config).context();
    assert_eq!(fixture("deepseek-v3", &[]).context, 163_840);
    assert_eq!(fixture("llama-3.1-8b", &[]).context, 131_072);
    assert_eq!(fixture("gemma-3-27b", &[]).context, 131_072);
    assert_eq!(context(json!({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}})), 16_384);
    assert_eq!(context(json!({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}})), 16_384);
    assert_eq!(context(json!({"n_positions": 1024})), 1_024);
    let long = json!({"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}});
    assert_eq!(context(long), 4_096);
    assert_eq!(context(json!({})), 2_048);
}

fn folder_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    folder
}

const SMALL: &str = r#"{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "dtype": "bfloat16"}"#;

fn read(model: &str, arguments: &[&str], downloads: &Path) -> ModelInfo {
    let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    ModelFacts::read(model, &arguments, downloads)
}

#[test]
fn the_weight_size_comes_from_index_files_or_shapes() {
    let nowhere = Path::new("/nonexistent");
    let index = r#"{"metadata": {"total_size": 4000}}"#;
    let table = [
        (
            vec![("config.json", SMALL), ("model.safetensors.index.json", index), ("model-1.safetensors", "xx")],
            Some((4_000, WeightSizeSource::Index)),
        ),
        (
            vec![("config.json", SMALL), ("a.safetensors", "xxxx"), ("b.safetensors", "xx"), ("pytorch_model.bin", "x")],
            Some((6, WeightSizeSource::Files)),
        ),
        (
            vec![("config.json", SMALL), ("model.safetensors", "xxxx"), ("consolidated.safetensors", "xxxx")],
            Some((4, WeightSizeSource::Files)),
        ),
        (vec![("config.json", SMALL), ("consolidated.safetensors", "xxxxxx")], Some((6, WeightSizeSource::Files))),
        (vec![("config.json", SMALL), ("pytorch_model.bin", "xx")], Some((2, WeightSizeSource::Files))),
        (vec![("config.json", SMALL)], None),
    ];
    for (files, expected) in table {
        let folder = folder_with(&files);
        let model = read(folder.path().to_str().unwrap(), &[], nowhere);
        let facts = model.facts().unwrap();
        match expected {
            Some((bytes, measured)) => assert_eq!((facts.weight_bytes, facts.size_source, facts.parameters), (bytes, measured, bytes / 2)),
            None => assert_eq!(facts.size_source, WeightSizeSource::Shapes),
        }
    }
}

#[test]
fn a_model_is_found_among_the_downloaded_ones() {
    let downloads = folder_with(&[
        ("models--org--name/refs/main", "abc\n"),
        ("models--org--name/snapshots/abc/config.json", SMALL),
        ("models--org--name/snapshots/old/config.json", SMALL),
    ]);
    assert!(read("org/name", &[], downloads.path()).facts().is_some());
    assert!(read("org/name", &["--revision", "old"], downloads.path()).facts().is_some());
    assert!(read("org/name", &["--revision", "gone"], downloads.path()).facts().is_none());
}

#[test]
fn an_unreadable_model_is_unknown_with_a_reason() {
    let because = |model: &str| match read(model, &[], Path::new("/nonexistent")) {
        ModelInfo::Unknown { because } => because,
        ModelInfo::Known(facts) => panic!("{facts:?}"),
    };
    assert!(because("org/name").contains("`hf download org/name config.json` first, or decide with --tp"));
    let broken = folder_with(&[("config.json", "{")]);
    assert!(because(broken.path().to_str().unwrap()).contains("is not JSON"));
    let other = folder_with(&[("config.json", "{}")]);
    assert!(because(other.path().to_str().unwrap()).contains("does not name the model's shapes"));
    let empty = folder_with(&[]);
    assert!(because(empty.path().to_str().unwrap()).contains("cannot be read"));
}
