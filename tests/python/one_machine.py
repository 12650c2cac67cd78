"""`hostler up` on one machine, as the tests of it start it: with simulated engines and free ports, and beside another one."""

import subprocess

import httpx2

from processes import Process, binary, environment

# On a machine that is busy, in seconds.
START, END = 60, 60
# One request at a time and one that waits: others wait in the router, as far as it lets them.
BOUND = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")


def run(runtime: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """`hostler ARGUMENTS`, which ends by itself."""
    return subprocess.run(
        [binary(), *arguments], env=environment() | runtime, capture_output=True, text=True, timeout=START, check=False
    )


def start(tmp_path, runtime: dict[str, str], model: str, *more: str) -> tuple[Process, str]:
    """`hostler up` that serves this model, and the address of its edge; `more` are options."""
    options = ["--engine", "simulated", "--replicas", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *more]
    up = Process("up", ["up", *options, "--", "--served-model-name", model, *BOUND], tmp_path, runtime)
    edge = up.printed("edge", START)
    up.printed("ready", START)
    return up, edge


def beside(tmp_path, runtime: dict[str, str], edge: str, model: str) -> Process:
    """Another `hostler up`, which has joined the router of this edge, when its model serves."""
    address = edge.removeprefix("http://").removesuffix("/v1")
    options = ["--engine", "simulated", "--replicas", "1", "--listen", address, "--", "--served-model-name", model]
    up = Process(model, ["up", *options], tmp_path, runtime)
    assert up.printed("edge", START) == edge
    up.printed("ready", START)
    return up


def answers(edge: str, model: str) -> bool:
    """Whether this model is served there."""
    body = {"model": model, "prompt": "a b c", "max_tokens": 2}
    return httpx2.post(f"{edge}/completions", json=body, timeout=START).status_code == 200
