"""Real vLLM behind the router, through the OpenAI SDK and with many requests at once. What one
request is answered is compared byte by byte in differential/.

Each engine also answers to a model name of its own (`tiny-a`, `tiny-b`). A question under that name
reaches this engine through the router, so both answers of a comparison come from one process. All
questions are greedy.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from fleet import MODEL, Fleet, own_model
from processes import wait_until
from wire import send_completion

pytestmark = pytest.mark.vllm

# Within this long after a client has left, vLLM must run nothing of its request, which would take it far longer, in seconds.
FREED_SECONDS = 10


def sdk(edge: str, client: httpx2.Client | None = None) -> openai.OpenAI:
    """The SDK with its retries off, so that every answer is the first one."""
    return openai.OpenAI(base_url=edge, http_client=client, api_key="unused", max_retries=0, timeout=300)


def ask(client: openai.OpenAI, **asked) -> tuple:
    """What a streamed completion says: its text, its tokens, why it ended and what it used."""
    asked |= {"max_tokens": 24, "temperature": 0, "stream_options": {"include_usage": True}}
    events = list(client.completions.create(**asked, stream=True, extra_body={"return_token_ids": True}))
    choices = [choice for event in events for choice in event.choices]
    ids = [token for choice in choices for token in choice.token_ids or []]
    usage = events[-1].usage
    text, tokens = "".join(choice.text for choice in choices), (usage.prompt_tokens, usage.completion_tokens)
    return text, ids, choices[-1].finish_reason, tokens


@pytest.mark.smoke
def test_thirty_two_streams_each_say_what_the_engine_says(vllm_fleet: Fleet):
    vllm_fleet.wait_ready()
    replica = vllm_fleet.replica(Fleet.NODES[1])
    prompts = [[(37 * number + 11 * place) % 4000 for place in range(8 + number % 5)] for number in range(32)]
    with sdk(vllm_fleet.routers[0].edge) as routed, vllm_fleet.direct(replica) as client, ThreadPoolExecutor(32) as clients:
        through = list(clients.map(lambda prompt: ask(routed, model=own_model(replica.node), prompt=prompt), prompts))
        direct = sdk("http://engine/v1", client)
        assert through == [ask(direct, model=own_model(replica.node), prompt=prompt) for prompt in prompts]


def test_errors_are_the_sdks_own_classes(vllm_fleet: Fleet):
    vllm_fleet.wait_ready()
    with sdk(vllm_fleet.routers[0].edge) as client:
        with pytest.raises(openai.NotFoundError, match=MODEL):
            client.completions.create(model="no-such-model", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model=MODEL, prompt="x", max_tokens=-1)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=MODEL, input="x")


def test_the_threads_of_an_engines_core_take_turns(vllm_fleet: Fleet):
    vllm_fleet.wait_ready()
    logs = vllm_fleet.engine_logs(last=10_000_000)
    assert len(logs) == len(Fleet.NODES), list(logs)
    for log, text in logs.items():
        said = [line for line in text.splitlines() if "take turns" in line]
        assert said, log
        assert all("EngineCore" in line and "every 0.5 ms" in line for line in said), said


@pytest.mark.smoke
def test_every_engine_and_name_is_listed_and_serves(vllm_fleet: Fleet):
    vllm_fleet.wait_ready()
    router = vllm_fleet.routers[0]
    before = {replica.id: replica.served for replica in router.replicas()}
    with sdk(router.edge) as client, ThreadPoolExecutor(32) as clients:
        assert {model.id for model in client.models.list()} == {MODEL, *map(own_model, Fleet.NODES)}
        answers = list(clients.map(lambda _: ask(client, model=MODEL, prompt="all together"), range(32)))
    assert len({str(answer) for answer in answers}) == 1, answers

    def served() -> dict[str, int]:
        return {replica.id: replica.served - before[replica.id] for replica in router.replicas()}

    wait_until(lambda: sum(served().values()) >= 32, 20, "all are counted")
    assert all(count > 0 for count in served().values()) and sum(served().values()) == 32, served()


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
            if time.monotonic() - sent > 20:
                return None
        if stream:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    departure = time.monotonic()
    wait_until(lambda: running(engine) == 0, FREED_SECONDS, "the engine runs nothing", pause=0.005)
    return time.monotonic() - departure


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_departed_client_frees_the_engine(vllm_fleet: Fleet, stream):
    vllm_fleet.wait_ready()
    replica = vllm_fleet.replica(Fleet.NODES[0])
    asked = {"model": own_model(replica.node), "prompt": "x", "max_tokens": 3500, "ignore_eos": True, "stream": stream}
    took = {vllm_fleet.routers[0].edge: [], replica.engine_socket: []}
    deadline = time.monotonic() + 300
    with vllm_fleet.direct(replica) as engine:
        while min(map(len, took.values())) < 3:
            assert time.monotonic() < deadline, f"too few departures while the engine ran: {took}"
            # In turns, so that what the machine itself adds shows in the engine's own figures too.
            for to, seconds in took.items():
                seconds.append(freed_after_departure(engine, send_completion(to, asked), stream))
            took = {to: [one for one in seconds if one is not None] for to, seconds in took.items()}
    for to, seconds in took.items():
        print(f"freed after a departure from {to}: {' '.join(f'{one * 1000:.0f}' for one in sorted(seconds))} ms")
    vllm_fleet.wait_idle()
