"""Runs inside of vLLM, which loads it as a plugin in each of its processes: the node agent puts this folder on their PYTHONPATH."""

import logging
import multiprocessing
import os
import sys


def register():
    """Lets the threads of the engine's core take turns as often as the agent asks.

    vLLM calls this once in each process, and would end with whatever it raised. The processes of the front-end and of the model are left as they are.
    """
    log = logging.getLogger("vllm.hostler")
    try:
        seconds = os.environ.get("HOSTLER_SWITCH_INTERVAL")
        if seconds and multiprocessing.current_process().name.startswith("EngineCore"):
            sys.setswitchinterval(float(seconds))
            log.info("threads of the engine's core take turns every %g ms", 1000 * sys.getswitchinterval())
    except Exception:
        log.exception("threads of the engine's core take turns as Python has them")
