"""What an OpenAI SDK may rely on, asked of `hostler up` with two simulated engines: answers, errors, departures."""

import asyncio
import json

import httpx2
import openai
import pytest

from fleet import MODEL, Up, host_and_port
from processes import wait_until

MESSAGES = [{"role": "user", "content": "Say something about locomotives"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# The edge's default limit of a body, in bytes.
BODY_LIMIT = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def client(up: Up):
    """The SDK with its retries off, so that every answer is the first one."""
    with openai.OpenAI(base_url=up.edge, api_key="unused", max_retries=0, timeout=30) as sdk:
        yield sdk


def test_a_chat_answers_with_text_a_reason_and_usage(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_streamed_chat_adds_up_to_the_whole_one(client):
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_usage_when_asked(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, **options))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_completion_answers_whole_and_streamed(client):
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 10, "temperature": 0, "seed": 1}
    whole = client.completions.create(**asked)
    assert whole.object == "text_completion" and whole.usage.completion_tokens == 10
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_a_prompt_may_be_an_array_of_tokens(client):
    answer = client.completions.create(model=MODEL, prompt=[11, 12, 13, 14, 15], max_tokens=3)
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_arrive_under_their_own_index(client, stream):
    answer = client.completions.create(model=MODEL, prompt="Either or", n=2, max_tokens=4, stream=stream)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    assert {choice.index for choice in choices} == {0, 1}
    assert sum(choice.finish_reason == "length" for choice in choices) == 2


def test_models_are_listed_once_however_many_engines_serve_them(client):
    assert [model.id for model in client.models.list()].count(MODEL) == 1


def test_embeddings_pass_through(client):
    answer = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1]
    assert all(item.embedding for item in answer.data)


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(client, stream):
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 64}
    if stream:
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
    else:
        calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert calls[0].function.name == "get_weather"
    json.loads("".join(call.function.arguments or "" for call in calls))


def test_a_field_nobody_knows_passes(client):
    unknown = {"a_field_of_tomorrow": {"nested": [1, 2.50, None]}}
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body=unknown)
    assert answer.choices[0].finish_reason == "length"


def test_thirty_two_streams_run_at_once(client, up):
    async def one(sdk: openai.AsyncOpenAI) -> int:
        stream = await sdk.completions.create(model=MODEL, prompt="together", max_tokens=40, stream=True)
        return sum([len(chunk.choices) async for chunk in stream])

    async def all_of_them() -> list[int]:
        async with openai.AsyncOpenAI(base_url=up.edge, api_key="unused", max_retries=0, timeout=30) as sdk:
            return await asyncio.gather(*(one(sdk) for _ in range(32)))

    before = {replica.id: replica.served for replica in up.replicas()}
    assert all(events > 0 for events in asyncio.run(all_of_them()))
    assert all(replica.served > before[replica.id] for replica in up.replicas()), "one engine served none of 32"
    wait_until(lambda: up.in_flight() == 0, 5, "in-flight back to zero")


def test_a_client_that_leaves_mid_stream_is_no_longer_counted(client, up):
    stream = client.completions.create(model=MODEL, prompt="never read", max_tokens=3000, stream=True)
    next(iter(stream))
    wait_until(lambda: up.in_flight() == 1, 5, "one request in flight")
    stream.close()
    wait_until(lambda: up.in_flight() == 0, 5, "in-flight back to zero")


def test_a_client_that_leaves_early_is_no_longer_counted(client, up):
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="never read", max_tokens=3000, timeout=0.5)
    wait_until(lambda: up.in_flight() == 0, 5, "in-flight back to zero")


def test_an_unknown_models_error_names_the_models_there_are(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    error = refused.value.body
    assert "no-such-model" in error["message"] and MODEL in error["message"].replace("no-such-model", "")
    assert set(error) >= {"message", "type", "param", "code"} and error["param"] == "model"


def test_a_value_the_engine_refuses_is_the_engines_error(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", max_tokens=-1)
    assert "max_tokens" in str(refused.value)


def test_malformed_json_is_refused_with_the_position(up):
    body = b'{"model": "tiny", "prompt": }'
    answer = httpx2.post(f"{up.edge}/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    # The closing brace is the first byte that cannot be there: byte 28, the 29th column.
    assert "28" in error["message"] or "29" in error["message"], error["message"]


def test_a_body_over_the_limit_is_refused(client):
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model=MODEL, prompt="x" * BODY_LIMIT)
    assert refused.value.status_code == 413
    assert refused.value.body["message"]


def test_a_body_of_unknown_length_over_the_limit_is_refused(up):
    pieces = (b" " * 65536 for _ in range(BODY_LIMIT // 65536 + 2))
    answer = httpx2.post(f"{up.edge}/completions", content=pieces, timeout=30)
    assert answer.status_code == 413


def test_routes_of_the_engine_beside_openais_pass_through(up):
    asked = {"model": MODEL, "prompt": "some words to count"}
    answer = httpx2.post(f"http://{host_and_port(up.edge)}/tokenize", json=asked).json()
    assert answer["count"] == len(answer["tokens"]) > 0


def test_a_route_nobody_knows_is_the_engines_404(up):
    answer = httpx2.get(f"{up.edge}/no/such/route")
    assert answer.status_code == 404 and answer.json() == {"detail": "Not Found"}
