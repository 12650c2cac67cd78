"""What a batch system does to a job, with real vLLM on the CPU: it signals every process of the agent's session.

PBS does so on `qdel`, at the walltime, on `qsig` and on suspension; docs/hpc.md.
"""

import os
import signal

import pytest

from fleet import Fleet, own_model
from processes import Process, alive, descendants, running, wait_until
from wire import Stream, all_streaming

pytestmark = pytest.mark.vllm("sessions")

# Within this the kernel and an agent have done what they must, on a machine that is busy, in seconds.
DONE = 30
# An agent's drain, and what vLLM takes to end on two busy cores.
DRAINED = 120
# Tokens of a stream that is to finish. On a machine that is busy with builds the tiny model was seen to give 21 a second.
LONG = 200
# More tokens than any test waits for.
ENDLESS = 3500


@pytest.fixture(scope="module")
def jobs(vllm_fleet: Fleet) -> Fleet:
    """Two agents, each of which leads a session as a job's top process does. None is left."""
    vllm_fleet.wait_ready()
    return vllm_fleet


def signal_session(job: Process, number: signal.Signals) -> None:
    """Sends a signal to every process of the job's session."""
    members = alive(session=job.child.pid)
    assert job.child.pid in members
    for pid in members:
        os.kill(pid, number)


def streams_on(jobs: Fleet, node: str, count: int, tokens: int) -> list[Stream]:
    """This many streams that a node's engine is at."""
    streams = [Stream(jobs.routers[0].edge, tokens, own_model(node)) for _ in range(count)]
    all_streaming(streams, 60)
    return streams


def states(pids: set[int]) -> set[str]:
    """What these processes do, as the kernel's letters."""
    return {one.state for one in running() if one.pid in pids}


def test_an_engine_is_suspended_with_its_job(jobs: Fleet):
    before, job = jobs.replica("a"), jobs.agents[0]
    engine = set(alive(group=os.getpgid(before.engine_pid)))
    assert len(engine) >= 3 and not engine & set(alive(session=job.child.pid)), engine
    streams = streams_on(jobs, "a", 2, LONG)
    signal_session(job, signal.SIGSTOP)
    wait_until(lambda: states(engine) == {"T"}, DONE, "every process of the engine is stopped", pause=0.01)
    assert any(stream.running for stream in streams), "all streams had ended before"
    signal_session(job, signal.SIGCONT)
    wait_until(lambda: "T" not in states(engine), DONE, "they go on", pause=0.01)
    for stream in streams:
        stream.join(DRAINED)
    assert all(stream.complete for stream in streams), [stream.end() for stream in streams]
    now = jobs.replica("a")
    assert (now.engine_pid, now.restarts) == (before.engine_pid, before.restarts)


def test_sigterm_to_a_whole_session_lets_streams_finish(jobs: Fleet):
    job, group = jobs.agents[0], os.getpgid(jobs.replica("a").engine_pid)
    # Half of it, so that they end within the drain also where engines are slow.
    streams = streams_on(jobs, "a", 2, LONG // 2)
    job.sessions()
    signal_session(job, signal.SIGTERM)
    for stream in streams:
        stream.join(DRAINED)
    assert all(stream.complete for stream in streams), [stream.end() for stream in streams]
    assert job.child.wait(timeout=DRAINED) == 0, job.tail()
    assert not alive(group=group) and not job.left()


def test_nothing_survives_a_session_that_is_killed(jobs: Fleet):
    job = jobs.agents[1]
    streams = streams_on(jobs, "b", 2, ENDLESS)
    started = {one.pid for one in descendants(job.child.pid)}
    assert len(started) >= 4, "a keeper and the engine's processes"
    job.sessions()
    job.killed = True
    signal_session(job, signal.SIGKILL)
    wait_until(lambda: not states(started) and not job.left(), DONE, "no process is left", pause=0.01)
    job.child.wait(timeout=DONE)
    for stream in streams:
        stream.join(30)
    assert not any(stream.complete for stream in streams)
