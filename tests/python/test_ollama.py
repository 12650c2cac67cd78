"""Ollama's own Python client, unmodified, against a fleet: only its address says that this is no Ollama.

What a model makes of a prompt is the engine's affair: simulated engines call tools and embed, the tiny model of vLLM does
neither.
"""

import asyncio
import json

import ollama
import pytest

from fleet import MODEL, Fleet, Up
from processes import wait_until

MESSAGES = [{"role": "user", "content": "Say something about locomotives"}]
SHORT = {"num_predict": 8, "temperature": 0, "seed": 1}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "even": {"type": "boolean"}},
    "required": ["colour", "even"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    """`hostler up` with simulated engines that call tools by themselves."""
    flags = ["--served-model-name", MODEL, "--sim-step-ms", "5", "--sim-call-tools"]
    running = Up(tmp_path_factory.mktemp("calling"), flags)
    yield running
    running.stop()


def host(edge: str) -> str:
    """The address that a client of Ollama is given: without the path of OpenAI's API."""
    return edge.removesuffix("/v1")


@pytest.fixture
def client(fleet: Fleet):
    """A client of the first router of a fleet, with simulated engines and with vLLM in turn."""
    return ollama.Client(host(fleet.routers[0].edge), timeout=300)


@pytest.fixture
def caller(calling: Up):
    """A client of engines that call tools and embed."""
    return ollama.Client(host(calling.edge), timeout=300)


def assert_figures(answer, tokens: int) -> None:
    """Fails unless the last of an answer says what it took."""
    assert answer.done and answer.done_reason == "length"
    assert answer.eval_count == tokens and answer.prompt_eval_count > 0
    assert 0 < answer.eval_duration <= answer.total_duration and answer.load_duration == 0


def test_a_chat_answers_whole_and_line_by_line(client):
    whole = client.chat(MODEL, MESSAGES, options=SHORT)
    assert whole.message.role == "assistant" and whole.message.content and whole.model == MODEL
    assert_figures(whole, 8)
    *parts, last = client.chat(MODEL, MESSAGES, options=SHORT, stream=True)
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert not any(part.done for part in parts)
    assert_figures(last, 8)
    assert last.prompt_eval_duration + last.eval_duration == last.total_duration


def test_a_prompt_is_answered_through_the_template_and_raw(client):
    asked = {"model": f"{MODEL}:latest", "prompt": "Once upon a time", "options": SHORT}
    whole = client.generate(**asked, system="You tell fairy tales.")
    assert whole.response and whole.model == f"{MODEL}:latest" and whole.context is None
    assert_figures(whole, 8)
    raw = client.generate(**asked, raw=True)
    assert_figures(raw, 8)
    assert raw.prompt_eval_count < whole.prompt_eval_count
    parts = list(client.generate(**asked, raw=True, stream=True))
    assert "".join(part.response for part in parts) == raw.response


def test_a_raw_prompt_is_answered_beyond_sixteen_tokens(client):
    """Where engines themselves would stop."""
    parts = client.generate(MODEL, "Once upon a time", raw=True, stream=True, options={"seed": 1, "temperature": 0})
    for count, part in enumerate(parts):
        if count > 16 or part.done:
            break
    assert count > 16 or part.eval_count > 16, part


def test_log_probabilities_come_with_the_tokens(client):
    answer = client.chat(MODEL, MESSAGES, options=SHORT, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == 8
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) >= 2 for entry in answer.logprobs)
    parts = list(client.chat(MODEL, MESSAGES, options=SHORT, logprobs=True, top_logprobs=2, stream=True))
    assert sum(len(part.logprobs or []) for part in parts) == 8


def test_an_answer_follows_a_schema(client):
    answer = client.chat(MODEL, MESSAGES, format=SCHEMA, options={"num_predict": 64, "seed": 1})
    value = json.loads(answer.message.content)
    assert value["colour"] in ("red", "green", "blue") and isinstance(value["even"], bool)
    parts = client.generate(MODEL, "A colour?", format=SCHEMA, options={"num_predict": 64, "seed": 1}, stream=True)
    assert set(json.loads("".join(part.response for part in parts))) == {"colour", "even"}


def get_weather(city: str) -> str:
    """Tells the weather.

    Args:
      city: Where.
    """
    return f"rain in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_is_answered(caller, stream):
    messages = list(MESSAGES)
    answer = caller.chat(MODEL, messages, tools=[get_weather], stream=stream)
    message = next(part.message for part in answer if part.message.tool_calls) if stream else answer.message
    call = message.tool_calls[0].function
    assert call.name == "get_weather" and isinstance(call.arguments["city"], str)
    messages += [message, {"role": "tool", "tool_name": call.name, "content": get_weather(**call.arguments)}]
    answer = caller.chat(MODEL, messages, tools=[get_weather], options=SHORT)
    assert answer.message.content and not answer.message.tool_calls


def test_texts_are_embedded_one_or_many(caller):
    many = caller.embed(MODEL, ["one", "two"], dimensions=16)
    assert len(many.embeddings) == 2 and all(len(vector) == 16 for vector in many.embeddings)
    assert many.prompt_eval_count > 0 and many.total_duration > 0
    assert caller.embed(MODEL, "two", dimensions=16).embeddings[0] == many.embeddings[1]
    assert len(caller.embeddings(MODEL, "one").embedding) == 64


def test_models_are_listed_shown_and_running(client):
    names = {MODEL, f"{MODEL}-a", f"{MODEL}-b"}
    assert {model.model for model in client.list().models} == names
    assert {model.model for model in client.ps().models} == names
    shown = client.show(f"{MODEL}:latest")
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] >= 4096
    assert "completion" in shown.capabilities


def test_errors_are_the_clients_own_with_status_and_message(client):
    for refused, status, words in [
        (lambda: client.chat("none", MESSAGES), 404, "none"),
        (lambda: list(client.chat("none", MESSAGES, stream=True)), 404, "none"),
        (lambda: client.show("none"), 404, "none"),
        (lambda: client.chat(MODEL, MESSAGES, options={"temperature": -1}), 400, "temperature"),
        (lambda: client.generate(MODEL, "x", template="{{ .Prompt }}"), 400, "template"),
        (lambda: client.pull("none"), 404, "none"),
        (lambda: client.delete(MODEL), 403, "operator"),
    ]:
        with pytest.raises(ollama.ResponseError) as error:
            refused()
        assert error.value.status_code == status and words in error.value.error, error.value


def test_a_served_model_is_pulled_already(client):
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(MODEL, stream=True)] == ["success"]


def test_an_engines_death_is_an_error_of_the_client(tmp_path):
    """The line that says so reaches it as an exception."""
    up = Up(tmp_path, ["--served-model-name", MODEL, "--sim-step-ms", "20", "--sim-die-after-ms", "4000"], engines=1)
    try:
        client = ollama.Client(host(up.edge), timeout=300)
        with pytest.raises(ollama.ResponseError) as error:
            for part in client.chat(MODEL, MESSAGES, options={"num_predict": 3000}, stream=True):
                assert not part.done
        # No status: that of the answer had been 200 when it broke.
        assert error.value.status_code == -1 and "engine" in error.value.error, error.value
    finally:
        up.stop()


def test_a_client_that_leaves_mid_stream_frees_the_engine(client, fleet):
    stream = client.chat(MODEL, MESSAGES, options={"num_predict": 3000}, stream=True)
    next(stream)
    wait_until(lambda: fleet.routers[0].in_flight() == 1, 5, "one request in flight")
    stream.close()
    fleet.wait_idle()


def test_sixteen_streams_run_at_once(fleet):
    async def one(client: ollama.AsyncClient) -> int:
        parts = [part async for part in await client.chat(MODEL, MESSAGES, options={"num_predict": 20}, stream=True)]
        return parts[-1].eval_count

    async def all_of_them() -> list[int]:
        client = ollama.AsyncClient(host(fleet.routers[0].edge), timeout=300)
        return await asyncio.gather(*(one(client) for _ in range(16)))

    assert all(0 < count <= 20 for count in asyncio.run(all_of_them()))
