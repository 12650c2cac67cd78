"""Fixtures of both suites: one `hostler up` for the contract, one fleet for each kind of engine."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import fleet as fleets
import processes
from batch import JobFleet
from fleet import BLOCK, KEEP, MODEL, Fleet, Up

# vLLM on the CPU takes no smaller blocks than these. There is room for 64, so that old ones soon make way.
SMALL = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", "64", "--max-model-len", "1920")
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")

# The fleets of real vLLM, in the order in which tests run on them: `pytest.mark.vllm("mixed")` names one,
# and without a name it is the first. A name that is not a key of STARTS is a fleet of a module's own.
STARTS = {
    "python": lambda: Fleet(fleets.vllm()),
    "rust": lambda: Fleet(fleets.vllm_rust()),
    # Its engines are made to hang, too.
    "mixed": lambda: Fleet(fleets.vllm(stall="30s"), fleets.vllm_rust(stall="30s"), KEEP),
    "small": lambda: Fleet(fleets.vllm(*SMALL, *LORA)),
    "tekken": lambda: Fleet(fleets.vllm(*SMALL, *fleets.tekken())),
}
# These end the agents of the fleet "python", so they are the last on it.
ORDER = ["python", "sessions", "rust", "mixed", "small", "tekken", "supervised", "own"]


class Engines:
    """The one fleet of real vLLM that lives: two engines take 4 GB, and keep two cores busy."""

    def __init__(self):
        """None yet."""
        self.name, self.fleet = "", None

    def need(self, name: str, start=None) -> Fleet:
        """The fleet of this name; where another one lives, that ends first."""
        if name != self.name:
            self.stop()
            self.fleet = (start or STARTS[name])()
            self.name = name
        return self.fleet

    def stop(self) -> None:
        """Ends the fleet that lives."""
        ending, self.name, self.fleet = self.fleet, "", None
        if ending:
            ending.stop()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Puts tests on one fleet of real vLLM behind each other, so that each starts once."""

    def place(item) -> int:
        marker = item.get_closest_marker("vllm")
        return ORDER.index(marker.args[0] if marker.args else "python") if marker else -1

    items.sort(key=place)


@pytest.fixture(scope="session")
def engines():
    """Real vLLM, a fleet at a time."""
    one = Engines()
    yield one
    one.stop()


@pytest.fixture(scope="session")
def up(tmp_path_factory):
    """`hostler up` with two simulated engines, for questions that one client asks."""
    running = Up(tmp_path_factory.mktemp("up"), ["--served-model-name", MODEL, "--sim-step-ms", "5"])
    yield running
    running.stop()


@pytest.fixture(scope="session")
def simulated_fleet():
    """Two routers, two agents, one simulated engine each."""
    running = Fleet(fleets.simulated())
    yield running
    running.stop()


@pytest.fixture(scope="module")
def vllm_fleet(engines: Engines):
    """Two routers, two agents, one real vLLM on the CPU each."""
    return engines.need("python")


@pytest.fixture(scope="module")
def vllm_rust_fleet(engines: Engines):
    """The same with vLLM's Rust front-end."""
    return engines.need("rust")


@pytest.fixture(scope="module")
def mixed_fleet(engines: Engines):
    """The Rust front-end on node `b` alone, and engines that outlive their agents."""
    return engines.need("mixed")


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def fleet(request):
    """A fleet of each kind in turn, whole and idle before the test and again after it."""
    running = request.getfixturevalue(f"{request.param}_fleet")
    running.wait_ready()
    running.wait_idle()
    yield running
    running.wait_idle()


@pytest.fixture(scope="module")
def small_simulated_fleet():
    """Simulated engines with room for 64 blocks."""
    running = Fleet(fleets.simulated(*SMALL))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def small_vllm_fleet(engines: Engines):
    """Real engines with room for 64 blocks, which take adapters too."""
    return engines.need("small")


@pytest.fixture(scope="module")
def small_tekken_fleet(engines: Engines):
    """Real engines of that size whose chat template is code: only they can read their prompts."""
    return engines.need("tekken")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Adds what every process of the run logged last to the report of a failure."""
    report = yield
    if report.failed:
        for process in processes.started:
            report.sections.append((f"log of {process.name}", process.tail()))
        # A fleet may be there as several fixtures.
        for running in {id(fixture): fixture for fixture in item.funcargs.values()}.values():
            if isinstance(running, Fleet):
                report.sections.extend((f"engine's {path}", text) for path, text in running.engine_logs().items())
            if isinstance(running, JobFleet):
                report.sections.extend((f"output of {job}", text) for job, text in running.scheduler.printed().items())
    return report


@pytest.fixture
def runtime(tmp_path):
    """Folders for sockets and state, so that commands see only what the test has up.

    They are short, because paths of sockets may have 107 bytes. What a failed test leaves up there ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="h-", dir="/tmp"))
    variables = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(tmp_path / "state")}
    yield variables
    if list(folder.glob("hostler/*.sock")):
        end = [processes.binary(), "down"]
        subprocess.run(end, env=processes.environment() | variables, capture_output=True, timeout=120, check=False)
    shutil.rmtree(folder, ignore_errors=True)
