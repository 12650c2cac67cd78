"""An engine in a container (`agent.image`) lives and dies as without one; with simulated engines.

The runtime is the stand-in of tests/apptainer, or what HOSTLER_TEST_APPTAINER names. The image is a folder with a shell
and a `vllm` that is the simulated engine. Nothing of the host is mounted by itself: what works here works where a site
has turned that off.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from one_machine import END, START, run
from processes import REPOSITORY, Process, binary, descendants, running, wait_until

STAND_IN = REPOSITORY / "tests" / "apptainer" / "apptainer.py"
ANY_PORT = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
MODEL = "in-a-container"
# The image's program: it needs the model's weights, says what it sees, and has no flag of vLLM that the simulation lacks.
VLLM = """\
#!/bin/sh
[ "$1" = --version ] && { echo 0.11.0; exit; }
[ -r "$2/weights" ] || { echo "no weights in $2" >&2; exit 1; }
echo "sees PYTHONPATH=$PYTHONPATH CC=$CC OF_THE_USER=$OF_THE_USER image=$(cat /image)"
trouble=$(cat "$2/trouble")
[ -n "$trouble" ] && { echo "trouble: $trouble"; eval "$trouble"; }
model=$2
while [ "$1" != --uds ]; do shift; done
exec hostler sim engine "$model" --uds "$2" --sim-step-ms 10 --served-model-name in-a-container
"""


def has_user_namespaces() -> bool:
    """Whether a process of this user may have mounts of its own, as the stand-in needs."""
    child = os.fork()
    if child == 0:
        kernel = ctypes.CDLL(None)
        # Where AppArmor restricts them, only the second call fails.
        os._exit(kernel.unshare(0x1002_0000) or kernel.mount(b"none", b"/", None, 0x4_4000, None))
    return os.waitpid(child, 0)[1] == 0


pytestmark = pytest.mark.skipif(not has_user_namespaces(), reason="this kernel lets users have no user namespaces")


def copy(file: Path, place: Path):
    """Puts a file of the host into the image, as a second name of it where that is possible."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.hardlink_to(file.resolve())
    except OSError:
        shutil.copy(file, place)


def libraries(program: Path) -> list[Path]:
    """The shared libraries of a program, its loader among them."""
    printed = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=START, check=False).stdout
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", printed)]


@pytest.fixture(scope="session")
def image(tmp_path_factory) -> Path:
    """An unpacked image."""
    root = tmp_path_factory.mktemp("image")
    programs = {"sh": Path("/bin/sh"), "cat": Path("/bin/cat"), "hostler": binary()}
    for name, program in programs.items():
        copy(program, root / "usr" / "local" / "bin" / name)
        for library in libraries(program):
            if not (place := root / str(library).lstrip("/")).exists():
                copy(library, place)
    copy(Path("/bin/sh"), root / "bin" / "sh")
    vllm = root / "usr" / "local" / "bin" / "vllm"
    vllm.write_text(VLLM)
    vllm.chmod(0o755)
    (root / "image").write_text("of the test\n")
    return root


class Contained:
    """`hostler up` with an engine in a container, whose model's weights are a link out of its folder."""

    def __init__(self, folder: Path, runtime: dict[str, str], image: Path):
        """Starts nothing yet."""
        self.folder, self.image = folder, image
        self.model = folder / "models" / "m"
        self.model.mkdir(parents=True)
        (folder / "blobs").mkdir()
        (folder / "blobs" / "weights").write_text("")
        (self.model / "weights").symlink_to(folder / "blobs" / "weights")
        self.trouble("")
        home = folder / "home"
        home.mkdir()
        # Apptainer asks for rights that a root of a container lacks, unless it is told to take a user namespace.
        site = {"APPTAINER_NO_MOUNT": "tmp,home,cwd", "APPTAINER_USERNS": "1"}
        ours = {"HOME": str(home), "PYTHONPATH": "/of/the/host", "CC": "/opt/cray/cc", "OF_THE_USER": "kept"}
        self.variables = runtime | site | ours

    def trouble(self, script: str):
        """What the engine does in place of serving, from its next start on."""
        (self.model / "trouble").write_text(script)

    def options(self) -> list[str]:
        """What follows `hostler up`."""
        program = os.environ.get("HOSTLER_TEST_APPTAINER", str(STAND_IN))
        return [str(self.model), "--image", str(self.image), "--container", program, *ANY_PORT]

    def start(self, *more: str) -> tuple[Process, str]:
        """Starts it, and returns it with the edge once the engine serves."""
        up = Process("up", ["up", *self.options(), *more], self.folder, self.variables)
        edge = up.printed("edge", START)
        up.printed("ready", START)
        return up, edge

    def engine_log(self) -> str:
        """What the engine has printed in all its lives."""
        [log] = (self.folder / "state" / "hostler" / "logs").glob("*-e0.log")
        return log.read_text()


@pytest.fixture
def contained(tmp_path, runtime, image) -> Contained:
    """What the tests start."""
    return Contained(tmp_path, runtime, image)


def parts(up: Process) -> dict[str, int]:
    """The processes between the agent and its engine: `keeper`, `parent` of the container, `engine`."""

    def found() -> dict[str, int] | None:
        family = descendants(up.child.pid)
        engines = [one for one in family if " sim engine " in f" {one.command} "]
        parents = {one.pid: one.parent for one in family}
        if len(engines) != 1 or engines[0].parent not in parents:
            return None
        engine = engines[0]
        return {"keeper": parents[engine.parent], "parent": engine.parent, "engine": engine.pid}

    return wait_until(found, START, "an engine runs in a container")


def stream(edge: str, tokens: int, has_begun=lambda: None) -> str:
    """A streamed answer, as it came; calls `has_begun` when it begins."""
    body = {"model": MODEL, "prompt": "a b c", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{edge}/completions", json=body, timeout=START) as answer:
        pieces = answer.iter_text()
        first = next(pieces)
        has_begun()
        return first + "".join(pieces)


def failed(up: Process, times: int = 1) -> str:
    """The line of the engine's last failure, once there were so many."""

    def lines() -> str | None:
        found = [line for line in up.log.read_text().splitlines() if " ERROR " in line]
        return found[-1] if len(found) >= times else None

    return wait_until(lines, START, "the engine's failure is told")


def test_the_engine_has_the_images_files_and_what_of_the_host_it_needs(contained):
    up, edge = contained.start()
    assert "[DONE]" in stream(edge, 5)
    # What is left of PYTHONPATH is the agent's own plugin.
    assert re.search(r"sees PYTHONPATH=\S+/e0/python CC= OF_THE_USER=kept image=of the test", contained.engine_log())
    engine = parts(up)["engine"]
    assert os.readlink(f"/proc/{engine}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
    assert os.readlink(f"/proc/{engine}/ns/pid") == os.readlink("/proc/self/ns/pid")
    up.stop()


@pytest.mark.parametrize("victim", ["engine", "parent", "keeper"])
def test_a_killed_process_of_the_container_takes_the_rest_with_it(contained, victim):
    up, edge = contained.start()
    before = parts(up)
    os.kill(before[victim], signal.SIGKILL)
    gone = set(before.values())
    wait_until(lambda: not gone & {one.pid for one in running()}, END, "nothing is left of the engine")
    assert "SIGKILL" in failed(up) or victim == "keeper"
    assert parts(up)["engine"] != before["engine"]
    wait_until(lambda: "[DONE]" in stream(edge, 5), START, "the next engine serves")
    up.stop()


def test_a_killed_agent_leaves_nothing(contained):
    up, _ = contained.start()
    before = parts(up)
    up.kill()
    wait_until(lambda: not set(before.values()) & {one.pid for one in running()}, END, "nothing is left of the engine")
    up.stop()


def test_an_agent_and_a_keeper_that_are_killed_at_once_leave_nothing(contained):
    up, _ = contained.start()
    before = parts(up)
    sessions = up.sessions()
    os.kill(up.child.pid, signal.SIGSTOP)
    up.killed = True
    # The agent can do nothing between the two.
    os.kill(before["keeper"], signal.SIGKILL)
    os.kill(up.child.pid, signal.SIGKILL)
    up.child.wait(END)
    wait_until(lambda: not sessions & {one.session for one in running()}, END, "nothing is left of the engine")
    up.stop()


def test_a_drain_lets_running_streams_end(contained):
    up, edge = contained.start()
    begun = threading.Barrier(4, timeout=START)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(stream, edge, 100, begun.wait) for _ in range(3)]
        begun.wait()
        up.child.terminate()
        assert all("[DONE]" in one.result(START) for one in answers)
    assert up.child.wait(END) == 0
    up.stop()


def test_a_suspended_agent_suspends_the_whole_container(contained):
    up, edge = contained.start()
    own = set(parts(up).values()) - {parts(up)["keeper"]}
    states = lambda: {one.state for one in running() if one.pid in own}  # noqa: E731
    os.kill(up.child.pid, signal.SIGSTOP)
    wait_until(lambda: states() == {"T"}, START, "the container is stopped")
    os.kill(up.child.pid, signal.SIGCONT)
    wait_until(lambda: "T" not in states(), START, "the container goes on")
    assert "[DONE]" in stream(edge, 5)
    assert {one.pid for one in running()} >= own, "in the same life"
    up.stop()


@pytest.mark.parametrize(("end", "told"), [("kill -SEGV $$", "segmentation fault"), ("exit 7", "exit status: 7")])
def test_the_programs_end_is_told_as_without_a_container(contained, end, told):
    contained.trouble(end)
    up = Process("up", ["up", *contained.options()], contained.folder, contained.variables)
    up.printed("edge", START)
    wait_until(lambda: told in up.log.read_text(), START, f"{told} is told")
    up.child.terminate()
    up.child.wait(END)
    up.killed = True
    up.stop()


def test_what_keeps_a_container_from_starting_is_said_at_once(contained, tmp_path):
    model, image, runtime = str(contained.model), str(contained.image), contained.options()[4]

    def said(image: str, runtime: str, *more: str) -> str:
        ended = run(contained.variables, "plan", model, "--image", image, "--container", runtime, *more)
        assert ended.returncode == 1, ended
        return ended.stderr

    assert "the image has no such program" in said(image, runtime, "--vllm-bin", "vllm-of-another-name")
    assert "cannot find `/nowhere/apptainer`" in said(image, "/nowhere/apptainer")
    assert "cannot read the image" in said(str(tmp_path / "nowhere.sif"), runtime)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'ERROR  : Failed to create user namespace: not allowed to create user namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert "ask the site's support for user namespaces" in said(image, str(broken))
