"""What the events of a batch job's life do to the streams of its engines, with agents in jobs of the stand-in for PBS.

The clients are those of a busy fleet: streams, and short requests all the time, of which none may fail in any test.
After each test nothing of any job is left. Times are the scheduler's (tests/pbs/pbs.py), twice as fast as PBS's own.
"""

import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest

from batch import (
    DONE,
    NOT_RESUMED,
    STAND_IN,
    JobFleet,
    Pbs,
    broken_honestly,
    documented,
    gone_on,
    honest,
    state_of,
    tokens,
    whole,
)
from processes import alive, wait_until
from wire import Stream, all_streaming

sys.path.insert(0, str(STAND_IN.parent))
from pbs import PACE, TERM_TO_KILL, TERM_TO_KILL_OF_SCRIPT, WALLTIME_LATENESS  # noqa: E402

pytestmark = pytest.mark.jobs

# The grace that agents count on is six seconds under PBS.
GRACE = ("--leave-grace", f"{6 / PACE}s")
# What a stream may still need when the signal comes, in seconds, so that it can end within that grace.
CAN_END = 3 / PACE
CANNOT_END = 60
# How long before its end a job leaves that is only seconds long: the sum of both, and a quarter of the job at most.
LEAVES_EARLY = ("--drain-timeout", "4s", "--stop-grace", "1s")
# Exit codes of an agent, see docs/hpc.md.
NOT_TAKEN_IN, NO_ENGINE, CUT_OFF = 3, 4, 5


class PbsFleet(JobFleet):
    """Three jobs of two engines."""

    def __init__(self):
        """The scheduler and the router; jobs are to be submitted."""
        folder = Path(tempfile.mkdtemp(prefix="hostler-"))
        super().__init__(Pbs(folder / "pbs"), folder)
        self.jobs: list[str] = []

    def submit(self, *options: str, flags: tuple[str, ...] = (), engine: tuple[str, ...] = ()) -> str:
        """One job whose top process is the agent."""
        command = self.agent(*GRACE, *options, engine=engine)
        job = self.scheduler.call("qsub", "-N", "agent", "-l", "select=1:ncpus=2", *flags, "--", *command)
        self.jobs.append(job)
        return job

    def submit_array(self, parts: int) -> list[str]:
        """An array of such jobs; returns the ids of its parts."""
        array = self.submit(flags=("-J", f"0-{parts - 1}"))
        return [array.replace("[]", f"[{index}]") for index in range(parts)]

    def submit_three(self) -> list[str]:
        """An array of three, ready."""
        jobs = self.submit_array(3)
        self.wait_ready(3)
        return jobs

    def delete_all(self) -> None:
        """Ends all jobs that still run, and waits for that."""
        for job in self.jobs:
            if any(shown["job_state"] not in "FX" for shown in self.parts(job)):
                self.scheduler.call("qdel", job)

        def over() -> bool:
            return all(shown["job_state"] in "FX" for job in self.jobs for shown in self.parts(job))

        wait_until(over, TERM_TO_KILL + DONE, "all jobs ended", pause=0.1)

    def stop(self) -> None:
        """Ends the scheduler, too."""
        self.scheduler.stop()
        super().stop()

    def parts(self, job: str) -> list[dict]:
        """What qstat says of a job, or of each part of an array."""
        jobs = json.loads(self.scheduler.call("qstat", "-x", "-t", "-f", "-F", "json", job))["Jobs"]
        return [shown for id, shown in jobs.items() if "[]" not in id]


@pytest.fixture
def fleet():
    """A router and a scheduler without jobs; afterwards nothing of any job is left."""
    yield from PbsFleet().watched()


@pytest.mark.smoke
def test_qdel_of_an_agent_loses_no_stream_that_can_end(fleet: PbsFleet):
    jobs = fleet.submit_three()
    fleet.requests()
    streams = fleet.streams_everywhere(CAN_END, on=jobs[1])
    fleet.scheduler.call("qdel", jobs[1])
    whole(streams)
    assert fleet.scheduler.ended(jobs[1]) == 0
    fleet.wait_ready(2)


def test_qdel_breaks_a_long_stream_with_the_jobs_name(fleet: PbsFleet):
    jobs = fleet.submit_three()
    fleet.requests()
    streams = fleet.streams_everywhere(CANNOT_END, on=jobs[1], **NOT_RESUMED)
    fleet.scheduler.call("qdel", jobs[1])
    broken_honestly(streams, jobs[1], "ended by its scheduler")
    assert fleet.scheduler.ended(jobs[1]) == CUT_OFF, "it had left before it was killed"


def test_the_manuals_jobs_serve_and_lose_no_stream(fleet: PbsFleet):
    script = fleet.scheduler.folder / "agents.sh"
    script.write_text(fleet.documented_script("exec hostler agent", *GRACE))
    script.chmod(0o755)
    command = documented("qsub -N agents").replace("$PWD", str(script.parent))
    fleet.jobs.append(fleet.scheduler.call(*shlex.split(command)))
    jobs = [part["array_index"] for part in fleet.parts(fleet.jobs[0])]
    fleet.wait_ready(len(jobs))
    fleet.requests()
    job = fleet.jobs[0].replace("[]", f"[{jobs[0]}]")
    streams = fleet.streams_everywhere(CAN_END, on=job)
    fleet.scheduler.call("qdel", job)
    whole(streams)
    assert fleet.scheduler.ended(job) == 0


def test_qdel_of_a_script_loses_no_stream(fleet: PbsFleet):
    fleet.submit_array(2)
    shortest = ("--leave-grace", f"{TERM_TO_KILL_OF_SCRIPT}s")
    script = fleet.folder / "agent.pbs"
    command = " ".join(fleet.agent(*shortest))
    script.write_text(f"#!/bin/bash\n#PBS -N agent -l select=1:ncpus=2\n#PBS -j oe\nexec {command}\n")
    job = fleet.scheduler.call("qsub", str(script))
    fleet.jobs.append(job)
    fleet.wait_ready(3)
    fleet.requests()
    streams = fleet.streams_everywhere(1, on=job)
    fleet.scheduler.call("qdel", job)
    whole(streams)
    # SIGTERM has ended the shell.
    assert fleet.scheduler.ended(job) == 256 + signal.SIGTERM
    assert (fleet.scheduler.folder / f"agent.o{job.partition('.')[0]}").read_text(), "the output is staged"


def test_sigterm_to_the_agent_loses_no_stream(fleet: PbsFleet):
    jobs = fleet.submit_three()
    fleet.requests()
    streams = fleet.streams_everywhere(CAN_END, on=jobs[0])
    os.kill(fleet.scheduler.job(jobs[0])["session_id"], signal.SIGTERM)
    whole(streams)
    assert fleet.scheduler.ended(jobs[0]) == 0


def test_qdel_overrides_the_engines_own_shutdown_timeout(fleet: PbsFleet):
    fleet.submit_array(2)
    job = fleet.submit(engine=("--shutdown-timeout", "30"))
    fleet.wait_ready(3)
    fleet.requests()
    streams = fleet.streams_everywhere(CAN_END, on=job)
    fleet.scheduler.call("qdel", job)
    whole(streams)
    assert fleet.scheduler.ended(job) == 0


def test_sigusr1_drains_a_job_for_longer_than_the_grace(fleet: PbsFleet):
    jobs = fleet.submit_three()
    fleet.requests()
    streams = fleet.streams_everywhere(6, on=jobs[2])
    fleet.scheduler.call("qsig", "-s", "SIGUSR1", jobs[2])
    whole(streams)
    assert fleet.scheduler.ended(jobs[2]) == 0
    fleet.wait_ready(2)


def test_the_end_of_the_walltime_loses_no_stream(fleet: PbsFleet):
    fleet.submit_array(2)
    walltime = 24
    job = fleet.submit(*LEAVES_EARLY, flags=("-l", f"walltime={walltime}"))
    fleet.wait_ready(3)
    started = fleet.scheduler.job(job)
    fleet.requests()
    streams = fleet.streams(3)
    # How long a step takes is learned from streams.
    wait_until(lambda: any(stream.done for stream in streams.all), DONE, "a stream has ended")
    # From the first one on, all that is asked for now goes on until after the job's end.
    long = [Stream(fleet.edge, tokens(walltime + 5)) for _ in range(6)]
    all_streaming(long)
    before = time.monotonic()
    assert fleet.scheduler.ended(job, walltime + WALLTIME_LATENESS + TERM_TO_KILL + DONE) == 0
    print(f"\nwalltime of {walltime} s: the job had ended {time.monotonic() - before:.1f} s later")
    used = fleet.scheduler.job(job)["resources_used"]["walltime"]
    assert used <= f"00:00:{walltime:02}", f"{used}: it left by the scheduler's signal, not by its own clock: {started}"
    whole(streams.stop())
    whole(long, walltime + DONE)


def test_qdel_moves_the_streams_that_cannot_end_in_time(fleet: PbsFleet):
    jobs = fleet.submit_three()
    fleet.requests()
    streams = fleet.streams_everywhere(CANNOT_END, on=jobs[1])
    fleet.scheduler.call("qdel", jobs[1])
    gone_on(streams)
    assert fleet.scheduler.ended(jobs[1]) == 0


def test_an_ending_jobs_stream_breaks_with_deadline_and_job(fleet: PbsFleet):
    walltime = 24
    job = fleet.submit(*LEAVES_EARLY, flags=("-l", f"walltime={walltime}"))
    fleet.wait_ready(1)
    streams = [Stream(fleet.edge, tokens(CANNOT_END)) for _ in range(4)]
    all_streaming(streams)
    for stream in streams:
        stream.join(walltime + WALLTIME_LATENESS + DONE)
        honest(stream, job, "deadline")
    assert fleet.scheduler.ended(job) == CUT_OFF


def test_a_requeued_job_loses_no_stream_and_serves_again(fleet: PbsFleet):
    jobs = fleet.submit_three()
    fleet.requests()
    before = fleet.node(jobs[1])
    streams = fleet.streams_everywhere(CAN_END, on=jobs[1])
    fleet.scheduler.call("qrerun", jobs[1])
    whole(streams)
    wait_until(lambda: fleet.scheduler.job(jobs[1])["run_count"] == 2, DONE, "its second run began", pause=0.1)
    fleet.wait_ready(3)
    after = fleet.node(jobs[1])
    assert (before["job"]["run"], after["job"]["run"]) == (1, 2), (before, after)
    assert len({node["node"] for node in fleet.nodes()}) == 3


def test_a_suspended_jobs_engines_stop_and_serve_again(fleet: PbsFleet):
    jobs = fleet.submit_three()
    fleet.requests()
    engines = fleet.engines(jobs[0])
    assert all(engines)
    streams = fleet.streams_everywhere(CANNOT_END, on=jobs[0])
    fleet.scheduler.call("qsig", "-s", "suspend", jobs[0])
    wait_until(lambda: all(state_of(pid) == "T" for pid in engines), DONE, "the engines are suspended")
    # Nobody waits for a suspended job for long.
    gone_on(streams)
    fleet.scheduler.call("qsig", "-s", "resume", jobs[0])
    wait_until(lambda: not any(state_of(pid) == "T" for pid in engines), DONE, "the engines continue")
    fleet.wait_ready(3)
    assert fleet.engines(jobs[0]) == engines, "the same engines"
    # The others are faster for a while, as far as the router has seen.
    served = fleet.served(jobs[0])
    wait_until(lambda: fleet.served(jobs[0]) > served, DONE, "it serves again")


def test_a_short_suspension_loses_no_stream(fleet: PbsFleet):
    jobs = fleet.submit_three()
    fleet.requests()
    streams = fleet.streams_everywhere(4, on=jobs[0])
    fleet.scheduler.call("qsig", "-s", "suspend", jobs[0])
    wait_until(lambda: all(state_of(pid) == "T" for pid in fleet.engines(jobs[0])), DONE, "the engines are suspended")
    time.sleep(1)
    fleet.scheduler.call("qsig", "-s", "resume", jobs[0])
    whole(streams)


@pytest.mark.parametrize("killed", ["agent", "session"])
def test_nothing_of_a_job_whose_agent_is_killed_is_left(fleet: PbsFleet, killed: str):
    jobs = fleet.submit_three()
    fleet.requests()
    streams = fleet.streams_everywhere(CANNOT_END, on=jobs[1])
    engines = fleet.engines(jobs[1])
    assert all(engines)
    if killed == "agent":
        os.kill(fleet.scheduler.job(jobs[1])["session_id"], signal.SIGKILL)
    else:
        fleet.scheduler.call("qsig", "-s", "SIGKILL", jobs[1])
    began = time.monotonic()
    wait_until(lambda: not any(state_of(pid) for pid in engines), DONE, "the engines are gone")
    session = fleet.scheduler.job(jobs[1])["session_id"]
    wait_until(lambda: not alive(session=session), DONE, "nothing of the session is left")
    print(f"\n{killed} killed: nothing left after {time.monotonic() - began:.2f} s")
    gone_on(streams)
    # What a killed agent leaves on disk is for the next one on that host to remove.
    assert len(fleet.remains()) == 3
    fleet.submit()
    fleet.wait_ready(3)
    assert len(fleet.remains()) == 3


def test_parts_of_an_array_serve_under_their_own_names(fleet: PbsFleet):
    jobs = fleet.submit_three()
    nodes = fleet.nodes()
    assert len({node["node"] for node in nodes}) == 3, nodes
    assert sorted(node["job"]["id"] for node in nodes) == sorted(jobs)
    assert sorted(node["job"]["array_index"] for node in nodes) == [0, 1, 2]
    assert all(Path(path).is_dir() for path in fleet.remains())


def test_an_agent_that_reaches_no_router_gives_its_job_back(fleet: PbsFleet):
    fleet.submit_array(1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        fleet.agents_address = f"127.0.0.1:{nobody.getsockname()[1]}"
        job = fleet.submit("--attach-timeout", "2s")
        assert fleet.scheduler.ended(job) == NOT_TAKEN_IN
    fleet.wait_ready(1)


def test_an_agent_without_engines_gives_its_job_back(fleet: PbsFleet):
    fleet.submit_array(1)
    job = fleet.submit(engine=("--sim-fail-start",))
    assert fleet.scheduler.ended(job) == NO_ENGINE
    gone = next(gone for gone in fleet.listed()["gone_jobs"] if gone["job"]["id"] == job)
    print(f"\n{gone}")
    assert "engine ended" in gone["reason"], gone
    fleet.wait_ready(1)
