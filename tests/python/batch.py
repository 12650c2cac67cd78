"""A fleet whose agents run in batch jobs: one router, the jobs of a scheduler, and clients that never stop asking.

The scheduler is the stand-in for PBS in tests/pbs here, and real Slurm in slurm.py.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx2

from fleet import MODEL, Router
from processes import REPOSITORY, ask, binary, environment, wait_until
from wire import Stream, all_streaming, certificates

STAND_IN = REPOSITORY / "tests" / "pbs" / "pbs.py"
# Engines give a token each so many milliseconds.
STEP_MS = 25
# How long an agent and two simulated engines take at most to be ready, in seconds, while other jobs start beside them.
START_SECONDS = 180
# What ends is over within this time, on a machine that is busy, and nothing is left of it.
DONE = 60


# A stream with these is not resumed (docs/streams.md).
NOT_RESUMED = {"stop": ["no model says this"], "temperature": 1}


def tokens(seconds: float) -> int:
    """How many tokens a stream of this length has."""
    return int(seconds * 1000 / STEP_MS)


def documented(words: str) -> str:
    """The example of docs/hpc.md with these words in it, as somebody would copy it."""
    text = (REPOSITORY / "docs" / "hpc.md").read_text()
    blocks = [textwrap.dedent(block).strip("\n") + "\n" for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)]
    (found,) = (block for block in blocks if words in block)
    return found


def marked(value: str, variable: str = "PBS_STAND_IN") -> dict[int, str]:
    """The living processes that have this variable with this value in their environment, by pid with their command
    lines, whatever session they are in."""
    wanted, found = f"{variable}={value}".encode(), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # Zombies have no environment.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def kill_all(left) -> None:
    """SIGKILL to the processes that `left` finds, until it finds none."""

    def none_left() -> bool:
        found = left()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_until(none_left, DONE, "what was left is killed")


def state_of(pid: int) -> str:
    """The letter of a process's state: `T` where it is stopped; empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


class Pbs:
    """The stand-in for PBS: its server, and its commands as methods."""

    def __init__(self, folder: Path, hosts: int = 0):
        """Starts the server; `folder` holds all its state, and is the home of its users.

        Each host runs one job; 0 hosts run all that come."""
        self.folder = folder
        folder.mkdir()
        server, limit = [sys.executable, STAND_IN, "serve", folder], {"PBS_STAND_IN_HOSTS": str(hosts)}
        self.server = subprocess.Popen(server, start_new_session=True, env=os.environ | limit)
        wait_until((folder / "server.sock").exists, DONE, "the scheduler answers")

    def call(self, command: str, *arguments: str, stdin: str = "") -> str:
        """Runs one of its commands as a manager on the login node and returns what it prints."""
        home = {"HOME": str(self.folder), "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PBS_STAND_IN_MANAGER": "1"}
        ended = subprocess.run(
            [self.folder / "bin" / command, *arguments],
            **{"capture_output": True, "text": True, "input": stdin, "cwd": self.folder, "timeout": 30, "check": False},
            env=environment() | home,
        )
        assert ended.returncode == 0, f"{command} {' '.join(arguments)}: {ended.stderr}"
        return ended.stdout.strip()

    def job(self, job: str) -> dict:
        """What qstat says of it, also when it has ended."""
        return json.loads(self.call("qstat", "-x", "-f", "-F", "json", job))["Jobs"][job]

    def ended(self, job: str, seconds: float = DONE) -> int:
        """Waits until it has ended and returns its exit status."""
        wait_until(lambda: self.job(job)["job_state"] in "FX", seconds, f"{job} ended", pause=0.1)
        return self.job(job)["Exit_status"]

    def left(self) -> dict[int, str]:
        """The processes of all its jobs."""
        return marked(str(self.folder))

    def printed(self) -> dict[str, str]:
        """The end of what each job has printed."""
        texts = {path: path.read_text(errors="replace").strip() for path in (self.folder / "spool").glob("*.[OE][UR]")}
        return {path.name: text[-3000:] for path, text in texts.items() if text}

    def stop(self) -> None:
        """Ends the server and its jobs, and what they left."""
        self.server.terminate()
        try:
            self.server.wait(timeout=DONE)
        finally:
            self.server.kill()
            kill_all(self.left)


class Requests:
    """Short requests, twenty a second, until `stop`."""

    def __init__(self, edge: str, model: str = MODEL, key: str = "", trust: ssl.SSLContext = certificates):
        """Begins to ask, with this key where there is one."""
        self._model, self._headers, self._trust = model, {"authorization": f"Bearer {key}"} if key else {}, trust
        self.answered, self.failures = 0, []
        self._ended = threading.Event()
        self._counting = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(edge,), daemon=True) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def _ask(self, edge: str) -> None:
        body = {"model": self._model, "prompt": f"short {threading.get_ident()}", "max_tokens": 4, "temperature": 0}
        with httpx2.Client(timeout=30, verify=self._trust, headers=self._headers) as client:
            while not self._ended.wait(0.2):
                try:
                    answer = client.post(f"{edge}/completions", json=body)
                    failure = None if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
                except httpx2.HTTPError as error:
                    failure = repr(error)
                with self._counting:
                    self.answered += failure is None
                    self.failures += [failure] if failure else []

    def stop(self) -> None:
        """Ends them, when some were answered; every one must have been."""
        # A test may be over before the first of them are answered.
        wait_until(lambda: self.answered > 5 or self.failures, DONE, "some short requests are answered")
        self._ended.set()
        for thread in self._threads:
            thread.join(40)
        assert not self.failures, f"{len(self.failures)} short requests failed beside {self.answered}: {self.failures}"


class Streams:
    """Streams of one length, a new one every quarter of a second, until `stop`."""

    def __init__(self, edge: str, seconds: float):
        """Begins to ask."""
        self.all: list[Stream] = []
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(edge,), daemon=True)
        self._thread.start()

    def _ask(self, edge: str) -> None:
        while not self._ended.wait(0.25):
            self.all.append(Stream(edge, tokens(self._seconds)))

    def stop(self) -> list[Stream]:
        """Begins no more, waits for the last one and returns all."""
        self._ended.set()
        self._thread.join()
        for stream in self.all:
            stream.join(self._seconds + DONE)
        return self.all


class JobFleet:
    """One router, and agents with two simulated engines each in the jobs of a scheduler."""

    def __init__(self, scheduler, folder: Path):
        """`folder` is for this fleet; a short path, for engines listen on Unix sockets below it."""
        self.folder, self.scheduler = folder, scheduler
        self.router = Router("router", self.folder)
        self.edge, self.agents_address = self.router.edge, self.router.agents
        self.clients: list[Requests | Streams] = []

    def agent(self, *options: str, engine: tuple[str, ...] = ()) -> list[str]:
        """The command line of an agent, with more options of its own and more flags for its engines."""
        return [
            *(str(binary()), "agent", "--router", self.agents_address, "--engine", "simulated", "--replicas", "2"),
            *("--run-dir", str(self.folder / "run"), *options),
            *("--", "--served-model-name", MODEL, "--sim-step-ms", str(STEP_MS), *engine),
        ]

    def documented_script(self, words: str, *options: str) -> str:
        """An example of docs/hpc.md whose agent is one of this fleet's."""
        return re.sub(r"hostler agent (.*\\\n)*.*", lambda _: shlex.join(self.agent(*options)), documented(words))

    def listed(self) -> dict:
        """What `hostler ps --json` prints."""
        return json.loads(ask("ps", "--admin", self.router.socket, "--json"))

    def nodes(self) -> list[dict]:
        """The attached nodes of it."""
        return [node for node in self.listed()["nodes"] if node["attached"]]

    def node(self, job: str) -> dict | None:
        """The node whose agent runs in this job."""
        return next((node for node in self.nodes() if (node["job"] or {}).get("id") == job), None)

    def wait_ready(self, nodes: int) -> None:
        """Returns when so many nodes serve with all their engines."""

        def ready() -> bool:
            phases = [[replica["phase"] for replica in node["replicas"]] for node in self.nodes()]
            return phases == [["ready", "ready"]] * nodes

        try:
            wait_until(ready, START_SECONDS, f"{nodes} jobs serve", pause=0.1)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.nodes()}\n{self.scheduler.printed()}") from late

    def in_flight(self, job: str) -> int:
        """How many requests the engines of a job work on."""
        node = self.node(job)
        return sum(replica["in_flight"] for replica in node["replicas"]) if node else 0

    def served(self, job: str) -> int:
        """How many requests the engines of a job have answered."""
        return sum(replica["served"] for replica in self.node(job)["replicas"])

    def engines(self, job: str) -> list[int]:
        """The pids of its engines."""
        return [replica["engine_pid"] for replica in self.node(job)["replicas"]]

    def requests(self) -> Requests:
        """Short requests from now on until the end of the test."""
        self.clients.append(Requests(self.edge))
        return self.clients[-1]

    def streams(self, seconds: float) -> Streams:
        """Streams from now on until they are stopped."""
        self.clients.append(Streams(self.edge, seconds))
        return self.clients[-1]

    def streams_everywhere(self, seconds: float, on: str, **parameters: object) -> list[Stream]:
        """Twelve streams over all engines, each with a first token, at least one of them on this job."""
        streams = [Stream(self.edge, tokens(seconds), **parameters) for _ in range(12)]
        all_streaming(streams)
        assert self.in_flight(on), "the job has none of the streams"
        return streams

    def watched(self):
        """A fixture's body. After the test all jobs end; no short request may have failed and nothing may be left."""
        try:
            yield self
            for client in self.clients:
                if isinstance(client, Requests):
                    client.stop()
            self.delete_all()
            self.wait_nothing_left(DONE)
        except BaseException:
            print(*(f"\n--- {name}\n{text}" for name, text in self.scheduler.printed().items()))
            raise
        finally:
            self.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """Ends all, by force where something is left."""
        kill_all(self.scheduler.left)
        self.router.stop()

    def wait_nothing_left(self, seconds: float) -> None:
        """Returns when no process, socket or run directory of any job is left."""
        deadline = time.monotonic() + seconds
        while left := [*self.scheduler.left().values(), *self.remains()]:
            assert time.monotonic() < deadline, f"left behind after {seconds} s: {left}"
            time.sleep(0.05)

    def remains(self) -> list[str]:
        """What agents leave in their run directory, but for the lock that they share."""
        return [str(path) for path in (self.folder / "run").glob("*") if path.name != "lock"]


def whole(streams: list[Stream], seconds: float = DONE) -> None:
    """All these streams end, and end well."""
    for stream in streams:
        stream.join(seconds)
    lost = [stream.end() for stream in streams if not stream.complete]
    assert not lost, f"{len(lost)} of {len(streams)} streams lost: {lost}"


def honest(stream: Stream, job: str, *reasons: str) -> None:
    """It ended with one error event, which names the job and says one of these words."""
    assert len(stream.errors) == 1 and not stream.done, stream.end()
    message = stream.errors[0]["message"]
    assert job in message, f"the error does not name {job}: {message}"
    assert any(reason in message for reason in reasons), f"the error does not say why: {message}"


def gone_on(streams: list[Stream]) -> None:
    """Those of the streams that were on the job go on elsewhere, and none ends."""
    wait_until(lambda: sum(bool(stream.seams) for stream in streams) >= 2, 40, "the job's streams went on")
    so_far = [len(stream.events) for stream in streams]
    wait_until(
        lambda: all(len(stream.events) > seen for stream, seen in zip(streams, so_far, strict=True)),
        DONE,
        "all streams went on",
    )
    assert all(stream.running and not stream.errors for stream in streams), [stream.end() for stream in streams]
    for stream in streams:
        stream.leave()


def broken_honestly(streams: list[Stream], job: str, *reasons: str) -> None:
    """Those of the streams that were on the job end with an honest error; the others go on."""
    wait_until(lambda: any(not stream.running for stream in streams), DONE, "a stream ended")
    wait_until(lambda: sum(not stream.running for stream in streams) >= 2, DONE, "the job's streams ended")
    time.sleep(0.5)
    broken = [stream for stream in streams if not stream.running]
    assert len(broken) < len(streams), "streams of other jobs ended, too"
    for stream in broken:
        honest(stream, job, *reasons)
    for stream in streams:
        stream.leave()
