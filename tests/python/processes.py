"""hostler's processes as the suites run them: start one, read what it prints, end it with all it started.

Every process gets a session of its own, and so does each engine of an agent, with its keeper. Whatever still carries
the number of one of these sessions afterwards was left behind, and `Process.stop` says so. Topologies of several
processes are in fleet.py.
"""

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# How long a command that only asks (`hostler ps`) may take, in seconds.
ASK_SECONDS = 60
# How long a drain with nothing left in flight may take, in seconds: vLLM alone needs about five on two cores.
STOP_SECONDS = 120

# All that were started in this run and did not end well yet, newest last; conftest.py shows their logs on a failure.
started: list["Process"] = []


def binary() -> Path:
    """The program under test: HOSTLER_BIN, else the release build, else the debug build."""
    if chosen := os.environ.get("HOSTLER_BIN"):
        return Path(chosen).resolve()
    for build in ("release", "debug"):
        candidate = REPOSITORY / "target" / build / "hostler"
        if candidate.exists():
            return candidate
    raise FileNotFoundError("no hostler binary: run `cargo build --release`, or set HOSTLER_BIN")


def environment() -> dict[str, str]:
    """This process's environment without settings of hostler's own and of traces, which would leak into the run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOSTLER_", "OTEL_"))}
    # vLLM's installation has no compiled modules: with this set, which images for containers do, each process of an
    # engine would compile some 5,000 of them anew.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    # One compute thread for each engine on the CPU: more of them wait for each other by spinning, and two such engines
    # starve everything else on a small machine for seconds.
    kept |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    kept |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # Adds the route that empties the prefix cache, and has engines keep the responses that they give.
    return kept | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}


def ask(*arguments: str) -> str:
    """Runs a hostler command that ends by itself and returns what it printed; raises when it failed."""
    ended = subprocess.run(
        [binary(), *arguments], capture_output=True, text=True, timeout=ASK_SECONDS, env=environment(), check=False
    )
    assert ended.returncode == 0, f"hostler {' '.join(arguments)} exited {ended.returncode}: {ended.stderr.strip()}"
    return ended.stdout


def wait_until(condition, seconds: float, what: str, pause: float = 0.02):
    """Asks `condition` again and again until its answer is true and returns that; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if answer := condition():
            return answer
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(pause)


# Below those that Linux gives to clients (32768 and up), and other ones for each worker of the suite, so that nobody takes one meanwhile.
_ports = itertools.count(20_000 + 4_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) + random.randrange(2_000))


def free_port() -> int:
    """A port that nobody has, for a server that is to be given one."""
    while True:
        port = next(_ports)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


def alive(*, session: int | None = None, group: int | None = None) -> dict[int, str]:
    """The processes of a session or of a process group that still run, by pid with their command line."""
    wanted = [one for one in running() if (one.session == session if session is not None else one.group == group)]
    return {one.pid: one.command for one in wanted}


@dataclasses.dataclass(frozen=True)
class Running:
    """A process as the kernel shows it."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    command: str


def running() -> list[Running]:
    """All processes.

    Zombies do not count: in a container without an init nobody collects the grandchildren of a killed engine.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name may hold spaces and brackets; the fields after the last bracket do not.
            state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended while we looked
        if state not in "ZX":
            found.append(Running(int(entry.name), state, *map(int, numbers), command))
    return found


def descendants(pid: int) -> list[Running]:
    """What a process has started, and what that has started."""
    family, processes = {pid}, running()
    while more := {one.pid for one in processes if one.parent in family} - family:
        family |= more
    return [one for one in processes if one.pid in family - {pid}]


def shared_memory(group: int) -> set[str]:
    """The files in shared memory that the processes of a group have mapped and that still have a name."""
    mapped = set()
    for pid in alive(group=group):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {line.split()[-1] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return {path for path in mapped if Path(path).exists()}


class Process:
    """One running hostler command: its standard output as lines, its standard error in a file."""

    def __init__(self, name: str, arguments: list[str], folder: Path, variables: dict[str, str] | None = None):
        """Starts `hostler ARGUMENTS`; `name` names its log file in `folder`, `variables` are more of its environment."""
        self.name = name
        self.log = folder / f"{name}.stderr"
        self.killed = False
        self._sessions: set[int] = set()
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [binary(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=environment() | (variables or {}),
            )
        self.lines: list[str] = []
        self._printed = threading.Condition()
        threading.Thread(target=self._collect, daemon=True).start()
        started.append(self)

    def _collect(self) -> None:
        for line in self.child.stdout:
            with self._printed:
                self.lines.append(line.rstrip("\n"))
                self._printed.notify_all()

    def printed(self, word: str, seconds: float) -> str:
        """Waits for the output line that begins with `word` and returns the rest of it."""

        deadline = time.monotonic() + seconds
        with self._printed:
            while (rest := dict(line.partition(" ")[::2] for line in self.lines).get(word)) is None:
                left = deadline - time.monotonic()
                assert self.child.poll() is None, f"{self.name} exited {self.child.returncode}\n{self.tail()}"
                assert left > 0, f"{self.name} printed no line {word!r} within {seconds} s\n{self.tail()}"
                self._printed.wait(min(left, 0.1))
            return rest.strip()

    def tail(self, characters: int = 4000) -> str:
        """The end of its log and all it printed, for a failure's report."""
        # A fleet that was stopped has taken its folder with it.
        log = self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""
        return "\n".join([*self.lines, log])

    def sessions(self) -> set[int]:
        """Its own session, and those of all that it has started and that still lives, or did when it was last seen."""
        self._sessions |= {self.child.pid} | {one.session for one in descendants(self.child.pid)}
        return self._sessions

    def left(self) -> dict[int, str]:
        """What lives in these sessions, by pid with its command line."""
        sessions = self._sessions | {self.child.pid}
        return {one.pid: one.command for one in running() if one.session in sessions}

    def kill(self) -> None:
        """SIGKILL to this one process, as a crash would be; what it started is left to itself."""
        self.killed = True
        self.sessions()
        self.child.kill()
        self.child.wait(timeout=60)

    def stop(self) -> None:
        """Ends it with SIGTERM and checks that nothing of its sessions is left; cleans up even where that fails."""
        complaint = None
        self.sessions()
        if not self.killed:
            self.child.terminate()
            try:
                if code := self.child.wait(timeout=STOP_SECONDS):
                    complaint = f"{self.name} exited {code}"
            except subprocess.TimeoutExpired:
                complaint = f"{self.name} was still running {STOP_SECONDS} s after SIGTERM"
                self.kill()
        try:
            wait_until(lambda: not self.left(), 30, f"{self.name} ended with all it started")
        except AssertionError:
            left = self.left()
            complaint = complaint or f"{self.name} left processes behind: {left}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.kill(pid, signal.SIGKILL)
        assert complaint is None, f"{complaint}\n{self.tail()}"
        started.remove(self)
