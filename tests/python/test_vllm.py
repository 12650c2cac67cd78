"""Real vLLM behind the router: through the OpenAI SDK, every answer is what the same engine says when asked directly.

Each engine also answers to a model name of its own (`tiny-a`, `tiny-b`). A question under that name reaches this engine
through the router, so both answers of a comparison come from one process. All questions are greedy or have a seed.
"""

import dataclasses
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from fleet import MODEL, Fleet, own_model
from processes import wait_until
from wire import send_completion

pytestmark = pytest.mark.vllm

# Within this long after a client has left, vLLM must run nothing of its request, in seconds.
FREED_SECONDS = 0.2
# Where vLLM computes in bfloat16, which keeps eight bits, a logarithm near seven is known to about this much.
LOGPROB_TOLERANCE = 0.03

USER = [{"role": "user", "content": "weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]},
        },
    }
]
NAMED_TOOL = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "even": {"type": "boolean"}},
    "required": ["colour", "even"],
    "additionalProperties": False,
}
STRUCTURED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
IDS = {"return_token_ids": True}

CHATS = {
    "plain": {"max_tokens": 24},
    "logprobs": {"max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    "stop string": {"max_tokens": 64, "stop": ["e"]},
    "two choices": {"max_tokens": 8, "n": 2, "temperature": 0.9, "seed": 7},
    "required tool": {"max_tokens": 64, "tools": TOOLS, "tool_choice": "required"},
    "named tool": {"max_tokens": 64, "tools": TOOLS, "tool_choice": NAMED_TOOL},
    "structured output": {"max_tokens": 64, "response_format": STRUCTURED},
}
COMPLETIONS = {
    "text prompt": {"prompt": "The engine", "max_tokens": 24},
    "token prompt": {"prompt": [11, 402, 77, 1203, 9], "max_tokens": 24},
    "several prompts": {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 6},
    "logprobs": {"prompt": "The engine", "max_tokens": 8, "logprobs": 3},
    "echo": {"prompt": "The engine", "max_tokens": 4, "echo": True},
    "long prompt": {"prompt": [(7 * number) % 4000 for number in range(3000)], "max_tokens": 16},
}
REFUSED = {
    "negative length": ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    "prompt too long": ("/v1/completions", {"prompt": [1] * 5000, "max_tokens": 4}),
    "messages of a wrong type": ("/v1/chat/completions", {"messages": "x"}),
    "usage of a stream without a stream": (
        "/v1/completions",
        {"prompt": "x", "stream_options": {"include_usage": True}},
    ),
    "token outside the vocabulary": ("/v1/completions", {"prompt": "x", "logit_bias": {"99999": 1}}),
    "refused before its stream": ("/v1/completions", {"prompt": "x", "max_tokens": -1, "stream": True}),
    "route this model lacks": ("/v1/embeddings", {"input": "x"}),
}


@dataclasses.dataclass
class Pair:
    """One engine, asked in two ways."""

    model: str
    """The name that only this engine answers to."""
    routed: openai.OpenAI
    direct: openai.OpenAI
    routed_bytes: httpx2.Client
    """The HTTP client below the SDK, for answers that the SDK would turn into an exception."""
    direct_bytes: httpx2.Client


@pytest.fixture(scope="module", params=Fleet.NODES)
def pair(vllm_fleet: Fleet, request):
    """Each engine in turn, through the router and on its own socket."""
    vllm_fleet.wait_ready()
    replica = vllm_fleet.replica(request.param)
    edge = vllm_fleet.routers[0].edge
    with httpx2.Client(base_url=edge.removesuffix("/v1"), timeout=60) as routed, vllm_fleet.direct(replica) as direct:
        common = {"api_key": "unused", "max_retries": 0}
        yield Pair(
            own_model(replica.node),
            openai.OpenAI(base_url=edge, http_client=routed, **common),
            openai.OpenAI(base_url="http://engine/v1", http_client=direct, **common),
            routed,
            direct,
        )


def gathered(chunks: list[dict]) -> dict:
    """A stream as one answer: where its text was cut into events is chance, what it adds up to is not."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "calls": "", "ids": [], "logprobs": []})
            delta = choice.get("delta") or {}
            whole["text"] += delta.get("content") or choice.get("text") or ""
            for call in delta.get("tool_calls") or []:
                whole["calls"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            whole["ids"] += choice.get("token_ids") or []
            if logprobs := choice.get("logprobs"):
                whole["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            if choice["finish_reason"]:
                whole["finish_reason"] = choice["finish_reason"]
    return {"choices": choices, "usage": chunks[-1]["usage"], "models": sorted({chunk["model"] for chunk in chunks})}


def ask(create, asked: dict, stream: bool) -> dict:
    """The answer of one SDK call, whole or gathered."""
    asked = {"temperature": 0, **asked, "extra_body": IDS}
    if not stream:
        return create(**asked).model_dump()
    chunks = create(**asked, stream=True, stream_options={"include_usage": True})
    return gathered([chunk.model_dump() for chunk in chunks])


def difference(one, other, path: str = "") -> str | None:
    """Where two answers differ beyond what is new with each request; None where they do not."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            if key in ("id", "created", "cached_tokens"):
                continue
            if key not in one or key not in other:
                return f"{path}.{key} is only in one of them"
            if found := difference(one[key], other[key], f"{path}.{key}"):
                return found
        return None
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (difference(*pair, f"{path}[{at}]") for at, pair in enumerate(zip(one, other, strict=True)))
        return next(filter(None, found), None)
    if isinstance(one, float) and isinstance(other, float):
        return None if abs(one - other) <= LOGPROB_TOLERANCE else f"{path}: {one} and {other}"
    return None if one == other else f"{path}: {one!r} and {other!r}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_what_the_engine_says(pair: Pair, name, stream):
    asked = {"model": pair.model, "messages": USER, **CHATS[name]}
    routed = ask(pair.routed.chat.completions.create, asked, stream)
    direct = ask(pair.direct.chat.completions.create, asked, stream)
    assert difference(routed, direct) is None
    if "tool" in name:
        assert "get_weather" in str(routed["choices"])
    if name == "structured output":
        assert '{"colour":' in str(routed["choices"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_is_what_the_engine_says(pair: Pair, name, stream):
    asked = {"model": pair.model, **COMPLETIONS[name]}
    routed = ask(pair.routed.completions.create, asked, stream)
    direct = ask(pair.direct.completions.create, asked, stream)
    assert difference(routed, direct) is None
    assert routed["usage"]["completion_tokens"] > 0


@pytest.mark.smoke
def test_thirty_two_streams_at_once_each_say_what_the_engine_says(pair: Pair):
    prompts = [[(37 * number + 11 * place) % 4000 for place in range(8 + number % 5)] for number in range(32)]
    questions = [{"model": pair.model, "prompt": prompt, "max_tokens": 24} for prompt in prompts]
    with ThreadPoolExecutor(32) as clients:
        routed = list(clients.map(lambda asked: ask(pair.routed.completions.create, asked, True), questions))
    direct = [ask(pair.direct.completions.create, asked, True) for asked in questions]
    assert [difference(*answers) for answers in zip(routed, direct, strict=True)] == [None] * len(questions)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_the_engines_own(pair: Pair, name):
    path, body = REFUSED[name]
    asked = {"model": pair.model, **body}
    routed, direct = pair.routed_bytes.post(path, json=asked), pair.direct_bytes.post(path, json=asked)
    assert routed.status_code == direct.status_code >= 400
    assert routed.content == direct.content
    assert routed.headers["content-type"] == direct.headers["content-type"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_other_routes_of_the_engine_answer_as_the_engine(pair: Pair, path):
    asked = {"model": pair.model, **({"prompt": "some words"} if path == "/tokenize" else {"tokens": [5, 6]})}
    routed, direct = pair.routed_bytes.post(path, json=asked), pair.direct_bytes.post(path, json=asked)
    assert (routed.status_code, routed.content) == (direct.status_code, direct.content)
    assert routed.status_code == 200


def test_errors_are_the_sdks_own_classes(pair: Pair):
    with pytest.raises(openai.NotFoundError, match=pair.model):
        pair.routed.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        pair.routed.completions.create(model=pair.model, prompt="x", max_tokens=-1)
    with pytest.raises(openai.NotFoundError):
        pair.routed.embeddings.create(model=pair.model, input="x")


def test_the_threads_of_each_engines_core_take_turns_as_the_agent_asks(vllm_fleet: Fleet):
    vllm_fleet.wait_ready()
    logs = vllm_fleet.engine_logs(last=10_000_000)
    assert len(logs) == len(Fleet.NODES), list(logs)
    for log, text in logs.items():
        said = [line for line in text.splitlines() if "take turns" in line]
        assert said, log
        assert all("EngineCore" in line and "every 0.5 ms" in line for line in said), said


@pytest.mark.smoke
def test_every_engine_and_name_is_listed_and_serves(vllm_fleet: Fleet):
    router = vllm_fleet.routers[0]
    before = {replica.id: replica.served for replica in router.replicas()}
    with openai.OpenAI(base_url=router.edge, api_key="unused", max_retries=0, timeout=60) as sdk:
        names = {own_model(node) for node in Fleet.NODES}
        assert {model.id for model in sdk.models.list()} == {MODEL} | names
        with ThreadPoolExecutor(32) as clients:
            asked = {"model": MODEL, "prompt": "all together", "max_tokens": 24}
            answers = list(clients.map(lambda _: ask(sdk.completions.create, asked, True), range(32)))
    assert all(difference(answer, answers[0]) is None for answer in answers)
    served = {replica.id: replica.served - before[replica.id] for replica in router.replicas()}
    assert all(count > 0 for count in served.values()) and sum(served.values()) == 32, served


def running(engine: httpx2.Client) -> float:
    """What vLLM itself says it is computing."""
    figures = engine.get("/metrics/?name[]=vllm:num_requests_running").text.splitlines()
    return sum(float(line.split()[-1]) for line in figures if line.startswith("vllm:num_requests_running{"))


def freed_after_departure(engine: httpx2.Client, connection: socket.socket, stream: bool) -> float | None:
    """Seconds from the departure of a client, whose request was just sent, until the engine runs nothing of it.

    None where the engine had finished before we could see it run: a machine with few cores can stall that long.
    """
    sent = time.monotonic()
    with connection:
        while running(engine) != 1:
            if time.monotonic() - sent > 5:
                return None
        if stream:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    departure = time.monotonic()
    wait_until(lambda: running(engine) == 0, 10, "the engine runs nothing", pause=0.005)
    return time.monotonic() - departure


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_departed_client_frees_the_engine(vllm_fleet: Fleet, stream):
    vllm_fleet.wait_ready()
    replica = vllm_fleet.replica(Fleet.NODES[0])
    asked = {"model": own_model(replica.node), "prompt": "x", "max_tokens": 3500, "ignore_eos": True, "stream": stream}
    took = {vllm_fleet.routers[0].edge: [], replica.engine_socket: []}
    deadline = time.monotonic() + 120
    with vllm_fleet.direct(replica) as engine:
        while min(map(len, took.values())) < 5:
            assert time.monotonic() < deadline, f"too few departures while the engine ran: {took}"
            # In turns, so that what the machine itself adds shows in the engine's own figures too.
            for to, seconds in took.items():
                seconds.append(freed_after_departure(engine, send_completion(to, asked), stream))
            took = {to: [one for one in seconds if one is not None] for to, seconds in took.items()}
    for to, seconds in took.items():
        print(f"freed after a departure from {to}: {' '.join(f'{one * 1000:.0f}' for one in sorted(seconds))} ms")
    assert statistics.median(took[vllm_fleet.routers[0].edge]) < FREED_SECONDS
    vllm_fleet.wait_idle()
