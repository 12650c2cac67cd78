//! Each finding appears in the minute that shows it, and in no minute that does not.

use super::*;
use crate::engine::control::LoraAdapter;
use crate::gpu::{Gpu, GpuReading};
use crate::probe::{EngineDetails, EngineMetrics};

const GIB: u64 = 1 << 30;

fn busy() -> Observation {
    let figures = EngineMetrics { running: 40, kv_use: 0.4, kv_blocks: Some(10_000), block_size: Some(16), ..EngineMetrics::default() };
    let details = EngineDetails { requests: 50, longest_prompt: Some(1_000), longest_answer: Some(200), ..EngineDetails::default() };
    Observation { metrics: Some(figures), details: Some(details), front_end_cpu: Some(0.5), gpus: vec![GpuReading::default()], guided: 0 }
}

fn idle() -> Observation {
    Observation { metrics: Some(EngineMetrics::default()), front_end_cpu: Some(0.01), ..Observation::default() }
}

fn with_figures(change: impl Fn(&mut EngineMetrics)) -> Observation {
    let mut observation = busy();
    change(observation.metrics.as_mut().unwrap());
    observation
}

fn with_details(change: impl Fn(&mut EngineDetails)) -> Observation {
    let mut observation = busy();
    change(observation.details.as_mut().unwrap());
    observation
}

fn gpu(index: u32) -> Gpu {
    Gpu { index, uuid: format!("GPU-{index}"), name: "NVIDIA L4".into(), memory_bytes: 24 * GIB, ..Gpu::default() }
}

fn setup(arguments: &[&str]) -> EngineSetup {
    EngineSetup {
        gpus: vec![gpu(3)],
        has_nvlink_mesh: true,
        arguments: arguments.iter().map(ToString::to_string).collect(),
        tensor_parallel: 1,
        ..EngineSetup::default()
    }
}

fn facts() -> RuntimeFacts {
    RuntimeFacts { python: true, max_model_len: Some(8_192), kv_tokens: Some(160_000), ..RuntimeFacts::default() }
}

/// A minute: this many seconds of each observation.
fn minute(parts: &[(usize, Observation)]) -> Window {
    let mut window = Window::default();
    for (seconds, observation) in parts {
        (0..*seconds).for_each(|_| window.push(1, observation.clone()));
    }
    window
}

fn kinds(findings: &[Finding]) -> Vec<FindingKind> {
    findings.iter().map(|finding| finding.kind).collect()
}

fn found(observation: &Observation, setup: &EngineSetup, facts: &RuntimeFacts) -> Vec<Finding> {
    evaluate_rules(&minute(&[(60, observation.clone())]), setup, facts, &[])
}

fn sentence(finding: &Finding) -> String {
    format!("{}: {}\n-> {}", finding.kind.as_str(), finding.evidence, finding.advice)
}

fn only(observation: &Observation, setup: &EngineSetup, facts: &RuntimeFacts) -> String {
    let found = found(observation, setup, facts);
    assert_eq!(found.len(), 1, "{found:?}");
    sentence(&found[0])
}

#[test]
fn a_busy_and_healthy_engine_gets_no_advice() {
    assert_eq!(found(&busy(), &setup(&["--max-num-seqs", "256"]), &facts()), []);
}

#[test]
fn an_idle_engine_gets_no_advice_however_it_was_started() {
    let two = EngineSetup { gpus: vec![gpu(0), gpu(1)], has_nvlink_mesh: false, weights_bytes: Some(GIB), ..setup(&["--enforce-eager"]) };
    let facts = RuntimeFacts { eager: true, kv_tokens: Some(9_000), ..facts() };
    assert_eq!(found(&idle(), &two, &facts), []);
    assert_eq!(found(&Observation::default(), &two, &facts), []);
}

#[test]
fn requests_waiting_beside_an_empty_cache_need_a_larger_batch() {
    let waiting = with_figures(|figures| (figures.running, figures.waiting, figures.kv_use) = (256, 12, 0.031));
    insta::assert_snapshot!(only(&waiting, &setup(&["--max-num-seqs", "256"]), &facts()), @"
    batch_limit: 12 requests waited on average, in 60 of the last 60 s, while 256 ran and the KV cache was at most 3.1 % full
    -> raise --max-num-seqs (now 256), to 512
    ");
    let steps = setup(&["--max-num-seqs=1024", "--max-num-batched-tokens", "2048"]);
    let words = only(&waiting, &steps, &facts());
    assert!(words.ends_with("raise --max-num-batched-tokens (now 2048), to 4096"), "{words}");
    let full = with_figures(|figures| (figures.running, figures.waiting, figures.kv_use) = (256, 12, 0.8));
    assert_eq!(found(&full, &setup(&[]), &facts()), []);
}

#[test]
fn a_batch_limit_finding_shows_the_time_in_the_queue() {
    let waiting = |queued: u64, queue_seconds: f64| Observation {
        details: Some(EngineDetails { queued, queue_seconds, ..EngineDetails::default() }),
        ..with_figures(|figures| (figures.waiting, figures.kv_use) = (3, 0.05))
    };
    let window = minute(&[(30, waiting(100, 50.0)), (30, waiting(140, 150.0))]);
    let found = evaluate_rules(&window, &setup(&[]), &facts(), &[]);
    assert!(found[0].evidence.starts_with("3 requests waited on average, each 2.5 s, in 60"), "{found:?}");
    let nearly_idle = minute(&[(30, waiting(100, 50.0)), (30, waiting(140, 51.0))]);
    assert_eq!(evaluate_rules(&nearly_idle, &setup(&[]), &facts(), &[]), [], "each waited for one step");
}

#[test]
fn frequent_preemptions_are_a_finding_and_rare_ones_are_not() {
    let after = |preemptions: u64, requests: u64| {
        let mut observation = with_figures(|figures| (figures.running, figures.kv_use, figures.preemptions) = (200, 0.97, preemptions));
        observation.details = Some(EngineDetails { requests, ..EngineDetails::default() });
        observation
    };
    let window = |preemptions: u64, requests: u64| minute(&[(30, after(10, 1_000)), (30, after(10 + preemptions, 1_000 + requests))]);
    let found = evaluate_rules(&window(14, 300), &setup(&[]), &facts(), &[]);
    insta::assert_snapshot!(sentence(&found[0]), @"
    preemptions: requests were pushed out of the batch 14 times in the last 60 s, to be computed again: the KV cache was 97 % full with 200 of them running
    -> lower --max-num-seqs to about 160, or give the KV cache more: --gpu-memory-utilization nearer to 1, --kv-cache-dtype fp8 (a little less exact), or more GPUs for each replica (--tp)
    ");
    assert_eq!(evaluate_rules(&window(5, 300), &setup(&[]), &facts(), &[]), [], "five a minute are a burst");
    assert_eq!(evaluate_rules(&window(14, 3_000), &setup(&[]), &facts(), &[]), [], "not one in a hundred");
    assert_eq!(
        kinds(&evaluate_rules(&window(1, 3_000), &setup(&[]), &facts(), &[FindingKind::Preemptions])),
        [FindingKind::Preemptions],
        "it stands while there are any"
    );
    assert_eq!(evaluate_rules(&window(0, 300), &setup(&[]), &facts(), &[FindingKind::Preemptions]), []);
}

#[test]
fn a_python_front_end_saturating_its_core_is_a_finding() {
    let saturated = Observation { front_end_cpu: Some(0.97), ..busy() };
    let chosen = EngineSetup { python_front_end_reason: "agent.front_end says so".into(), ..setup(&[]) };
    insta::assert_snapshot!(only(&saturated, &chosen, &facts()), @"
    front_end: the Python front-end used up to 0.97 of a core, and it cannot use much more than one, in 60 of the last 60 s, at 0 tokens/s: the engine waits for it
    -> --front-end rust (about a quarter of the CPU for each event; not in use here: agent.front_end says so), or --stream-interval 4 (fewer events, each of more tokens), or --api-server-count 2
    ");
    let fell_back = only(&saturated, &setup(&["--enable-lora"]), &facts());
    assert!(fell_back.contains("not in use here: it did not start") && !fell_back.contains("api-server-count"), "{fell_back}");
    assert_eq!(found(&saturated, &setup(&[]), &RuntimeFacts { python: false, ..facts() }), [], "the Rust front-end has threads");
    assert_eq!(found(&saturated, &EngineSetup { simulated: true, ..setup(&[]) }, &facts()), []);
    assert_eq!(found(&Observation { front_end_cpu: Some(0.89), ..busy() }, &setup(&[]), &facts()), []);
}

#[test]
fn eager_mode_on_a_gpu_is_a_finding_after_work() {
    let eager = setup(&["--enforce-eager"]);
    insta::assert_snapshot!(only(&busy(), &eager, &facts()), @"
    eager: the engine runs without CUDA graphs and compiled kernels: in every step the CPU launches each kernel by itself
    -> drop --enforce-eager
    ");
    assert_eq!(evaluate_rules(&minute(&[(29, busy()), (31, idle())]), &eager, &facts(), &[]), []);
    // Eager mode stays a finding after the work is done.
    assert_eq!(kinds(&evaluate_rules(&minute(&[(30, busy()), (200, idle())]), &eager, &facts(), &[])), [FindingKind::Eager]);
    assert_eq!(found(&busy(), &EngineSetup { gpus: Vec::new(), ..eager }, &facts()), []);
    assert_eq!(kinds(&found(&busy(), &setup(&[]), &RuntimeFacts { eager: true, ..facts() })), [FindingKind::Eager]);
}

#[test]
fn only_small_models_split_over_pcie_are_a_finding() {
    let two = EngineSetup { gpus: vec![gpu(0), gpu(1)], has_nvlink_mesh: false, weights_bytes: Some(5 * GIB), ..setup(&[]) };
    insta::assert_snapshot!(only(&busy(), &two, &facts()), @"
    tensor_parallel: the model's 5.0 GiB of weights fit one NVIDIA L4 of 24.0 GiB, and its 2 GPUs are not joined by NVLink: every layer waits for PCIe twice
    -> --tp 1: 2 replicas of one GPU each, between which requests are spread
    ");
    for other in [
        EngineSetup { has_nvlink_mesh: true, ..two.clone() },
        EngineSetup { weights_bytes: Some(13 * GIB), ..two.clone() },
        EngineSetup { weights_bytes: None, ..two.clone() },
        EngineSetup { gpus: vec![gpu(0)], ..two },
    ] {
        assert_eq!(found(&busy(), &other, &facts()), [], "{other:?}");
    }
}

#[test]
fn waits_for_grammars_are_distinguished_from_waits_for_room() {
    let mut waiting = with_details(|details| details.deferred = 7);
    let figures = waiting.metrics.as_mut().unwrap();
    (figures.waiting, figures.kv_use) = (7, 0.02);
    insta::assert_snapshot!(only(&waiting, &setup(&[]), &facts()), @"
    guided_decoding: up to 7 requests at once waited for their grammar to be compiled, in 60 of the last 60 s
    -> send the same JSON schemas again instead of a new one with each request (compiled ones are kept), give the engine more CPU cores, or use simpler schemas
    ");
    // These requests may wait for an adapter or for blocks in transfer.
    assert_eq!(found(&waiting, &setup(&["--enable-lora"]), &facts()), []);
    assert_eq!(found(&waiting, &setup(&["--kv-transfer-config={}"]), &facts()), []);
}

/// Seconds of work with this token distance, appended to the window.
fn work(window: &mut Window, seconds: u32, running: u32, guided: u32, milliseconds: f64) {
    for _ in 0..seconds {
        let before = window.details.unwrap_or_default();
        let (gaps, gap_seconds) = (before.gaps + 1_000, before.gap_seconds + milliseconds);
        let details = EngineDetails { gaps, gap_seconds, ..before };
        window.push(1, Observation { guided, details: Some(details), ..with_figures(|figures| figures.running = running) });
    }
}

#[test]
fn guided_requests_that_slow_equal_batches_are_a_finding() {
    let found = |plain_running, guided_gap| {
        let mut window = Window::default();
        work(&mut window, 40, plain_running, 0, 14.0);
        work(&mut window, 40, 40, 3, guided_gap);
        evaluate_rules(&window, &setup(&[]), &facts(), &[])
    };
    insta::assert_snapshot!(sentence(&found(50, 31.0)[0]), @"
    guided_decoding: with up to 3 requests that follow a schema or grammar, tokens were 31.0 ms apart in 40 of the last 60 s; without them, at batches of that size, 14.0 ms
    -> give the engine more CPU cores, try another backend (--structured-outputs-config.backend), use simpler schemas, or keep such requests on replicas of their own
    ");
    assert_eq!(found(50, 16.0), [], "about as fast as without");
    assert_eq!(found(8, 31.0), [], "a smaller batch is faster by itself");
}

#[test]
fn guided_requests_are_no_finding_without_unguided_batches_to_compare() {
    let mut window = Window::default();
    work(&mut window, 9, 40, 0, 14.0);
    work(&mut window, 50, 40, 3, 31.0);
    assert_eq!(evaluate_rules(&window, &setup(&[]), &facts(), &[]), []);
}

#[test]
fn a_long_context_is_a_finding_where_few_requests_fit() {
    let usual = with_details(|details| details.requests = 500);
    let narrow = RuntimeFacts { max_model_len: Some(131_072), kv_tokens: Some(200_000), ..facts() };
    insta::assert_snapshot!(only(&usual, &setup(&[]), &narrow), @"
    context: none of 500 requests was longer than 1200 tokens, but one may take 131072 of the KV cache's 200000 tokens and push the others out
    -> --max-model-len 4096
    ");
    assert_eq!(found(&usual, &setup(&[]), &RuntimeFacts { kv_tokens: Some(600_000), ..narrow.clone() }), [], "five of them fit");
    assert_eq!(
        found(&usual, &setup(&[]), &RuntimeFacts { max_model_len: Some(4_096), kv_tokens: Some(8_000), ..facts() }),
        [],
        "the limit is used"
    );
    assert_eq!(found(&busy(), &setup(&[]), &narrow), [], "fifty requests show nothing");
    let beyond = with_details(|details| (details.requests, details.longest_prompt) = (500, None));
    assert_eq!(found(&beyond, &setup(&[]), &narrow), [], "one was longer than the scale");
    // If the log does not mention the cache's size, it follows from the blocks: 160 000 tokens.
    assert_eq!(kinds(&found(&usual, &setup(&[]), &RuntimeFacts { kv_tokens: None, ..narrow })), [FindingKind::Context]);
}

#[test]
fn clocks_throttled_by_heat_are_a_finding_unlike_power_limits() {
    let throttled = |reason| Observation {
        gpus: vec![GpuReading {
            uuid: "GPU-3".into(),
            throttled: vec![reason],
            sm_mhz: Some(990),
            celsius: Some(91),
            watts: Some(412.4),
            ..GpuReading::default()
        }],
        ..busy()
    };
    insta::assert_snapshot!(only(&throttled("temperature"), &setup(&[]), &facts()), @"
    throttled: the clocks of GPU 3 were held down in 60 of the last 60 s: temperature (990 MHz, 91 °C, 412 W)
    -> no flag of the engine helps: look at this node's cooling and power, or keep work away from it with `hostler drain`
    ");
    assert_eq!(found(&throttled("power limit"), &setup(&[]), &facts()), []);
    let idle = Observation { metrics: Some(EngineMetrics::default()), ..throttled("temperature") };
    assert_eq!(found(&idle, &setup(&[]), &facts()), []);
}

#[test]
fn findings_appear_after_half_a_minute_and_clear_with_hysteresis() {
    let sign = Observation { front_end_cpu: Some(0.99), ..busy() };
    for (seconds, stands, expected) in [(29, false, false), (30, false, true), (10, true, true), (9, true, false), (10, false, false)] {
        let window = minute(&[(60 - seconds, busy()), (seconds, sign.clone())]);
        let standing: &[FindingKind] = if stands { &[FindingKind::FrontEnd] } else { &[] };
        let found = kinds(&evaluate_rules(&window, &setup(&[]), &facts(), standing));
        assert_eq!(found == [FindingKind::FrontEnd], expected, "{seconds} s, stood before: {stands}");
    }
}

#[test]
fn a_sign_near_its_threshold_does_not_flap() {
    let mut window = Window::default();
    let mut standing = Vec::new();
    let mut changes = 0;
    for second in 0..600 {
        // Half of the time, in turns of seven seconds.
        let share = if second / 7 % 2 == 0 { 0.95 } else { 0.85 };
        window.push(1, Observation { front_end_cpu: Some(share), ..busy() });
        let now = kinds(&evaluate_rules(&window, &setup(&[]), &facts(), &standing));
        changes += u32::from(now != standing);
        standing = now;
    }
    assert_eq!((changes, standing), (1, vec![FindingKind::FrontEnd]));
}

#[test]
fn the_throttled_gpu_is_named_though_another_has_no_reading() {
    let gpus = [0, 1].map(|index| Gpu { uuid: format!("GPU-{index}"), ..gpu(index) });
    let reading = GpuReading { uuid: "GPU-1".into(), throttled: vec!["temperature"], ..GpuReading::default() };
    let words = only(&Observation { gpus: vec![reading], ..busy() }, &EngineSetup { gpus: gpus.into(), ..setup(&[]) }, &facts());
    assert!(words.contains("the clocks of GPU 1 were"), "{words}");
}

#[test]
fn a_lost_adapter_is_a_finding_until_it_is_reloaded() {
    let adapter = |name: &str| LoraAdapter { name: name.into(), path: format!("/adapters/{name}") };
    let lost = RuntimeFacts { lost_adapters: vec![adapter("poet"), adapter("bard")], ..facts() };
    insta::assert_snapshot!(only(&idle(), &setup(&[]), &lost), @"
    adapter: the engine has started again and could not load what operators had loaded: poet (/adapters/poet), bard (/adapters/bard); the agent's log says why
    -> `hostler lora load poet PATH` with the path where it is now, or `hostler lora unload poet` to do without
    ");
    assert_eq!(evaluate_rules(&minute(&[]), &setup(&[]), &facts(), &[FindingKind::Adapter]), []);
}

#[test]
fn old_token_times_are_forgotten_when_guided_requests_are_judged() {
    // Contexts have grown: tokens are now as far apart without guided requests.
    let mut window = Window::default();
    work(&mut window, 600, 40, 0, 14.0);
    work(&mut window, 300, 40, 0, 31.0);
    work(&mut window, 60, 40, 3, 31.0);
    assert_eq!(evaluate_rules(&window, &setup(&[]), &facts(), &[]), []);
}

#[test]
fn the_gravest_finding_comes_first() {
    let mut bad = Observation { front_end_cpu: Some(1.0), ..with_figures(|figures| (figures.waiting, figures.kv_use) = (9, 0.01)) };
    bad.gpus = vec![GpuReading { throttled: vec!["temperature"], ..GpuReading::default() }];
    let found = kinds(&found(&bad, &setup(&["--enforce-eager"]), &facts()));
    assert_eq!(found, [FindingKind::Throttled, FindingKind::FrontEnd, FindingKind::BatchLimit, FindingKind::Eager]);
    assert!(FindingKind::ALL.is_sorted());
}

#[test]
fn a_new_engine_life_starts_without_findings() {
    let mut window = minute(&[(60, Observation { front_end_cpu: Some(1.0), ..busy() })]);
    window.push(2, busy());
    assert_eq!(evaluate_rules(&window, &setup(&["--enforce-eager"]), &facts(), &[FindingKind::FrontEnd, FindingKind::Eager]), []);
}
