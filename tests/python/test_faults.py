"""What a fleet does when a part of it dies, and whether two routers over the same engines agree; on simulated engines
and, marked `vllm`, on real ones."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from fleet import MODEL, Fleet, Replica, own_model
from processes import alive, wait_until
from wire import Stream, all_streaming

# How long an engine or a router that is back may take to its first answer, on a machine that is busy, in seconds.
BACK_SECONDS = 60
# More tokens than any test waits for: vLLM on the CPU makes some hundred a second, a simulated engine a hundred.
ENDLESS = 3500


def complete(edge: str, prompt: str = "short", tokens: int = 4) -> httpx2.Response:
    """One completion, not streamed and not tried again."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return httpx2.post(f"{edge}/completions", json=body, timeout=300)


@pytest.mark.smoke
def test_streams_go_on_when_their_engine_is_killed(fleet: Fleet):
    router = fleet.routers[0]
    streams = [Stream(router.edge, ENDLESS) for _ in range(16)]
    all_streaming(streams)
    wait_until(lambda: router.in_flight() == 16, 20, "all streams counted")
    victim = fleet.replica("a")
    assert 0 < victim.in_flight < 16, "both engines should have streams"

    group = os.getpgid(victim.engine_pid)
    agent = fleet.agents[Fleet.NODES.index("a")]
    assert group not in (os.getpgid(0), os.getpgid(agent.child.pid)), "an engine has a process group of its own"
    with ThreadPoolExecutor(8) as clients:
        # These are asked while the engine dies and before anyone knows.
        early = [clients.submit(complete, router.edge, f"early {number}", 20) for number in range(4)]
        os.killpg(group, signal.SIGKILL)
        late = [clients.submit(complete, router.edge, f"late {number}") for number in range(8)]
        statuses = [answer.result().status_code for answer in [*early, *late]]
    assert statuses == [200] * len(statuses), "a request that had not begun to answer was lost"

    wait_until(
        lambda: sum(len(stream.seams) for stream in streams) == victim.in_flight, 60, "its streams go on elsewhere"
    )
    so_far = [len(stream.events) for stream in streams]
    wait_until(
        lambda: all(len(stream.events) > seen for stream, seen in zip(streams, so_far, strict=True)),
        60,
        "all streams went on",
    )
    assert not any(stream.errors for stream in streams) and all(stream.running for stream in streams)
    for stream in streams:
        stream.leave()

    wait_until(lambda: not alive(group=group), 60, "no process of the killed group is left")
    back = wait_until(lambda: ready_again(fleet, victim), fleet.engine.start_seconds, "the engine is ready again")
    became_ready = time.monotonic()
    assert back.restarts == victim.restarts + 1
    assert back.engine_pid != victim.engine_pid
    first = Stream(router.edge, 8, model=own_model("a"))
    wait_until(lambda: first.events, BACK_SECONDS, "a request reached it")
    print(f"first answer {time.monotonic() - became_ready:.2f} s after the engine was ready")
    first.join(60)
    assert first.complete


def ready_again(fleet: Fleet, before: Replica) -> Replica | None:
    """The replica once it is ready in its next life."""
    now = fleet.replica(before.node)
    return now if now.phase == "ready" and now.engine_pid != before.engine_pid else None


def test_a_killed_router_serves_again_after_its_start(fleet: Fleet):
    abandoned = [Stream(fleet.routers[0].edge, ENDLESS) for _ in range(4)]
    all_streaming(abandoned)
    fleet.routers[0].kill()
    for stream in abandoned:
        stream.join(20)
    assert not any(stream.complete for stream in abandoned)

    began = time.monotonic()
    router = fleet.restart_router(0)
    while True:
        try:
            answer = complete(router.edge)
        except httpx2.ConnectError:
            answer = None  # it does not listen yet
        # The first request that is taken is answered: a young router waits for its agents.
        if answer is not None:
            break
        assert time.monotonic() - began < BACK_SECONDS, "nothing is served yet"
        time.sleep(0.02)
    took = time.monotonic() - began
    assert answer.status_code == 200, answer.text
    print(f"first answer {took:.2f} s after the start of the router's process")
    wait_until(lambda: fleet.routers[1].in_flight() == 0, 20, "the dead router's requests ended on the engines")


def test_two_routers_over_the_same_engines_count_alike(fleet: Fleet):
    streams = [Stream(router.edge, ENDLESS) for router in fleet.routers for _ in range(4)]
    all_streaming(streams)
    counts = [len(streams)] * len(fleet.routers)
    wait_until(lambda: [router.in_flight() for router in fleet.routers] == counts, 20, "each counts the whole")
    per_router = [[(replica.id, replica.in_flight) for replica in router.replicas()] for router in fleet.routers]
    assert sorted(per_router[0]) == sorted(per_router[1])
    for stream in streams:
        stream.leave()
    for stream in streams:
        stream.join(20)
    fleet.wait_idle()


def test_requests_through_two_routers_at_once_are_all_answered(fleet: Fleet):
    with ThreadPoolExecutor(16) as clients:
        edges = [fleet.routers[number % 2].edge for number in range(48)]
        answers = list(clients.map(lambda edge: complete(edge, tokens=8), edges))
    assert [answer.status_code for answer in answers] == [200] * len(edges)
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
