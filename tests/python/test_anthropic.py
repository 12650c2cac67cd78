"""Anthropic's Python SDK, unmodified: what it asks both kinds of engines through Hostler, and what it makes of Hostler's own errors."""

import json

import anthropic
import pytest

from fleet import MODEL, Fleet, Up

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}},
        "required": ["city"],
        # A model of random weights would add one after the other.
        "additionalProperties": False,
    },
}
# The SDK has no argument for it any more; engines take it still.
GREEDY = {"model": MODEL, "messages": HELLO, "extra_body": {"temperature": 0}}


def sdk(edge: str) -> anthropic.Anthropic:
    """The SDK with its retries off, so that every answer is the first one."""
    return anthropic.Anthropic(base_url=edge.removesuffix("/v1"), api_key="unused", max_retries=0, timeout=300)


@pytest.fixture(scope="module", params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def client(request):
    """The SDK on a router of a fleet of each kind."""
    fleet: Fleet = request.getfixturevalue(f"{request.param}_fleet")
    fleet.wait_ready()
    with sdk(fleet.routers[0].edge) as client:
        yield client


@pytest.fixture(scope="module")
def simulated(up: Up):
    """The SDK on a router whose engines are simulated: they hold any answer to a form."""
    with sdk(up.edge) as client:
        yield client


def test_a_message_is_answered_whole_and_streamed(client):
    whole = client.messages.create(**GREEDY, max_tokens=12)
    assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", 12)
    assert whole.content[0].type == "text" and whole.content[0].text
    with client.messages.stream(**GREEDY, max_tokens=12) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)


@pytest.mark.vllm
def test_a_stop_sequence_and_a_system_prompt_are_the_engines(vllm_fleet: Fleet):
    client = sdk(vllm_fleet.routers[0].edge)
    asked = {**GREEDY, "system": "Be brief.", "max_tokens": 64}
    whole = client.messages.create(**asked).content[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = client.messages.create(**asked, stop_sequences=[stop]).content[0].text
    assert cut == whole[: whole.index(stop)]


def test_a_required_tool_is_called_and_its_result_read(client):
    # A model of random weights never ends the arguments, so the call is looked at as far as it comes.
    asked = {**GREEDY, "max_tokens": 32, "tools": [TOOL], "tool_choice": {"type": "any"}}
    with client.messages.stream(**asked) as events:
        begun = [event.content_block for event in events if event.type == "content_block_start"]
    call = next(block for block in begun if block.type == "tool_use")
    assert call.name == "get_weather" and call.id
    called = {"type": "tool_use", "id": call.id, "name": call.name, "input": {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*HELLO, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    after = client.messages.create(model=MODEL, messages=turns, max_tokens=4, tools=[TOOL])
    before = client.messages.create(model=MODEL, messages=HELLO, max_tokens=4, tools=[TOOL])
    assert after.usage.input_tokens > before.usage.input_tokens


def test_counted_tokens_are_those_that_a_message_uses(client):
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    used = client.messages.create(**GREEDY, max_tokens=1).usage
    # What is cached, or will be, is counted apart where engines tell it.
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)


def test_an_engines_errors_are_the_sdks_own_classes(client):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL, messages=HELLO, max_tokens=4, extra_body={"temperature": "hot"})
    assert "temperature" in str(refused.value)
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        client.messages.create(**{**GREEDY, "model": "no-such-model"}, max_tokens=4)


def test_a_forced_tool_is_called_with_input_of_its_schema(simulated):
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        asked = {**GREEDY, "max_tokens": 256, "tools": [TOOL], "tool_choice": choice}
        whole = simulated.messages.create(**asked)
        (call,) = whole.content
        assert (whole.stop_reason, call.name) == ("tool_use", "get_weather")
        assert call.input.get("city", "Bern") in ("Bern", "Oslo")
        with simulated.messages.stream(**asked) as stream:
            assert stream.get_final_message().content[0].input == call.input


def test_a_message_is_json_of_the_wanted_schema(simulated):
    schema = {**TOOL["input_schema"], "required": ["city"]}
    asked = {**GREEDY, "max_tokens": 256, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    whole = simulated.messages.create(**asked)
    assert json.loads(whole.content[0].text)["city"] in ("Bern", "Oslo")
    assert whole.stop_reason == "end_turn"


def test_hostlers_errors_are_the_sdks_own_classes(simulated):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        simulated.messages.create(**{**GREEDY, "model": "no-such-model"}, max_tokens=4)
    error = unknown.value.body
    assert error["type"] == "error" and "no-such-model" in error["error"]["message"]
    large = [{"role": "user", "content": "x" * (64 << 20)}]
    with pytest.raises(anthropic.APIStatusError) as refused:
        simulated.messages.create(model=MODEL, messages=large, max_tokens=4)
    assert refused.value.status_code == 413
    assert refused.value.body["error"]["type"] == "request_too_large"
