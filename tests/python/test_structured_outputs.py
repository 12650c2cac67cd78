"""Answers in a form: OpenAI's `parse`, instructor and plain requests, unmodified, get objects of their own types from simulated engines."""

import enum
import json
from typing import Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field

from fleet import MODEL, Up

MESSAGES = [{"role": "user", "content": "How is the weather in Bern and in Oslo?"}]


class Sky(enum.Enum):
    """What is above."""

    clear = "clear"
    cloudy = "cloudy"


class Wind(BaseModel):
    """A part that is referred to."""

    speed: float = Field(ge=0, lt=60)
    direction: Literal["N", "E", "S", "W"]


class City(BaseModel):
    """The weather of one city."""

    name: str = Field(min_length=2, max_length=30)
    code: str = Field(pattern=r"^[A-Z]{2}-\d{4}$")
    degrees: int = Field(ge=-60, le=60)
    sky: Sky
    wind: Wind | None


class Report(BaseModel):
    """What is asked for."""

    cities: list[City] = Field(min_length=1, max_length=3)
    is_sure: bool
    remarks: dict[str, str] = {}


class Strict(BaseModel):
    """A schema that OpenAI's strict mode takes: no bounds, no defaults."""

    city: str
    degrees: int
    sky: Sky
    parts: list[Wind]


@pytest.fixture(scope="module")
def client(up: Up):
    """The SDK with its retries off, so that every answer is the first one."""
    with openai.OpenAI(base_url=up.edge, api_key="unused", max_retries=0, timeout=60) as sdk:
        yield sdk


def test_a_chat_is_parsed_into_the_wanted_model(client):
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Strict)
    assert isinstance(answer.choices[0].message.parsed, Strict)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Strict) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_a_response_is_parsed_into_the_wanted_model(client):
    answer = client.responses.parse(model=MODEL, input="How is the weather?", text_format=Strict)
    assert isinstance(answer.output_parsed, Strict)
    with client.responses.stream(model=MODEL, input="How is the weather?", text_format=Strict) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == answer.output_parsed


def test_a_forced_tool_is_called_with_arguments_of_its_model(client):
    tool = openai.pydantic_function_tool(Strict, name="report")
    for choice in ("required", {"type": "function", "function": {"name": "report"}}):
        answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=[tool], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Strict)
    flat = {"type": "function", "strict": True, **tool["function"]}
    for choice in ("required", {"type": "function", "name": "report"}):
        response = client.responses.parse(model=MODEL, input="How is the weather?", tools=[flat], tool_choice=choice)
        (call,) = response.output
        assert Strict.model_validate_json(call.arguments)


def test_an_answer_that_is_cut_is_said_to_be(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Strict, max_tokens=5)


# `TOOLS` names the function; the JSON modes show the schema, as a constraint or in words.
@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor_gets_its_model_at_the_first_try(client, mode):
    structured = instructor.from_openai(client, mode=instructor.Mode[mode])
    asked = {"model": MODEL, "messages": MESSAGES, "max_retries": 0}
    assert isinstance(structured.chat.completions.create(**asked, response_model=Report), Report)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_and_expressions_are_vllms(client, stream):
    def text(**constraint) -> str:
        asked = {"model": MODEL, "messages": MESSAGES, "extra_body": {"structured_outputs": constraint}}
        if not stream:
            return client.chat.completions.create(**asked).choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True))

    assert text(choice=["naïve", "日本語"]) in ("naïve", "日本語")
    assert len(text(regex=r"\d{3}-[a-f]{4}")) == 8
    assert City.model_validate(json.loads(text(json=City.model_json_schema())))


def test_a_schema_that_nothing_fits_is_a_bad_request(client):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: nothing"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=schema)
