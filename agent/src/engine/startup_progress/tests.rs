use super::*;

/// Recorded from vLLM 0.32 on CPU, with replaced paths and addresses.
const EAGER: &str = include_str!("../../../../tests/fixtures/vllm/start_0.32_cpu_eager.log");
const COMPILED: &str = include_str!("../../../../tests/fixtures/vllm/start_0.32_cpu_compiled.log");

/// Lines from vLLM's source for GPUs; written, not recorded.
const GPU: &str = "\
(EngineCore pid=2) INFO 11-21 19:05:15 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/models/tiny'
(EngineCore pid=2) INFO 11-21 19:05:32 [gpu_model_runner.py:5040] Starting to load model /models/tiny...
Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]
Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:10<00:30,  0.10it/s]
Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:40<00:00,  0.10it/s]
(EngineCore pid=2) INFO 11-21 19:05:32 [default_loader.py:501] Loading weights took 40.21 seconds
(EngineCore pid=2) INFO 11-21 19:05:33 [gpu_model_runner.py:5150] Model loading took 14.99 GiB memory and 41.234567 seconds
(EngineCore pid=2) INFO 11-21 19:05:33 [monitor.py:45] Starting torch.compile
(EngineCore pid=2) INFO 11-21 19:05:50 [monitor.py:62] torch.compile took 17.50 s in total
(EngineCore pid=2) INFO 11-21 19:05:51 [gpu_worker.py:760] Available KV cache memory: 51.03 GiB
(EngineCore pid=2) INFO 11-21 19:05:51 [kv_cache_utils.py:2327] GPU KV cache size: 371,536 tokens, Maximum concurrency for 4,096 tokens per request: 90.71x
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/20 [00:00<?, ?it/s]\r\
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  45%|████▌     | 9/20 [00:02<00:02,  4.20it/s]
Capturing CUDA graphs (decode, FULL):  10%|█         | 1/10 [00:00<00:00,  9.21it/s]
(EngineCore pid=2) INFO 11-21 19:05:55 [gpu_model_runner.py:6582] Graph capturing finished in 4 secs, took 0.61 GiB
(EngineCore pid=2) INFO 11-21 19:05:55 [core.py:385] init engine (profile, create kv cache, warmup model) took 22.31 s (compilation: 17.50 s)
(APIServer pid=1) INFO 11-21 19:05:56 [entry.py:140] Starting vLLM server on unix:/run/s.sock
INFO:     Application startup complete.
";

/// Reads a whole log as if its lines came a second apart.
fn read(log: &str, expected: Option<Duration>) -> (Vec<StartupProgress>, LogFacts) {
    let mut reader = StartupLogParser::new(expected);
    let reports = (1..).zip(log.split('\n')).filter_map(|(second, line)| reader.parse_line(line, Duration::from_secs(second))).collect();
    (reports, reader.facts())
}

fn stages(reports: &[StartupProgress]) -> Vec<(&str, u8)> {
    reports.iter().map(|progress| (progress.stage.as_str(), progress.percent)).collect()
}

#[test]
fn a_recorded_start_passes_its_stages_in_order() {
    let (reports, facts) = read(EAGER, None);
    let expected = [
        ("reading the model's configuration", 10),
        ("starting its processes", 18),
        ("loading weights", 30),
        ("loading weights", 60),
        ("preparing the model", 60),
        ("warming up", 80),
        ("starting its server", 95),
        ("beginning to answer", 98),
    ];
    assert_eq!(stages(&reports), expected);
    assert_eq!((facts.kv_tokens, facts.max_model_len, facts.eager), (Some(131_072), Some(4_096), true));
    assert_eq!((facts.weights_seconds, facts.prefix_caching), (Some(0.06), Some(true)));
    assert_eq!((facts.version.as_deref(), facts.address.as_deref()), (Some("0.32.0"), Some("unix:/run/hostler/s.sock")));
    assert_eq!(facts.max_concurrency, Some(32.0));
}

#[test]
fn a_compiling_start_is_reported_and_ends_the_others_wait() {
    let (reports, facts) = read(COMPILED, None);
    assert!(reports.is_sorted_by_key(|progress| progress.percent), "{reports:?}");
    assert!(stages(&reports).contains(&("compiling the model", 62)), "{reports:?}");
    assert!(facts.compiled && !facts.eager);
    let until = |sign: &str| COMPILED.split_inclusive('\n').take_while(|line| !line.contains(sign)).collect::<String>();
    assert!(!read(&until("saved AOT compiled function"), None).1.compiled);
    assert!(read(&until("init engine ("), None).1.compiled);
}

#[test]
fn a_model_compiled_before_counts_as_warmed_up() {
    let loaded = "(Worker pid=3) INFO 11-21 19:33:20 [decorators.py:320] Directly load AOT compilation from path /var/cache/vllm/x";
    assert!(read(loaded, None).1.compiled);
    let loaded =
        "INFO 11-21 19:33:20 [backends.py:296] Directly load the compiled graph(s) for compile range (1, 8192) from the cache, took 1.2 s";
    assert!(read(loaded, None).1.compiled);
}

#[test]
fn a_gpu_start_reports_weights_compilation_graphs_and_memory() {
    let (reports, facts) = read(GPU, None);
    let stages = stages(&reports);
    for expected in [("loading weights", 37), ("compiling the model", 62), ("measuring memory", 75), ("capturing CUDA graphs", 87)] {
        assert!(stages.contains(&expected), "{expected:?} in {stages:?}");
    }
    // The second bar starts again; the whole progress does not.
    assert!(stages.is_sorted_by_key(|(_, percent)| *percent), "{stages:?}");
    let logged_facts = LogFacts {
        kv_tokens: Some(371_536),
        weights_seconds: Some(40.21),
        weights_gib: Some(14.99),
        compiled: true,
        compile_seconds: Some(17.5),
        graph_seconds: Some(4.0),
        max_concurrency: Some(90.71),
        address: Some("unix:/run/s.sock".to_owned()),
        ..LogFacts::default()
    };
    assert_eq!(facts, logged_facts);
}

#[test]
fn the_time_left_is_estimated_from_an_earlier_start() {
    let mut reader = StartupLogParser::new(Some(Duration::from_secs(60)));
    let loading = reader.parse_line("Starting to load model /models/tiny...", Duration::from_secs(20)).unwrap();
    assert_eq!(loading.seconds_left, Some(40));
    assert_eq!(reader.progress(Duration::from_secs(59)).seconds_left, Some(1));
    assert_eq!(reader.progress(Duration::from_secs(70)).seconds_left, None);
}

#[test]
fn a_first_start_estimates_its_time_left_from_its_rate() {
    let at = Duration::from_secs;
    let mut reader = StartupLogParser::new(None);
    assert_eq!(reader.parse_line("Resolved architecture: X", at(10)).unwrap().seconds_left, None);
    assert_eq!(reader.parse_line("Starting to load model /models/tiny...", at(30)).unwrap().seconds_left, None);
    // 100 s for a quarter of the weights leave 300 s for the others; 30 s for the first 30 parts
    // leave 40 s for the last 40.
    let quarter = reader.parse_line("Loading safetensors checkpoint shards:  25% Completed | 1/4", at(130)).unwrap();
    assert_eq!(quarter.seconds_left, Some(340));
    let loaded = reader.parse_line("Loading weights took 400 seconds", at(430)).unwrap();
    assert_eq!((loaded.percent, loaded.seconds_left), (60, Some(40)));
}

#[test]
fn unrelated_and_misordered_lines_do_not_change_the_progress() {
    let mut reader = StartupLogParser::new(None);
    let at = Duration::from_secs(1);
    assert!(reader.parse_line("KV cache size: 5 tokens", at).is_some());
    assert_eq!(reader.parse_line("Starting to load model /models/draft...", at), None);
    assert_eq!(reader.parse_line("", at), None);
    assert_eq!(reader.parse_line("100% of something else, 3 %", at), None);
    assert_eq!(reader.progress(at).stage, "warming up");
    assert_eq!(reader.facts().kv_tokens, Some(5));
}
