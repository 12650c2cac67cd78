"""Responses that an engine keeps: found, continued and ended through either router, whichever engine has them."""

import openai
import pytest

from fleet import MODEL, Fleet
from processes import wait_until


@pytest.fixture
def routers(fleet: Fleet):
    """The SDK on both routers of a fleet of each kind."""
    clients = [openai.OpenAI(base_url=router.edge, api_key="unused", max_retries=0, timeout=300) for router in fleet.routers]
    yield clients
    for client in clients:
        client.close()


def asked(number: int, **more) -> dict:
    """A short response; `number` makes it another one."""
    return {"model": MODEL, "input": f"Say something, number {number}", "max_output_tokens": 6, **more}


def test_a_kept_response_is_found_through_both_routers(routers):
    first, second = routers
    kept = [first.responses.create(**asked(number)) for number in range(6)]
    streamed = [event for event in first.responses.create(**asked(6), stream=True) if event.type == "response.completed"]
    kept.append(streamed[0].response)
    for response in kept:
        for client in (first, second, first):
            found = client.responses.retrieve(response.id)
            assert (found.id, found.output_text) == (response.id, response.output_text)
        for client in (second, first):
            after = client.responses.create(**asked(7), previous_response_id=response.id)
            assert after.id != response.id and after.output_text


def test_a_response_in_the_background_is_found_and_ended(routers):
    first, second = routers
    long = asked(0, background=True) | {"max_output_tokens": 1000}
    begun = first.responses.create(**long, extra_body={"ignore_eos": True})
    assert begun.status == "queued"
    assert first.responses.cancel(begun.id).status == "cancelled"
    assert second.responses.retrieve(begun.id).status == "cancelled"
    short = second.responses.create(**asked(1, background=True))
    done = ("completed", "incomplete")
    wait_until(lambda: first.responses.retrieve(short.id).status in done, 30, "the response is complete")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        second.responses.cancel(short.id)


def test_an_unkept_response_is_not_found_in_the_engines_words(routers):
    unstored = routers[0].responses.create(**asked(0, store=False)).id
    for client in routers:
        for call in (client.responses.retrieve, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as missing:
                call(unstored)
            assert missing.value.body["message"] == f"Response with id '{unstored}' not found."
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**asked(0), previous_response_id=unstored)
