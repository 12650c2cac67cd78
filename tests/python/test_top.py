"""`hostler top` as an operator has it: in a terminal, which tmux stands in for, before a real router, an agent and two
simulated engines.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from fleet import MODEL, Router
from processes import Process, binary, environment, wait_until
from terminal import SHOWN_SECONDS, Screen

# Two simulated engines that start at once.
START_SECONDS = 30

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="there is no tmux here")


@pytest.fixture
def folder():
    """A folder with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="hostler-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def router(folder: Path):
    """A router with the agent of node `n`, whose two engines start."""
    router = Router("router", folder)
    engines = ["--engine", "simulated", "--replicas", "2", "--", "--served-model-name", MODEL, "--sim-step-ms", "10"]
    places = ["--run-dir", str(folder / "run"), "--log-dir", str(folder / "log")]
    agent = Process("agent", ["agent", "--router", router.agents, "--node", "n", *places, *engines], folder)
    running = [router]
    yield running
    for process in (agent, *running):
        process.stop()


@pytest.fixture
def top(folder: Path, router: list[Router]):
    """`hostler top` between two lines of its shell, which also says how the terminal is afterwards."""
    command = f"{binary()} top --admin {router[0].socket}"
    screen = Screen(folder, f"echo before; {command}; echo ended $?; stty -a; exec sleep 600")
    yield screen
    screen.end()


def test_an_operator_sorts_replicas_and_drains_one(top: Screen, router: list[Router]):
    top.wait("2 replicas: 2 ready", "sorted by node", seconds=START_SECONDS)
    assert "ready" in top.row("n/0") and "ready" in top.row("n/1") and "attached" in top.row("n"), top.text()
    top.press("s")
    top.wait("sorted by phase")
    top.press("/", "/", "1", "Enter")
    top.wait("filter: /1")
    assert not top.row("n/0") and top.row("n/1").startswith(">"), top.text()
    top.press("Enter")
    top.wait("WHY THE LAST REQUESTS CAME HERE", "THE END OF ITS LOG", "Application startup complete")
    top.press("d")
    top.wait("drain n/1?", "y/N")
    top.press("n")
    top.wait("nothing was ordered")
    assert {replica.id: replica.phase for replica in router[0].replicas()} == {"n/0": "ready", "n/1": "ready"}
    top.press("d")
    top.wait("drain n/1?")
    top.press("y")
    top.wait("ordered: drain n/1")
    top.press("Escape")
    # With nothing in flight it drains within milliseconds, so that the view may not see it do so.
    top.wait("n/1 ready → ", "→ stopped: the engine was asked to stop", "1 stopped")
    assert "stopped" in top.row("n/1"), top.text()
    top.press("l")
    top.wait("release n/1?")
    top.press("y")
    top.wait("2 replicas: 2 ready", seconds=START_SECONDS)
    top.press("Escape")
    wait_until(lambda: top.row("n/0"), SHOWN_SECONDS, "all replicas are shown again")
    top.press("q")
    shown = top.wait("ended 0", " echo ")
    assert shown.startswith("before"), f"the screen from before is there again, and keys are seen\n{shown}"


def test_top_tells_of_a_router_that_is_gone(top: Screen, router: list[Router], folder: Path):
    top.wait("2 replicas: 2 ready", seconds=START_SECONDS)
    router[0].kill()
    top.wait("no answer since", "trying again", "OLD FIGURES", "n/0")
    top.press("d")
    top.wait("no answer since")
    assert "y/N" not in top.text(), "nothing is ordered on the word of old figures"
    router.append(Router("router", folder, like=router[0]))
    shown = top.wait("the router answers again", "2 replicas: 2 ready", seconds=START_SECONDS)
    assert "OLD FIGURES" not in shown and "no answer since" not in shown, shown
    top.press("C-c")
    top.wait("ended 0")


def test_top_needs_a_terminal_but_no_colours(folder: Path, router: list[Router]):
    ask = f"{binary()} top --admin {router[0].socket}"
    screen = Screen(folder, f"TERM=dumb {ask}; echo ended $?; read again; exec {ask}", {"NO_COLOR": "1"})
    try:
        refused = screen.wait("ended 1")
        assert "hostler ps" in refused.replace("\n", ""), refused
        screen.press("Enter")
        screen.wait("2 replicas: 2 ready", seconds=START_SECONDS)
        codes = {int(code) for codes in re.findall(r"\x1b\[([\d;]+)m", screen.text("-e")) for code in codes.split(";")}
        # Bold, underlined and reversed there may be, and the terminal's own colours.
        assert codes <= {0, 1, 2, 4, 7, 39, 49}, codes
    finally:
        screen.end()
    piped = subprocess.run(ask, shell=True, capture_output=True, text=True, timeout=20, env=environment(), check=False)
    assert piped.returncode == 1 and "needs a terminal" in piped.stderr and "hostler ps" in piped.stderr, piped
