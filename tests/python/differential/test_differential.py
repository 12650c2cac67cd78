"""Every request of the table, to the engine itself and through Hostler: the same bytes, status and headers.

What is masked is random or the time: ids that engines draw, moments, and how much of a prompt was cached, which the
first of two equal requests changes for the second. Where a stream is cut into events, and how those of its choices
mix, is chance on a busy machine: one that differs is asked again, and choices are compared one by one. On real vLLM the status is also the one in the table; simulated engines lack routes.
"""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from fleet import Fleet, own_model
from table import ALL, MESSAGES, Asked

NAMES = [asked.name for asked in ALL]

# Times that a pair of streams is asked, at most.
TRIES = 6

# Names under which engines draw ids, with the digits that follow.
DRAWN = re.compile(r"\b(chatcmpl-tool|chatcmpl|cmpl|resp|msg|call|fc|rs|toolu|generative-scoring)([-_])[0-9a-f]{8,32}\b")
MOMENTS = re.compile(r'("(?:created|created_at|completed_at)":)\s*[0-9.]+')
CACHED = re.compile(r'("(?:cached_tokens|created_cache_tokens|cache_write_tokens|cache_read_input_tokens|cache_creation_input_tokens)":)\s*\d+')
# The models of a fleet are more than those of the engine asked.
ALIASES = re.compile(r"(Valid aliases:) [^\"]*\.")
# Of one connection, or of whoever wrote the answer.
NOT_COMPARED = {"date", "server", "connection", "transfer-encoding", "content-length", "x-hostler-id", "x-accel-buffering"}
CHOICE = re.compile(r'"choices":\[\{"index":(\d+)')


@dataclasses.dataclass
class Ways:
    """One engine, asked in two ways."""

    kind: str
    model: str
    routed: httpx2.Client
    direct: httpx2.Client
    answers: dict[str, tuple[dict, dict]] = dataclasses.field(default_factory=dict)
    """What was asked beforehand, by the row's name."""


@pytest.fixture(scope="module", params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def ways(request):
    """The first engine of each kind of fleet, through the first router and on its own socket."""
    fleet: Fleet = request.getfixturevalue(f"{request.param}_fleet")
    fleet.wait_ready()
    replica = fleet.replica(Fleet.NODES[0])
    edge = fleet.routers[0].edge.removesuffix("/v1")
    with httpx2.Client(base_url=edge, timeout=60) as routed, fleet.direct(replica) as direct:
        ways = Ways(request.param, own_model(replica.node), routed, direct)
        if ways.kind == "simulated":
            # Several at once change a real engine's arithmetic, and no simulated one's.
            with ThreadPoolExecutor(12) as clients:
                ways.answers = dict(zip(NAMES, clients.map(lambda asked: both(ways, asked), ALL), strict=True))
        yield ways


def masked(text: str) -> str:
    """A body without what is new with each request."""
    text = DRAWN.sub(r"\1\2*", text)
    text = MOMENTS.sub(r"\1*", text)
    text = ALIASES.sub(r"\1 *", text)
    return CACHED.sub(r"\1*", text)


def in_order(events: str) -> str:
    """A stream with the events of each choice together: which choice is a step ahead is chance."""

    def choice(event: str) -> int:
        found = CHOICE.search(event)
        return int(found[1]) if found else -1

    parts = events.split("\n\n")
    places = [place for place, part in enumerate(parts) if choice(part) >= 0]
    for place, part in zip(places, sorted((parts[place] for place in places), key=choice), strict=True):
        parts[place] = part
    return "\n\n".join(parts)


def answer(client: httpx2.Client, asked: Asked, model: str, name: str) -> dict:
    """What is compared of one answer."""
    headers = {"x-request-id": name, "accept": "*/*", "accept-encoding": "identity", **asked.typed()}
    request = client.build_request(asked.method, asked.path, content=asked.content(model), headers=headers)
    got = client.send(request, follow_redirects=False)
    kept = {name: value for name, value in got.headers.items() if name not in NOT_COMPARED}
    if "location" in kept:
        # The engine names itself by the host that it was asked for.
        kept["location"] = kept["location"].removeprefix(str(client.base_url).rstrip("/"))
    body = masked(got.content.decode())
    return {"status": got.status_code, "headers": kept, "body": in_order(body) if asked.streams else body}


def both(ways: Ways, asked: Asked) -> tuple[dict, dict]:
    """The answer through the router, and the engine's own."""
    name = f"differential-{NAMES.index(asked.name)}"
    for _ in range(TRIES if asked.streams else 1):
        direct = answer(ways.direct, asked, ways.model, name)
        routed = answer(ways.routed, asked, ways.model, name)
        if routed == direct:
            break
    return routed, direct


@pytest.mark.parametrize("asked", ALL, ids=lambda asked: asked.name)
def test_the_same_answer_as_from_the_engine(ways: Ways, asked: Asked):
    if ways.kind == "simulated" and asked.path.startswith(MESSAGES):
        pytest.skip("simulated engines have no Messages API")
    routed, direct = ways.answers.get(asked.name) or both(ways, asked)
    assert routed == direct
    if ways.kind == "vllm":
        assert routed["status"] == asked.status, routed["body"]


def test_the_table_is_as_large_as_it_claims():
    assert len(ALL) >= 150 and len(set(NAMES)) == len(ALL)
