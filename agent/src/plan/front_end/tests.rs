//! Conditions under which an engine gets the Rust front-end.

use super::super::model::tests::fixture;
use super::*;
use crate::config::AgentConfig;
use crate::host::EngineProgram;
use crate::vllm::VllmVersion;

fn chosen(setting: FrontEnd, minor: Option<u32>, binary: bool, profile: Profile, line: &str) -> Result<FrontEndChoice, PlanError> {
    let engine_args = line.split_whitespace().map(str::to_owned).collect();
    let config = AgentConfig { profile, engine_args, ..AgentConfig::default() };
    let setup = EnginePlanSetup::new(
        &EngineProgram::Vllm { program: "/opt/vllm".into(), container: None },
        minor.map(|minor| VllmVersion::new(0, minor)),
        &config,
    );
    let model = ModelInfo::Known(Box::new(fixture("llama-3.1-8b", &[])));
    choose(setting, binary.then_some(Path::new("/opt/vllm-rs")), &setup, &model)
}

#[test]
fn the_rust_front_end_is_used_where_present_and_capable() {
    let (rust, python) = (FrontEndInUse::Rust, FrontEndInUse::Python);
    let table = [
        (FrontEnd::Auto, Some(32), true, Profile::Throughput, "", rust, "more tokens"),
        (FrontEnd::Auto, Some(24), true, Profile::Latency, "--max-model-len 4096", rust, "--front-end python"),
        (FrontEnd::Auto, Some(23), true, Profile::Throughput, "", python, "since vLLM 0.24"),
        (FrontEnd::Auto, Some(32), false, Profile::Throughput, "", python, "comes without it"),
        (FrontEnd::Auto, None, false, Profile::Throughput, "", python, "version of vLLM is unknown"),
        (FrontEnd::Auto, Some(32), true, Profile::Conservative, "", python, "conservative"),
        (FrontEnd::Auto, Some(32), true, Profile::Throughput, "--max-num-queued-reqs 5", python, "does not do --max-num-queued-reqs"),
        (FrontEnd::Auto, Some(32), true, Profile::Throughput, "--tokenizer=other", python, "does not do --tokenizer"),
        (FrontEnd::Auto, Some(33), true, Profile::Throughput, "--tokenizer=other", rust, ""),
        (FrontEnd::Auto, Some(29), true, Profile::Throughput, "--lora-modules a=b", python, "does not do --lora-modules"),
        (FrontEnd::Auto, Some(32), true, Profile::Throughput, "--lora-modules a=b", rust, ""),
        (FrontEnd::Auto, Some(32), true, Profile::Throughput, "--runner pooling", python, "does not do --runner"),
        (FrontEnd::Python, Some(32), true, Profile::Throughput, "", python, "agent.front_end"),
        (FrontEnd::Rust, Some(22), true, Profile::Conservative, "", rust, "agent.front_end"),
    ];
    for (setting, minor, binary, profile, line, in_use, part) in table {
        let chosen = chosen(setting, minor, binary, profile, line).unwrap();
        assert_eq!(chosen.in_use, in_use, "{setting:?} {minor:?} {line}: {}", chosen.because);
        assert!(chosen.because.contains(part), "{}", chosen.because);
        assert_eq!(chosen.may_fall_back, setting == FrontEnd::Auto && in_use == rust);
    }
}

#[test]
fn a_requested_but_missing_rust_front_end_is_an_error() {
    let error = chosen(FrontEnd::Rust, Some(32), false, Profile::Throughput, "").unwrap_err().to_string();
    assert!(error.contains("vLLM 0.32.0 comes without it"), "{error}");
}

#[test]
fn a_model_without_text_generation_keeps_the_python_front_end() {
    let setup = EnginePlanSetup::new(
        &EngineProgram::Vllm { program: "/opt/vllm".into(), container: None },
        Some(VllmVersion::new(0, 32)),
        &AgentConfig::default(),
    );
    let facts = ModelFacts { architecture: "BertModel".to_owned(), ..fixture("llama-3.1-8b", &[]) };
    let chosen = choose(FrontEnd::Auto, Some(Path::new("/opt/vllm-rs")), &setup, &ModelInfo::Known(Box::new(facts))).unwrap();
    assert_eq!(chosen.in_use, FrontEndInUse::Python);
    assert!(chosen.because.contains("BertModel"), "{}", chosen.because);
}

#[test]
fn a_front_end_binary_from_the_environment_must_exist() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vllm-rs");
    assert_eq!(binary_from_environment(Some(path.clone().into())), None);
    std::fs::write(&path, "").unwrap();
    assert_eq!(binary_from_environment(Some(path.clone().into())), Some(path));
    assert_eq!(binary_from_environment(Some("auto".into())), None);
    assert_eq!(binary_from_environment(None), None);
}
