"""Every request of the table, to the engine itself and through Hostler: the same bytes, status and headers.

Simulated engines are asked everything. Real ones are asked so that each pair occurs of a request, whole or streamed,
and a front-end: what is asked both ways is asked whole of one front-end and streamed of the other, in turn.

What is masked is random or the time: ids that engines draw, moments, and how much of a prompt was cached, which the
first of two equal requests changes for the second. Where a stream is cut into events, and how those of its choices
mix, is chance on a busy machine: one that differs is asked again, and choices are compared one by one. On real vLLM the
status is also the one in the table; simulated engines lack routes.

vLLM's Rust front-end lacks routes too, and has errors of its own. What it has is compared in the same way. Where it lacks
a route the answer is what the Python one says, told by the router, or a refusal with what to do.
"""

import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from fleet import MODEL, Fleet, own_model
from said import said
from table import ALL, CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, Asked, asks_for_several

NAMES = [asked.name for asked in ALL]
STREAMED = " streamed"


def covering(rows: list[Asked]) -> dict[str, list[Asked]]:
    """The rows for each front-end of real vLLM."""
    kinds, chosen, names = ("vllm", "vllm_rust"), {"vllm": [], "vllm_rust": []}, {row.name for row in rows}
    pairs = [row.name for row in rows if row.name + STREAMED in names]
    for row in rows:
        name = row.name.removesuffix(STREAMED)
        turn = pairs.index(name) + row.streams if name in pairs else None
        for at, kind in enumerate(kinds):
            if turn is None or turn % 2 == at:
                chosen[kind].append(row)
    return chosen


ASKED = {"simulated": ALL, **covering(ALL)}

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
# What the Rust front-end writes in an order of the moment: the bounds of a field.
BOUNDS = re.compile(r"(?<=Validation error: )(\w+) \[\{(.*?)\}\]")
NOTHING_CACHED = re.compile(r'("prompt_tokens_details":)\s*(null|\{[^}]*\})')
# What the router answers itself.
ANSWERED_BY_ROUTER = {"/health", "/ping"}
# What the router asks of an engine by another route where a front-end lacks this one.
STOOD_FOR = {MESSAGES, COUNT_TOKENS, RESPONSES, "/invocations"}
# Routes of which the client is told that only the Python front-end has them.
REFUSED_IN_WORDS = {
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *(f"{CHAT}/batch", f"{CHAT}/render", "/generative_scoring", "/v1/systemone", "/cohere/v2/chat"),
    *("/v1/audio/transcriptions", "/v1/audio/translations"),
}
# Rows that have no answer of the Rust front-end, and why.
RUST_DOES_NOT_END = {
    f"{CHAT} length beyond the context": "it takes the request, and its engine computes to the end of the context",
    f"{CHAT} as application/json-patch+json": "it takes the request, and its engine computes to the end of the context",
    f"{CHAT} choice streamed": "it cannot read the choice, and breaks the stream without a word",
}
# Requests of several answers, or of one prompt in a list, which the router splits for the Rust front-end.
SPLIT = {row.name for row in ALL if row.path in (CHAT, COMPLETIONS) and asks_for_several(row.body)}
# Both front-ends choose the same tokens. A call that `max_tokens` cuts is a text of the Python one and a call of the Rust one.
TRANSLATED = [
    row
    for row in ALL
    if row.status == 200
    and (row.name in SPLIT or row.path in STOOD_FOR - {"/invocations"})
    and not re.search("(any|a) tool|beam search", row.name)
]
# Streams that may be resumed, of which the router asks engines for the tokens: to a length, to the end that the model
# gives after a token that has no text, and with characters of several tokens.
CUT_CHARACTERS = {"logit_bias": {"130": 100, "105": 100}}
TOLD_TOKENS = [
    Asked(f"{path} {name}", path, {**prompt, **more, "temperature": 0, "stream": True})
    for path, prompt in [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        (COMPLETIONS, {"prompt": "The engine"}),
    ]
    for name, more in [
        ("to a length", {"max_tokens": 12, "stream_options": {"include_usage": True}}),
        ("to an end", {"max_tokens": 12, "min_tokens": 3, "logit_bias": {"2": 100}}),
        ("with cut characters", {"max_tokens": 9, "repetition_penalty": 1.5, **CUT_CHARACTERS}),
    ]
]
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


MARKS = {"simulated": (), "vllm": pytest.mark.vllm, "vllm_rust": pytest.mark.vllm("rust")}


def each_of(asked: dict[str, list[Asked]]):
    """Parametrizes a test by the kinds of engine and what they are asked."""
    rows = [pytest.param(kind, row, marks=MARKS[kind], id=f"{kind}-{row.name}") for kind in asked for row in asked[kind]]
    return pytest.mark.parametrize(("ways", "asked"), rows, indirect=["ways"], scope="module")


@pytest.fixture(scope="module")
def ways(request):
    """The first engine of each kind of fleet, through the first router and on its own socket."""
    fleet: Fleet = request.getfixturevalue(f"{request.param}_fleet")
    fleet.wait_ready()
    replica = fleet.replica(Fleet.NODES[0])
    edge = fleet.routers[0].edge.removesuffix("/v1")
    with httpx2.Client(base_url=edge, timeout=300) as routed, fleet.direct(replica) as direct:
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


def send(client: httpx2.Client, asked: Asked, model: str, name: str) -> httpx2.Response:
    """One answer as it came."""
    headers = {"x-request-id": name, "accept": "*/*", "accept-encoding": "identity", **asked.typed()}
    request = client.build_request(asked.method, asked.path, content=asked.content(model), headers=headers)
    return client.send(request, follow_redirects=False)


def answer(client: httpx2.Client, asked: Asked, model: str, name: str) -> dict:
    """What is compared of one answer."""
    got = send(client, asked, model, name)
    kept = {name: value for name, value in got.headers.items() if name not in NOT_COMPARED}
    if "location" in kept:
        # The engine names itself by the host that it was asked for.
        kept["location"] = kept["location"].removeprefix(str(client.base_url).rstrip("/"))
    body = masked(got.content.decode())
    return {"status": got.status_code, "headers": kept, "body": in_order(body) if asked.streams else body}


def both(ways: Ways, asked: Asked) -> tuple[dict, dict]:
    """The answer through the router, and the engine's own."""
    name = f"differential-{[*ALL, *TOLD_TOKENS].index(asked)}"
    for _ in range(TRIES if asked.streams else 1):
        direct = answer(ways.direct, asked, ways.model, name)
        routed = answer(ways.routed, asked, ways.model, name)
        if routed == direct:
            break
    return routed, direct


@each_of(ASKED)
def test_an_answer_is_the_engines_own(ways: Ways, asked: Asked):
    if ways.kind == "vllm_rust" and asked.name in RUST_DOES_NOT_END:
        pytest.skip(f"vLLM's Rust front-end: {RUST_DOES_NOT_END[asked.name]}")
    if ways.kind == "simulated" and asked.path.startswith(MESSAGES):
        pytest.skip("simulated engines draw ids of messages in a form of their own")
    routed, direct = ways.answers.get(asked.name) or both(ways, asked)
    if ways.kind == "vllm_rust":
        check_rust(asked, routed, direct)
        return
    assert routed == direct
    if ways.kind == "vllm":
        assert routed["status"] == asked.status, routed["body"]


@each_of(dict.fromkeys(ASKED, TOLD_TOKENS))
def test_a_stream_with_tokens_has_the_engines_own_bytes(ways: Ways, asked: Asked):
    routed, direct = both(ways, asked)
    explained = dataclasses.replace(asked, headers={"x-hostler-explain": "1"})
    reason = send(ways.routed, explained, ways.model, "explained").headers["x-hostler-reason"]
    assert "resume=token_exact" in reason, reason
    if ways.kind == "vllm_rust":
        routed, direct = in_any_order(routed), in_any_order(direct)
    assert routed["body"] == direct["body"]
    assert '"token_ids":[' not in routed["body"] and routed["body"].endswith("data: [DONE]\n\n")


def check_rust(asked: Asked, routed: dict, direct: dict) -> None:
    """As the engine's own; or what the router says, where it answers itself or the front-end lacks the route."""
    if asked.path in ANSWERED_BY_ROUTER or "unknown model" in asked.name:
        assert routed["status"] == asked.status, routed
    elif asked.name in SPLIT and direct["status"] == 400:
        # A test of translated routes compares what it says. Beam search stays the engine's to refuse.
        assert routed["status"] == asked.status or routed["body"] == direct["body"], routed
    elif (direct["status"], direct["body"]) != (404, ""):
        assert in_any_order(routed) == in_any_order(direct)
    elif asked.path in STOOD_FOR and asked.status == 200:
        assert routed["status"] == 200, routed
    elif "--front-end python" in routed["body"]:
        assert routed["status"] in (400, 404), routed
    else:
        # Paths that no front-end has, and refusals of the router's own.
        assert asked.path not in REFUSED_IN_WORDS, routed
        assert routed["status"] == asked.status or (asked.status in (307, 405) and routed["status"] == 404), routed


def in_any_order(answer: dict) -> dict:
    """An answer of the Rust front-end, which writes maps in any order, and says how much was cached only where something was."""
    body = NOTHING_CACHED.sub(r"\1*", answer["body"])
    body = BOUNDS.sub(lambda found: " ".join([found[1], *sorted(found[2].split(", "))]), body)

    def sorted_line(line: str) -> str:
        start = line.find("{")
        try:
            return line[:start] + json.dumps(json.loads(line[start:].replace(":*", ':"*"')), sort_keys=True) if start >= 0 else line
        except ValueError:
            return line

    return answer | {"body": "\n".join(map(sorted_line, body.split("\n")))}


@pytest.fixture(scope="module")
def front_ends(mixed_fleet: Fleet):
    """An engine with the Python front-end, asked directly, and through a router one with the Rust front-end."""
    mixed_fleet.wait_ready()
    edge = mixed_fleet.routers[0].edge.removesuffix("/v1")
    python, rust = map(mixed_fleet.replica, Fleet.NODES)
    with httpx2.Client(base_url=edge, timeout=300) as routed, mixed_fleet.direct(python) as direct:
        yield Ways("front-ends", own_model(rust.node), routed, direct)


@pytest.mark.vllm("mixed")
@pytest.mark.parametrize("asked", TRANSLATED, ids=lambda asked: asked.name)
def test_a_translated_route_says_what_the_python_front_end_says(front_ends: Ways, asked: Asked):
    name = f"front-ends-{NAMES.index(asked.name)}"
    python = send(front_ends.direct, asked, MODEL, name)
    rust = send(front_ends.routed, asked, front_ends.model, name)
    assert (python.status_code, rust.status_code) == (200, 200), (python.text, rust.text)
    assert said(asked.path, rust.text.replace(front_ends.model, MODEL), asked.streams) == said(asked.path, python.text, asked.streams)


def test_the_selection_has_every_pair():
    """Every row, every row whole and streamed, and every request of both front-ends."""
    assert len(ALL) >= 150 and len(set(NAMES)) == len(ALL)
    chosen = covering(ALL)
    assert {row.name for rows in chosen.values() for row in rows} == set(NAMES)
    requests = {name.removesuffix(STREAMED) for name in NAMES if name.removesuffix(STREAMED) in NAMES}
    for rows in chosen.values():
        assert requests <= {row.name.removesuffix(STREAMED) for row in rows}
