"""Starts `vllm serve` in a process that has imported vLLM before.

The engine's keeper runs this file with a socket as standard input, and sends the command when the engine is to start.
"""

import contextlib
import gc
import importlib
import os
import sys
import tempfile

# What `vllm serve` and the engine's core import before they look at the model. Classes of models are left out, because some of them initialize CUDA.
MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
)

# Beginnings of variables that are read during these imports (0.32 and 0.33).
READ_AT_IMPORT = (
    "FLA_",
    "LD_",
    "MKL_",
    "OMP_",
    "TORCH",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CONFIG_ROOT",
    "VLLM_LOGGING_",
    "VLLM_PLUGINS",
    "VLLM_PROCESS_NAME_PREFIX",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_USAGE_STATS_SERVER",
    "VLLM_USE_MODELSCOPE",
)

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def installed():
    """Times at which packages were last installed or removed."""
    return [os.stat(folder).st_mtime_ns for folder in sys.path if folder.endswith("-packages") and os.path.isdir(folder)]


def import_vllm():
    """Imports what processes of the engine share. What is missing here, vLLM itself will report."""
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # A forked process would copy every object that a collection looks at: 4.0 s until ready instead of 1.9 (0.32 on a CPU).
    gc.collect()
    gc.freeze()


def read_order():
    """Returns whether to fork, the arguments and the variables; None if the agent has left.

    All fields end with a zero byte: "1" or "0", the number of arguments, the arguments, and each variable as NAME=VALUE.
    """
    with os.fdopen(os.dup(0), "rb") as gate:
        fields = gate.read().split(b"\0")[:-1]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not fields:
        return None
    forks, count, *words = [os.fsdecode(field) for field in fields]
    return forks == "1", words[: int(count)], dict(word.split("=", 1) for word in words[int(count) :])


def obstacle(variables, installed_before):
    """Why the imported modules are not those that this engine would import; None if they are."""
    if installed() != installed_before:
        return "packages were installed since"
    changed = [name for name, value in variables.items() if name.startswith(READ_AT_IMPORT) and os.environ.get(name) != value]
    return f"{', '.join(changed)} differs" if changed else None


def share_imports():
    """Makes the engine's processes forks of this one; vLLM's own way is to import everything again in each."""
    import torch
    from multiprocessing import resource_tracker
    from vllm.platforms import current_platform

    if METHOD in os.environ or torch.cuda.is_initialized():
        return
    # Otherwise the core starts a tracker that ends with it, and its shared memory stays (0.32).
    resource_tracker.ensure_running()
    os.environ[METHOD] = "fork"
    if current_platform.is_cpu():
        # This platform forces "spawn" when it checks the configuration.
        check = current_platform.check_and_update_config

        def check_and_keep_fork(*arguments, **named):
            check(*arguments, **named)
            os.environ[METHOD] = "fork"

        type(current_platform).check_and_update_config = staticmethod(check_and_keep_fork)


def main():
    installed_before = installed()
    import_vllm()
    os.write(0, b"\n")
    order = read_order()
    if order is None:
        return 0
    forks, sys.argv, variables = order
    because = obstacle(variables, installed_before)
    os.environ.update(variables)
    tempfile.tempdir = None  # it was asked for TMPDIR before
    if because:
        print(f"hostler: vLLM is imported anew: {because}", flush=True)
        os.execv(sys.argv[0], sys.argv)
    # Python began without the agent's plugin, and with this file's own folder instead.
    sys.path[:1] = variables["PYTHONPATH"].split(os.pathsep)[:1] if "PYTHONPATH" in variables else []
    if forks:
        share_imports()
    from vllm.entrypoints.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
