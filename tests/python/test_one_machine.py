"""What a person does with `hostler up` on one machine: end it by name, start it twice, start it with a flag that vLLM does not have."""

import subprocess

import pytest

from processes import Process, binary, environment

# On a machine that is busy, in seconds.
START, END = 60, 60


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


def start(tmp_path, runtime: dict[str, str], model: str) -> tuple[Process, str]:
    """`hostler up` that serves this model, and the address of its edge."""
    options = ["--engine", "simulated", "--replicas", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    up = Process("up", ["up", *options, "--", "--served-model-name", model], tmp_path, runtime)
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
