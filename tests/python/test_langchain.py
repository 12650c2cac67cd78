"""LangChain's ChatOpenAI, unmodified, on both kinds of fleet: chat, streams, tools and structured output."""

from typing import Literal

import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from fleet import MODEL, Fleet

TURNS = [SystemMessage("Be brief."), HumanMessage("Say something about locomotives")]


@tool
def get_weather(city: Literal["Bern", "Oslo"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Answer(BaseModel):
    """What the model is to say."""

    colour: Literal["red", "green", "blue"]
    even: bool


def model(fleet: Fleet, **options) -> ChatOpenAI:
    """The client of the fleet's first router, with its retries off."""
    edge = fleet.routers[0].edge
    options = {"model": MODEL, "temperature": 0, "seed": 1, **options}
    return ChatOpenAI(base_url=edge, api_key="unused", max_retries=0, timeout=300, **options)


def test_a_chat_is_answered_whole_and_streamed(fleet: Fleet):
    chat = model(fleet, max_tokens=12, stream_usage=True)
    whole = chat.invoke(TURNS)
    assert whole.content and whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 12
    pieces = list(chat.stream(TURNS))
    assert "".join(piece.content for piece in pieces) == whole.content and len(pieces) > 2
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) == 12


def test_several_chats_at_once_are_each_answered(fleet: Fleet):
    chat = model(fleet, max_tokens=6)
    answers = chat.batch([f"number {number}" for number in range(8)])
    assert len(answers) == 8 and all(answer.content for answer in answers)


def test_a_tool_is_called_and_its_result_is_read(simulated_fleet: Fleet):
    # Real vLLM does not hold a model of random weights to the arguments of a tool: it never ends a call.
    simulated_fleet.wait_ready()
    fleet = simulated_fleet
    bound = model(fleet, max_tokens=64).bind_tools([get_weather], tool_choice="get_weather")
    answer = bound.invoke("How is the weather?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and "city" in call["args"]
    streamed = None
    for piece in bound.stream("How is the weather?"):
        streamed = piece if streamed is None else streamed + piece
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [(call["name"], call["args"])]
    turns = [HumanMessage("How is the weather?"), answer, ToolMessage("rain", tool_call_id=call["id"])]
    assert model(fleet, max_tokens=4).invoke(turns).content is not None


def test_an_answer_is_an_object_of_the_type_asked_for(fleet: Fleet):
    asked = model(fleet, max_tokens=64).with_structured_output(Answer, method="json_schema", strict=True)
    assert isinstance(asked.invoke("Choose."), Answer)


def test_an_unknown_model_is_the_sdks_own_error(fleet: Fleet):
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        model(fleet, model="no-such-model").invoke("x")
