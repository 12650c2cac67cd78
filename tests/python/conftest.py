"""Fixtures of both suites: one `hostler up` for the contract, one fleet for each kind of engine."""

import pytest

import fleet as fleets
import processes
from batch import JobFleet
from fleet import BLOCK, MODEL, Fleet, Up


@pytest.fixture(scope="session")
def up(tmp_path_factory):
    """`hostler up` with two simulated engines, for questions that one client asks."""
    running = Up(tmp_path_factory.mktemp("up"), ["--served-model-name", MODEL, "--sim-step-ms", "5"])
    yield running
    running.stop()


def running_fleet(engine: fleets.Engine, nodes=Fleet.NODES):
    """The body of the fleet fixtures."""
    running = Fleet(engine, nodes)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def simulated_fleet():
    """Two routers, two agents, one simulated engine each."""
    yield from running_fleet(fleets.simulated())


@pytest.fixture(scope="session")
def vllm_fleet():
    """Two routers, two agents, one real vLLM on the CPU each."""
    yield from running_fleet(fleets.vllm())


@pytest.fixture(scope="module")
def vllm_rust_fleet():
    """Two routers and one agent with one real vLLM on the CPU, with its Rust front-end."""
    yield from running_fleet(fleets.vllm_rust(), nodes=("a",))


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def fleet(request):
    """A fleet of each kind in turn, whole and idle before the test and again after it."""
    running = request.getfixturevalue(f"{request.param}_fleet")
    running.wait_ready()
    running.wait_idle()
    yield running
    running.wait_idle()


@pytest.fixture(scope="module", params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def small_fleet(request):
    """A fleet of each kind in turn whose engines have room for 64 blocks, so that old ones soon make way."""
    # vLLM on the CPU takes no smaller blocks than these.
    flags = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", "64", "--max-model-len", "1920")
    yield from running_fleet(getattr(fleets, request.param)(*flags))


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
