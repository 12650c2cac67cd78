"""What lab.py, peers.py and pairs.py share: processes and their ends, `hostler up` over all GPUs, and what processes and engines say of themselves."""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

START_SECONDS = 240

begun = time.monotonic()


def say(text: str) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.monotonic() - begun:6.1f}] {text}", flush=True)


def run(*command: str) -> str:
    """What a short command prints; what it says of its failure otherwise."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        return str(error)
    return done.stdout if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()}"


@contextlib.contextmanager
def process(name: str, command: list[str], environment: dict[str, str] | None = None, cores: set[int] | None = None):
    """A process in a group of its own and the file of its output; the group is gone afterwards.

    `environment` replaces what the process would inherit, `cores` says where it runs.
    """
    log = Path(tempfile.gettempdir()) / f"lab-{name}.log"
    bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True, preexec_fn=bind)
    try:
        yield started, log
    except BaseException:
        say(f"the last lines of {name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:]))
        raise
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            say(f"{name} does not end by SIGTERM")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def wait_until(what: str, check, seconds: float = START_SECONDS):
    """The first true answer of `check`, asked twice a second."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
            answer = check()
            if answer:
                return answer
        time.sleep(0.5)
    raise SystemExit(f"not within {seconds} s: {what}")


def must_run(started: subprocess.Popen, name: str, log: Path) -> None:
    """Ends everything when a process has ended that should not."""
    if started.poll() is not None:
        raise SystemExit(f"{name} ended:\n" + log.read_text(errors="replace")[-3000:])


@dataclasses.dataclass
class Up:
    """`hostler up`, ready: the process, its edge address, its operators' socket, its replicas as `hostler ps --json` shows them."""

    pid: int
    edge: str
    socket: str
    replicas: list[dict]
    log: Path

    @property
    def sockets(self) -> list[str]:
        """The engines', as load generators take them."""
        return [f"unix:{replica['engine_socket']}" for replica in self.replicas]


@contextlib.contextmanager
def hostler_up(options: argparse.Namespace, name: str = "up"):
    """Starts an engine on every GPU and waits until all are ready. `name` is that of its log."""
    command = [options.hostler, "up", "--model", options.model, "--vllm-bin", options.vllm, "--listen", "127.0.0.1:0"]
    command += ["--agents-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *options.up, "--", *options.engine]
    since = time.monotonic()
    with process(name, command) as (up, log):

        def printed(word: str) -> str:
            lines = (line.split() for line in log.read_text(errors="replace").splitlines())
            return next((words[1] for words in lines if len(words) > 1 and words[0] == word), "")

        def ready() -> list[dict]:
            must_run(up, "hostler up", log)
            found = replicas(options.hostler, operators)
            if any(replica["phase"] == "failed" for replica in found):
                raise SystemExit("a replica failed")
            return found if found and all(replica["phase"] == "ready" for replica in found) else []

        operators = wait_until("the router's addresses", lambda: printed("socket"), 60)
        edge = printed("edge").removesuffix("/v1")
        found = wait_until("all replicas are ready", ready)
        say(f"{len(found)} replicas are ready after {time.monotonic() - since:.0f} s")
        yield Up(up.pid, edge, operators, found, log)


def replicas(hostler: str, operators: str) -> list[dict]:
    """The replicas, as `hostler ps --json` shows them."""
    nodes = json.loads(run(hostler, "ps", "--admin", operators, "--json"))["nodes"]
    return [replica for node in nodes for replica in node["replicas"]]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str):
        super().__init__("engine", timeout=10)
        self.path = path

    def connect(self) -> None:
        """As HTTPConnection does it, elsewhere."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def generated(engine: str) -> float:
    """Tokens that an engine has generated, by its own count; `engine` is `unix:PATH` or `http://HOST:PORT`."""
    kind, _, rest = engine.partition(":")
    connection = UnixConnection(rest) if kind == "unix" else http.client.HTTPConnection(rest.removeprefix("//"), timeout=10)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    samples = (line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{"))
    return sum(float(value) for value in samples)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_seconds(pid: int) -> float:
    """CPU time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def gpu_processes() -> str:
    """What still holds memory of a GPU."""
    return run("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader").strip() or "none"


def flags() -> argparse.ArgumentParser:
    """Those that all programs have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hostler", required=True)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=512, help="for each GPU")
    parser.add_argument("--up", action="append", default=[], help="one more argument of hostler up; repeat")
    parser.add_argument("--engine", action="append", default=[], help="one more argument of every engine; repeat")
    parser.add_argument("--json", type=Path)
    return parser


def begin(options: argparse.Namespace) -> None:
    """Says what the machine and the programs are, and lets what is started open as many connections as this user may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    say(run("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader").strip())
    say(run(options.hostler, "--version").strip() + f", {os.cpu_count()} cores")
