"""What an agent does about real vLLM that dies, hangs, cannot start or loses its agent; with the tiny model on the CPU.

The tests share a fleet and are quickest in the order they are written: each breaks something and waits only for what
it needs itself, so that both engines start again at the same time. What was measured is printed (`-s`).
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import httpx2
import pytest

import fleet as fleets
from fleet import KEEP, MODEL, Fleet, Replica, Router, own_model
from processes import Process, alive, ask, binary, environment, shared_memory, wait_until
from wire import Stream, all_streaming

pytestmark = pytest.mark.vllm("supervised")

# Within this an agent has done what it must, on a machine that is busy, in seconds. How long it took is printed.
DONE = 120
# More tokens than any test waits for.
ENDLESS = 3500


def members(group: int) -> dict[str, int]:
    """The processes of an engine by the name that vLLM gives them: `api`, `core`, `worker`."""
    names = {"VLLM::EngineCore": "core", "VLLM::Worker": "worker"}
    found = {names[word]: pid for pid, line in alive(group=group).items() for word in names if line.startswith(word)}
    return found | {"api": group}


def sockets(group: int) -> set[str]:
    """The paths of the Unix sockets that the processes of a group hold."""
    paths = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) == 8 and words[7].startswith("/"):
            paths[f"socket:[{words[6]}]"] = words[7]
    held = set()
    for pid in alive(group=group):
        with contextlib.suppress(OSError):
            held |= {paths.get(os.readlink(link), "") for link in Path(f"/proc/{pid}/fd").iterdir()}
    return held - {""}


class KeptFleet(Fleet):
    """A fleet whose node `b` keeps its engine when the agent dies, and whose node `a` has a full disk for its logs."""

    full_disk = False

    def options_of(self, node: str) -> tuple[str, ...]:
        """Only one keeps its engine."""
        if node == "b":
            return KEEP
        log = self.folder / "log-a"
        self.full_disk = self.full_disk or (not log.exists() and full_disk(log))
        return ()

    def stop(self, keep_logs: bool = False) -> None:
        """As for every fleet; then the disk goes."""
        try:
            super().stop(keep_logs=True)
        finally:
            if self.full_disk:
                subprocess.run(["umount", self.folder / "log-a"], check=False)
            if not keep_logs:
                shutil.rmtree(self.folder, ignore_errors=True)


def full_disk(folder: Path) -> bool:
    """Mounts a disk of 1 MiB there and fills it; false where that is not allowed."""
    folder.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        with contextlib.suppress(OSError), (folder / "something-else").open("wb") as file:
            while True:
                file.write(bytes(4096))
    return mounted.returncode == 0


@pytest.fixture(scope="module")
def kept(engines) -> KeptFleet:
    """The fleet of this module."""
    return engines.need("supervised", lambda: KeptFleet(fleets.vllm(stall="30s")))


def ready(kept: Fleet, node: str, after: int = 0) -> Replica:
    """The replica of a node once it serves, in a life after the one with this process."""

    def now() -> Replica | None:
        replica = kept.replica(node)
        return replica if replica.phase == "ready" and replica.engine_pid not in (0, after) else None

    return wait_until(now, kept.engine.start_seconds, f"the engine of {node} is ready", pause=0.2)


def endless(kept: Fleet, node: str, count: int) -> list[Stream]:
    """This many streams that the engine of a node is at."""
    # No two alike: what was in flight when an engine died is suspected, and let in one by one from then on.
    prompts = [f"story {number} of {time.monotonic()}" for number in range(count)]
    streams = [Stream(kept.routers[0].edge, ENDLESS, own_model(node), prompt) for prompt in prompts]
    all_streaming(streams, DONE)
    return streams


def failed(stream: Stream) -> bool:
    """Whether a stream ended with an error that says so, and not as if it were whole."""
    return not stream.complete and len(stream.errors) == 1 and bool(stream.errors[0]["message"])


def test_an_engine_serves_although_its_logs_disk_is_full(kept: KeptFleet):
    if not kept.full_disk:
        pytest.skip("may not mount a small disk here")
    stream = Stream(kept.routers[0].edge, 8, model=own_model("a"))
    stream.join(DONE)
    assert stream.complete
    assert "No space left on device" in kept.agents[0].log.read_text(), "the agent's log says so"
    lines = ask("logs", "a/0", "--admin", kept.routers[0].socket, "-n", "200")
    assert "No space left on device" in lines, "and so does the engine's"
    assert "Application startup complete" in lines, "whose lines are still shown"


def kill(kept: KeptFleet, victim: str, node: str) -> None:
    """Kills one process of an engine that rests, and checks all that must follow until the next life has begun."""
    before = ready(kept, node)
    group = os.getpgid(before.engine_pid)
    processes, mapped, bound = members(group), shared_memory(group), sockets(group)
    assert len(processes) == 3 and mapped, (processes, mapped)
    began = time.monotonic()
    os.kill(processes[victim], signal.SIGKILL)
    wait_until(lambda: kept.replica(node).phase != "ready", DONE, "the routers know", pause=0.01)
    noticed = time.monotonic() - began
    wait_until(lambda: not alive(group=group), DONE, "no process of the group is left", pause=0.01)
    empty = time.monotonic() - began
    wait_until(lambda: kept.replica(node).restarts == before.restarts + 1, DONE, "the next life has begun")
    print(f"\nSIGKILL of {victim}: noticed after {noticed:.2f} s, group empty {empty - noticed:.2f} s later", end="")
    cause = described(kept, node)["failure"]["cause"]
    print(f", next life {time.monotonic() - began - empty:.2f} s after that: {cause}")
    left = {path for path in mapped if Path(path).exists()}
    assert not left, "shared memory of the dead engine"
    outside = {path for path in bound if not path.startswith(f"{kept.folder}/run-{node}/")}
    assert not outside and bound, "vLLM never removes its sockets, so all must be where the agent does"


# One engine after the other, so that they start again at the same time.
@pytest.mark.parametrize(("victim", "node"), [("api", "a"), ("core", "b")])
def test_an_engine_that_loses_a_process_is_replaced(kept: KeptFleet, victim: str, node: str):
    kill(kept, victim, node)


def test_a_start_tells_how_far_it_is(kept: KeptFleet):
    if kept.replica("b").phase == "ready":  # when the test before, which killed it, does not run
        ask("restart", "b/0", "--force", "--admin", kept.routers[0].socket)
        wait_until(lambda: kept.replica("b").phase == "starting", 60, "it starts again")
    seen = []

    def is_ready() -> bool:
        replica = described(kept, "b")
        progress = replica["progress"]
        if progress and (not seen or seen[-1] != (progress["stage"], progress["percent"])):
            seen.append((progress["stage"], progress["percent"]))
        return replica["phase"] == "ready"

    wait_until(is_ready, kept.engine.start_seconds, "the engine is ready", pause=0.1)
    print(f"\nstart: {seen}")
    percents = [percent for _, percent in seen]
    assert percents == sorted(percents) and len(set(percents)) >= 3
    assert described(kept, "b")["failure"] is None
    assert described(kept, "b")["launch"]["kv_tokens"] > 0


def test_an_engine_that_hangs_under_load_is_replaced(kept: KeptFleet):
    before, other = ready(kept, "b"), ready(kept, "a")
    group = os.getpgid(before.engine_pid)
    streams = endless(kept, "b", 4)
    began = time.monotonic()
    os.kill(members(group)["core"], signal.SIGSTOP)
    wait_until(lambda: kept.replica("b").phase != "ready", DONE, "it leaves service", pause=0.02)
    provable = time.monotonic() - began
    answers = [complete(kept.routers[number % 2].edge) for number in range(8)]
    assert [answer.status_code for answer in answers] == [200] * len(answers), "new requests go to the other engine"
    assert kept.replica("a").served >= other.served + len(answers)
    wait_until(lambda: not alive(group=group), DONE, "no process of the group is left", pause=0.01)
    took = time.monotonic() - began
    # It is told until the next life serves.
    failure = wait_until(lambda: described(kept, "b")["failure"], DONE, "the failure is told")
    cause = failure["cause"]
    # No other engine has this model's name, so its next life goes on with them.
    told = [len(stream.choices) for stream in streams]
    wait_until(lambda: all(len(stream.choices) > before for stream, before in zip(streams, told, strict=True)), DONE, "they go on")
    assert all(stream.running and not stream.errors for stream in streams), [stream.end() for stream in streams]
    for stream in streams:
        stream.leave()
        stream.join(DONE)
    print(f"\nSIGSTOP of core: out of service after {provable:.1f} s, group empty after {took:.1f} s: {cause}")
    assert failure["kind"] == "hang" and "no token for" in failure["cause"], failure


def test_an_engine_that_loses_its_worker_is_replaced(kept: KeptFleet):
    kill(kept, "worker", "a")


def complete(edge: str, prompt: str = "short") -> httpx2.Response:
    """One completion under the name that all engines have."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return httpx2.post(f"{edge}/completions", json=body, timeout=300)


def described(kept: Fleet, node: str) -> dict:
    """All that `hostler ps --json` says of a node's replica."""
    return replica_of(kept.routers[0].socket, node)


def replica_of(socket: str, node: str) -> dict:
    """The first replica of this node, as the router with this operators' socket shows it."""
    nodes = json.loads(ask("ps", "--admin", socket, "--json"))["nodes"]
    return next((node_["replicas"][0] for node_ in nodes if node_["node"] == node and node_["replicas"]), {})


def test_a_rolling_restart_under_load_fails_no_request(kept: KeptFleet):
    before = {node: ready(kept, node) for node in Fleet.NODES}
    answers, stop = [], threading.Event()

    # With pauses: on two cores, an engine that is always busy would leave little to the one that starts.
    def ask_on(edge: str) -> None:
        while not stop.wait(0.5):
            try:
                answers.append(complete(edge, f"roll {len(answers)}").status_code)
            except httpx2.HTTPError as error:
                answers.append(error)

    def stream_on(edge: str) -> None:
        while not stop.wait(2):
            stream = Stream(edge, 60)
            with contextlib.suppress(AssertionError):
                stream.join(60)
            answers.append(200 if stream.complete else stream.end())

    edges = [router.edge for router in kept.routers]
    clients = [threading.Thread(target=client, args=(edge,)) for client in (ask_on, stream_on) for edge in edges]
    for client in clients:
        client.start()
    # By force: each engine has a name that the other does not have, and that nobody asks for here.
    order = ["restart", "--rolling", "--force", "--admin", kept.routers[0].socket, "--wait", "600s"]
    try:
        rolled = subprocess.run(
            [binary(), *order], capture_output=True, text=True, timeout=1300, env=environment(), check=False
        )
    finally:
        stop.set()
        for client in clients:
            client.join(90)
    assert rolled.returncode == 0, rolled.stdout + rolled.stderr
    bad = [answer for answer in answers if answer != 200]
    back = [line for line in rolled.stdout.splitlines() if "ready again" in line]
    print(f"\nrolling restart with {len(answers)} requests, {len(bad)} failed; {'; '.join(back)}")
    assert not bad and len(answers) > 20, bad
    after = {node: kept.replica(node) for node in Fleet.NODES}
    assert all(after[node].engine_pid != before[node].engine_pid for node in Fleet.NODES)


def test_a_kept_engine_serves_again_under_the_next_agent(kept: KeptFleet):
    before = ready(kept, "b")
    streams = endless(kept, "b", 50)
    kept.kill_agent("b")
    for stream in streams:
        stream.join(DONE)
    assert all(failed(stream) for stream in streams), [stream.end() for stream in streams if not failed(stream)]
    assert alive(group=os.getpgid(before.engine_pid)), "the engine lives on"
    began = time.monotonic()
    kept.next_agent("b")
    body = {"model": own_model("b"), "prompt": "again", "max_tokens": 2}

    def answers() -> bool:
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.post(f"{kept.routers[0].edge}/completions", json=body, timeout=10).status_code == 200
        return False

    wait_until(answers, DONE, "the engine serves again")
    took = time.monotonic() - began
    now = kept.replica("b")
    print(f"\nagent killed with {len(streams)} streams: the next agent's first answer after {took:.2f} s, engine kept")
    assert (now.engine_pid, now.restarts) == (before.engine_pid, before.restarts), "not started again"


def test_an_engine_that_is_not_kept_dies_with_its_agent(kept: KeptFleet):
    before = ready(kept, "a")
    group = os.getpgid(before.engine_pid)
    streams = endless(kept, "a", 50)
    mapped = shared_memory(group)
    began = kept.kill_agent("a")
    wait_until(lambda: not alive(group=group), DONE, "no process of the engine is left", pause=0.01)
    print(f"\nagent killed with {len(streams)} streams: group empty after {time.monotonic() - began:.2f} s")
    for stream in streams:
        stream.join(DONE)
    assert all(failed(stream) for stream in streams), [stream.end() for stream in streams if not failed(stream)]
    wait_until(lambda: not any(Path(path).exists() for path in mapped), DONE, "its shared memory is gone")


def test_an_agent_removes_remains_and_ends_while_its_engine_starts(kept: KeptFleet):
    if not kept.agents[0].killed:  # when the test before does not run
        kept.kill_agent("a")
    left = {path.parent for path in kept.folder.glob("run-a/*/admin.sock")}
    assert len(left) == 1
    before, agent = kept.replica("a"), kept.next_agent("a")

    def loads() -> Replica | None:
        replica = kept.replica("a")
        return replica if replica.phase == "loading" and replica.engine_pid not in (0, before.engine_pid) else None

    group = os.getpgid(wait_until(loads, 120, "the engine loads").engine_pid)
    assert not any(path.exists() for path in left)
    mapped = shared_memory(group)
    began = time.monotonic()
    kept.agents.remove(agent)
    agent.stop()
    took = time.monotonic() - began
    assert not alive(group=group)
    assert not [path for path in mapped if Path(path).exists()]
    print(f"\nSIGTERM in mid-start: agent and engine gone after {took:.2f} s")


@dataclasses.dataclass(frozen=True)
class Failing:
    """An engine that cannot start, and what its failure must be called and say."""

    kind: str
    cause: str
    remedy: str
    model: str
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Shown:
    """What is known of a failed engine."""

    failure: dict
    line: str
    """Its line of `hostler ps`."""
    logs: str
    """Of the engine."""
    agent_log: str


# What else goes wrong is told apart by what vLLM printed when it did: see the agent's tests.
FAILING = {
    "bad-flag": Failing("bad-flag", "--no-such-flag", "--help=all", "tiny", ("--no-such-flag", "3")),
    "no-model": Failing("model-missing", "no-model-here", "--model", "no-model-here"),
    "small-cache": Failing("kv-too-small", "max_model_len 4096", "use ", "tiny", ("--num-gpu-blocks-override", "8")),
}


class Ward:
    """A router, and an agent for each failing engine, until it is known how that failed."""

    def __init__(self):
        """Starts them all at once."""
        self.folder = Path(tempfile.mkdtemp(prefix="hostler-"))
        self.router = Router("router", self.folder)
        self.agents = {name: self._agent(name, failing) for name, failing in FAILING.items()}
        self.shown: dict[str, Shown] = {}

    def _agent(self, name: str, failing: Failing) -> Process:
        folders = ["--run-dir", str(self.folder / f"run-{name}"), "--log-dir", str(self.folder / f"log-{name}")]
        _, tiny, *program = fleets.vllm().options
        model = tiny
        if failing.model != "tiny":
            # The agent itself refuses a path where nothing is.
            model = str(self.folder / failing.model)
            Path(model).mkdir()
        engine = ["--model", model, *program, "--replicas", "1"]
        flags = ["--", "--enforce-eager", "--max-model-len", "4096", *failing.flags]
        command = ["agent", "--router", self.router.agents, "--node", name, *folders, *engine, *flags]
        return Process(f"agent-{name}", command, self.folder)

    def wait(self, name: str) -> Shown:
        """What is shown of this one once it has failed; meanwhile the others are looked at, too."""
        wait_until(
            lambda: [self._look(each) for each in FAILING] and name in self.shown, 600, f"{name} has failed", 0.1
        )
        return self.shown[name]

    def _look(self, name: str) -> None:
        """Reads all when it has failed, and stops its agent: the next starts would only cost the others time."""
        if name in self.shown:
            return
        admin = ["--admin", self.router.socket]
        failure = replica_of(self.router.socket, name).get("failure")
        line = next((line for line in ask("ps", *admin).splitlines() if line.startswith(name)), "")
        # Between two starts for a second or more, and again as soon as the next one tells how far it is.
        if not failure or failure["cause"][:60] not in line:
            return
        logs = ask("logs", f"{name}/0", *admin, "-n", "200")
        self.shown[name] = Shown(failure, line, logs, self.agents[name].log.read_text())
        self.agents.pop(name).stop()

    def stop(self) -> None:
        """Ends all; a failing engine leaves nothing either."""
        try:
            for process in [*self.agents.values(), self.router]:
                process.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ward(engines):
    """The failing engines of this module."""
    engines.stop()
    running = Ward()
    yield running
    running.stop()


@pytest.mark.parametrize("name", FAILING)
def test_an_engine_that_cannot_start_says_why(ward: Ward, name: str):
    failing, began = FAILING[name], time.monotonic()
    shown = ward.wait(name)
    failure = shown.failure
    print(f"\n{name}, after {time.monotonic() - began:.0f} s more: {failure['cause']} | {failure['remedy']}")
    assert failure["kind"] == failing.kind, failure
    assert failing.cause in failure["cause"] and failing.remedy in failure["remedy"], failure
    assert failure["remedy"][:40] in shown.line, shown.line
    assert "error" in shown.logs.lower(), "what the engine printed"
    assert failure["remedy"] in shown.agent_log, "for somebody who has nothing else"
