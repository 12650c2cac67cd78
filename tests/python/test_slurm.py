"""The events of test_pbs.py on real Slurm: two nodes on this host, started by slurm.py. tests/slurm/run.sh runs it."""

import contextlib
import os
import shlex
import signal
import tempfile
import time
from pathlib import Path

import pytest

from batch import DONE, NOT_RESUMED, JobFleet, broken_honestly, gone_on, marked, state_of, whole
from processes import binary, wait_until
from slurm import KILL_WAIT, Slurm

pytestmark = pytest.mark.slurm

# What a stream may still need when the signal comes, in seconds, so that it can end within KillWait.
CAN_END = 4
CANNOT_END = 90


class SlurmFleet(JobFleet):
    """Jobs of one task, which is the agent."""

    def submit(self, *flags: str, options: tuple[str, ...] = ()) -> str:
        """One job; `flags` are more of its directives, `options` more of its agent's."""
        directives = "\n".join(f"#SBATCH {flag}" for flag in ("--job-name=agent", "--ntasks=1", "--requeue", *flags))
        return self.scheduler.submit(f"#!/bin/bash\n{directives}\nsrun {shlex.join(self.agent(*options))}\n")

    def delete_all(self) -> None:
        """Cancels every job, and waits until the nodes are idle."""
        self.scheduler.call("scancel", "--user=root")
        self.scheduler.wait_idle()

    def end(self, job: str) -> dict[str, str]:
        """Waits until it has ended, and says how."""
        return self.scheduler.ended(job, KILL_WAIT + DONE)


@pytest.fixture(scope="module")
def slurm():
    """One Slurm for all tests."""
    running = Slurm(Path(tempfile.mkdtemp(prefix="hostler-slurm-")) / "s")
    yield running
    running.stop()


@pytest.fixture
def fleet(slurm: Slurm):
    """A router and a scheduler without jobs; afterwards nothing of any job is left."""
    yield from SlurmFleet(slurm, Path(tempfile.mkdtemp(prefix="hostler-"))).watched()


def test_scancel_loses_no_stream_that_can_end(fleet: SlurmFleet):
    jobs = [fleet.submit("--time=10") for _ in range(3)]
    fleet.wait_ready(3)
    fleet.requests()
    streams = fleet.streams_everywhere(CAN_END, on=jobs[1])
    fleet.scheduler.call("scancel", jobs[1])
    whole(streams)
    fleet.end(jobs[1])
    fleet.wait_ready(2)


def test_the_manuals_jobs_serve_and_lose_no_stream(fleet: SlurmFleet):
    script = fleet.documented_script("#SBATCH")
    # There are no GPUs here.
    array = fleet.scheduler.submit(script.replace(" --gpus-per-node=4", ""))
    fleet.wait_ready(4)
    fleet.requests()
    streams = fleet.streams_everywhere(CAN_END, on=f"{array}_2")
    fleet.scheduler.call("scancel", f"{array}_2")
    whole(streams)
    fleet.wait_ready(3)


def test_scancel_breaks_a_long_stream_with_the_jobs_name(fleet: SlurmFleet):
    jobs = [fleet.submit("--time=10") for _ in range(3)]
    fleet.wait_ready(3)
    fleet.requests()
    streams = fleet.streams_everywhere(CANNOT_END, on=jobs[1], **NOT_RESUMED)
    fleet.scheduler.call("scancel", jobs[1])
    broken_honestly(streams, jobs[1], "drain", "leav", "end")
    fleet.end(jobs[1])


def test_time_limit_and_early_sigusr1_lose_no_stream(fleet: SlurmFleet):
    """Slurm counts limits in minutes, so one has both: a job that leaves by its own clock, and one that Slurm warns.
    It does so up to half a minute early."""
    stays = fleet.submit("--time=10")
    soon = ("--drain-timeout", "5s", "--stop-grace", "1s")
    limited = fleet.submit("--time=1", options=soon)
    warned = fleet.submit("--time=1", "--signal=USR1@10", options=soon)
    fleet.wait_ready(3)
    fleet.requests()
    streams = fleet.streams(3)
    for job in (warned, limited):
        ended = fleet.scheduler.ended(job, 75 + DONE)
        assert ended["JobState"] == "COMPLETED", ended
        print(f"\njob {job} ran for {ended['RunTime']} of {ended['TimeLimit']}")
    whole(streams.stop())
    assert "User1" in fleet.scheduler.output(warned), "it was not warned"
    assert "leaving it" in fleet.scheduler.output(limited), "its own clock"
    assert [node["job"]["id"] for node in fleet.nodes()] == [stays]


def test_a_requeued_job_loses_no_stream_and_serves_again(fleet: SlurmFleet):
    jobs = [fleet.submit("--time=10") for _ in range(3)]
    fleet.wait_ready(3)
    fleet.requests()
    streams = fleet.streams_everywhere(CAN_END, on=jobs[1])
    fleet.scheduler.call("scontrol", "requeue", jobs[1])
    whole(streams)
    wait_until(lambda: fleet.scheduler.job(jobs[1])["Restarts"] == "1", 2 * DONE, "it was requeued", pause=0.2)
    wait_until(lambda: fleet.scheduler.job(jobs[1])["JobState"] == "RUNNING", 2 * DONE, "its second run began", pause=0.2)
    fleet.wait_ready(3)
    assert fleet.node(jobs[1])["job"]["run"] == 2


def test_a_dead_nodes_streams_and_job_go_on_elsewhere(fleet: SlurmFleet):
    jobs = [fleet.submit("--time=10", f"--nodelist={node}") for node in ("n1", "n1", "n2")]
    fleet.wait_ready(3)
    fleet.requests()
    streams = fleet.streams_everywhere(CANNOT_END, on=jobs[2])
    # Of the node nothing answers any more: its daemon and everything of its job stand still.
    lost = {*marked(jobs[2], "SLURM_JOB_ID")} & {*fleet.scheduler.left()} | fleet.scheduler.daemon("n2")
    signal_all(lost, signal.SIGSTOP)
    try:
        gone_on(streams)
        fleet.scheduler.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=died")
        signal_all(lost, signal.SIGKILL)
        # It was bound to the node that died.
        fleet.scheduler.call("scontrol", "update", f"JobId={jobs[2]}", "ReqNodeList=")
        wait_until(lambda: fleet.scheduler.job(jobs[2])["JobState"] == "RUNNING", 2 * DONE, "it runs elsewhere", pause=0.2)
        assert fleet.scheduler.job(jobs[2])["NodeList"] == "n1"
    finally:
        signal_all(lost, signal.SIGKILL)
        fleet.scheduler.daemons["n2"].wait(DONE)
        fleet.scheduler.start_node("n2")
    fleet.wait_ready(3)


def signal_all(pids: set[int], number: signal.Signals) -> None:
    """A signal to each of them that lives."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_nothing_of_a_job_whose_agent_is_killed_is_left(fleet: SlurmFleet):
    jobs = [fleet.submit("--time=10") for _ in range(2)]
    fleet.wait_ready(2)
    fleet.requests()
    engines = fleet.engines(jobs[1])
    own = {pid: command for pid, command in marked(jobs[1], "SLURM_JOB_ID").items() if pid in fleet.scheduler.left()}
    os.kill(next(pid for pid, command in own.items() if command.startswith(f"{binary()} agent")), signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: not any(state_of(pid) for pid in engines), DONE, "the engines are gone")
    print(f"\nkilled: its engines were gone after {time.monotonic() - began:.2f} s")
    fleet.end(jobs[1])
    # What a killed agent leaves on disk is for the next one on that host to remove.
    fleet.submit("--time=10")
    fleet.wait_ready(2)
    assert len(fleet.remains()) == 2
