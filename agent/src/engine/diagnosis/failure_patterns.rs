//! Failure messages of vLLM, PyTorch, Python and the libraries below them, and the failure that
//! each means.
//!
//! They cover vLLM 0.11 to 0.33. Messages that could be produced without a GPU are recorded in
//! `tests/fixtures/vllm`; the others are from the sources.

use super::super::crash_output::{FinalLines, message};
use super::{Diagnosis, FailureKind, remedies};

struct FailurePattern {
    kind: FailureKind,
    phrases: &'static [&'static str],
    remedy: &'static str,
}

/// Patterns in order: certain failures come before their possible consequences.
const FAILURE_PATTERNS: &[FailurePattern] = &[
    FailurePattern { kind: FailureKind::BadValue, phrases: &["Bfloat16 is only supported on GPUs"], remedy: remedies::NO_BFLOAT16 },
    FailurePattern {
        kind: FailureKind::BadValue,
        phrases: &["must be divisible by tensor parallel size", "not divisible by weight quantization block"],
        remedy: remedies::TENSOR_PARALLEL,
    },
    FailurePattern {
        kind: FailureKind::HubForbidden,
        phrases: &["gated repo", "GatedRepoError", "401 Client Error", "403 Client Error", "401 Unauthorized", "403 Forbidden"],
        remedy: remedies::HUB_FORBIDDEN,
    },
    FailurePattern {
        kind: FailureKind::HubOffline,
        phrases: &[
            "outgoing traffic has been disabled",
            "Cannot reach https://huggingface.co",
            "OfflineModeIsEnabled",
            "offline mode is enabled",
        ],
        remedy: remedies::HUB_OFFLINE,
    },
    FailurePattern {
        kind: FailureKind::HubOffline,
        phrases: &[
            "We couldn't connect to",
            "trying to locate the files on the Hub",
            "An error happened while trying to locate",
            "ConnectError",
            "Name or service not known",
            "Temporary failure in name resolution",
        ],
        remedy: remedies::HUB_UNREACHABLE,
    },
    FailurePattern {
        kind: FailureKind::ModelMissing,
        phrases: &[
            "RepositoryNotFoundError",
            "RevisionNotFoundError",
            "is not a valid model identifier",
            "is not a valid git identifier",
            "404 Client Error",
        ],
        remedy: remedies::NO_SUCH_MODEL,
    },
    FailurePattern { kind: FailureKind::ModelMissing, phrases: &["HFValidationError: Repo id must be"], remedy: remedies::NO_DIRECTORY },
    FailurePattern {
        kind: FailureKind::CorruptWeights,
        phrases: &[
            "SafetensorError",
            "Error while deserializing header",
            "PytorchStreamReader failed",
            "invalid load key",
            "file not fully covered",
            "Value error, Unterminated string",
            "Value error, Expecting value: line",
            "JSONDecodeError",
        ],
        remedy: remedies::CORRUPT_WEIGHTS,
    },
    FailurePattern {
        kind: FailureKind::ModelMissing,
        phrases: &[
            "Invalid repository ID or local directory specified",
            "Cannot find any model weights",
            "does not appear to have a file named",
            "Can't load tokenizer for",
            "Couldn't instantiate the backend tokenizer",
            "Can't load the configuration of",
        ],
        remedy: remedies::PART_MISSING,
    },
    FailurePattern {
        kind: FailureKind::UnsupportedModel,
        phrases: &["trust_remote_code=True", "--trust-remote-code"],
        remedy: remedies::TRUST_REMOTE_CODE,
    },
    FailurePattern {
        kind: FailureKind::UnsupportedModel,
        phrases: &[
            "are not supported for now. Supported",
            "does not recognize this architecture",
            "failed to be inspected",
            "has no vLLM implementation",
            "Unknown quantization method",
        ],
        remedy: remedies::UNSUPPORTED_MODEL,
    },
    FailurePattern {
        kind: FailureKind::GpuUnsupported,
        phrases: &[
            "driver on your system is too old",
            "driver version is insufficient for CUDA runtime",
            "forward compatibility was attempted on non supported HW",
            "PTX was compiled with an unsupported toolchain",
        ],
        remedy: remedies::DRIVER_TOO_OLD,
    },
    FailurePattern {
        kind: FailureKind::GpuUnsupported,
        phrases: &["no kernel image is available for execution"],
        remedy: remedies::GPU_TOO_OLD,
    },
    FailurePattern {
        kind: FailureKind::NoGpu,
        phrases: &[
            "No CUDA GPUs are available",
            "Failed to infer device type",
            "invalid device ordinal",
            "no CUDA-capable device is detected",
        ],
        remedy: remedies::NO_GPU,
    },
    FailurePattern {
        kind: FailureKind::Hardware,
        phrases: &["uncorrectable ECC error", "GPU is lost", "fallen off the bus", "uncorrectable NVLink error", "hardware stack error"],
        remedy: remedies::HARDWARE,
    },
    FailurePattern {
        kind: FailureKind::GpuFault,
        phrases: &[
            "an illegal memory access was encountered",
            "unspecified launch failure",
            "device-side assert triggered",
            "misaligned address",
            "CUBLAS_STATUS_EXECUTION_FAILED",
            "illegal instruction was encountered",
        ],
        remedy: remedies::GPU_FAULT,
    },
    FailurePattern {
        kind: FailureKind::Nccl,
        phrases: &["NCCL error", "ncclSystemError", "ncclInternalError", "ncclUnhandledCudaError", "caught collective operation timeout"],
        remedy: remedies::NCCL,
    },
    FailurePattern {
        kind: FailureKind::SharedMemory,
        phrases: &[
            "Insufficient space in /dev/shm",
            "No space left on device: '/psm_",
            "No space left on device: '/dev/shm",
            "unable to write to file </torch_",
            "unable to resize file </torch_",
            "insufficient shared memory",
        ],
        remedy: remedies::SHARED_MEMORY,
    },
    FailurePattern {
        kind: FailureKind::DiskFull,
        phrases: &["No space left on device", "Disk quota exceeded"],
        remedy: remedies::DISK_FULL,
    },
    FailurePattern { kind: FailureKind::FileLimit, phrases: &["Too many open files"], remedy: remedies::FILE_LIMIT },
    FailurePattern { kind: FailureKind::Compiler, phrases: &["Python.h: No such file"], remedy: remedies::PYTHON_HEADERS },
    FailurePattern {
        kind: FailureKind::Compiler,
        phrases: &[
            "Failed to find C compiler",
            "InvalidCxxCompiler",
            "No working C++ compiler",
            "No such file or directory: 'gcc'",
            "No such file or directory: 'g++'",
        ],
        remedy: remedies::COMPILER,
    },
    FailurePattern {
        kind: FailureKind::AddressInUse,
        phrases: &["Address already in use", "EADDRINUSE"],
        remedy: remedies::ADDRESS_IN_USE,
    },
    FailurePattern {
        kind: FailureKind::Permission,
        phrases: &["PermissionError: ", "Read-only file system", "Permission denied"],
        remedy: remedies::PERMISSION,
    },
    FailurePattern {
        kind: FailureKind::Installation,
        phrases: &["ModuleNotFoundError: ", "cannot open shared object file", "ImportError: ", "undefined symbol: "],
        remedy: remedies::INSTALLATION,
    },
    FailurePattern {
        kind: FailureKind::HostMemory,
        phrases: &["on kv cache allocation is less than requested"],
        remedy: remedies::HOST_KV,
    },
    FailurePattern {
        kind: FailureKind::HostMemory,
        phrases: &["MemoryError", "Cannot allocate memory", "not enough memory: you tried to allocate", "std::bad_alloc"],
        remedy: remedies::HOST_MEMORY,
    },
];

/// The messages of PyTorch and CUDA for a GPU with too little memory.
const GPU_MEMORY: [&str; 5] = [
    "CUDA out of memory",
    "torch.OutOfMemoryError",
    "CUDA error: out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
];

pub(super) fn diagnose_output(ending: FinalLines<'_>, was_ready: bool) -> Option<Diagnosis> {
    // A request's exception does not stop an engine that served.
    if was_ready && !ending.has_given_up() && !ending.messages().any(is_abort) {
        return None;
    }
    ending
        .messages()
        .find_map(diagnose_arguments)
        .or_else(|| ending.messages().find_map(diagnose_memory))
        .or_else(|| match_patterns(ending, was_ready))
}

fn match_patterns(ending: FinalLines<'_>, was_ready: bool) -> Option<Diagnosis> {
    let messages = || ending.messages().filter(|message| !is_traceback_line(message));
    if let Some(message) = messages().find(|message| GPU_MEMORY.iter().any(|words| message.contains(words))) {
        let remedy = if was_ready { remedies::GPU_MEMORY_SERVING } else { remedies::GPU_MEMORY_AT_START };
        return Some(Diagnosis::new(FailureKind::GpuMemory, strip_library_prefix(message), remedy));
    }
    for words in FAILURE_PATTERNS {
        if let Some(message) = messages().find(|message| words.phrases.iter().any(|one| message.contains(one))) {
            return Some(Diagnosis::new(words.kind, strip_library_prefix(message), words.remedy));
        }
    }
    // The configuration's own checks print this, and no pattern above was more certain.
    messages().find_map(|message| message.trim_start().strip_prefix("Value error, ")).map(|text| {
        let text = text.split(" [type=").next().unwrap_or(text);
        Diagnosis::new(FailureKind::BadValue, text, remedies::BAD_VALUES)
    })
}

/// Whether a traceback line is no message but a place, or the source that was run.
fn is_traceback_line(message: &str) -> bool {
    message.starts_with("  File ") || message.starts_with("    ")
}

/// Strips what Python's libraries add around a message.
fn strip_library_prefix(message: &str) -> &str {
    let message = message.trim();
    let message = message.strip_prefix("Value error, ").unwrap_or(message);
    message.split(" [type=").next().unwrap_or(message)
}

/// Diagnoses errors of `argparse` about the command line, those of `clap` in the Rust front-end and
/// the simulated engine, and of vLLM about the longest context.
fn diagnose_arguments(message: &str) -> Option<Diagnosis> {
    if message.starts_with("error: unexpected argument '") {
        let cause = format!("the engine refuses its command line: {}", message.trim_start_matches("error: "));
        return Some(Diagnosis::new(FailureKind::BadFlag, cause, remedies::BAD_FLAG));
    }
    if message.starts_with("vllm")
        && let Some((_, error)) = message.split_once(": error: ")
    {
        if let Some(value) = error.strip_prefix("argument ") {
            let flag = value.split([':', '/']).next().unwrap_or_default();
            let name = flag.trim_start_matches('-');
            let remedy = format!("correct it among the engine arguments; `vllm serve --help={name}` explains it");
            return Some(Diagnosis::new(FailureKind::BadValue, format!("vLLM refuses the argument {value}"), remedy));
        }
        return Some(Diagnosis::new(FailureKind::BadFlag, format!("vLLM refuses its command line: {error}"), remedies::BAD_FLAG));
    }
    let (_, rest) = message.split_once("User-specified max_model_len (")?;
    let (length, rest) = rest.split_once(')')?;
    let own = rest.split(['=', ',', ' ', ')']).filter_map(whole_number).find(|number| *number > 0);
    let cause = match own {
        Some(own) => format!("--max-model-len {length} is greater than what the model is made for, {own} (max_position_embeddings)"),
        None => format!("--max-model-len {length} is greater than what the model is made for"),
    };
    let limit = own.map_or_else(|| "less".to_owned(), |own| format!("{own} or less"));
    let remedy = format!("use --max-model-len {limit}, or VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 if the model can do more than it says");
    Some(Diagnosis::new(FailureKind::BadValue, cause, remedy))
}

/// Diagnoses messages whose numbers determine the remedy.
fn diagnose_memory(message: &str) -> Option<Diagnosis> {
    diagnose_kv_cache(message).or_else(|| diagnose_gpu_in_use(message))
}

fn diagnose_kv_cache(message: &str) -> Option<Diagnosis> {
    if message.contains("No available memory for the cache blocks") {
        let cause = "the weights leave no memory for the KV cache (No available memory for the cache blocks)";
        let remedy = "raise --gpu-memory-utilization, or spread the model over more GPUs with --tp";
        return Some(Diagnosis::new(FailureKind::KvTooSmall, cause, remedy));
    }
    // Until 0.10: `The model's max seq len (N) is larger than the maximum number of tokens that can
    // be stored in KV cache (M).`
    if let Some((_, stored)) = message.split_once("tokens that can be stored in KV cache (") {
        let (longest, fits) = (number_after(message, "max seq len (")?, whole_number(stored.split(')').next()?)?);
        return Some(kv_too_small(longest, &format!("it holds {fits} tokens"), Some(fits)));
    }
    // vLLM itself wrote `models's`.
    let (_, rest) = message.split_once("To serve at least one request with the model")?;
    let longest = number_after(rest, "max seq len (")?;
    let needed = rest.split_once("), (")?.1.split(' ').next()?;
    let there = rest.split_once("memory (")?.1.split(' ').next()?;
    let fits = number_after(rest, "estimated maximum model length is ");
    Some(kv_too_small(longest, &format!("that takes {needed} GiB of KV cache, and there are {there}"), fits))
}

fn kv_too_small(longest: u64, numbers: &str, fits: Option<u64>) -> Diagnosis {
    let cause = format!("the KV cache is too small for one request of max_model_len {longest}: {numbers}");
    let shorter = fits.map_or_else(|| "a smaller --max-model-len".to_owned(), |fits| format!("--max-model-len {fits}"));
    let remedy = format!("use {shorter}, or raise --gpu-memory-utilization; {}", remedies::KV_CPU);
    Diagnosis::new(FailureKind::KvTooSmall, cause, remedy)
}

/// Diagnoses `Free memory on device cuda:0 (3.2/79.1 GiB) on startup is less than desired GPU
/// memory utilization (0.92, 72.8 GiB).`
fn diagnose_gpu_in_use(message: &str) -> Option<Diagnosis> {
    let (_, rest) = message.split_once("Free memory on device ")?;
    let (device, rest) = rest.split_once(" (")?;
    let (free, rest) = rest.split_once('/')?;
    let (all, rest) = rest.split_once(" GiB)")?;
    let part = rest.split_once("utilization (").and_then(|(_, part)| part.split(',').next()).unwrap_or("its share");
    let cause = format!("only {free} of {all} GiB are free on {device} and the engine wants {part} of it: somebody else uses this GPU");
    // Take a little less than the free share, because CUDA contexts need some, too.
    let share = free.parse::<f32>().ok()? / all.parse::<f32>().ok()? - 0.02;
    let remedy = if share > 0.1 {
        format!("end the other processes (`nvidia-smi` shows them), or use --gpu-memory-utilization {:.2}", (share * 100.0).floor() / 100.0)
    } else {
        "end the other processes: `nvidia-smi` shows them".to_owned()
    };
    Some(Diagnosis::new(FailureKind::GpuInUse, cause, remedy))
}

/// Process and signal in `Failed core proc(s): {'EngineCore_DP0': -9}`.
pub(super) fn failed_process(lines: &[String]) -> Option<(&str, i32)> {
    let processes =
        lines.iter().rev().find_map(|line| message(line).split_once("Failed core proc(s): {")).map(|(_, processes)| processes)?;
    let (name, code) = processes.split_once('}').map_or(processes, |(inside, _)| inside).split(',').next()?.split_once(':')?;
    let code: i32 = code.trim().parse().ok()?;
    (code < 0).then_some((name.trim().trim_matches('\''), -code))
}

/// Whether a message only says that a process of the engine died.
pub(super) fn is_process_death(message: &str) -> bool {
    message.contains("EngineDeadError")
}

/// Process that another one saw die, such as `EngineCore_DP0` or `VllmWorker-0`, and the signal
/// that ended it, if known.
pub(super) fn dead_process(message: &str) -> Option<(&str, Option<i32>)> {
    if message.contains("engine core exited unexpectedly") {
        return Some(("EngineCore", None));
    }
    let (before, after) = message.split_once(" died unexpectedly")?;
    let code = after.split_once("exit code: ").and_then(|(_, code)| code.split(')').next()?.parse::<i32>().ok());
    Some((before.split_whitespace().next_back()?, code.filter(|code| *code < 0).map(|code| -code)))
}

/// Whether the C library or C++ prints this before it aborts a process.
fn is_abort(message: &str) -> bool {
    message.contains("terminate called after") || message.contains("Fatal Python error") || message.contains("Assertion failed")
}

fn number_after(text: &str, words: &str) -> Option<u64> {
    whole_number(text.split_once(words)?.1.split([' ', ')', ',', '.']).next()?)
}

/// Parses `8192` and `8192.0`; `None` for anything else.
fn whole_number(text: &str) -> Option<u64> {
    text.strip_suffix(".0").unwrap_or(text).parse().ok()
}
