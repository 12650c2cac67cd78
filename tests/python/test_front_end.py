"""Anthropic's and OpenAI's Python SDKs, unmodified, on engines with vLLM's Rust front-end, which lacks `/v1/messages` and `/v1/responses`."""

import anthropic
import openai
import pytest

from fleet import MODEL, Up

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
ASKED = {"model": MODEL, "messages": HELLO}


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """`hostler up` with simulated engines that play the Rust front-end."""
    flags = ["--served-model-name", MODEL, "--sim-step-ms", "5", "--enable-prompt-tokens-details"]
    running = Up(tmp_path_factory.mktemp("rust"), flags, options=["--front-end", "rust"])
    yield running
    running.stop()


@pytest.fixture(scope="module")
def messages(up):
    """The Messages API of Anthropic's SDK."""
    with anthropic.Anthropic(base_url=up.edge.removesuffix("/v1"), api_key="unused", max_retries=0, timeout=60) as client:
        yield client.messages


@pytest.fixture(scope="module")
def responses(up):
    """The Responses API of OpenAI's SDK."""
    with openai.OpenAI(base_url=up.edge, api_key="unused", max_retries=0, timeout=60) as client:
        yield client.responses


def test_a_message_is_the_same_whole_and_streamed(messages):
    # Both may go to one engine, whose answers to sampled requests without a seed differ.
    asked = {**ASKED, "max_tokens": 12, "system": "Be brief.", "extra_body": {"temperature": 0}}
    whole = messages.create(**asked)
    assert (whole.type, whole.role, whole.stop_reason, whole.usage.output_tokens) == ("message", "assistant", "max_tokens", 12)
    with messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    counted = messages.count_tokens(**ASKED, system="Be brief.").input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_tool_is_called_and_its_result_is_read(messages):
    asked = {**ASKED, "max_tokens": 64, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    with messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for answer in (messages.create(**asked), streamed):
        (call,) = (block for block in answer.content if block.type == "tool_use")
        assert (answer.stop_reason, call.name) == ("tool_use", "get_weather") and isinstance(call.input, dict)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*HELLO, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
    assert messages.create(model=MODEL, messages=turns, max_tokens=4, tools=[TOOL], tool_choice={"type": "none"}).content


def test_errors_are_the_sdks_own_classes(messages, responses):
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        messages.create(**{**ASKED, "model": "no-such-model"}, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        messages.create(**ASKED, max_tokens=4, extra_body={"temperature": "hot"})
    with pytest.raises(openai.BadRequestError, match="--front-end python"):
        responses.create(model=MODEL, input="Hello", previous_response_id="resp_1")


def test_a_response_is_the_same_whole_and_streamed(responses):
    asked = {"model": MODEL, "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0}
    whole = responses.create(**asked)
    assert (whole.status, whole.incomplete_details.reason, whole.usage.output_tokens) == ("incomplete", "max_output_tokens", 12)
    with responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text != ""
    turns = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in whole.output), {"role": "user", "content": "Go on"}]
    assert responses.create(model=MODEL, input=turns, max_output_tokens=4).output_text


def test_a_function_is_called_in_a_response(responses):
    asked = {"model": MODEL, "input": "Hello", "tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 64}
    with responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for answer in (responses.create(**asked), streamed):
        (call,) = (item for item in answer.output if item.type == "function_call")
        assert (call.name, answer.status) == ("get_weather", "completed") and call.arguments.startswith("{")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turns = [{"role": "user", "content": "Hello"}, call.model_dump(exclude={"parsed_arguments"}), result]
    assert responses.create(model=MODEL, input=turns, max_output_tokens=4).output_text


def test_log_probabilities_come_or_the_sdk_learns_otherwise(messages, responses):
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "temperature": 0}
    asked |= {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = responses.create(**asked).output[0].content[0]
    with responses.stream(**asked) as stream:
        events = list(stream)
    streamed = events[-1].response.output[0].content[0]
    told = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    for text in (whole, streamed):
        assert len(text.logprobs) == 4 and all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in text.logprobs)
        assert [one.token for one in text.logprobs] == told and "".join(told) == text.text
    with pytest.raises(anthropic.BadRequestError, match="ask for a chat completion"):
        messages.create(**ASKED, max_tokens=4, extra_body={"logprobs": True})
