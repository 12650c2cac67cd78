"""The requests of the differential suite, as tables: what is asked, and what status real vLLM 0.32 gives.

Each is sent to the engine itself and through Hostler, and both answers must be the same bytes. `whole and streamed`
rows are sent once each way. Everything is greedy, or has a seed; prompts are shorter than a block of the cache unless
their name says otherwise. The `model` is the name that only the engine asked answers to, unless a row says another.
"""

import dataclasses
import json

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
JSON = "application/json"
# Left out of a body instead of filled in.
NO_MODEL = object()


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request, before its model is known."""

    name: str
    path: str
    body: dict | bytes | None = None
    status: int = 200
    method: str = "POST"
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    def content(self, model: str) -> bytes | None:
        """The bytes of its body, for an engine of this name."""
        if not isinstance(self.body, dict):
            return self.body.replace(b"MODEL", model.encode()) if self.body else self.body
        body = {"model": model, **self.body}
        return json.dumps({key: value for key, value in body.items() if value is not NO_MODEL}).encode()

    def typed(self) -> dict[str, str]:
        """Its headers, with a content type where it has a body and says none itself."""
        return self.headers if self.body is None or "content-type" in self.headers else {"content-type": JSON, **self.headers}

    @property
    def streams(self) -> bool:
        """Whether the answer is asked for as events."""
        return isinstance(self.body, dict) and self.body.get("stream") is True


def asks_for_several(body: dict | bytes | None) -> bool:
    """Whether a chat or completion asks for several choices, or has its prompts in a list."""
    if not isinstance(body, dict):
        return False
    prompt = body.get("prompt")
    return body.get("n", 1) != 1 or (isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt))


def both_ways(path: str, common: dict, rows: dict[str, dict], status: int = 200) -> list[Asked]:
    """Each row once whole and once streamed; `common` and then greedy sampling are what a row does not say itself."""
    base = {"temperature": 0, **common}
    return [
        Asked(f"{path} {name}{' streamed' if stream else ''}", path, {**base, **row, **({"stream": True} if stream else {})}, status)
        for name, row in rows.items()
        for stream in (False, True)
    ]


def refused(path: str, status: int, common: dict, rows: dict[str, dict]) -> list[Asked]:
    """Requests that the engine does not take."""
    return [Asked(f"{path} {name}", path, {**common, **row}, status) for name, row in rows.items()]


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "even": {"type": "boolean"}},
    "required": ["colour", "even"],
    "additionalProperties": False,
}
# Closed, so that a model of random weights comes to an end.
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "asks", "parameters": CITY}}]
NAMED_TOOL = {"type": "function", "function": {"name": "get_weather"}}
ANTHROPIC_TOOLS = [{"name": "get_weather", "description": "asks", "input_schema": CITY}]
USER = [{"role": "user", "content": "weather?"}]
CALLED = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Bern"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
USAGE = {"include_usage": True}

CHATS = both_ways(
    CHAT,
    {"messages": USER, "max_tokens": 6},
    {
        "plain": {},
        "max_completion_tokens": {"max_completion_tokens": 4},
        "system and turns": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three"},
            ]
        },
        "content of parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]},
        "other scripts": {"messages": [{"role": "user", "content": "Grüße, 東京 \U0001f682 \u0000 \"quoted\" \\"}]},
        "answer continued": {
            "messages": [*USER, {"role": "assistant", "content": "It is"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "n of 3, seeded": {"n": 3, "temperature": 0.9, "seed": 7},
        "seeded": {"temperature": 1.1, "seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        "logit_bias": {"logit_bias": {"17": 5.0, "40": -100}},
        "logprobs": {"logprobs": True, "top_logprobs": 3},
        "logprobs of no alternatives": {"logprobs": True},
        "logprobs of n": {"logprobs": True, "top_logprobs": 1, "n": 2, "temperature": 0.8, "seed": 3},
        "stop string": {"stop": "e", "max_tokens": 24},
        "stop strings": {"stop": ["e", "a"], "include_stop_str_in_output": True, "max_tokens": 24},
        "stop token": {"stop_token_ids": list(range(0, 2000, 2)), "max_tokens": 12},
        "min_tokens": {"min_tokens": 4},
        "ignore_eos": {"ignore_eos": True},
        "bad words": {"bad_words": ["the"]},
        "allowed tokens": {"allowed_token_ids": [30, 31, 32, 33]},
        "tool required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 48},
        "tool named": {"tools": TOOLS, "tool_choice": NAMED_TOOL, "max_tokens": 48},
        "tool left free": {"tools": TOOLS, "tool_choice": "auto"},
        "tools not to be used": {"tools": TOOLS, "tool_choice": "none"},
        "one tool at a time": {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 48,
        },
        "tool's result": {"messages": CALLED, "tools": TOOLS, "tool_choice": "none"},
        "json_schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            "max_tokens": 40,
        },
        "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 8},
        "plain response_format": {"response_format": {"type": "text"}},
        "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
        "regex": {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}, "max_tokens": 16},
        "grammar": {"structured_outputs": {"grammar": 'root ::= "x" "y"'}, "max_tokens": 8},
        "schema of vLLM": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
        "token ids": {"return_token_ids": True},
        "tokens as ids": {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
        "cache salt": {"cache_salt": "salt"},
        "priority": {"priority": 3},
        "a name of its own": {"request_id": "chosen"},
        "user and metadata": {"user": "someone", "metadata": {"a": "b"}, "store": False},
        "a field of tomorrow": {"a_field_of_tomorrow": {"nested": [1, 2.5, None]}},
        "template's arguments": {"chat_template_kwargs": {"enable_thinking": False}},
        "special tokens kept": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        "no model named": {"model": NO_MODEL},
        "empty model": {"model": ""},
        "no model but null": {"model": None},
    },
)
CHATS += [
    Asked(f"{CHAT} {name}", CHAT, {"messages": USER, "max_tokens": 6, "temperature": 0, **row}, 200, "POST", headers)
    for name, row, headers in (
        ("usage streamed", {"stream": True, "stream_options": USAGE}, {}),
        ("usage streamed of n", {"stream": True, "stream_options": USAGE, "n": 2, "seed": 1, "temperature": 0.9}, {}),
        ("usage in each event", {"stream": True, "stream_options": {**USAGE, "continuous_usage_stats": True}}, {}),
        ("prompt_logprobs", {"prompt_logprobs": 1}, {}),
        ("echo", {"echo": True}, {}),
        ("content type with charset", {}, {"content-type": "application/json; charset=utf-8"}),
        ("content type in capitals", {}, {"content-type": "Application/JSON"}),
        ("traced", {}, {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}),
        ("an origin", {}, {"origin": "https://example.org"}),
        ("an unknown header", {}, {"x-tomorrow": "yes", "cookie": "a=b"}),
        ("load metrics wanted", {}, {"endpoint-load-metrics-format": "JSON"}),
        ("a session", {}, {"x-session-id": "s-1"}),
    )
]

TEXT = {"prompt": "The engine", "max_tokens": 6}
TEXTS = both_ways(
    COMPLETIONS,
    TEXT,
    {
        "plain": {},
        "prompt of tokens": {"prompt": [11, 402, 77, 1203, 9]},
        "prompts": {"prompt": ["one", "two", "three"]},
        "prompts of tokens": {"prompt": [[5, 6, 7], [8, 9]]},
        "n of 2, seeded": {"n": 2, "temperature": 0.9, "seed": 5},
        "prompts and n": {"prompt": ["one", "two"], "n": 2, "temperature": 0.9, "seed": 5},
        "logprobs": {"logprobs": 3},
        "logprobs of none": {"logprobs": 0},
        "echo": {"echo": True},
        "echo and logprobs": {"echo": True, "logprobs": 1, "max_tokens": 2},
        "stop": {"stop": ["e"], "max_tokens": 24},
        "penalties": {"presence_penalty": 1.0, "frequency_penalty": -0.5},
        "seeded": {"temperature": 0.7, "seed": 3},
        "logit_bias": {"logit_bias": {"17": 100}},
        "token ids": {"return_token_ids": True},
        "cache salt": {"cache_salt": "s"},
        "schema": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
        "regex": {"structured_outputs": {"regex": "[ab]{4}"}, "max_tokens": 8},
        "truncated prompt": {"prompt": [7] * 40, "truncate_prompt_tokens": 5},
        # More than an engine computes in one step.
        "a long prompt": {"prompt": [(7 * number) % 4000 for number in range(3000)], "max_tokens": 3},
        "a field of tomorrow": {"tomorrow": [{}]},
    },
)
TEXTS += [
    Asked(f"{COMPLETIONS} {name}", COMPLETIONS, {**TEXT, "temperature": 0, **row})
    for name, row in (
        ("usage streamed", {"stream": True, "stream_options": USAGE}),
        ("usage of prompts streamed", {"stream": True, "stream_options": USAGE, "prompt": ["a", "b"]}),
        ("prompt_logprobs", {"prompt_logprobs": 2}),
        ("no tokens but the echo", {"echo": True, "max_tokens": 0}),
        ("beam search", {"use_beam_search": True, "n": 2}),
    )
]

REPLY = both_ways(
    RESPONSES,
    {"input": "Hello", "max_output_tokens": 6},
    {
        "text": {},
        "messages": {"input": [{"role": "user", "content": "Hello"}]},
        "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]},
        "instructions": {"instructions": "Be brief."},
        "not stored": {"store": False},
        "metadata": {"metadata": {"a": "b"}, "user": "u"},
        "seeded": {"temperature": 0.9, "top_p": 0.9},
    },
)
REPLY = [row for row in REPLY if "seeded" not in row.name]

ANTHROPIC = both_ways(
    MESSAGES,
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6},
    {
        "text": {},
        "system": {"system": "Be brief."},
        "system of blocks": {"system": [{"type": "text", "text": "Be brief."}]},
        "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
        "turns": {
            "messages": [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three"},
            ]
        },
        "stop sequences": {"stop_sequences": ["e"], "max_tokens": 24},
        "any tool": {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 48},
        "a tool": {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 48},
        "tool left free": {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "auto"}},
        "top_k and metadata": {"top_k": 3, "metadata": {"user_id": "u"}},
    },
)
ANTHROPIC += [
    Asked(f"{COUNT_TOKENS} {name}", COUNT_TOKENS, {"messages": [{"role": "user", "content": "Hello"}], **row})
    for name, row in (("text", {}), ("system", {"system": "Be brief."}), ("tools", {"tools": ANTHROPIC_TOOLS}))
]

OTHERS = [
    Asked("/tokenize prompt", "/tokenize", {"prompt": "some words"}),
    Asked("/tokenize with tokens as text", "/tokenize", {"prompt": "some words", "return_token_strs": True}),
    Asked("/tokenize without special tokens", "/tokenize", {"prompt": "some words", "add_special_tokens": False}),
    Asked("/tokenize messages", "/tokenize", {"messages": USER}),
    Asked("/tokenize messages and tools", "/tokenize", {"messages": USER, "tools": TOOLS}),
    Asked("/tokenize nothing", "/tokenize", {}, 400),
    Asked("/tokenize of an unknown model", "/tokenize", {"prompt": "x", "model": "no-such-model"}, 404),
    Asked("/detokenize", "/detokenize", {"tokens": [5, 6, 700]}),
    Asked("/detokenize a token there is not", "/detokenize", {"tokens": [10**7]}),
    Asked("/detokenize a text", "/detokenize", {"tokens": "x"}, 400),
    Asked("batch chat", f"{CHAT}/batch", {"messages": [USER, USER], "max_tokens": 4, "temperature": 0}),
    Asked("batch chat of no list", f"{CHAT}/batch", {"messages": USER, "max_tokens": 4}, 400),
    Asked("batch chat that cannot be streamed", f"{CHAT}/batch", {"messages": [USER], "max_tokens": 4, "stream": True, "temperature": 0}),
    Asked("generative scoring", "/generative_scoring", {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]}),
    Asked("generative scoring of nothing", "/generative_scoring", {}, 400),
    Asked("a decision of nothing", "/v1/systemone", {}, 400),
    Asked("invocation of a chat", "/invocations", {"messages": USER, "max_tokens": 4, "temperature": 0}),
    Asked("invocation of a completion", "/invocations", {"prompt": "x", "max_tokens": 4, "temperature": 0}),
    Asked("invocation of nothing", "/invocations", {}, 400),
    Asked("version", "/version", method="GET"),
    Asked("version with a query", "/version?a=b&c=%20", method="GET"),
    Asked("health", "/health", method="GET"),
    Asked("ping", "/ping", method="GET"),
    Asked("ping by POST", "/ping"),
    Asked("embeddings of a text model", "/v1/embeddings", {"input": "x"}, 404),
    Asked("pooling of a text model", "/pooling", {"input": "x"}, 404),
    Asked("classification of a text model", "/classify", {"input": "x"}, 404),
    Asked("score of a text model", "/score", {"text_1": "x", "text_2": "y"}, 404),
    Asked("score of a text model, v1", "/v1/score", {"text_1": "x", "text_2": "y"}, 404),
    Asked("rerank of a text model", "/rerank", {"query": "x", "documents": ["y"]}, 404),
    Asked("rerank of a text model, v1", "/v1/rerank", {"query": "x", "documents": ["y"]}, 404),
    Asked("rerank of a text model, v2", "/v2/rerank", {"query": "x", "documents": ["y"]}, 404),
    Asked("embedding of a text model, v2", "/v2/embed", {"texts": ["x"]}, 404),
    Asked("chat of Cohere's", "/cohere/v2/chat", {"messages": USER}, 404),
    Asked("generation by tokens, not switched on", "/inference/v1/generate", {"token_ids": [5]}, 403),
    Asked("rendering, not switched on", f"{CHAT}/render", {"messages": USER}, 403),
]

FORM = "multipart/form-data; boundary=b0"
SOUND = (
    b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\nMODEL\r\n'
    b'--b0\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n'
    b"--b0--\r\n"
)
OTHERS += [
    Asked("transcription by a text model", "/v1/audio/transcriptions", SOUND, 404, headers={"content-type": FORM}),
    Asked("translation by a text model", "/v1/audio/translations", SOUND, 404, headers={"content-type": FORM}),
]

BAD = [
    *refused(
        CHAT,
        400,
        {"messages": USER, "max_tokens": 4},
        {
            "without messages": {"messages": None},
            "messages of a wrong type": {"messages": "x"},
            "no messages": {"messages": []},
            "a role there is not": {"messages": [{"role": 7, "content": "x"}]},
            "negative length": {"max_tokens": -1},
            "no length": {"max_tokens": 0},
            "length as text": {"max_tokens": "many"},
            "length beyond the context": {"max_tokens": 100_000},
            "negative temperature": {"temperature": -1},
            "temperature as text": {"temperature": "hot"},
            "top_p beyond 1": {"top_p": 2},
            "top_k below": {"top_k": -5},
            "n of 0": {"n": 0},
            "n of too many": {"n": 100_000},
            "n of greedy answers": {"n": 2, "temperature": 0},
            "stream as text": {"stream": "perhaps"},
            "stream options without a stream": {"stream_options": USAGE},
            "top_logprobs alone": {"top_logprobs": 3},
            "top_logprobs of too many": {"logprobs": True, "top_logprobs": 500},
            "a token beyond the vocabulary": {"logit_bias": {"99999999": 1}},
            "model of a wrong type": {"model": 7},
            "a required tool without tools": {"tool_choice": "required"},
            "a tool there is not": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tools of a wrong type": {"tools": "x"},
            "a schema that is none": {"response_format": {"type": "json_schema"}},
            "a regex that is none": {"structured_outputs": {"regex": "("}},
            "two structures": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "prompt_logprobs streamed": {"prompt_logprobs": 1, "stream": True},
            "seed as text": {"seed": "x"},
            "empty cache salt": {"cache_salt": ""},
            "negative length streamed": {"max_tokens": -1, "stream": True},
        },
    ),
    *refused(
        CHAT,
        404,
        {"messages": USER, "max_tokens": 4},
        {"unknown model": {"model": "no-such-model"}, "unknown model streamed": {"model": "no such", "stream": True}},
    ),
    *refused(
        COMPLETIONS,
        400,
        TEXT,
        {
            "without a prompt": {"prompt": NO_MODEL},
            "prompt of null": {"prompt": None},
            "prompt of a wrong type": {"prompt": {"a": 1}},
            "empty prompts": {"prompt": []},
            "prompt beyond the context": {"prompt": [1] * 5000},
            "prompt beyond the context streamed": {"prompt": [1] * 5000, "stream": True},
            "text beyond the context": {"prompt": "word " * 9000},
            "token beyond the vocabulary": {"prompt": [99_999_999]},
            "negative token": {"prompt": [-1]},
            "negative length": {"max_tokens": -1},
            "too many logprobs": {"logprobs": 500},
            "negative logprobs": {"logprobs": -1},
            "stream options without a stream": {"stream_options": USAGE},
            "suffix": {"suffix": "x"},
            "suffix of nothing": {"suffix": ""},
            "temperature of a list": {"temperature": [0]},
        },
    ),
    *refused(COMPLETIONS, 404, TEXT, {"unknown model": {"model": "no-such-model"}}),
    *refused(
        RESPONSES,
        400,
        {"input": "x", "max_output_tokens": 4},
        {"without input": {"input": NO_MODEL}, "input of a wrong type": {"input": 7}, "temperature": {"temperature": "x"}},
    ),
    *refused(
        RESPONSES,
        404,
        {"input": "x", "max_output_tokens": 4},
        {
            "unknown model": {"model": "no-such-model"},
            "previous that is not there": {"previous_response_id": "resp_none"},
            "previous that is not there, streamed": {"previous_response_id": "resp_none", "stream": True},
        },
    ),
    Asked("a response that is not there", f"{RESPONSES}/resp_none", None, 404, "GET"),
    Asked("a response that is not there, as events", f"{RESPONSES}/resp_none?stream=true", None, 404, "GET"),
    Asked("end of a response that is not there", f"{RESPONSES}/resp_none/cancel", None, 404),
    Asked("a response is not deleted", f"{RESPONSES}/resp_none", None, 405, "DELETE"),
    Asked("a response is not changed", f"{RESPONSES}/resp_none", {}, 405),
    Asked("input of a response", f"{RESPONSES}/resp_none/input_items", None, 404, "GET"),
    *refused(
        MESSAGES,
        400,
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
        {
            "without messages": {"messages": NO_MODEL},
            "without a length": {"max_tokens": NO_MODEL},
            "a role there is not": {"messages": [{"role": "cook", "content": "x"}]},
            "temperature as text": {"temperature": "hot"},
        },
    ),
    *refused(
        MESSAGES,
        404,
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
        {"unknown model": {"model": "no-such-model"}, "unknown model streamed": {"model": "no", "stream": True}},
    ),
    *refused(COUNT_TOKENS, 404, {"messages": USER}, {"unknown model": {"model": "no-such-model"}}),
    *refused(COUNT_TOKENS, 400, {}, {"without messages": {}}),
]
BAD += [
    Asked(f"{CHAT} body: {name}", CHAT, body, 400)
    for name, body in (
        ("cut short", b'{"model": "MODEL", "messages": ['),
        ("a value missing", b'{"model": "MODEL", "max_tokens": }'),
        ("a comma too many", b'{"model": "MODEL", "messages": [],}'),
        ("a key without quotes", b"{model: 1}"),
        ("single quotes", b"{'model': 'MODEL'}"),
        ("something after it", b'{"model": "MODEL"} x'),
        ("no JSON at all", b"hello"),
        ("a list", b'["MODEL"]'),
        ("a text", b'"MODEL"'),
        ("null", b"null"),
        ("empty", b""),
        ("a line break in a text", b'{"model": "MODEL\n"}'),
        ("an escape there is not", b'{"model": "\\q"}'),
        ("a number that is none", b'{"max_tokens": 01}'),
    )
]
BAD += [
    Asked(f"{CHAT} as {kind or 'nothing'}", CHAT, b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}]}', 400, "POST", {"content-type": kind})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json-patch+json", "application/jsonp", "")
]
BAD += [
    Asked(f"{method} {path}", path, None, status, method)
    for method, path, status in (
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("PATCH", RESPONSES, 405),
        ("GET", RESPONSES, 405),
        ("GET", MESSAGES, 405),
        ("GET", "/tokenize", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/version", 405),
        ("POST", "/health", 405),
        ("PUT", "/ping", 405),
        ("HEAD", "/health", 405),
        ("HEAD", CHAT, 405),
        ("HEAD", "/v1/models", 405),
        ("OPTIONS", CHAT, 405),
        ("OPTIONS", "/v1/models", 405),
        ("OPTIONS", "/health", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/nothing/below?x=%20y", 404),
        ("POST", "/v2/nothing", 404),
        ("GET", "/v1/", 404),
        ("GET", "/v1", 404),
        ("GET", "/nothing", 404),
        ("POST", "/v1/chat", 404),
        ("POST", "/v1/chat/completion", 404),
        ("GET", "/V1/models", 404),
        ("GET", "//v1/nothing", 404),
        ("GET", "/v1/images/generations", 404),
        ("GET", "/v1/assistants", 404),
        ("POST", f"{CHAT}/", 307),
        ("GET", "/v1/models/", 307),
        ("GET", "/health/", 307),
        ("GET", "/version/", 307),
    )
]
PREFLIGHT = {"origin": "https://example.org", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
BAD += [
    Asked(f"preflight of {path}", path, None, 400, "OPTIONS", PREFLIGHT) for path in (CHAT, "/v1/models", "/tokenize")
]
BAD += [
    Asked(f"{path} for a page of another origin", path, None, status, "GET", {"origin": "https://example.org"})
    for path, status in (("/health", 200), ("/nothing", 404))
]

ALL = [*CHATS, *TEXTS, *REPLY, *ANTHROPIC, *OTHERS, *BAD]
