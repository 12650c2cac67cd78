//! Flags of each release, and the precedence of the user's own.

use super::*;
use crate::config::AgentConfig;
use crate::host::EngineProgram;
use crate::vllm::VllmVersion;

fn gpu(gib: u64) -> Gpu {
    Gpu { name: "test GPU".to_owned(), memory_bytes: gib << 30, ..Gpu::default() }
}

fn setup(minor: u32, profile: Profile, line: &str) -> EnginePlanSetup {
    let engine_args = line.split_whitespace().map(str::to_owned).collect();
    let config = AgentConfig { profile, engine_args, ..AgentConfig::default() };
    EnginePlanSetup::new(&EngineProgram::Vllm { program: "/opt/vllm".into(), container: None }, Some(VllmVersion::new(0, minor)), &config)
}

/// Command line without the flags of every engine and without graphs, which have their own test.
fn line(setup: &EnginePlanSetup, gpu: Option<&Gpu>, tp: u32, front_end: FrontEndInUse) -> String {
    let choices = choose_flags(
        setup,
        &ReplicaContext {
            gpu,
            tp,
            stages: 1,
            memory: MemoryPart::Alone,
            shortened_context: None,
            front_end,
            host_cache: None,
            files: None,
            has_workers: false,
        },
    );
    let words: Vec<&str> = choices.iter().filter(|choice| choice.flag != GRAPHS).flat_map(FlagChoice::to_arguments).collect();
    let line = words.join(" ");
    line.strip_suffix("--disable-uvicorn-access-log --enable-prompt-tokens-details --enable-request-id-headers")
        .unwrap()
        .trim_end()
        .to_owned()
}

const GRAPHS: &str = "--cudagraph-capture-sizes";

#[test]
fn a_release_plans_ahead_for_a_pipeline_only_where_it_can() {
    let asynchronous = |minor, stages| {
        let place = ReplicaContext {
            gpu: Some(&gpu(80)),
            tp: 4,
            stages,
            memory: MemoryPart::Alone,
            shortened_context: None,
            front_end: PYTHON,
            host_cache: None,
            files: None,
            has_workers: false,
        };
        let choices = choose_flags(&setup(minor, Profile::Throughput, ""), &place);
        choices.iter().find(|choice| choice.flag == "--async-scheduling").map(|choice| (choice.value.clone(), choice.origin))
    };
    for (minor, stages, expected) in [
        (11, 2, None),
        (12, 1, Some(("", FlagOrigin::Hostler))),
        // These releases do not start with both.
        (12, 2, Some(("off", FlagOrigin::Engine))),
        (14, 2, Some(("off", FlagOrigin::Engine))),
        (15, 2, Some(("", FlagOrigin::Engine))),
        (33, 1, Some(("", FlagOrigin::Engine))),
    ] {
        let expected = expected.map(|(value, origin)| (value.to_owned(), origin));
        assert_eq!(asynchronous(minor, stages), expected, "0.{minor}, {stages} stages");
    }
}

fn graphs(minor: u32, profile: Profile, given: &str, gib: u64) -> Vec<u32> {
    let place = ReplicaContext {
        gpu: Some(&gpu(gib)),
        tp: 1,
        stages: 1,
        memory: MemoryPart::Alone,
        shortened_context: None,
        front_end: PYTHON,
        host_cache: None,
        files: None,
        has_workers: false,
    };
    let choices = choose_flags(&setup(minor, profile, given), &place);
    let words: Vec<&str> = choices.iter().filter(|choice| choice.flag == GRAPHS).flat_map(FlagChoice::to_arguments).collect();
    assert!(words.is_empty() || words[0] == GRAPHS);
    words.iter().skip(1).map(|size| size.parse().unwrap()).collect()
}

#[test]
fn prefill_steps_have_cuda_graphs_with_little_padding() {
    let sizes = graphs(24, Profile::Throughput, "", 80);
    assert_eq!((sizes.len(), sizes.last()), (59, Some(&4_096)));
    assert!(sizes.is_sorted());
    let padding = |pair: &[u32]| f64::from(pair[1] - pair[0] - 1) / f64::from(pair[1]);
    assert!(sizes.windows(2).filter(|pair| pair[0] >= 64).all(|pair| padding(pair) < 0.125), "{sizes:?}");
    assert_eq!(graphs(24, Profile::Throughput, "--max-num-batched-tokens 1000", 80).last(), Some(&1_000), "no larger than a step");
}

#[test]
fn graph_sizes_are_left_to_deciding_engines_and_users() {
    assert!(graphs(19, Profile::Throughput, "", 80).is_empty(), "its memory is not counted by this release");
    assert!(graphs(24, Profile::Latency, "", 80).is_empty());
    assert!(graphs(24, Profile::Conservative, "", 80).is_empty());
    assert!(graphs(24, Profile::Throughput, "", 10).is_empty(), "small");
    let given =
        ["--enforce-eager", "-O2", "-cc.mode=3", "--compilation_config {}", "--cudagraph-capture-sizes 1 2", "--speculative-config {}"];
    for given in given {
        assert!(graphs(24, Profile::Throughput, given, 80).is_empty(), "{given}");
    }
    assert!(graphs(24, Profile::Throughput, "--max-num-batched-tokens 512", 80).is_empty(), "the engine's own reach as far");
}

const PYTHON: FrontEndInUse = FrontEndInUse::Python;

#[test]
fn each_release_gets_only_flags_that_it_knows() {
    let table = [
        (11, Profile::Throughput, ""),
        (12, Profile::Throughput, "--async-scheduling"),
        (13, Profile::Throughput, "--async-scheduling"),
        (14, Profile::Throughput, ""),
        (17, Profile::Throughput, ""),
        (18, Profile::Throughput, "--shutdown-timeout 30"),
        (29, Profile::Throughput, "--shutdown-timeout 30 --max-num-queued-reqs 2048"),
        (33, Profile::Throughput, "--shutdown-timeout 30 --max-num-queued-reqs 2048"),
        (11, Profile::Latency, "--max-num-seqs 128 --max-num-batched-tokens 2048"),
        (13, Profile::Latency, "--max-num-seqs 128 --max-num-batched-tokens 2048 --async-scheduling"),
        (17, Profile::Latency, "--max-num-seqs 128 --max-num-batched-tokens 2048 --performance-mode interactivity"),
        (
            29,
            Profile::Latency,
            "--shutdown-timeout 30 --max-num-seqs 128 --max-num-batched-tokens 2048 --max-num-queued-reqs 256 --performance-mode interactivity",
        ),
        (11, Profile::Conservative, "--gpu-memory-utilization 0.85"),
        (33, Profile::Conservative, "--shutdown-timeout 30 --gpu-memory-utilization 0.85"),
    ];
    for (minor, profile, expected) in table {
        assert_eq!(line(&setup(minor, profile, ""), Some(&gpu(80)), 1, PYTHON), expected, "0.{minor} {profile:?}");
    }
}

#[test]
fn the_rust_front_end_gets_no_queue_limit() {
    assert_eq!(line(&setup(32, Profile::Throughput, ""), Some(&gpu(80)), 1, FrontEndInUse::Rust), "--shutdown-timeout 30");
}

#[test]
fn a_smaller_gpu_gets_larger_steps_than_by_default() {
    let expected = "--max-num-seqs 512 --max-num-batched-tokens 4096";
    assert_eq!(line(&setup(17, Profile::Throughput, ""), Some(&gpu(24)), 1, PYTHON), expected);
    assert_eq!(line(&setup(17, Profile::Throughput, ""), Some(&gpu(10)), 1, PYTHON), "");
}

#[test]
fn an_engine_without_a_gpu_gets_no_gpu_flags() {
    for profile in [Profile::Throughput, Profile::Latency, Profile::Conservative] {
        assert_eq!(line(&setup(33, profile, ""), None, 0, PYTHON), "--shutdown-timeout 30 --enforce-eager", "{profile:?}");
    }
}

#[test]
fn a_cpu_engine_compiles_only_on_request() {
    let on_cpu = |given: &str| line(&setup(32, Profile::Throughput, given), None, 1, FrontEndInUse::Python);
    assert!(on_cpu("").contains("--enforce-eager"));
    for given in ["--no-enforce-eager", "-O2", "--compilation-config {}"] {
        assert!(!on_cpu(given).split(' ').any(|flag| flag == "--enforce-eager"), "{given}");
    }
}

#[test]
fn an_unknown_release_gets_only_universal_flags() {
    let setup = EnginePlanSetup { version: None, ..setup(33, Profile::Throughput, "") };
    assert_eq!(line(&setup, Some(&gpu(80)), 2, PYTHON), "--tensor-parallel-size 2");
}

#[test]
fn a_model_named_by_a_path_is_served_by_its_last_part_too() {
    let named = |model: &str, given: &str| {
        let setup = EnginePlanSetup { model: model.to_owned(), ..setup(32, Profile::Conservative, given) };
        let place = ReplicaContext {
            gpu: None,
            tp: 1,
            stages: 1,
            memory: MemoryPart::Alone,
            shortened_context: None,
            front_end: PYTHON,
            host_cache: None,
            files: None,
            has_workers: false,
        };
        let names = choose_flags(&setup, &place).into_iter().find(|choice| choice.flag == NAMES_FLAG);
        names.map(|choice| choice.to_arguments().collect::<Vec<_>>().join(" ")).unwrap_or_default()
    };
    assert_eq!(named("/models/tiny", ""), "--served-model-name /models/tiny tiny");
    assert_eq!(named("./tiny", ""), "--served-model-name ./tiny tiny");
    assert_eq!(named("org/tiny", ""), "");
    assert_eq!(named("/models/tiny", "--served_model_name mine"), "", "the user's own names are the only ones");
}

#[test]
fn the_users_own_flags_come_first() {
    let mine = "--max-num-seqs 7 --no-enable-prefix-caching --max_num_batched_tokens=99 --max-num-queued-reqs 5 --shutdown-timeout 9 --stream-interval 4";
    let setup = setup(32, Profile::Throughput, mine);
    assert_eq!(line(&setup, Some(&gpu(24)), 1, PYTHON), "");
    let shown = choose_flags(
        &setup,
        &ReplicaContext {
            gpu: Some(&gpu(24)),
            tp: 1,
            stages: 1,
            memory: MemoryPart::Alone,
            shortened_context: None,
            front_end: PYTHON,
            host_cache: None,
            files: None,
            has_workers: false,
        },
    );
    let of = |flag| shown.iter().find(|choice| choice.flag == flag).map(|choice| (choice.value.as_str(), choice.origin));
    assert_eq!(of("--max-num-seqs"), Some(("7", FlagOrigin::User)));
    assert_eq!(of("--max-num-batched-tokens"), Some(("99", FlagOrigin::User)));
    assert_eq!(of("--enable-prefix-caching"), Some(("off", FlagOrigin::User)));
    assert_eq!(of("--stream-interval"), Some(("4", FlagOrigin::User)));
    assert_eq!(of("--enable-chunked-prefill"), Some(("", FlagOrigin::Engine)));
    assert!(shown.iter().all(|choice| !choice.because.is_empty()));
}

#[test]
fn tensor_parallelism_and_a_shortened_context_reach_the_engine() {
    let place = ReplicaContext {
        gpu: Some(&gpu(80)),
        tp: 4,
        stages: 1,
        memory: MemoryPart::Alone,
        shortened_context: Some(16_384),
        front_end: FrontEndInUse::Rust,
        host_cache: None,
        files: None,
        has_workers: false,
    };
    let words: Vec<String> =
        choose_flags(&setup(32, Profile::Throughput, ""), &place).iter().flat_map(FlagChoice::to_arguments).map(str::to_owned).collect();
    assert!(words.join(" ").starts_with("--shutdown-timeout 30 --tensor-parallel-size 4 --max-model-len 16384"));
}

#[test]
fn a_single_gpu_engine_gets_a_worker_process_for_throughput() {
    const FLAG: &str = "--distributed-executor-backend";
    let chosen = |profile, given, tp, has_workers| {
        let place = ReplicaContext {
            gpu: Some(&gpu(80)),
            tp,
            stages: 1,
            memory: MemoryPart::Alone,
            shortened_context: None,
            front_end: PYTHON,
            host_cache: None,
            files: None,
            has_workers,
        };
        let choices = choose_flags(&setup(24, profile, given), &place);
        choices.into_iter().find(|choice| choice.flag == FLAG).map(|choice| (choice.value, choice.origin))
    };
    let mp = |origin| Some(("mp".to_owned(), origin));
    assert_eq!(chosen(Profile::Throughput, "", 1, true), mp(FlagOrigin::Hostler));
    assert_eq!(chosen(Profile::Throughput, "", 1, false), None, "its threads spin: they would take the front-end's CPUs");
    assert_eq!(chosen(Profile::Throughput, "", 2, true), None, "so it has by itself");
    assert_eq!(chosen(Profile::Latency, "", 1, true), None, "with few streams it gives nothing");
    assert_eq!(chosen(Profile::Conservative, "", 1, true), None);
    assert_eq!(chosen(Profile::Throughput, "--distributed-executor-backend=uni", 1, true), Some(("uni".to_owned(), FlagOrigin::User)));
}

#[test]
fn an_engine_renders_prompts_where_only_it_can_read_them() {
    let renders = |minor, only_engine_reads_prompts, kv_events, front_end| {
        let setup = EnginePlanSetup { only_engine_reads_prompts, kv_events, ..setup(minor, Profile::Throughput, "") };
        line_of(&setup, front_end).contains(SCALE_OUT_FLAG)
    };
    assert!(renders(30, true, true, PYTHON));
    assert!(!renders(29, true, true, PYTHON), "the release has the routes without it");
    assert!(!renders(30, false, true, PYTHON), "routers read such prompts themselves");
    assert!(!renders(30, true, false, PYTHON), "nobody would know what is cached");
    assert!(!renders(32, true, true, FrontEndInUse::Rust), "it has no such routes");
}

/// The command line of an engine on a GPU.
fn line_of(setup: &EnginePlanSetup, front_end: FrontEndInUse) -> String {
    let place = ReplicaContext {
        gpu: Some(&gpu(80)),
        tp: 1,
        stages: 1,
        memory: MemoryPart::Alone,
        shortened_context: None,
        front_end,
        host_cache: None,
        files: None,
        has_workers: false,
    };
    choose_flags(setup, &place).iter().flat_map(FlagChoice::to_arguments).collect::<Vec<_>>().join(" ")
}

#[test]
fn engines_send_traces_or_the_plan_says_why_not() {
    let traced = |traces, line: &str, front_end| {
        let setup = EnginePlanSetup { traces, ..setup(32, Profile::Throughput, line) };
        let place = ReplicaContext {
            gpu: None,
            tp: 1,
            stages: 1,
            memory: MemoryPart::Alone,
            shortened_context: None,
            front_end,
            host_cache: None,
            files: None,
            has_workers: false,
        };
        choose_flags(&setup, &place).into_iter().find(|choice| choice.flag == TRACES_FLAG)
    };
    let endpoint = "http://collector:4317";
    let sent = || EngineTraces::SentTo(endpoint.to_owned());
    assert_eq!(traced(EngineTraces::Unasked, "", PYTHON), None);
    let choice = traced(sent(), "", PYTHON).unwrap();
    assert_eq!(choice.to_arguments().collect::<Vec<_>>(), [TRACES_FLAG, endpoint]);
    let own = traced(sent(), "--otlp-traces-endpoint http://mine:4317", PYTHON).unwrap();
    assert_eq!((own.origin, own.to_arguments().count(), &*own.value), (FlagOrigin::User, 0, "http://mine:4317"));
    for (traces, front_end, words) in [
        (sent(), FrontEndInUse::Rust, "--front-end python"),
        (EngineTraces::Impossible { because: "no package".to_owned() }, PYTHON, "no package"),
    ] {
        let choice = traced(traces, "", front_end).unwrap();
        assert_eq!((choice.to_arguments().count(), &*choice.value), (0, "off"));
        assert!(choice.because.contains(words), "{}", choice.because);
    }
}

#[test]
fn the_users_own_parser_is_enabled_and_kept() {
    let of = |given: &str, tools: Result<&'static str, String>| {
        let mut setup = setup(32, Profile::Throughput, given);
        setup.parsers.python = ModelParsers { tools, reasoning: Ok("qwen3") };
        let words = line(&setup, None, 1, PYTHON);
        words.strip_prefix("--shutdown-timeout 30 --enforce-eager").unwrap().trim().to_owned()
    };
    let none = || Err("its chat template has no tools".to_owned());
    assert_eq!(of("", Ok("hermes")), "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3");
    assert_eq!(of("", none()), "--reasoning-parser qwen3");
    assert_eq!(of("--tool-call-parser mine --reasoning-parser mine", none()), "--enable-auto-tool-choice");
    assert_eq!(of("--no-enable-auto-tool-choice", Ok("hermes")), "--reasoning-parser qwen3");
    assert_eq!(of("--tool-parser-plugin mine.py --reasoning-config {}", Ok("hermes")), "");
}
