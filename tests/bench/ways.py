"""The ways to the engines that run.py compares, each as the processes it consists of.

`Hostler` is a router and an agent that has started two simulated engines on Unix sockets; `Engines` are two more on
TCP ports; `Direct` is nothing between; `Proxy` is a peer in front of either. A way is ready when its constructor
returns, that is when a request through it was answered, and ends, with all that it started, in `stop`. hostler's own
processes are started and ended by ../python/processes.py.
"""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from install import Missing
from peers import Peer, Site

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from processes import Process, alive, ask, wait_until  # noqa: E402

# How long a process may take to listen and engines to become ready, in seconds.
START_SECONDS = 20
# How long requests that have been answered may still be counted as in flight, in seconds.
SETTLE_SECONDS = 2
# How often a way that starts is asked whether it answers, in seconds.
ASK_PAUSE = 0.005
# The user's own configuration file must not decide what is measured.
NO_CONFIG = ("--config", os.devnull)
# What the engines call their model; routers refuse a request that names none.
MODEL = "simulated"


class Way(Protocol):
    """What requests can be sent through."""

    name: str
    targets: list[str]
    """Where load generators send to, each an equal share."""
    parts: dict[str, list[int]]
    """Processes between client and engine: hostler's `router` and `agent`, or a `proxy`."""
    engines: list[int]
    """The processes of the engines behind it."""
    start_seconds: float
    """From its start until a request through it was answered."""

    def settle(self) -> None:
        """Waits until nothing is in flight."""

    def stop(self) -> None:
        """Ends all of it."""


class Hostler:
    """A router and an agent with two simulated engines."""

    def __init__(self, folder: Path, flags: tuple[str, ...], name: str = "hostler", variables: dict[str, str] | None = None):
        """Starts both and waits for the engines; `flags` are the engines', `variables` the router's."""
        self.name = name
        any_port = "127.0.0.1:0"
        begun = time.monotonic()
        with contextlib.ExitStack() as undo:
            listeners = ("--listen", any_port, "--agents-listen", any_port, "--admin-listen", any_port)
            self._router = Process("router", ["router", *NO_CONFIG, *listeners], folder, variables)
            undo.callback(self._router.stop)
            words = ("edge", "agents", "admin", "socket")
            edge, agents, self.admin, self.socket = (self._router.printed(word, START_SECONDS) for word in words)
            options = ("--router", agents, "--engine", "simulated", "--replicas", "2")
            folders = ("--run-dir", str(folder / "run"), "--log-dir", str(folder / "log"))
            self._agent = Process("agent", ["agent", *NO_CONFIG, *options, *folders, "--", *flags], folder)
            undo.callback(self._agent.stop)
            self.targets = [edge.removesuffix("/v1")]
            wait_until(lambda: answers(self.targets[0]), START_SECONDS, "an answer through hostler", ASK_PAUSE)
            self.start_seconds = time.monotonic() - begun
            replicas = wait_until(self._ready, START_SECONDS, "both engines ready", pause=0.1)
            self.stop = undo.pop_all().close
        self.parts = {"router": [self._router.child.pid], "agent": [self._agent.child.pid]}
        self.sockets = [replica["engine_socket"] for replica in replicas]
        self.engines = [replica["engine_pid"] for replica in replicas]

    def settle(self) -> None:
        """Waits until nothing is in flight; fails when something stays."""
        wait_until(
            lambda: not any(replica["in_flight"] + replica["local_in_flight"] for replica in self._replicas()),
            SETTLE_SECONDS,
            "nothing in flight",
            pause=0.05,
        )

    def logs(self) -> str:
        """What both said, for a failure's report."""
        return f"{self._router.tail()}\n{self._agent.tail()}"

    def _replicas(self) -> list[dict]:
        nodes = json.loads(ask("ps", "--admin", self.socket, "--json"))["nodes"]
        return [replica for node in nodes for replica in node["replicas"]]

    def _ready(self) -> list[dict]:
        replicas = self._replicas()
        return replicas if [replica["phase"] for replica in replicas] == ["ready"] * 2 else []


class Engines:
    """Two simulated engines on TCP ports, for those that cannot use the others' Unix sockets."""

    def __init__(self, folder: Path, flags: tuple[str, ...]):
        """Starts them and waits until they answer; `flags` as for the others."""
        self.urls = []
        self.pids = []
        with contextlib.ExitStack() as undo:
            for number in range(2):
                port = free_port()
                # As the agent calls it, the engine has the size of its cache and the model's name from flags.
                options = ("sim", "engine", MODEL, "--port", str(port), "--sim-start-ms", "0")
                process = Process(f"engine-{number}", [*options, *flags], folder)
                undo.callback(process.stop)
                self.urls.append(f"http://127.0.0.1:{port}")
                self.pids.append(process.child.pid)
            for url in self.urls:
                wait_until(lambda url=url: answers(url), START_SECONDS, f"an answer of {url}")
            self.stop = undo.pop_all().close


class Direct:
    """The load generator on the engines themselves, half of it on each."""

    name = "direct"
    start_seconds = 0.0

    def __init__(self, hostler: Hostler):
        """Nothing to start: these are the engines behind hostler."""
        self.targets = [f"unix:{path}" for path in hostler.sockets]
        self.parts: dict[str, list[int]] = {}
        self.engines = hostler.engines

    def settle(self) -> None:
        """The engines have ended what the load generator has seen the end of."""

    def stop(self) -> None:
        """Nothing to end."""


class Proxy:
    """A peer in front of the engines."""

    def __init__(self, peer: Peer, folder: Path, hostler: Hostler, engines: Engines):
        """Starts it and waits until a request through it is answered; raises `Missing` when that does not come."""
        self.name = peer.name
        folder.mkdir()
        port = free_port()
        site = Site(folder, port, free_port(), hostler.sockets, engines.urls)
        command = [str(peer.package.find()), *peer.arguments(site)]
        self._log = folder / "output"
        begun = time.monotonic()
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.targets = [f"http://127.0.0.1:{port}"]
        try:
            wait_until(self._is_ready, START_SECONDS, "an answer through it", ASK_PAUSE)
        except BaseException as failure:
            self.stop()
            if isinstance(failure, AssertionError):
                raise Missing(f"{failure}; its last words: {self._last_words()}") from None
            raise
        self.start_seconds = time.monotonic() - begun
        # Its workers, too; nothing else is in its session.
        self.parts = {"proxy": list(alive(session=self._child.pid))}
        self.engines = engines.pids if peer.over_tcp else hostler.engines

    def settle(self) -> None:
        """Nobody counts."""

    def stop(self) -> None:
        """Ends it as its operator would, and what is left of it after that at once."""
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=3)
        for pid in alive(session=self._child.pid):
            with contextlib.suppress(ProcessLookupError):  # it ended with its master
                os.kill(pid, 9)
        self._child.wait(timeout=5)

    def _is_ready(self) -> bool:
        assert self._child.poll() is None, f"it exited {self._child.returncode}"
        return answers(self.targets[0])

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "none"


def answers(url: str) -> bool:
    """Whether a completion of one token comes back from there."""
    body = json.dumps({"model": MODEL, "prompt": "Are you there?", "max_tokens": 1, "stream": False})
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=START_SECONDS)
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status == 200 and bool(json.load(answer)["choices"])
        except (OSError, http.client.HTTPException, ValueError):
            return False


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as chooser:
        chooser.bind(("127.0.0.1", 0))
        return chooser.getsockname()[1]
