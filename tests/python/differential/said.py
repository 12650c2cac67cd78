"""What an answer of messages, responses or several choices says, whole or streamed, whoever tells it in which fields and events.

Ids, moments and what was cached are left out, and so is how a text is cut into events.
"""

import json

from table import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES


def said(path: str, body: str, streams: bool) -> dict:
    """The same for a whole answer and for the stream that says it."""
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")] if streams else []
    if path in (CHAT, COMPLETIONS):
        return choices_said(events if streams else [json.loads(body)])
    if path == MESSAGES:
        return message_said(gathered_message(events) if streams else json.loads(body))
    if path == COUNT_TOKENS:
        return {"tokens": json.loads(body)["input_tokens"]}
    if not streams:
        return response_said(json.loads(body))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    told = response_said(events[-1]["response"])
    assert "".join(deltas) == "".join(text for kind, text in told["items"] if kind == "message")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return told


def choices_said(parts: list[dict]) -> dict:
    """The text of each choice of a whole answer or a stream's events, why it ended, and what all used."""
    texts, ends, used = {}, {}, None
    for part in parts:
        for choice in part["choices"]:
            index = choice["index"]
            text = (choice.get("message") or choice.get("delta") or {}).get("content") or choice.get("text") or ""
            texts[index] = texts.get(index, "") + text
            ends[index] = choice.get("finish_reason") or ends.get(index)
        used = part.get("usage") or used
    # The Rust front-end writes the part of a character that a limit has cut; the Python one leaves it out.
    texts = {index: text.rstrip("\ufffd") for index, text in texts.items()}
    return {"texts": texts, "ends": ends, "used": used and [used[kind] for kind in ("prompt_tokens", "completion_tokens", "total_tokens")]}


def message_said(message: dict) -> dict:
    """The blocks of a message, why it ended, and what it used."""
    usage = message["usage"]
    prompt = sum(usage.get(kind) or 0 for kind in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))
    return {
        "kind": (message["type"], message["role"], message["model"]),
        "blocks": [
            (block["type"], block.get("text"), block.get("thinking"), block.get("name"), block.get("input"))
            for block in message["content"]
        ],
        "end": (message["stop_reason"], message.get("stop_sequence")),
        "tokens": (prompt, usage["output_tokens"]),
    }


def gathered_message(events: list[dict]) -> dict:
    """The message that these events tell, as Anthropic's SDK gathers it."""
    message: dict = {}
    arguments = ""
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                delta, block = event["delta"], message["content"][event["index"]]
                for field in ("text", "thinking"):
                    if field in delta:
                        block[field] += delta[field]
                arguments += delta.get("partial_json") or ""
            case "content_block_stop" if arguments:
                message["content"][event["index"]]["input"] = arguments
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case "error":
                raise AssertionError(event)
    assert events[-1]["type"] == "message_stop"
    return message


def response_said(response: dict) -> dict:
    """The items of a response, how it ended, what it used, and what it repeats of its request."""

    def item(item: dict) -> tuple:
        if item["type"] == "function_call":
            return (item["type"], item["name"], item["arguments"])
        return (item["type"], "".join(part["text"] for part in item["content"]))

    usage = response["usage"]
    repeated = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "tools", "truncation", "user", "background")
    return {
        "items": [item(one) for one in response["output"]],
        "end": (response["status"], (response.get("incomplete_details") or {}).get("reason")),
        "tokens": (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]),
        "repeated": {name: response.get(name) for name in repeated},
    }
