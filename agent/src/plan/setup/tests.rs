//! Setups that follow from arguments, profiles and releases.

use super::*;
use crate::plan::model::tests::fixture;

fn gpu(name: &str, gib: u64) -> Option<Gpu> {
    Some(Gpu { name: name.to_owned(), memory_bytes: gib << 30, ..Gpu::default() })
}

fn setup(simulated: bool, version: Option<VllmVersion>, profile: Profile, line: &str) -> EnginePlanSetup {
    let engine = if simulated {
        EngineProgram::Simulated { program: "/opt/hostler".into() }
    } else {
        EngineProgram::Vllm { program: "/opt/vllm".into(), container: None }
    };
    let engine_args = line.split_whitespace().map(str::to_owned).collect();
    EnginePlanSetup::new(&engine, version, &AgentConfig { profile, engine_args, ..AgentConfig::default() })
}

#[test]
fn the_token_budget_is_the_given_or_the_engines_default() {
    let table = [
        (false, gpu("NVIDIA H100 80GB HBM3", 79), "", 8_192),
        (false, gpu("NVIDIA A100-SXM4-80GB", 80), "", 2_048),
        (false, gpu("NVIDIA L40S", 45), "", 2_048),
        (false, gpu("NVIDIA B200", 178), "", 16_384),
        (false, None, "", 2_048),
        (false, gpu("NVIDIA H200", 140), "--performance-mode throughput", 16_384),
        (false, gpu("NVIDIA H200", 140), "--max-num-batched-tokens 4096", 4_096),
        (false, None, "--max_num_batched_tokens=8K", 8_192),
        (false, None, "--max-num-batched-tokens 2.5k", 2_500),
        (false, None, "--max-num-batched-tokens -1", 0),
        (false, None, "--max-num-batched-tokens 9e99k", 0),
        (false, None, "--max-num-batched-tokens many", 0),
        (false, None, "--config engine.yaml", 0),
        (true, None, "", 8_192),
        (true, None, "--max-num-batched-tokens 512", 512),
    ];
    for (simulated, gpu, line, expected) in table {
        let setup = setup(simulated, Some(VllmVersion::new(0, 32)), Profile::Conservative, line);
        assert_eq!(setup.token_budget(gpu.as_ref()), expected, "{gpu:?} {line}");
    }
    let unknown = setup(false, None, Profile::Conservative, "");
    assert_eq!(unknown.token_budget(gpu("NVIDIA B200", 178).as_ref()), 8_192);
}

#[test]
fn profiles_change_steps_only_for_known_releases_and_gpus() {
    let new = Some(VllmVersion::new(0, 32));
    let table = [
        (Profile::Throughput, new, gpu("H100", 80), "", (8_192, 1_024)),
        (Profile::Throughput, new, gpu("A100", 80), "", (2_048, 1_024)),
        (Profile::Throughput, new, gpu("B200", 180), "", (16_384, 1_024)),
        (Profile::Throughput, new, gpu("L4", 24), "", (4_096, 512)),
        (Profile::Throughput, new, gpu("MIG", 10), "", (2_048, 256)),
        (Profile::Throughput, None, gpu("L4", 24), "", (2_048, 256)),
        (Profile::Throughput, new, None, "", (2_048, 128)),
        (Profile::Throughput, new, gpu("L4", 24), "--max-num-seqs 64", (4_096, 64)),
        (Profile::Throughput, new, gpu("L4", 24), "--performance-mode throughput", (4_096, 512)),
        (Profile::Throughput, new, gpu("L4", 24), "--performance-mode balanced", (2_048, 256)),
        (Profile::Latency, new, gpu("H100", 80), "", (2_048, 128)),
        (Profile::Latency, new, None, "", (2_048, 128)),
        (Profile::Conservative, new, gpu("H100", 80), "", (8_192, 1_024)),
    ];
    for (profile, version, gpu, line, (tokens, sequences)) in table {
        let steps = setup(false, version, profile, line).steps(gpu.as_ref());
        assert_eq!(steps, StepLimits { tokens, sequences }, "{profile:?} {version:?} {gpu:?} {line}");
    }
}

#[test]
fn memory_utilization_comes_from_user_profile_or_release() {
    let utilization = |profile, minor, line| setup(false, Some(VllmVersion::new(0, minor)), profile, line).utilization();
    let near = |left: f64, right: f64| assert!((left - right).abs() < 1e-9, "{left} {right}");
    near(utilization(Profile::Throughput, 32, ""), 0.92);
    near(utilization(Profile::Throughput, 19, ""), 0.9);
    near(utilization(Profile::Conservative, 32, ""), 0.85);
    near(utilization(Profile::Conservative, 32, "--gpu-memory-utilization 0.95"), 0.95);
    near(utilization(Profile::Latency, 32, "--gpu_memory_utilization=0.5"), 0.5);
}

#[test]
fn a_context_is_read_as_the_engine_reads_it() {
    let context = |line| setup(false, None, Profile::Throughput, line).context();
    assert_eq!(context("--max-model-len 4096"), Some(4_096));
    assert_eq!(context("--max-model-len=32k"), Some(32_000));
    assert_eq!(context("--max-model-len 32K"), Some(32_768));
    assert_eq!(context("--max-model-len auto"), None);
    assert_eq!(context("--max-model-len -1"), None);
    assert_eq!(context(""), None);
}

#[test]
fn steps_never_exceed_what_the_engine_starts_with() {
    let new = Some(VllmVersion::new(0, 32));
    let table = [
        // No step has more requests than tokens.
        (Profile::Throughput, gpu("L4", 24), "--max-num-batched-tokens 256", (256, 256)),
        (Profile::Throughput, gpu("L4", 24), "--max-num-seqs 6000", (6_000, 6_000)),
        (Profile::Latency, gpu("H100", 80), "--max_num_batched_tokens=64", (64, 64)),
        // Whole prompts must fit one step.
        (Profile::Throughput, gpu("L4", 24), "--no-enable-chunked-prefill", (2_048, 256)),
        (Profile::Latency, gpu("H100", 80), "--no_enable_chunked_prefill", (8_192, 1_024)),
        // Values left to the engine, right or wrong.
        (Profile::Conservative, gpu("L4", 24), "--max-num-seqs 6000", (2_048, 6_000)),
    ];
    for (profile, gpu, line, (tokens, sequences)) in table {
        let setup = setup(false, new, profile, line);
        assert_eq!(setup.steps(gpu.as_ref()), StepLimits { tokens, sequences }, "{profile:?} {line}");
    }
}

#[test]
fn stateful_and_textless_models_keep_the_engines_own_steps() {
    let of = |architecture: &str, recurrent_layers: u32| {
        let mut facts = fixture("llama-3.1-8b", &[]);
        (facts.architecture, facts.shape.recurrent_layers) = (architecture.to_owned(), recurrent_layers);
        let setup = setup(false, Some(VllmVersion::new(0, 32)), Profile::Throughput, "").for_model(&ModelInfo::Known(Box::new(facts)));
        setup.steps(gpu("L4", 24).as_ref()).sequences
    };
    assert_eq!(of("LlamaForCausalLM", 0), 512);
    assert_eq!(of("", 0), 512);
    assert_eq!(of("Qwen3NextForCausalLM", 36), 256);
    assert_eq!(of("BertModel", 0), 256);
}

#[test]
fn settings_in_the_engines_config_file_count_as_the_users() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("engine.yaml");
    std::fs::write(&file, "max-model-len: 16k\ngpu-memory-utilization: 0.5\nmax-num-batched-tokens: 4096\n").unwrap();
    let line = format!("--config {} --gpu-memory-utilization 0.6", file.display());
    let setup = setup(false, Some(VllmVersion::new(0, 32)), Profile::Throughput, &line);
    assert_eq!((setup.context(), setup.utilization()), (Some(16_000), 0.6));
    assert_eq!(setup.token_budget(gpu("L4", 24).as_ref()), 4_096);
}
