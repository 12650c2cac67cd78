"""Starts of real vLLM from a process that has imported it before; with the tiny model on the CPU. How long each start took is printed (`-s`)."""

import json
import os
import signal
import time
from pathlib import Path

import httpx2
import pytest

import fleet as fleets
from fleet import MODEL, Up
from processes import alive, ask, shared_memory, wait_until

pytestmark = pytest.mark.vllm("own")

# Within this an engine starts, on a machine that is busy, in seconds.
START = 300
FLAGS = ["--enforce-eager", "--max-model-len", "2048", "--dtype", "float32", "--served-model-name", MODEL]


@pytest.fixture(scope="module")
def up(engines, tmp_path_factory):
    """Two engines that vLLM's own script runs: its wrappers start plainly."""
    engines.stop()
    cache = fleets.cache_folder()
    options = ["--model", str(cache / "tiny-model"), "--vllm-bin", str(cache / "vllm-0.32" / "bin" / "vllm")]
    running = Up(tmp_path_factory.mktemp("warm"), FLAGS, options=options, kind="vllm", start_seconds=START)
    yield running
    running.stop()


def described(up: Up, index: int) -> dict:
    """What `ps --json` says of a replica."""
    listed = json.loads(ask("ps", "--json", "--admin", up.socket))
    replicas = [replica for node in listed["nodes"] for replica in node["replicas"]]
    return next(replica for replica in replicas if replica["id"].endswith(f"/{index}"))


def ready(up: Up, index: int, after: int = 0) -> dict:
    """The replica once it serves, in a life after the one with this process."""

    def now() -> dict | None:
        replica = described(up, index)
        return replica if replica["phase"] == "ready" and replica["engine_pid"] not in (0, after) else None

    return wait_until(now, START, f"engine {index} is ready", pause=0.05)


def spares() -> list[int]:
    """Processes of this user that have begun as spares and are no engine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"/hostler_start.py") for word in words):
            found.append(int(folder.name))
    return found


def waiting_spare(up: Up) -> int:
    """The spare, once it waits."""

    def waits() -> bool:
        log = up.tail(100_000)
        return log.rfind("spare_waits") > max(log.rfind("engine_started"), log.rfind("spare_ended"))

    wait_until(waits, START, "a spare waits")
    pids = {described(up, index)["engine_pid"] for index in (0, 1)}
    return wait_until(lambda: next(iter(set(spares()) - pids), None), START, "the spare's process")


def core(engine: dict) -> int:
    """The process in which an engine computes."""
    group = os.getpgid(engine["engine_pid"])
    return next(pid for pid, line in alive(group=group).items() if line.startswith("VLLM::EngineCore"))


def kill(up: Up, *indexes: int) -> list[dict]:
    """Kills the cores of these engines at once, and returns the engines of the next lives."""
    before = [described(up, index) for index in indexes]
    began = time.monotonic()
    for engine in before:
        os.kill(core(engine), signal.SIGKILL)
    after = [ready(up, index, engine["engine_pid"]) for index, engine in zip(indexes, before, strict=True)]
    for engine in after:
        stages = ", ".join(f"{part['stage']} {part['seconds']:.2f}" for part in engine["start"]["stages"])
        print(f"\nready {time.monotonic() - began:.1f} s after SIGKILL, from {engine['start']['origin']}: {stages}", end="")
    return after


def text(up: Up) -> list[str]:
    """What each engine says at temperature 0."""
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": 24, "temperature": 0}
    return [httpx2.post(f"{up.edge}/completions", json=body, timeout=60).json()["choices"][0]["text"] for _ in range(4)]


def test_engines_import_vllm_once_and_restart_from_the_spare(up: Up):
    assert {ready(up, index)["start"]["origin"] for index in (0, 1)} == {"fork"}
    before = text(up)
    waiting_spare(up)
    mapped = shared_memory(os.getpgid(described(up, 0)["engine_pid"]))
    engine = kill(up, 0)[0]
    assert engine["start"]["origin"] == "spare"
    assert "threads of the engine's core take turns" in ask("logs", engine["id"], "--admin", up.socket, "-n", "200")
    assert text(up) == before
    assert mapped and not any(Path(path).exists() for path in mapped), "the dead engine's shared memory is gone"


def test_a_spare_that_is_killed_is_replaced_and_missed_by_nobody(up: Up):
    spare = waiting_spare(up)
    os.kill(spare, signal.SIGKILL)
    wait_until(lambda: spare not in spares(), START, "it is gone")
    assert kill(up, 1)[0]["start"]["origin"] in ("fork", "spare")


def test_two_engines_that_die_together_both_come_back(up: Up):
    waiting_spare(up)
    assert {engine["phase"] for engine in kill(up, 0, 1)} == {"ready"}


def test_a_spare_of_packages_that_have_changed_imports_them_anew(up: Up):
    spare = waiting_spare(up)
    packages = next((fleets.cache_folder() / "vllm-0.32" / "lib").glob("python*/site-packages"))
    os.utime(packages)
    engine = kill(up, 0)[0]
    assert "vLLM is imported anew: packages were installed since" in ask("logs", engine["id"], "--admin", up.socket, "-n", "400"), spare
