"""Replicas over two hosts each, in jobs of the stand-in for PBS: how they form, and what a job's events do to streams.

All hosts of the stand-in are this one, so what a host's death does is not seen here.
"""

import json
import os
import signal

import pytest

from batch import DONE, NOT_RESUMED, gone_on, marked, state_of, tokens, whole
from login_node import LoginNode
from processes import wait_until
from wire import Stream, all_streaming

pytestmark = pytest.mark.jobs

# How long streams are that an event is to interrupt, in seconds, which is more than PBS's grace.
LONG = 20


class SpreadLogin(LoginNode):
    """A login node whose jobs have two lines of PBS_NODEFILE for each host, with room for three of two hosts."""

    def __init__(self):
        """Nothing is up."""
        super().__init__("pbs", hosts=6)
        self.seen = self.folder / "seen"
        note = f"echo $PBS_JOBID $PBS_NODENUM $USER $PBS_ARRAY_INDEX >> {self.seen}"
        # In truth the hosts are one, where no two agents may have one name.
        name = "exec() { builtin exec $1 $2 --node host$PBS_NODENUM.${PBS_JOBID//[^0-9]/-} ${@:3}; }"
        self.cluster = self.cluster.replace("setup = [", f'setup = ["{note}", "{name}", ')
        self.cluster = self.cluster.replace('"1:ncpus=1"', '"1:ncpus=1:mpiprocs=2"')
        self.cluster = self.cluster.replace("[agent]", '[agent]\nreplica_interface = "lo"')

    def up(self, nodes: int, walltime: str = "0:30:00") -> None:
        """So many nodes of one model, two for each replica, ready."""
        options = ("--nodes", str(nodes), "--nodes-per-replica", "2", "--walltime", walltime)
        self.succeed("up", "org/chat", *options, "--", "--served-model-name", "chat", "--sim-step-ms", "25")

    def replicas(self) -> dict[str, dict]:
        """What `hostler ps` says of the replicas that serve, by their jobs."""
        nodes = json.loads(self.succeed("ps", "--json"))["nodes"]
        found = {node["job"]["id"]: node["replicas"][0] for node in nodes if node["attached"] and node["replicas"]}
        return {job: replica for job, replica in found.items() if replica["phase"] == "ready"}

    def left_of(self, job: str, host: int | None = None) -> dict[int, str]:
        """The processes of a job, or of those on one of its hosts, by pid with their command lines."""
        found = marked(job, "PBS_JOBID") if host is None else marked(str(host), "PBS_NODENUM")
        own = self.scheduler.left().keys() & marked(job, "PBS_JOBID").keys()
        return {pid: line for pid, line in found.items() if pid in own}

    def parts(self, job: str) -> list[int]:
        """The pids of both parts of the engine of a job, the head's first."""
        lines = [self.left_of(job, host) for host in (0, 1)]
        return [pid for host in lines for pid, line in host.items() if " sim engine " in line]

    def loaded(self, streams: int) -> tuple[str, list]:
        """Begins long streams on all replicas; one of the jobs, and the streams."""
        begun = self.streams(streams, LONG)
        jobs = self.replicas()
        assert len(jobs) == 2 and all(replica["in_flight"] for replica in jobs.values()), jobs
        return next(iter(jobs)), begun

    def wait_two(self, gone: str) -> None:
        """Returns when two replicas serve, and nothing is left of the job that is gone."""
        wait_until(
            lambda: len(self.replicas()) == 2 and gone not in self.replicas(), DONE, "another job serves", pause=0.5
        )
        wait_until(lambda: not self.left_of(gone), DONE, "nothing is left of the job", pause=0.2)


@pytest.fixture
def login():
    """A login node where nothing is up; afterwards nothing of any job is left."""
    node = SpreadLogin()
    try:
        node.initialise()
        yield node
        # Shown where the test has failed.
        print(*(f"\n--- {name}\n{text}" for name, text in node.scheduler.printed().items()), node.log())
        node.succeed("down")
        wait_until(lambda: not node.processes(), DONE, "nothing is left", pause=0.2)
    finally:
        node.stop()


@pytest.mark.smoke
def test_two_hosts_of_a_job_form_one_replica(login: SpreadLogin):
    login.up(4)
    jobs = login.replicas()
    assert len(jobs) == 2 and all(len(replica["members"]) == 1 for replica in jobs.values()), jobs
    assert all(len(login.parts(job)) == 2 for job in jobs)
    # The lines of `cluster.setup` mean the same on all hosts.
    lines = [line.split() for line in login.seen.read_text().splitlines()]
    assert sorted((job, host) for job, host, *_ in lines) == sorted((job, host) for job in jobs for host in "01")
    assert all(words[2:] == [lines[0][2], words[0].partition("[")[2].partition("]")[0]] for words in lines), lines
    assert login.answers()


def test_qdel_of_a_replicas_job_loses_no_stream(login: SpreadLogin):
    login.up(4)
    job, streams = login.loaded(8)
    login.scheduler.call("qdel", job)
    whole(streams)
    assert login.scheduler.ended(job) == 0
    login.wait_two(gone=job)


def test_a_replicas_job_ends_with_the_agent_of_any_host(login: SpreadLogin):
    login.up(4)
    job, streams = login.loaded(8)
    (member,) = (pid for pid, line in login.left_of(job, host=1).items() if " agent " in line)
    os.kill(member, signal.SIGKILL)
    whole(streams)
    login.wait_two(gone=job)
    (printed,) = (login.state / "jobs").glob(f"{job.replace('[', '[[]')}*")
    assert "-1 has ended, and this job with it" in printed.read_text(), printed.read_text()


def test_sigusr1_lets_a_replica_finish_what_cannot_go_on_elsewhere(login: SpreadLogin):
    login.up(4)
    edge, access = login.access()
    # Longer than PBS's grace, and shorter than `agent.drain_timeout`.
    streams = [Stream(edge, tokens(LONG), "chat", access=access, **NOT_RESUMED) for _ in range(8)]
    all_streaming(streams)
    job = next(job for job, replica in login.replicas().items() if replica["in_flight"])
    login.scheduler.call("qsig", "-s", "SIGUSR1", job)
    whole(streams)
    assert login.scheduler.ended(job) == 0
    login.wait_two(gone=job)


def test_a_suspended_replica_stops_on_all_its_hosts_and_serves_again(login: SpreadLogin):
    login.up(4)
    job, streams = login.loaded(8)
    parts = login.parts(job)
    login.scheduler.call("qsig", "-s", "suspend", job)
    wait_until(lambda: [state_of(pid) for pid in parts] == ["T", "T"], DONE, "both parts are stopped")
    gone_on(streams)
    login.scheduler.call("qsig", "-s", "resume", job)
    wait_until(lambda: job in login.replicas(), DONE, "it serves again", pause=0.2)
    assert login.parts(job) == parts, "the same engine"


def test_a_requeued_replica_loses_no_stream(login: SpreadLogin):
    login.up(4)
    job, streams = login.loaded(8)
    parts = login.parts(job)
    login.scheduler.call("qrerun", job)
    whole(streams)
    wait_until(lambda: not any(state_of(pid) for pid in parts), DONE, "nothing is left of the first run")
    wait_until(lambda: len(login.replicas()) == 2, DONE, "two replicas serve", pause=0.5)


def test_replicas_near_their_walltime_are_replaced_without_a_lost_stream(login: SpreadLogin):
    login.up(4, walltime="0:01:00")
    jobs, streams = login.replicas(), []
    while jobs.keys() & login.replicas().keys():
        streams += login.streams(4, 4)
        whole(streams)
    whole(login.streams(8, 4))
    for job in jobs:
        assert login.scheduler.ended(job) == 0, "it left by its own clock"
        wait_until(lambda job=job: not login.left_of(job), DONE, "nothing is left of the job", pause=0.2)
