"""What a person does with `hostler up` on one machine: end it by name, start it twice, start it with a flag that vLLM does not have."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from processes import Process, binary, environment

# On a machine that is busy, in seconds.
START, END = 60, 60
# One request at a time and one that waits: others wait in the router, as far as it lets them.
BOUND = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")


@pytest.fixture
def runtime(tmp_path):
    """A folder for sockets, as a login session has one; short, because their paths may have 107 bytes."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return {"XDG_RUNTIME_DIR": str(folder)}


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


# Only names that nobody else has, so that the test ends nothing of whoever runs it.
def test_down_ends_what_up_serves_from_this_machine(tmp_path, runtime):
    up, _ = start(tmp_path, runtime, "one-machine-down")
    unknown = run(runtime, "down", "one-machine-nobody")
    assert unknown.returncode == 1 and "one-machine-nobody is not up here" in unknown.stderr, unknown.stderr
    assert "one-machine-down (`hostler up`, process" in unknown.stderr
    ended = run(runtime, "down", "one-machine-down")
    assert ended.returncode == 0 and "ended     one-machine-down" in ended.stdout, ended
    assert up.child.wait(END) == 0
    assert run(runtime, "down", "one-machine-down").returncode == 1


def test_a_second_up_says_what_is_up_already(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-first")
    address = edge.removeprefix("http://").removesuffix("/v1")
    second = run(runtime, "up", "--engine", "simulated", "--listen", address, "--admin-listen", "127.0.0.1:0")
    assert second.returncode == 1
    assert "up here already: " in second.stderr and "one-machine-first (`hostler up`, process" in second.stderr, second.stderr
    assert "`hostler down` ends it" in second.stderr
    up.child.terminate()
    assert up.child.wait(END) == 0


def test_a_flag_that_the_engine_does_not_have_ends_up_with_the_reason(tmp_path, runtime):
    options = ["--engine", "simulated", "--replicas", "2", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    ended = run(runtime, "up", *options, "--", "--no-such-flag")
    assert ended.returncode == 4, ended
    assert "--no-such-flag" in ended.stderr


def test_a_storm_of_refusals_is_seen_although_every_replica_is_ready(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-storm", "--max-queued", "1")
    body = {"model": "one-machine-storm", "prompt": "a b c", "max_tokens": 200}

    def status(_) -> int:
        return httpx2.post(f"{edge}/completions", json=body, timeout=60).status_code

    assert run(runtime, "ps", "--admin", up.printed("socket", START)).stdout.count("TROUBLE") == 0
    with ThreadPoolExecutor(24) as pool:
        statuses = list(pool.map(status, range(24)))
    refused = len([one for one in statuses if one != 200])
    assert refused >= 5, statuses
    socket = up.printed("socket", START)
    shown = run(runtime, "ps", "--admin", socket)
    assert f"TROUBLE  {refused} of the 24 requests that ended in the last minute failed: {refused} found the router full" in shown.stdout, shown
    assert "ready" in shown.stdout, "its replica is well"
    assert "TROUBLE" in run(runtime, "advise", "--admin", socket).stdout
    findings = json.loads(run(runtime, "ps", "--json", "--admin", socket).stdout)["findings"]
    assert [finding["kind"] for finding in findings] == ["answers-fail"]
    up.child.terminate()
    assert up.child.wait(END) == 0
