use std::process::ExitStatus;
use std::time::Duration;

use super::*;

/// An engine that exited by itself before it was ready.
fn exited(code: i32) -> LifeEnd {
    ours(EndCause::Exited(ExitStatus::from_raw(code << 8)), false)
}

fn signalled(signal: i32) -> LifeEnd {
    ours(EndCause::Exited(ExitStatus::from_raw(signal)), false)
}

fn ours(cause: EndCause, was_ready: bool) -> LifeEnd {
    LifeEnd { cause, was_ready, oom_killed: None }
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

#[track_caller]
fn expect(ended: &LifeEnd, printed: &str, kind: FailureKind, cause: &str, remedy: &str) {
    let found = diagnose(ended, &lines(printed));
    assert_eq!(found.kind, kind, "{found:?}");
    assert!(found.cause.contains(cause), "{found:?}");
    assert!(found.remedy.contains(remedy), "{found:?}");
    // Cause and remedy fit one screen: a few lines of a terminal each.
    assert!(found.cause.chars().count() <= CAUSE_CAP + 2 && found.remedy.len() < 250 && !found.cause.contains('\n'), "{found:?}");
}

macro_rules! recorded {
    ($name:literal) => {
        include_str!(concat!("../../../../tests/fixtures/vllm/fail_0.32_", $name, ".log"))
    };
}

#[test]
fn a_command_line_that_vllm_refuses_is_diagnosed() {
    let argparse = exited(2);
    expect(&argparse, recorded!("bad_flag"), FailureKind::BadFlag, "unrecognized arguments: --no-such-flag 3", "--help=all");
    expect(&argparse, recorded!("bad_value"), FailureKind::BadValue, "--max-model-len: invalid", "`vllm serve --help=max-model-len`");
    expect(&argparse, recorded!("bad_choice"), FailureKind::BadValue, "--dtype: invalid choice: 'float13'", "--help=dtype");
    let later = exited(1);
    expect(&later, recorded!("tp_gpu"), FailureKind::BadValue, "attention heads (4) must be divisible", "--tp");
    expect(&later, recorded!("kv_len"), FailureKind::BadValue, "--max-model-len 100000000 is greater", "use --max-model-len 8192 or less");
}

#[test]
fn a_missing_or_incomplete_model_is_diagnosed() {
    let failed = exited(1);
    expect(&failed, recorded!("missing_path"), FailureKind::ModelMissing, "'/models/not/there'", "check --model");
    expect(&failed, recorded!("empty_dir"), FailureKind::ModelMissing, "Invalid repository ID or local directory", "hf download");
    expect(&failed, recorded!("no_weights"), FailureKind::ModelMissing, "Cannot find any model weights", "hf download");
    expect(&failed, recorded!("hub_offline"), FailureKind::HubOffline, "outgoing traffic has been disabled", "HF_HUB_OFFLINE");
    expect(&failed, recorded!("hub_unreachable"), FailureKind::HubOffline, "An error happened while trying to locate", "https_proxy");
    expect(&failed, recorded!("unknown_arch"), FailureKind::UnsupportedModel, "`foo_next`", "newer vLLM");
}

#[test]
fn weights_damaged_in_the_header_or_behind_it_are_diagnosed() {
    expect(&exited(1), recorded!("corrupt"), FailureKind::CorruptWeights, "Unterminated string", "--force-download");
    expect(&exited(1), recorded!("truncated"), FailureKind::CorruptWeights, "file not fully covered", "--force-download");
}

#[test]
fn a_cache_too_small_is_diagnosed_with_what_would_fit() {
    let cause = "one request of max_model_len 300000: that takes 2.29 GiB of KV cache, and there are 1.0";
    expect(
        &exited(1),
        recorded!("kv_small"),
        FailureKind::KvTooSmall,
        cause,
        "use --max-model-len 130944, or raise --gpu-memory-utilization",
    );
    let old = "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (9856). Try";
    expect(&exited(1), &uncaught(old), FailureKind::KvTooSmall, "it holds 9856 tokens", "use --max-model-len 9856");
    let misspelt = "ValueError: To serve at least one request with the models's max seq len (4096), (14.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.50 GiB). Try";
    expect(
        &exited(1),
        &uncaught(misspelt),
        FailureKind::KvTooSmall,
        "takes 14.00 GiB of KV cache, and there are 9.50",
        "a smaller --max-model-len",
    );
    let none = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`";
    expect(&exited(1), &uncaught(none), FailureKind::KvTooSmall, "leave no memory", "--tp");
}

#[test]
fn a_resource_that_the_host_lacks_is_diagnosed() {
    expect(&exited(1), recorded!("socket_used"), FailureKind::AddressInUse, "[Errno 98] Address already in use", "ss -xlp");
    expect(&exited(1), recorded!("cache_full"), FailureKind::DiskFull, "No space left on device", "TORCHINDUCTOR_CACHE_DIR");
    expect(&exited(1), recorded!("no_memory"), FailureKind::HostMemory, "requested memory for kv (4000.0 GiB)", "VLLM_CPU_KVCACHE_SPACE");
    expect(&exited(1), recorded!("no_compiler"), FailureKind::Compiler, "compiler", "gcc");
    expect(&exited(1), recorded!("few_files"), FailureKind::FileLimit, "Too many open files", "ulimit -n");
    expect(&exited(1), recorded!("shm_small"), FailureKind::SharedMemory, "160 MiB required, 0 MiB free", "--shm-size");
}

/// A message in the form in which Python ends an uncaught traceback.
fn uncaught(message: &str) -> String {
    format!(
        "(APIServer pid=1) Traceback (most recent call last):\n(APIServer pid=1)   File \"x.py\", line 1\n(APIServer pid=1) {message}\n"
    )
}

/// Sentences from the sources of vLLM and PyTorch, which need a GPU or a network.
#[test]
fn failures_of_gpus_and_networks_are_diagnosed_by_their_words() {
    let cases = [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
            FailureKind::GpuMemory,
            "--tp",
        ),
        (
            "ValueError: Free memory on device cuda:0 (30.25/79.11 GiB) on startup is less than desired GPU memory utilization (0.92, 72.78 GiB). Decrease",
            FailureKind::GpuInUse,
            "--gpu-memory-utilization 0.36",
        ),
        (
            "ValueError: Free memory on device cuda:1 (1.10/79.11 GiB) on startup is less than desired GPU memory utilization (0.92, 72.78 GiB). Decrease",
            FailureKind::GpuInUse,
            "nvidia-smi",
        ),
        ("OSError: You are trying to access a gated repo.", FailureKind::HubForbidden, "HF_TOKEN"),
        ("OSError: nobody/x is not a local folder and is not a valid model identifier listed on", FailureKind::ModelMissing, "revision"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", FailureKind::GpuUnsupported, "driver updated"),
        (
            "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
            FailureKind::GpuUnsupported,
            "no code",
        ),
        ("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.", FailureKind::BadValue, "--dtype half"),
        ("RuntimeError: Failed to infer device type, please set", FailureKind::NoGpu, "CUDA_VISIBLE_DEVICES"),
        ("RuntimeError: No CUDA GPUs are available", FailureKind::NoGpu, "CUDA_VISIBLE_DEVICES"),
        ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error", FailureKind::Nccl, "NCCL_DEBUG=INFO"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", FailureKind::Hardware, "hostler release"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", FailureKind::GpuFault, "dcgmi diag"),
        ("OSError: [Errno 28] No space left on device: '/psm_1a2b3c4d'", FailureKind::SharedMemory, "--shm-size"),
        ("OSError: [Errno 122] Disk quota exceeded", FailureKind::DiskFull, "quota"),
        ("PermissionError: [Errno 13] Permission denied: '/scratch/other/.cache'", FailureKind::Permission, "HF_HOME"),
        (
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
            FailureKind::Compiler,
            "module load gcc",
        ),
        (
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
            FailureKind::Installation,
            "install vLLM again",
        ),
        ("ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).", FailureKind::BadValue, "--tp"),
        (
            "ValueError: The repository contains custom code which must be executed; please pass trust_remote_code=True",
            FailureKind::UnsupportedModel,
            "--trust-remote-code",
        ),
    ];
    for (message, kind, remedy) in cases {
        let words = message.split_whitespace().nth(1).unwrap();
        expect(
            &exited(1),
            &uncaught(message),
            kind,
            if kind == FailureKind::GpuInUse { "somebody else uses this GPU" } else { words },
            remedy,
        );
    }
}

#[test]
fn memory_lost_while_serving_has_its_own_remedy() {
    let printed = "\
(EngineCore pid=2) ERROR 11-21 05:02:49 [core.py:900] EngineCore encountered a fatal error.
(EngineCore pid=2) ERROR 11-21 05:02:49 [core.py:900] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-21 05:02:49 [core.py:900] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB.
(APIServer pid=1) ERROR 11-21 05:02:50 [async_llm.py:600] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.";
    let serving = LifeEnd { was_ready: true, ..exited(0) };
    expect(&serving, printed, FailureKind::GpuMemory, "Tried to allocate 512.00 MiB", "--max-num-batched-tokens");
}

#[test]
fn a_killed_engine_process_is_diagnosed_despite_exit_code_zero() {
    let serving = LifeEnd { was_ready: true, ..exited(0) };
    expect(&serving, recorded!("kill_core"), FailureKind::CoreDied, "EngineCore", "dmesg");
    let seen_first = "the engine ended without having been asked to (exit status: 0): VllmWorker-0 died without saying why";
    expect(&serving, recorded!("kill_worker"), FailureKind::CoreDied, seen_first, "dmesg");
    expect(
        &serving,
        recorded!("ill_worker"),
        FailureKind::Crashed,
        "VllmWorker-0 ended while it served with an illegal instruction",
        "lscpu",
    );
    let hungry = LifeEnd { oom_killed: Some(true), ..serving };
    expect(&hungry, recorded!("kill_core"), FailureKind::HostMemory, "out-of-memory killer", "--replicas");
    expect(&exited(1), recorded!("kill_core_init"), FailureKind::Killed, "its process EngineCore was killed before it was ready", "dmesg");
}

#[test]
fn a_signal_to_the_first_process_is_named() {
    let serving = |signal| LifeEnd { was_ready: true, ..signalled(signal) };
    expect(&serving(9), "", FailureKind::Killed, "first process was killed while it served (SIGKILL), not by hostler", "dmesg");
    expect(
        &LifeEnd { oom_killed: Some(true), ..signalled(9) },
        "",
        FailureKind::HostMemory,
        "before it was ready by the kernel's",
        "--replicas",
    );
    expect(&serving(15), "", FailureKind::Killed, "SIGTERM", "batch system");
    expect(&signalled(4), "", FailureKind::Crashed, "SIGILL", "lscpu");
    expect(&signalled(7), "", FailureKind::SharedMemory, "SIGBUS", "--shm-size");
    expect(&signalled(11), "", FailureKind::Crashed, "SIGSEGV", "report it");
}

#[test]
fn dmesg_is_advised_only_where_the_kernel_may_have_killed() {
    let remedy = |printed: &str, end: LifeEnd| diagnose(&LifeEnd { was_ready: true, ..end }, &lines(printed)).remedy;
    for (printed, end) in [("", signalled(9)), (recorded!("kill_core"), exited(0))] {
        assert!(remedy(printed, end.clone()).contains("dmesg"));
        let other = remedy(printed, LifeEnd { oom_killed: Some(false), ..end });
        assert!(!other.contains("dmesg") && other.contains("batch system"), "{other}");
    }
}

#[test]
fn a_decision_of_hostler_is_the_cause_whatever_was_printed() {
    let noise = &uncaught("ValueError: of a request");
    expect(
        &ours(EndCause::Stalled { lasted: Duration::from_millis(10_200), waiting: 3, why: "its process 7 is stopped".into() }, true),
        noise,
        FailureKind::Hang,
        "no token for 10.2 s",
        "--stall-timeout",
    );
    expect(
        &ours(EndCause::Failed("XID 79 on GPU 3: it has fallen off the bus".into()), true),
        noise,
        FailureKind::Hardware,
        "XID 79",
        "hostler release",
    );
    let gone = "cannot start /opt/vllm/bin/vllm: No such file or directory (os error 2)";
    expect(&ours(EndCause::NotStarted(gone.into()), false), "", FailureKind::Program, gone, "--vllm-bin");
    expect(
        &ours(EndCause::NotStarted("cannot start x: Permission denied (os error 13)".into()), false),
        "",
        FailureKind::Program,
        "",
        "executable",
    );
    let refused =
        "INFO:    squashfuse not found\nFATAL:   could not open image /soft/vllm.sif: lstat /soft/vllm.sif: no such file or directory";
    expect(&exited(255), refused, FailureKind::Container, "could not open image /soft/vllm.sif", "look for the image");
    expect(&ours(EndCause::Exited(ExitStatus::from_raw(255 << 8)), true), refused, FailureKind::Unknown, "", "hostler logs");
    let late = ours(EndCause::NotReadyWithin(Duration::from_secs(600)), false);
    expect(&late, "", FailureKind::StartupTimeout, "not ready within 600 s", "--startup-timeout");
    let unhealthy = ours(EndCause::Unhealthy { checks: 3, reason: "status 503".into() }, true);
    expect(&unhealthy, noise, FailureKind::Unhealthy, "status 503", "hostler logs");
    let lost = ours(EndCause::ProcessLost { process: "VLLM::EngineCore (pid 7)".into(), health: "status 503".into() }, true);
    expect(&lost, "", FailureKind::CoreDied, "VLLM::EngineCore (pid 7) died", "dmesg");
    expect(&lost, recorded!("ill_worker"), FailureKind::Crashed, "VllmWorker-0 ended while it served with an illegal instruction", "lscpu");
}

#[test]
fn a_requests_exception_is_not_the_cause_of_a_kill() {
    let printed = "\
INFO:     Application startup complete.
ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File \"x.py\", line 1
PermissionError: [Errno 13] Permission denied: '/picture'
(EngineCore pid=2) INFO 11-21 05:02:49 [loggers.py:1] Engine 000: idle";
    let found = diagnose(&LifeEnd { was_ready: true, ..signalled(9) }, &lines(printed));
    assert_eq!(found.kind, FailureKind::Killed, "{found:?}");
}

#[test]
fn a_warning_about_a_limit_is_not_the_cause() {
    let printed = "(APIServer pid=1) WARNING 11-21 05:02:22 [system_utils.py:255] This can cause errors like `OSError: [Errno 24] Too many open files`.";
    assert_eq!(diagnose(&exited(3), &lines(printed)).kind, FailureKind::Unknown);
}

#[test]
fn an_unknown_failure_shows_its_exception_and_the_log() {
    expect(
        &exited(1),
        &uncaught("ZeroDivisionError: division by zero"),
        FailureKind::Unknown,
        "ZeroDivisionError: division",
        "hostler logs",
    );
    expect(&exited(7), "something else", FailureKind::Unknown, "exit status: 7", "hostler logs");
    let long = format!("ValueError: {}", "word ".repeat(500));
    expect(&exited(1), &uncaught(&long), FailureKind::Unknown, "ValueError: word", "hostler logs");
}

#[test]
fn failure_kinds_have_distinct_names() {
    let printed = [recorded!("bad_flag"), recorded!("bad_value"), recorded!("corrupt"), recorded!("kv_small"), recorded!("cache_full")];
    let mut words: Vec<&str> = printed.iter().map(|printed| diagnose(&exited(1), &lines(printed)).kind.as_str()).collect();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words, ["bad-flag", "bad-value", "corrupt-weights", "disk-full", "kv-too-small"]);
}

#[test]
fn a_flag_that_clap_does_not_know_is_a_bad_flag() {
    let lines = ["error: unexpected argument '--no-such-flag' found", "", "Usage: hostler sim engine"].map(str::to_owned);
    let ended = LifeEnd { cause: EndCause::Exited(ExitStatus::from_raw(2 << 8)), was_ready: false, oom_killed: None };
    let diagnosis = diagnose(&ended, &lines);
    assert_eq!(diagnosis.kind, FailureKind::BadFlag);
    assert!(diagnosis.cause.contains("unexpected argument '--no-such-flag' found"), "{}", diagnosis.cause);
}
