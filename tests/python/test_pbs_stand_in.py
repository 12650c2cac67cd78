"""Whether the stand-in for PBS treats a job's processes as a MoM was seen to: what test_pbs.py rests on."""

import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from batch import STAND_IN, Pbs, state_of
from processes import wait_until

sys.path.insert(0, str(STAND_IN.parent))
from pbs import TERM_TO_KILL, TERM_TO_KILL_OF_SCRIPT, WALLTIME_LATENESS  # noqa: E402

# Says when which signal comes; SIGTERM does not end it. With a second argument it starts two more of its kind: one in a
# process group of its own, one in a session of its own.
WITNESS = """
import os, signal, subprocess, sys, time
name = sys.argv[1]
def heard(number, _):
    print(name, signal.Signals(number).name, flush=True)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, heard)
if sys.argv[2:]:
    subprocess.Popen([sys.executable, __file__, "group"], process_group=0)
    subprocess.Popen([sys.executable, __file__, "session"], start_new_session=True)
print(name, "started", flush=True)
while True:
    time.sleep(0.05)
"""


class Watched(Pbs):
    """A scheduler with one job."""

    def __init__(self, folder: Path):
        """No job yet."""
        super().__init__(folder)
        (folder / "witness.py").write_text(WITNESS)
        self.id = ""

    def submit(self, *flags: str, stdin: str = "") -> str:
        """Submits the job, and waits until all it starts has started."""
        self.id = self.call("qsub", "-N", "witness", "-j", "oe", *flags, stdin=stdin)
        wait_until(lambda: self.output().count("started") == 3, 20, "all have started")
        return self.id

    def output(self) -> str:
        """What the job has printed, as long as it runs."""
        path = self.folder / "spool" / f"{self.id}.OU"
        return path.read_text() if path.exists() else ""

    def members(self) -> dict[str, int]:
        """The living witnesses by name."""
        commands = {pid: line.split() for pid, line in self.left().items()}
        return {words[2]: pid for pid, words in commands.items() if words[1:2] == [f"{self.folder}/witness.py"]}


@pytest.fixture
def pbs():
    """A scheduler without jobs; what it leaves is killed."""
    folder = Path(tempfile.mkdtemp(prefix="hostler-pbs-"))
    running = Watched(folder / "pbs")
    yield running
    running.stop()
    shutil.rmtree(folder)


def program(pbs: Watched) -> list[str]:
    """The command of a job whose top process is the first witness."""
    return ["--", sys.executable, str(pbs.folder / "witness.py"), "top", "more"]


def test_qdel_signals_the_session_and_kills_it_later_and_leaves_what_left_the_session(pbs: Watched):
    job = pbs.submit(*program(pbs))
    began = time.monotonic()
    pbs.call("qdel", job)
    wait_until(lambda: pbs.output().count("SIGTERM") == 2, 2, "both of the session hear it")
    assert pbs.ended(job, TERM_TO_KILL + 5) == 256 + signal.SIGKILL
    assert time.monotonic() - began > TERM_TO_KILL
    assert list(pbs.members()) == ["session"], "without cgroups it survives"
    assert "session SIGTERM" not in (pbs.folder / "witness.o11").read_text()


def test_sigterm_ends_the_shell_of_a_script_and_the_rest_is_killed_sooner(pbs: Watched):
    _, *command = program(pbs)
    job = pbs.submit(stdin=f"#PBS -l select=1:ncpus=3 -l walltime=1:00\necho $OMP_NUM_THREADS\n{shlex.join(command)}\n")
    began = time.monotonic()
    pbs.call("qdel", job)
    assert pbs.ended(job, TERM_TO_KILL) == 256 + signal.SIGTERM
    assert time.monotonic() - began > TERM_TO_KILL_OF_SCRIPT
    printed = (pbs.folder / "witness.o11").read_text()
    assert printed.startswith("3\n") and "top SIGTERM" in printed and "group SIGTERM" in printed, printed
    assert list(pbs.members()) == ["session"]


def test_when_the_top_process_ends_the_session_is_killed_without_a_word(pbs: Watched):
    job = pbs.submit(*program(pbs))
    os.kill(pbs.job(job)["session_id"], signal.SIGKILL)
    pbs.ended(job, 2)
    assert list(pbs.members()) == ["session"]
    assert "SIGTERM" not in (pbs.folder / "witness.o11").read_text()


def test_suspension_stops_every_process_of_the_session_and_no_other(pbs: Watched):
    job = pbs.submit(*program(pbs))
    pbs.call("qsig", "-s", "suspend", job)
    wait_until(lambda: states(pbs) == {"top": "T", "group": "T", "session": "S"}, 2, "stopped")
    assert pbs.job(job)["job_state"] == "S"
    pbs.call("qsig", "-s", "resume", job)
    wait_until(lambda: "T" not in states(pbs).values(), 2, "continued")
    pbs.call("qsig", "-s", "SIGUSR1", job)
    wait_until(lambda: pbs.output().count("SIGUSR1") == 2, 2, "both of the session hear it")


def states(pbs: Watched) -> dict[str, str]:
    """The letter of each witness's state; one that sleeps counts like one that runs."""
    return {name: state_of(pid).replace("R", "S") for name, pid in pbs.members().items()}


def test_the_walltime_ends_late_and_a_rerun_keeps_the_id(pbs: Watched):
    began = time.monotonic()
    job = pbs.submit("-l", "walltime=1", *program(pbs))
    pbs.call("qrerun", job)
    wait_until(lambda: pbs.job(job).get("run_count") == 2, TERM_TO_KILL + 10, "it runs again")
    began = time.monotonic()
    assert pbs.ended(job, WALLTIME_LATENESS + TERM_TO_KILL + 10) == 256 + signal.SIGKILL
    assert time.monotonic() - began > WALLTIME_LATENESS + TERM_TO_KILL
