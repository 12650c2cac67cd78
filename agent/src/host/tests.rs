//! Tables for every decision about the host.

use super::*;

fn vllm() -> EngineProgram {
    EngineProgram::Vllm { program: "/opt/vllm".into(), container: None }
}

fn simulated() -> EngineProgram {
    EngineProgram::Simulated { program: "/opt/hostler".into() }
}

fn lookup(found: bool) -> ProgramLookup {
    ProgramLookup { name: "vllm".into(), searched: "that name in PATH=/bin".to_owned(), found: found.then(|| "/opt/vllm".into()) }
}

#[test]
fn the_engine_kind_follows_from_settings_and_installation() {
    let no_vllm = || Err(HostError::NoVllm { name: "vllm".to_owned(), searched: "that name in PATH=/bin".to_owned() });
    let table = [
        (EngineKind::Auto, false, false, Ok(simulated())),
        (EngineKind::Auto, false, true, Err(HostError::NoModel)),
        (EngineKind::Auto, true, false, no_vllm()),
        (EngineKind::Auto, true, true, Ok(vllm())),
        (EngineKind::Vllm, false, false, Err(HostError::NoModel)),
        (EngineKind::Vllm, false, true, Err(HostError::NoModel)),
        (EngineKind::Vllm, true, false, no_vllm()),
        (EngineKind::Vllm, true, true, Ok(vllm())),
        (EngineKind::Simulated, true, true, Ok(simulated())),
        (EngineKind::Simulated, false, false, Ok(simulated())),
    ];
    for (kind, model_given, found, expected) in table {
        let resolved = choose_program(kind, model_given, &lookup(found), Path::new("/opt/hostler"));
        assert_eq!(resolved, expected, "{kind:?} {model_given} {found}");
    }
}

#[test]
fn settings_for_engines_that_the_agent_starts_are_refused_beside_attached_ones() {
    let attach = || AgentConfig { attach: vec!["http://127.0.0.1:8000".to_owned()], ..AgentConfig::default() };
    let of = |config: &AgentConfig| attached_engines(config, Path::new("hostler")).map_err(|error| error.to_string());
    assert!(of(&attach()).is_ok());
    for (config, words) in [
        (AgentConfig { attach_key_file: "key".into(), ..AgentConfig::default() }, "name them with --attach"),
        (AgentConfig { attach_key_file: "/absent/key".into(), ..attach() }, "cannot be read (agent.attach_key_file)"),
        (
            AgentConfig { attach: vec!["http://localhost:1".to_owned(), "http://127.0.0.1:1".to_owned()], ..attach() },
            "twice, as http://localhost:1 and http://127.0.0.1:1",
        ),
        (AgentConfig { model: "m".to_owned(), ..attach() }, "leave out --model"),
        (AgentConfig { profile: Profile::Latency, ..attach() }, "leave out --profile"),
        (AgentConfig { front_end: FrontEnd::Rust, ..attach() }, "leave out --front-end"),
        (AgentConfig { gpus: "0".to_owned(), ..attach() }, "leave out --gpus"),
        (
            AgentConfig { attach: vec!["http://a:1".to_owned(), "unix:b".to_owned(), "http://a:1/".to_owned()], ..attach() },
            "names one engine twice, as http://a:1 and http://a:1",
        ),
    ] {
        let refused = of(&config).expect_err("it has no effect");
        assert!(refused.contains(words), "{refused}");
    }
}

#[tokio::test]
async fn named_gpus_are_never_left_out_silently() {
    let named = AgentConfig { gpus: "0,1".to_owned(), ..AgentConfig::default() };
    let refused = Host::discover(&simulated(), &named).await.unwrap_err().to_string();
    assert_eq!(refused, "--gpus (agent.gpus) names `0,1`, but the simulated engine needs none: leave it out");
    assert!(Host::discover(&simulated(), &AgentConfig::default()).await.is_ok());
}
