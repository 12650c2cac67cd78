"""Streams whose engine dies in their middle, and whose request is sent again: real vLLM on the CPU.

`HOSTLER_RESUMPTION_ROUNDS` and `HOSTLER_RESUMPTION_RECORD` are as in test_resumption.py.
"""

import dataclasses
import itertools

import pytest

from fleet import Fleet, Replica
from processes import wait_until
from test_resumption import COMMENTS, DIFFERENT, ENDED, ROUNDS, count, kill_api, kill_core, spread, tell
from wire import Stream

TOKENS = 150
# All have brought so many events when the engine is killed, and not all of their own.
FLOWING = 8
# Of each kind, so that each engine has some.
COPIES = 2
WORDS = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 9}, "minItems": 60, "maxItems": 60}
SCHEMA = {"type": "object", "properties": {"words": WORDS}, "required": ["words"], "additionalProperties": False}
FUNCTION = {"name": "find", "description": "Finds words", "parameters": SCHEMA}
USAGE = {"stream_options": {"include_usage": True}}
SEEDED = {"temperature": 1, "seed": 7}
MESSAGE = {"chat": True, "route": "messages", "ignore_eos": None}

# What each kind of stream asks for besides its prompt and its length.
KINDS = {
    "schema": {
        "chat": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}},
        "ignore_eos": None,
        **USAGE,
    },
    "tools": {
        "chat": True,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "ignore_eos": None,
    },
    "seeded, logprobs": {"chat": True, "logprobs": True, "top_logprobs": 2, **SEEDED, **USAGE},
    "completion, seeded, logprobs": {"logprobs": 2, **SEEDED},
    "two choices, seeded": {"chat": True, "n": 2, **SEEDED, **USAGE},
    "stop, penalty": {"stop": ["never said"], "frequency_penalty": 0.5, **USAGE},
    "message": MESSAGE,
    "message, tools": {
        **MESSAGE,
        "tools": [{"name": "find", "description": "Finds words", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}

# The Rust front-end of 0.32 has one choice only, fails with the calls that a model of random weights makes, and messages
# are chats there, with usage in every event.
NOT_OF_RUST = {"two choices, seeded", "tools", "message", "message, tools"}

# Texts come in pieces, and would be repeated if a piece came twice.
TEXTS = {"content", "reasoning", "text", "arguments", "partial_json", "thinking", "name", "role", "token"}
TEXTS |= {"finish_reason", "stop_reason"}
# These differ in each answer: names, times, what was cached, and the last digits of log probabilities.
LEFT_OUT = {"id", "created", "logprob", "token_logprobs", "top_logprobs", "bytes", "prompt_tokens_details"}
LEFT_OUT |= {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "signature"}


@dataclasses.dataclass(frozen=True)
class Ask:
    """One of the requests that each round sends."""

    kind: str
    copy: int

    def open(self, edge: str, **more) -> Stream:
        """Sends it. No two are alike: one that was in flight when an engine died would be suspected the next time."""
        asked = {**KINDS[self.kind], **more}
        name = f"user {next(COMMENTS)}"
        asked |= {"metadata": {"user_id": name}} if asked.get("route") else {"user": name}
        return Stream(edge, TOKENS, prompt=f"{self.copy} is the number of a long story about {self.kind}", **asked)


KINDS_OF_FLEET = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("vllm_rust", marks=pytest.mark.vllm("rust"))]


@pytest.fixture(scope="module", params=KINDS_OF_FLEET)
def replaying(request) -> Fleet:
    """A fleet with each of vLLM's front-ends."""
    return request.getfixturevalue(f"{request.param}_fleet")


@pytest.fixture(scope="module")
def asked(replaying: Fleet) -> list[Ask]:
    """All kinds that the front-end has."""
    kinds = [kind for kind in KINDS if replaying.engine.kind == "vllm" or kind not in NOT_OF_RUST]
    return [Ask(kind, copy) for kind in kinds for copy in range(COPIES)]


def collect(path: str, value, told: dict) -> None:
    """Puts together what an event tells: texts that come in pieces, and the last of everything else."""
    if isinstance(value, dict):
        path += str(value.get("index", ""))
        for name, inner in value.items():
            if name in LEFT_OUT or inner is None:
                continue
            if name in TEXTS and isinstance(inner, str):
                told[f"{path}.{name}"] = told.get(f"{path}.{name}", "") + inner
            elif name in ("tokens", "text_offset"):
                told.setdefault(f"{path}.{name}", []).extend(inner)
            else:
                collect(f"{path}.{name}", inner, told)
    elif isinstance(value, list):
        for inner in value:
            collect(path, inner, told)
    else:
        told[path] = value


def understood(stream: Stream) -> dict:
    """What a client makes of a stream."""
    told: dict = {}
    for event in stream.events:
        collect("", event, told)
    return told


def is_whole(stream: Stream) -> bool:
    """Whether a client may take it for a whole answer."""
    ended = stream.complete or bool(stream.events) and stream.events[-1].get("type") == "message_stop"
    return ended and not stream.errors and stream.cut is None


def until_flowing(asked: list[Ask], streams: list[Stream]) -> None:
    """Returns when the middle of each has begun, if it has not ended: a call of a tool is told in few events."""
    least = [1 if "tools" in ask.kind else FLOWING for ask in asked]

    def flow() -> bool:
        return all(len(stream.events) >= few or not stream.running for few, stream in zip(least, streams, strict=True))

    wait_until(flow, ENDED, "tokens flow", pause=0.005)


def await_next_engine(replaying: Fleet, victim: Replica) -> None:
    """Returns when the router knows of the engine after one that was killed. Until then it may show the old one as ready."""
    wait_until(lambda: replaying.replica(victim.node).engine_pid != victim.engine_pid, ENDED, "the next engine")


def one_name(stream: Stream) -> bool:
    """Whether all events that name the answer have one name."""
    return len({event["id"] for event in stream.events if "id" in event}) <= 1


@pytest.fixture(scope="module")
def unbroken(replaying: Fleet, asked: list[Ask]) -> list[dict | None]:
    """The answers of engines that live, in the order of the requests; None where one is another when asked for again.

    It may be: what is computed beside a request changes the last digits of its probabilities.
    """
    answers = []
    for turn in range(2):
        streams = [ask.open(replaying.routers[turn % 2].edge) for ask in asked]
        for stream in streams:
            stream.join(ENDED)
        assert not [stream.end() for stream in streams if not is_whole(stream) or stream.seams]
        answers.append([understood(stream) for stream in streams])
    steady = [one if one == other else None for one, other in zip(*answers, strict=True)]
    same = sum(answer is not None for answer in steady)
    tell(f"unbroken: {same} of {len(asked)} answers are the same when they are asked for again")
    assert same >= len(asked) / 2
    return steady


@pytest.mark.parametrize("lose", [kill_core, kill_api])
def test_streams_are_replayed(replaying: Fleet, asked: list[Ask], unbroken: list[dict | None], lose):
    before = count(replaying, "hostler_resumptions_total")
    replayed, pauses, faults, different = 0, [], [], []
    for _ in range(ROUNDS):
        replaying.wait_ready()
        replaying.wait_idle(ENDED)
        streams = [ask.open(replaying.routers[0].edge) for ask in asked]
        until_flowing(asked, streams)
        victim = max(replaying.routers[0].replicas(), key=lambda replica: replica.in_flight)
        lose(replaying, victim.node)
        await_next_engine(replaying, victim)
        for ask, stream, expected in zip(asked, streams, unbroken, strict=True):
            stream.join(ENDED)
            gaps = [after - before for before, after in itertools.pairwise(stream.arrivals)]
            pauses += [gaps[seam - 1] for seam, _ in stream.seams if 0 < seam <= len(gaps)]
            replayed += bool(stream.seams)
            if any("did not give the same answer" in str(error) for error in stream.errors):
                if expected is None:
                    continue
                different.append(f"{ask}: it ended as a difference, behind {len(stream.events)} events")
            elif not is_whole(stream) or not one_name(stream):
                faults.append(f"{ask}: {stream.end()}")
            elif expected is not None and understood(stream) != expected:
                different.append(f"{ask}: {bool(stream.seams)}: {understood(stream)}, not {expected}")
    total = ROUNDS * len(asked)
    equal = total - len(different) - len(faults)
    tell(
        f"{replaying.engine.kind}: {lose.__doc__} {ROUNDS} rounds: {total} streams, {replayed} replayed, {equal} as the unbroken,"
        f" {len(faults)} faults; pause of the replayed {spread(pauses)}"
    )
    for line in different:
        tell(f"  differs: {line}")
    assert not faults, "\n".join(faults)
    assert replayed > 0 and count(replaying, "hostler_resumptions_total") - before >= replayed
    # Of few streams one is more than a tenth.
    assert len(different) <= max(1, DIFFERENT * total), "\n".join(different)


def test_a_stop_string_behind_the_seam_ends_the_stream(replaying: Fleet):
    ask = Ask("stop, penalty", 0)
    replaying.wait_ready()
    whole = ask.open(replaying.routers[0].edge)
    whole.join(ENDED)
    text = whole.text
    # Its first occurrence is to be far behind the place where the engine dies.
    places = (at for at in range(len(text) * 2 // 3, len(text) - 4) if text.find(text[at : at + 4]) == at)
    at = next(places, None)
    assert at is not None, f"nothing new in the last third of {text!r}"
    for spans in (4, 1):
        stop = [text[at : at + spans]] if text.find(text[at : at + spans]) == at else [text[at : at + 4]]
        replaying.wait_ready()
        stream = ask.open(replaying.routers[0].edge, stop=stop)
        until_flowing([ask], [stream])
        victim = max(replaying.routers[0].replicas(), key=lambda replica: replica.in_flight)
        kill_core(replaying, victim.node)
        stream.join(ENDED)
        assert is_whole(stream) and len(stream.seams) == 1, stream.end()
        assert (stream.text, stream.finish_reason) == (text[:at], "stop"), f"{stream.text!r} with {stop}, of {text!r}"
        await_next_engine(replaying, victim)
