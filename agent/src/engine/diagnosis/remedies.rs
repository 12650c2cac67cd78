//! Remedies for each failure, in sentences that name a flag, a variable or a command.

/// Stands for the replica's name in the remedies below.
pub(in crate::engine) const REPLICA: &str = "REPLICA";

pub(in crate::engine) const MEMBER: &str = "mend it on that node; the start is tried again by itself";
pub(super) const UNKNOWN: &str = "read the engine's last lines with `hostler logs REPLICA`, or in its log file";
pub(super) const NO_RUN_DIR: &str = "`df -h` and `ls -ld` show why; name another place on a local disk with --run-dir";
pub(super) const RUN_DIR_REMOVED: &str =
    "it is started again by itself; if a site's cleaner of /tmp did it, name a place that it leaves alone with --run-dir";
pub(super) const HARDWARE: &str = "`nvidia-smi -q` shows the GPU's errors; have it reset or replaced, then `hostler release REPLICA`";
pub(super) const HANG: &str =
    "it is replaced by itself; if it hangs again, look for one request that does it, or raise --stall-timeout if it only was slow";
pub(super) const UNHEALTHY: &str = "it is replaced by itself; read its last lines with `hostler logs REPLICA`";
pub(super) const STARTUP_TIMEOUT: &str =
    "see with `hostler logs REPLICA` what it was doing; raise --startup-timeout if it only was slow, as with weights on a slow disk";
pub(super) const HOST_MEMORY: &str =
    "give the job more memory, run fewer replicas (--replicas), or lower VLLM_CPU_KVCACHE_SPACE or --swap-space; `dmesg` names the process";
pub(super) const HOST_KV: &str = "lower VLLM_CPU_KVCACHE_SPACE (GiB), run fewer replicas (--replicas), or give the job more memory";
pub(super) const KILLED: &str = "find out who did it: not the kernel for want of memory, but perhaps a batch system at a limit of the job, systemd-oomd, or a person; it is started again by itself";
pub(super) const KILLED_PERHAPS_BY_KERNEL: &str =
    "find out who did it: `dmesg -T | grep -i kill` shows the kernel's memory killer, the batch system's log shows a limit of the job";
pub(super) const TERMINATED: &str = "find out who did it: a batch system that ends its job, or a person; it is started again by itself";
pub(super) const ILLEGAL_INSTRUCTION: &str = "this build of vLLM needs instructions that the processor lacks (`lscpu` shows its flags, AVX-512 as a rule): build vLLM on this kind of node";
pub(super) const CRASHED: &str =
    "read the engine's last lines with `hostler logs REPLICA`; if it happens again, report it to vLLM with them";
pub(super) const CORE_DIED: &str = "it is started again by itself; if it dies again, `hostler logs REPLICA` shows its last lines, and the batch system's log a limit of the job; the kernel has ended nothing for want of memory";
pub(super) const CORE_DIED_PERHAPS_BY_KERNEL: &str =
    "`dmesg -T | grep -i -e kill -e xid` shows the kernel's memory killer and GPU errors; it is started again by itself";

pub(super) const BAD_FLAG: &str = "remove or correct it among the engine arguments; `vllm serve --help=all` lists those of this release";
pub(super) const BAD_VALUES: &str = "correct the engine arguments; `hostler plan` shows what would be run";
pub(super) const NO_DIRECTORY: &str = "check --model: there is no such directory on this host, and a directory is looked for on each host";
pub(super) const NO_SUCH_MODEL: &str = "check the model's name and revision; for a private model set HF_TOKEN";
pub(super) const PART_MISSING: &str =
    "the directory is not a whole model: download it again with `hf download`, or name another with --model";
pub(super) const HUB_OFFLINE: &str =
    "download it where there is a network with `hf download MODEL`, into an HF_HOME that this host sees, or unset HF_HUB_OFFLINE";
pub(super) const HUB_UNREACHABLE: &str =
    "this host does not reach the model hub: set the site's proxy (https_proxy), or download the model elsewhere with `hf download MODEL`";
pub(super) const HUB_FORBIDDEN: &str = "accept the licence on the model's page, then set HF_TOKEN to a token of that account";
pub(super) const CORRUPT_WEIGHTS: &str =
    "a file is damaged or was not copied to its end: `hf download MODEL --force-download`, or compare its size with the original";
pub(super) const TRUST_REMOTE_CODE: &str = "read the model's own code, and if you trust it add --trust-remote-code to the engine arguments";
pub(super) const UNSUPPORTED_MODEL: &str = "use a newer vLLM (and transformers), or another model";
pub(super) const KV_CPU: &str = "raise VLLM_CPU_KVCACHE_SPACE (GiB) on an engine without a GPU";
pub(super) const GPU_MEMORY_AT_START: &str =
    "spread it over more GPUs with --tp, use a smaller or quantised model, or lower --max-num-seqs and --max-model-len";
pub(super) const GPU_MEMORY_SERVING: &str =
    "leave more room with a lower --gpu-memory-utilization, or lower --max-num-batched-tokens and --max-num-seqs";
pub(super) const NO_GPU: &str = "ask the scheduler for a GPU; compare `nvidia-smi -L` with CUDA_VISIBLE_DEVICES";
pub(super) const DRIVER_TOO_OLD: &str =
    "have the NVIDIA driver updated (`nvidia-smi` shows it), or install a vLLM that was built for an older CUDA";
pub(super) const GPU_TOO_OLD: &str = "this build has no code for this GPU: install a vLLM that supports it, or use another GPU";
pub(super) const NO_BFLOAT16: &str = "add --dtype half to the engine arguments";
pub(super) const TENSOR_PARALLEL: &str = "choose a --tp that divides the model's attention heads; `hostler plan` proposes one";
pub(super) const GPU_FAULT: &str =
    "it is started again by itself; if it happens again with other requests, test the GPU (`dcgmi diag -r 2`), else report it to vLLM";
pub(super) const NCCL: &str = "set NCCL_DEBUG=INFO to see which link fails; /dev/shm must be large enough in a container, and NCCL_P2P_DISABLE=1 goes around a broken one";
pub(super) const ADDRESS_IN_USE: &str =
    "`ss -xlp` and `ss -tlnp` show who listens there; end it, or take the port out of the engine arguments";
pub(super) const PERMISSION: &str =
    "make it readable (the model) or writable (a cache) for this user, or put caches elsewhere with HF_HOME and VLLM_CACHE_ROOT";
pub(super) const DISK_FULL: &str = "`df -h` and `quota` show which disk; free some, or put the caches on another with VLLM_CACHE_ROOT, TORCHINDUCTOR_CACHE_DIR and HF_HOME";
pub(super) const SHARED_MEMORY: &str = "`df -h /dev/shm`: make it larger, in a container with --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir with medium Memory";
pub(super) const FILE_LIMIT: &str = "raise the limit before the agent starts: `ulimit -n 65536`, or LimitNOFILE=65536 in its systemd unit";
pub(super) const COMPILER: &str =
    "install gcc and g++ on this host (`module load gcc`), or add --enforce-eager to the engine arguments, which serves more slowly";
pub(super) const PYTHON_HEADERS: &str = "install Python's headers (python3-dev), or add --enforce-eager to the engine arguments";
pub(super) const INSTALLATION: &str = "install vLLM again with all that it needs, in one environment: `pip install --force-reinstall vllm`";

pub(super) fn remedy_for_program(cause: &str) -> &'static str {
    if cause.contains("ermission denied") {
        "make it executable for this user (`ls -l` shows its rights; a disk may be mounted noexec), or name another with --vllm-bin"
    } else if cause.contains("No such file") {
        "it, or the Python in its first line, is gone: install vLLM again, or name another with --vllm-bin"
    } else if cause.contains("temporarily unavailable") {
        "this user may have no further process: raise `ulimit -u`, or the job's limit of processes"
    } else {
        "see the reason, or name another program with --vllm-bin"
    }
}
