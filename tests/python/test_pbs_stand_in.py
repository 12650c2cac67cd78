"""Whether the stand-in for PBS treats a job's processes as a MoM was seen to: what test_pbs.py rests on."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from batch import DONE, STAND_IN, Pbs, state_of
from processes import wait_until

sys.path.insert(0, str(STAND_IN.parent))
from pbs import TERM_TO_KILL, TERM_TO_KILL_OF_SCRIPT, WALLTIME_LATENESS  # noqa: E402

pytestmark = pytest.mark.jobs

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
        wait_until(lambda: self.output().count("started") == 3, DONE, "all have started")
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


@pytest.fixture
def full():
    """A scheduler with two hosts."""
    folder = Path(tempfile.mkdtemp(prefix="hostler-pbs-"))
    running = Pbs(folder / "pbs", hosts=2)
    yield running
    running.stop()
    shutil.rmtree(folder)


def listed(pbs: Pbs, *ids: str) -> dict[str, dict]:
    """What the crate `scheduler` reads: jobs, arrays and their parts."""
    return json.loads(pbs.call("qstat", "-E", "-t", "-f", "-F", "json", *ids)).get("Jobs", {})


def states_of(pbs: Pbs, *ids: str) -> dict[str, str]:
    """The letter of each job's state, by the part of its id before the server."""
    return {id.partition(".")[0]: job["job_state"] for id, job in listed(pbs, *ids).items()}


SLEEP = ("--", "/bin/sleep", "1000")


def test_jobs_without_a_host_wait_and_start_in_turn(full: Pbs):
    array = full.call("qsub", "-N", "agents", "-J", "1-3", "-A", "climate", "-q", "gpu", *SLEEP)
    assert states_of(full, array) == {"11[]": "B", "11[1]": "R", "11[2]": "R", "11[3]": "Q"}
    waiting = full.job("11[3].head")
    assert waiting["comment"].startswith("Job Array Began at "), "a part that waits has the words of its array"
    job = full.call("qsub", *SLEEP)
    assert full.job(job)["comment"].startswith("Not Running: Insufficient amount of resource: ncpus"), full.job(job)
    full.call("qdel", job)
    assert waiting["Account_Name"] == "climate" and waiting["queue"] == "gpu" and "exec_host" not in waiting
    full.call("qdel", "11[1].head")
    full.ended("11[1].head", TERM_TO_KILL + DONE)
    wait_until(lambda: states_of(full, array)["11[3]"] == "R", DONE, "the third has the host of the first")
    assert states_of(full, array) == {"11[]": "B", "11[1]": "X", "11[2]": "R", "11[3]": "R"}


def test_qdel_deletes_waiting_jobs_and_complains_of_gone_ones(full: Pbs):
    array = full.call("qsub", "-J", "1-3", *SLEEP)
    job = full.call("qsub", *SLEEP)
    full.call("qdel", "11[3].head")
    full.call("qdel", job)
    assert states_of(full, array) == {"11[]": "B", "11[1]": "R", "11[2]": "R", "11[3]": "X"}
    qdel = full.folder / "bin" / "qdel"

    def complaints(*ids: str) -> list[str]:
        return subprocess.run([qdel, *ids], capture_output=True, text=True, timeout=30, check=False).stderr.splitlines()

    assert complaints("77.head", job) == ["qdel: Unknown Job Id 77.head", "qdel: Job has finished 12.head"]
    assert complaints("11[3].head") == ["qdel: Request invalid for finished array subjob 11[3].head"]
    full.call("qdel", "11[1].head")
    full.ended("11[1].head", TERM_TO_KILL)


def test_qdel_of_several_parts_loses_some_of_them(full: Pbs):
    array = full.call("qsub", "-J", "1-9", *SLEEP)
    full.call("qdel", "11[3].head", "11[5].head", "11[7].head", "11[9].head")
    states = states_of(full, array)
    assert [states[f"11[{index}]"] for index in (3, 5, 7, 9)] == ["X", "X", "Q", "Q"]
    job = full.call("qsub", *SLEEP)
    full.call("qdel", "11[7].head", job)
    assert full.server.wait(10) == 139
    asked = subprocess.run(
        [full.folder / "bin" / "qstat", "-f", "-F", "dsv"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (asked.returncode, asked.stderr.splitlines()[-1]) == (
        255,
        "qstat: cannot connect to server head (errno=15010)",
    )


def test_qstat_prints_broken_json_and_sound_dsv(full: Pbs):
    words = ("-A", "nan", "--", "/bin/sh", "-c", "sleep 1000", "\\.", 'say "\\"', "é", "a|b\x01c\nd")
    job = full.call("qsub", *words)
    asked = [full.folder / "bin" / "qstat", "-f", "-F", "json", job]
    printed = subprocess.run(asked, capture_output=True, timeout=30, check=False).stdout.decode(errors="replace")
    assert '"Account_Name":nan' in printed and "^\x03^" in printed
    with pytest.raises(json.JSONDecodeError):
        json.loads(printed)
    asked[3:4] = ["dsv", "-D", "\x01"]
    printed = subprocess.run(asked, capture_output=True, timeout=30, check=False).stdout.decode(errors="replace")
    attributes = dict(one.split("=", 1) for one in printed.strip().split("\x01")[1:])
    assert attributes["job_state"] == "R" and attributes["Account_Name"] == "nan"
    assert "a|b\\^Ac\\nd" in attributes["Submit_arguments"], attributes


def test_jobs_are_selected_by_name_and_user_while_they_live(full: Pbs):
    array = full.call("qsub", "-N", "agents", "-J", "1-2", *SLEEP)
    job = full.call("qsub", "-N", "agent", *SLEEP)
    owner = full.job(job)["Job_Owner"].partition("@")[0]
    assert full.call("qselect", "-u", owner, "-N", "agents") == array
    assert full.call("qselect", "-u", owner) == f"{array}\n{job}"
    assert full.call("qselect", "-u", "nobody-else") == ""
    full.call("qdel", job)
    assert full.call("qselect", "-N", "agent") == ""


def test_qstat_shows_several_jobs_with_e_alone(full: Pbs):
    jobs = [full.call("qsub", *SLEEP) for _ in range(3)]
    assert states_of(full, *jobs) == {"11": "R", "12": "R", "13": "Q"}
    full.call("qdel", jobs[2])
    assert states_of(full, *jobs, "77.head") == {"11": "R", "12": "R"}
    without = json.loads(full.call("qstat", "-f", "-F", "json", *jobs[:2]))["Jobs"]
    assert list(without) == jobs[:1]


def test_a_jobs_output_is_put_into_a_folder(full: Pbs):
    folder = full.folder / "out"
    folder.mkdir()
    job = full.call("qsub", "-j", "oe", "-o", f"{folder}/", "--", "/bin/echo", "words")
    assert full.ended(job) == 0
    assert (folder / f"{job}.OU").read_text() == "words\n"


def program(pbs: Watched) -> list[str]:
    """The command of a job whose top process is the first witness."""
    return ["--", sys.executable, str(pbs.folder / "witness.py"), "top", "more"]


def test_qdel_signals_the_session_and_kills_it_later(pbs: Watched):
    job = pbs.submit(*program(pbs))
    began = time.monotonic()
    pbs.call("qdel", job)
    wait_until(lambda: pbs.output().count("SIGTERM") == 2, TERM_TO_KILL - 1, "both of the session hear it")
    assert pbs.ended(job, TERM_TO_KILL + DONE) == 256 + signal.SIGKILL
    assert time.monotonic() - began > TERM_TO_KILL
    assert list(pbs.members()) == ["session"], "without cgroups it survives"
    assert "session SIGTERM" not in (pbs.folder / "witness.o11").read_text()


def test_sigterm_ends_a_scripts_shell_and_hastens_the_kill(pbs: Watched):
    _, *command = program(pbs)
    job = pbs.submit(stdin=f"#PBS -l select=1:ncpus=3 -l walltime=1:00\necho $OMP_NUM_THREADS\n{shlex.join(command)}\n")
    began = time.monotonic()
    pbs.call("qdel", job)
    assert pbs.ended(job) == 256 + signal.SIGTERM
    assert time.monotonic() - began > TERM_TO_KILL_OF_SCRIPT
    printed = (pbs.folder / "witness.o11").read_text()
    assert printed.startswith("3\n") and "top SIGTERM" in printed and "group SIGTERM" in printed, printed
    assert list(pbs.members()) == ["session"]


def test_a_session_is_killed_when_its_top_process_ends(pbs: Watched):
    job = pbs.submit(*program(pbs))
    os.kill(pbs.job(job)["session_id"], signal.SIGKILL)
    pbs.ended(job)
    assert list(pbs.members()) == ["session"]
    assert "SIGTERM" not in (pbs.folder / "witness.o11").read_text()


def test_suspension_stops_every_process_of_the_session_and_no_other(pbs: Watched):
    job = pbs.submit(*program(pbs))
    pbs.call("qsig", "-s", "suspend", job)
    wait_until(lambda: states(pbs) == {"top": "T", "group": "T", "session": "S"}, DONE, "stopped")
    assert pbs.job(job)["job_state"] == "S"
    pbs.call("qsig", "-s", "resume", job)
    wait_until(lambda: "T" not in states(pbs).values(), DONE, "continued")
    pbs.call("qsig", "-s", "SIGUSR1", job)
    wait_until(lambda: pbs.output().count("SIGUSR1") == 2, DONE, "both of the session hear it")


def states(pbs: Watched) -> dict[str, str]:
    """The letter of each witness's state; one that sleeps counts like one that runs."""
    return {name: state_of(pid).replace("R", "S") for name, pid in pbs.members().items()}


def test_the_walltime_ends_late_and_a_rerun_keeps_the_id(pbs: Watched):
    began = time.monotonic()
    job = pbs.submit("-l", "walltime=1", *program(pbs))
    pbs.call("qrerun", job)
    wait_until(lambda: pbs.job(job).get("run_count") == 2, TERM_TO_KILL + DONE, "it runs again")
    began = time.monotonic()
    assert pbs.ended(job, WALLTIME_LATENESS + TERM_TO_KILL + DONE) == 256 + signal.SIGKILL
    assert time.monotonic() - began > WALLTIME_LATENESS + TERM_TO_KILL


def test_users_neither_suspend_nor_rerun_jobs(pbs: Watched):
    job = pbs.call("qsub", "--", "/bin/sleep", "600")
    wait_until(lambda: pbs.job(job)["job_state"] == "R", DONE, "it runs")
    for command in (["qsig", "-s", "suspend", job], ["qrerun", job]):
        call = [pbs.folder / "bin" / command[0], *command[1:]]
        refused = subprocess.run(call, capture_output=True, text=True, check=False)
        assert refused.returncode == 159 and "Unauthorized Request" in refused.stderr, refused
    assert pbs.job(job)["job_state"] == "R"


def test_a_dependent_job_is_held_until_the_other_ends(pbs: Watched):
    first = pbs.call("qsub", "--", "/bin/sleep", "600")
    second = pbs.call("qsub", "-W", f"depend=afterany:{first}", "--", "/bin/sleep", "600")
    held = pbs.job(second)
    assert (held["job_state"], held["Hold_Types"]) == ("H", "s"), held
    pbs.call("qdel", first)
    wait_until(lambda: pbs.job(second)["job_state"] == "R", DONE, "it runs when the first has ended")


# A job of two hosts with two lines each in PBS_NODEFILE.
TWO_HOSTS = ("-l", "select=2:ncpus=1:mpiprocs=2", "-l", "place=scatter:excl")


def script(pbs: Pbs, text: str) -> list[str]:
    """The command of a job that runs these lines."""
    path = pbs.folder / "script.sh"
    path.write_text(text)
    return ["--", "/bin/bash", str(path)]


def test_pbsdsh_counts_the_lines_of_the_nodefile(full: Pbs):
    lines = "for slot in 0 1 2 3 4; do pbsdsh -n $slot -- /bin/sh -c 'echo slot $PBS_NODENUM'; done; sort $PBS_NODEFILE | uniq -c\n"
    job = full.call("qsub", "-N", "slots", "-j", "oe", *TWO_HOSTS, *script(full, lines))
    assert full.ended(job) == 0
    printed = (full.folder / "slots.o11").read_text()
    assert re.findall(r"slot (\d)", printed) == ["0", "0", "1", "1", "0"], printed
    assert re.findall(r"^ +(\d) (\S+)", printed, re.MULTILINE) == [
        ("2", socket.gethostname()),
        ("2", f"{socket.gethostname()}-1"),
    ]


def test_a_job_of_two_hosts_waits_for_both(full: Pbs):
    first = full.call("qsub", *SLEEP)
    spread = full.call("qsub", *TWO_HOSTS, *SLEEP)
    assert states_of(full, first, spread) == {"11": "R", "12": "Q"}
    full.call("qdel", first)
    wait_until(lambda: states_of(full, spread) == {"12": "R"}, TERM_TO_KILL + DONE, "it has both hosts")


def test_a_task_of_pbsdsh_has_less_environment_than_its_job(full: Pbs):
    lines = 'i=$PBS_ARRAY_INDEX; env > job$i.env; pbsdsh -n 2 -- /bin/sh -c "env > task$i.env; exit 7"; echo code $?\n'
    job = full.call("qsub", "-N", "tasks", "-j", "oe", "-J", "1-2", *TWO_HOSTS, *script(full, lines)).replace(
        "[]", "[1]"
    )
    assert full.ended(job) == 0
    files = [(full.folder / f"{name}1.env").read_text().splitlines() for name in ("job", "task")]
    job_has, task_has = (dict(line.split("=", 1) for line in lines) for lines in files)
    lacks = {"LOGNAME", "USER", "SHELL", "PBS_ARRAY_INDEX", "PBS_ARRAY_ID"}
    assert lacks <= job_has.keys() and not lacks & task_has.keys(), task_has
    assert (task_has["PATH"], task_has["PBS_NODENUM"], task_has["PBS_JOBID"]) == ("/bin:/usr/bin", "1", job)
    printed = (full.folder / "tasks.o11.1").read_text()
    assert "exit status 7" in printed and "code 0" in printed, printed


@pytest.fixture
def spread(pbs: Watched):
    """A job of two hosts whose top process is a witness, with another one on the second host."""
    witness = f"{sys.executable} {pbs.folder}/witness.py"
    lines = f"pbsdsh -n 2 -- {witness} far more & exec {witness} top\n"
    pbs.id = pbs.call("qsub", "-N", "witness", "-j", "oe", *TWO_HOSTS, *script(pbs, lines))
    wait_until(lambda: pbs.output().count("started") == 4, DONE, "all have started")
    return pbs


def test_pbsdsh_passes_sigterm_on_to_its_task(spread: Watched):
    spread.call("qdel", spread.id)
    wait_until(
        lambda: {"top SIGTERM", "far SIGTERM", "group SIGTERM"} <= {*spread.output().splitlines()}, DONE, "all hear it"
    )
    assert spread.ended(spread.id, TERM_TO_KILL + DONE) == 256 + signal.SIGKILL
    printed = (spread.folder / "witness.o11").read_text()
    assert "pbsdsh: killing task 0x40000001 signal 15" in printed and printed.count("SIGTERM") == 3, printed
    assert list(spread.members()) == ["session"]


def test_sigusr1_ends_pbsdsh_and_reaches_no_task(spread: Watched):
    spread.call("qsig", "-s", "SIGUSR1", spread.id)
    wait_until(
        lambda: "top SIGUSR1" in spread.output() and not any("pbsdsh" in one for one in spread.left().values()),
        DONE,
        "pbsdsh is gone",
    )
    spread.call("qdel", spread.id)
    spread.ended(spread.id, TERM_TO_KILL + DONE)
    printed = (spread.folder / "witness.o11").read_text()
    assert "far SIG" not in printed and "top SIGTERM" in printed, printed
    assert list(spread.members()) == ["session"]


def test_suspension_and_the_end_of_the_top_process_reach_all_hosts(spread: Watched):
    spread.call("qsig", "-s", "suspend", spread.id)
    wait_until(lambda: states(spread) == {"top": "T", "far": "T", "group": "T", "session": "S"}, DONE, "stopped")
    spread.call("qsig", "-s", "resume", spread.id)
    wait_until(lambda: "T" not in states(spread).values(), DONE, "continued")
    os.kill(spread.job(spread.id)["session_id"], signal.SIGKILL)
    spread.ended(spread.id)
    assert list(spread.members()) == ["session"]
