"""Topologies for the suites: routers, agents and one engine for each agent, and what `hostler ps` says of them.

An `Engine` says what an agent is told to run, so that one suite can ask simulated engines and real vLLM the same
questions. Single processes are in processes.py.
"""

import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2

from processes import Process, ask, wait_until

# How long a router takes at most to print its addresses, in seconds.
LISTEN_SECONDS = 60
MODEL = "tiny"
# Tokens in a block of the engines with a small cache.
BLOCK = 32
# An agent's options with which its engines live on when it dies.
KEEP = ("--if-agent-dies", "keep", "--takeover-timeout", "60s")


@dataclasses.dataclass(frozen=True)
class Replica:
    """One replica as `hostler ps --json` shows it."""

    node: str
    id: str
    phase: str
    reason: str
    models: list[str]
    restarts: int
    in_flight: int
    engine_pid: int
    engine_socket: str
    served: int
    cache: dict
    """What this router knows of its cached blocks: whether exactly, how many, whether the agent counts the same."""


def replicas(socket: str) -> list[Replica]:
    """What the router with this operators' socket knows, in the order it prints."""
    names = [field.name for field in dataclasses.fields(Replica) if field.name != "node"]
    return [
        Replica(node=node["node"], **{name: replica[name] for name in names})
        for node in json.loads(ask("ps", "--admin", socket, "--json"))["nodes"]
        for replica in node["replicas"]
    ]


class Router(Process):
    """`hostler router`. Given another's addresses, it takes the same ports."""

    def __init__(
        self, name: str, folder: Path, like: "Router | None" = None, variables: dict[str, str] | None = None
    ):
        """Starts it on free ports, or on those of `like`, which has ended; returns once it listens.

        `variables` are more of its environment.
        """
        any_port = "127.0.0.1:0"
        super().__init__(
            name,
            [
                "router",
                *("--listen", host_and_port(like.edge) if like else any_port),
                *("--agents-listen", like.agents if like else any_port),
                *("--admin-listen", host_and_port(like.admin) if like else any_port),
                *("--operators-socket", str(folder / f"{name}.sock")),
            ],
            folder,
            variables,
        )
        self.edge = self.printed("edge", LISTEN_SECONDS)
        self.agents = self.printed("agents", LISTEN_SECONDS)
        self.admin = self.printed("admin", LISTEN_SECONDS)
        self.socket = self.printed("socket", LISTEN_SECONDS)

    def replicas(self) -> list[Replica]:
        """What this router knows of the fleet."""
        return replicas(self.socket)

    def in_flight(self) -> int:
        """Requests not finished yet, over all replicas, whichever router they came through."""
        return sum(replica.in_flight for replica in self.replicas())


class Up(Process):
    """`hostler up`: router, agent and engines of one machine in one process; ready when this returns."""

    def __init__(
        self,
        folder: Path,
        flags: list[str],
        engines: int = 2,
        options: Sequence[str] = (),
        kind: str = "simulated",
        start_seconds: float = 120,
    ):
        """Starts it with engines of this kind; `flags` are theirs, `options` are more of its own."""
        options = [*options, "--engine", kind, "--replicas", str(engines), "--listen", "127.0.0.1:0"]
        options += ["--admin-listen", "127.0.0.1:0", "--operators-socket", str(folder / "up.sock")]
        super().__init__("up", ["up", *options, "--", *flags], folder)
        self.edge = self.printed("edge", LISTEN_SECONDS)
        self.socket = self.printed("socket", LISTEN_SECONDS)
        self.printed("ready", start_seconds)

    replicas = Router.replicas
    in_flight = Router.in_flight


def host_and_port(url: str) -> str:
    """`127.0.0.1:8000` of `http://127.0.0.1:8000/v1`."""
    return url.removeprefix("http://").partition("/")[0]


def own_model(node: str) -> str:
    """The model name that only this node's engine answers to, beside the one that all share."""
    return f"{MODEL}-{node}"


@dataclasses.dataclass(frozen=True)
class Engine:
    """What each agent of a fleet runs, and how long that may take."""

    kind: str
    options: tuple[str, ...]
    """For `hostler agent`."""
    flags: tuple[str, ...]
    """For the engine itself."""
    start_seconds: float
    """From nothing to ready, with both engines starting at once."""
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    """More of its environment."""

    def command(self, node: str) -> list[str]:
        """What follows `hostler agent --node NODE …`."""
        return [*self.options, "--replicas", "1", "--", "--served-model-name", MODEL, own_model(node), *self.flags]


def simulated(*more: str) -> Engine:
    """Engines that emit a token of every running request each 10 ms; `more` are flags that vLLM has too."""
    flags = ("--sim-step-ms", "10", "--enable-prompt-tokens-details", *more)
    return Engine("simulated", ("--engine", "simulated"), flags, start_seconds=120)


def vllm(*more: str, stall: str = "300s") -> Engine:
    """Real vLLM on the CPU with the tiny model, both as tests/engine/install.sh leaves them; `more` are its flags.

    It hangs where no token has come for `stall`. On a machine that is busy it was seen to give none for half a minute.
    """
    cache = cache_folder()
    program, model = cache / "vllm-0.32" / "bin" / "vllm", cache / "tiny-model"
    assert program.exists() and model.exists(), "vLLM or its tiny model is missing: run tests/engine/install.sh"
    flags = (
        *("--enforce-eager", "--max-model-len", "4096"),
        # With bfloat16 and AMX, an answer depends on which others are computed with it: 1 of 32 differed from itself alone.
        *("--dtype", "float32"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        # Left free, a model of random weights fills structured output with blanks and never closes the object.
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *more,
    )
    # A minute for two engines at once on two cores, and several where others use these too.
    options = ("--model", str(model), "--vllm-bin", str(behind_the_rest(program)), "--stall-timeout", stall)
    return Engine("vllm", options, flags, start_seconds=600)


def vllm_rust(*more: str, stall: str = "300s") -> Engine:
    """The same with vLLM's Rust front-end."""
    front_end = cache_folder() / "vllm-rs-0.32.0" / "vllm-rs"
    assert front_end.exists(), "vLLM's Rust front-end is missing: run tests/engine/install.sh"
    python = vllm(*more, stall=stall)
    return dataclasses.replace(
        python,
        kind="vllm-rust",
        options=(*python.options, "--front-end", "rust"),
        variables={"VLLM_RUST_FRONTEND_PATH": str(front_end)},
    )


def tekken() -> tuple[str, ...]:
    """Flags for a tokenizer of Mistral's own kind, whose chat template is code.

    It has as many tokens as the tiny model, and is the beginning of the one that comes with vLLM's dependencies.
    """
    cache = cache_folder()
    [whole] = (cache / "vllm-0.32").glob("lib/python*/site-packages/mistral_common/data/tekken_240911.json")
    vocabulary = json.loads(whole.read_text())
    tokens = json.loads((cache / "tiny-model" / "config.json").read_text())["vocab_size"]
    own = tokens - vocabulary["config"]["default_num_special_tokens"]
    # The third version has the system's message in the last of the user's: no turn begins as the one before.
    vocabulary["config"] |= {"num_vocab_tokens": own, "default_vocab_size": tokens, "version": "v7"}
    folder = cache / "tiny-tekken"
    folder.mkdir(exist_ok=True)
    of_text = {"config": vocabulary["config"], "vocab": vocabulary["vocab"][:own]}
    (folder / "tekken.json").write_text(json.dumps(of_text))
    return "--tokenizer", str(folder), "--tokenizer-mode", "mistral", "--tool-call-parser", "mistral"


def cache_folder() -> Path:
    """Where tests/engine/install.sh puts what it installs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hostler"


def behind_the_rest(program: Path) -> Path:
    """A program that is vLLM with the least claim to the cores. Its threads spin while they wait for each other, and on two cores they left
    a router or an agent without time for ten seconds and more; on a GPU node there are cores for all."""
    nice = program.with_name("nice-vllm")
    # Begins as vLLM's own script does: the agent asks that interpreter for the version.
    script = f"#!{program.with_name('python')}\n" + BEHIND_THE_REST.format(program=str(program))
    if not nice.exists() or nice.read_text() != script:
        nice.write_text(script)
        nice.chmod(0o755)
    return nice


# An engine is in a session of its own, of which Linux makes a scheduling group: without the second step, niceness
# would hold it back against its keeper alone. 5 is a third of a router's claim. The kernel takes one such write in 100 ms from users without privileges.
BEHIND_THE_REST = """\
import os, sys, time
os.nice(15)
for _ in range(20):
    try:
        with open("/proc/self/autogroup", "w") as group:
            group.write("5")
        break
    except BlockingIOError:
        time.sleep(0.1)
    except OSError:
        break
os.execv({program!r}, [{program!r}, *sys.argv[1:]])
"""


class Fleet:
    """Two routers and two agents, `a` and `b`, each agent attached to both routers and running one engine."""

    NODES = ("a", "b")

    def __init__(self, engine: Engine, other: Engine | None = None, options: Sequence[str] = ()):
        """Starts everything and returns when both routers see the engines of all nodes ready.

        Node `b` runs the `other` engine where there is one; `options` are more of the agents' own.
        """
        self.engine, self.other, self.options = engine, other or engine, options
        # Not pytest's own folder: engines listen on Unix sockets below this one, whose paths must stay short.
        self.folder = Path(tempfile.mkdtemp(prefix="hostler-"))
        self.routers: list[Router] = []
        self.agents: list[Process] = []
        self.dead: list[Process] = []
        """Agents that were killed."""
        try:
            for name in ("router-1", "router-2"):
                self.routers.append(Router(name, self.folder))
            for node in self.NODES:
                self.agents.append(self._agent(node))
            self.wait_ready()
            self._warm_up()
        except BaseException:
            self.stop(keep_logs=True)
            raise

    def _agent(self, node: str) -> Process:
        routers = [word for router in self.routers for word in ("--router", router.agents)]
        folders = ["--run-dir", str(self.folder / f"run-{node}"), "--log-dir", str(self.folder / f"log-{node}")]
        engine = self.engine if node == self.NODES[0] else self.other
        command = ["agent", *routers, "--node", node, *folders, *self.options_of(node), *engine.command(node)]
        return Process(f"agent-{node}", command, self.folder, engine.variables)

    def options_of(self, node: str) -> Sequence[str]:
        """More options of a node's agent."""
        return self.options

    def _warm_up(self) -> None:
        """One request to each engine on its own socket: vLLM's first logprobs take it 12 s."""
        for replica in self.routers[0].replicas():
            with self.direct(replica, timeout=600) as engine:
                asked = {"model": MODEL, "prompt": "warm", "max_tokens": 2, "logprobs": 1}
                engine.post("/v1/completions", json=asked).raise_for_status()

    def replica(self, node: str) -> Replica:
        """The one replica of this node, as the first router sees it."""
        return next(replica for replica in self.routers[0].replicas() if replica.node == node)

    @staticmethod
    def direct(replica: Replica, timeout: float = 300) -> httpx2.Client:
        """A client of the engine itself, through its own socket, with nothing of hostler between.

        It keeps no connection: an engine may close one just as the next request goes out.
        """
        once = httpx2.Limits(max_keepalive_connections=0)
        transport = httpx2.HTTPTransport(uds=replica.engine_socket, limits=once)
        return httpx2.Client(transport=transport, base_url="http://engine", timeout=timeout)

    def wait_ready(self) -> None:
        """Returns when every router sees every engine ready; an engine that comes back from a crash is waited for."""

        def all_ready() -> bool:
            for agent in self.agents:
                assert agent.child.poll() is None, f"{agent.name} exited {agent.child.returncode}\n{agent.tail()}"
            phases = [[replica.phase for replica in router.replicas()] for router in self.routers]
            return all(seen == ["ready"] * len(self.NODES) for seen in phases)

        wait_until(all_ready, self.engine.start_seconds, "all engines ready at both routers", pause=0.2)

    def wait_idle(self, seconds: float = 15) -> None:
        """Returns when every router sees no request in flight."""
        wait_until(lambda: not any(router.in_flight() for router in self.routers), seconds, "in-flight back to zero")

    def restart_router(self, position: int) -> Router:
        """Starts a router on the ports of the one that was killed there."""
        old = self.routers[position]
        self.routers[position] = Router(f"{old.name}-again", self.folder, like=old)
        return self.routers[position]

    def kill_agent(self, node: str) -> float:
        """SIGKILL to the agent of a node; returns when."""
        agent = self.agents[self.NODES.index(node)]
        self.dead.append(agent)
        began = time.monotonic()
        agent.kill()
        return began

    def next_agent(self, node: str) -> Process:
        """Another agent, where one was killed."""
        agent = self._agent(node)
        self.agents[self.NODES.index(node)] = agent
        return agent

    def engine_logs(self, last: int = 3000) -> dict[str, str]:
        """The end of each engine log, so many characters."""
        logs = sorted(path for path in self.folder.glob("log-*/**/*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_text(errors="replace")[-last:] for path in logs}

    def stop(self, keep_logs: bool = False) -> None:
        """Ends agents, then routers; each is ended even where one before it left something behind."""
        complaints = []
        replaced = [agent for agent in self.dead if agent not in self.agents]
        for process in [*self.agents, *self.routers, *replaced]:
            try:
                process.stop()
            except AssertionError as complaint:
                complaints.append(str(complaint))
        left = [str(path) for path in self.folder.glob("run-*/**/*.sock")]
        # What a killed agent leaves is for the next one to remove.
        if left and not any(agent.killed for agent in self.agents):
            complaints.append(f"socket files left behind: {left}")
        if not keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)
        assert not complaints, "\n\n".join(complaints)
