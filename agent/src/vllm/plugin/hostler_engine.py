"""Runs inside of vLLM, which loads it as a plugin in each of its processes: the node agent puts this folder on their PYTHONPATH."""

import logging
import multiprocessing.util
import os
import sys

# In seconds, at the import.
PYTHONS_OWN = sys.getswitchinterval()


def register():
    """Lets the threads of the engine's core take turns as often as the agent asks.

    vLLM calls this once in each process, and would end with whatever it raised. Forked processes inherit that it was called, so they are told apart when they begin. The processes of the front-end and of the model are left as they are.
    """
    take_turns()
    multiprocessing.util.register_after_fork(sys.modules[__name__], lambda module: module.take_turns())


def take_turns():
    log = logging.getLogger("vllm.hostler")
    try:
        seconds = os.environ.get("HOSTLER_SWITCH_INTERVAL")
        if not seconds:
            return
        if multiprocessing.current_process().name.startswith("EngineCore"):
            sys.setswitchinterval(float(seconds))
            log.info("threads of the engine's core take turns every %g ms", 1000 * sys.getswitchinterval())
        elif sys.getswitchinterval() == float(seconds):
            sys.setswitchinterval(PYTHONS_OWN)  # a worker that the core has forked
    except Exception:
        log.exception("threads of the engine's core take turns as Python has them")
