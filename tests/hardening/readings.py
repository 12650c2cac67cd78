"""Requests that the router could read in one way and an engine in another: escaped paths, headers, forms, a route that carries others, priorities.

Each is refused. Simulated engines say `Not Found` to a form, so that is how one looks that was passed on.
"""

import json

import h2
import wire
from cases import Case, case, check

JSON = "Content-Type: application/json\r\n"
BODY = b'{"model":"simulated","prompt":"a","max_tokens":1}'

# Engines undo escapes once, before they look for a route. Name, and the path.
PATHS = {
    "an escaped letter": "/v1/%63ompletions",
    "an escaped slash": "/v1%2Fcompletions",
    "an escaped slash at the end": "/v1/completions%2f",
    "an escaped letter of a route for operators": "/v1/load%5Flora_adapter",
    "an escaped letter of a route that carries others": "/%69nvocations",
    "an escape escaped": "/v1/%2563ompletions",
    "an escape without its digits": "/v1/completions%",
    "an escape with other letters": "/v1/%zzcompletions",
    "an escaped line feed at the end": "/v1/completions%0a",
    "an escaped line feed at the end of a route for operators": "/v1/load_lora_adapter%0A",
    "an escaped carriage return at the end": "/v1/completions%0D",
    "an escaped zero byte": "/v1/completions%00",
    "escaped dots": "/v1/%2e%2e/metrics",
    "dots": "/v1/../metrics",
    "one dot": "/v1/./completions",
}

FETCHING = json.dumps({
    "model": "simulated",
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
}).encode()
# An engine, which gets them over HTTP/1.1, sees no blanks around values. Name, and a content type over HTTP/2.
BLANKS = {"a blank before a value": " application/json", "a tab before a value": "\tapplication/json", "a blank behind a value": "application/json "}
# Headers of the connection go no further. Name, and what is listed.
LISTED = {
    "the content type is the connection's": "content-type",
    "the content type is the connection's, among others": "close, X-Hop ,Content-Type",
    "the model of an invocation is the connection's": "X-Amzn-SageMaker-Adapter-Identifier",
    "the priority is the connection's": "x-vllm-priority",
}

FORM = "multipart/form-data; boundary=b"
DISPOSITION = "Content-Disposition: form-data; "
# What a reader of Python's takes for the model is another one, or none, which is the engine's own default.
OWN = f'--b\r\n{DISPOSITION}name="model"\r\n\r\nsimulated\r\n'
OTHER = OWN.replace("simulated", "other")
SOUND = f'--b\r\n{DISPOSITION}name="file"; filename="a.wav"\r\n\r\nRIFF url" "source" \\u0075rl\r\n'
END = "--b--\r\n"
# Name, content type, body.
FORMS = {
    "a name in capitals": (FORM, OWN.replace('"model"', '"MODEL"') + SOUND + END),
    "a parameter in capitals": (FORM, OWN.replace("name=", "NAME=") + SOUND + END),
    "two models": (FORM, OWN + OTHER + END),
    "two boundaries": (f"{FORM}; boundary=c", OWN + END + (OTHER + END).replace("--b", "--c")),
    "two boundaries that are the same": (f"{FORM}; Boundary=b", OWN + END),
    "an encoded boundary": (f"{FORM}; boundary*=utf-8''c", OWN + END + (OTHER + END).replace("--b", "--c")),
    "a boundary in quotes with an escape": ('multipart/form-data; boundary="\\b"', OWN + END),
    "a boundary behind a quote": ('multipart/form-data; x="; boundary=b; y="', OWN + END),
    "a boundary of 71 letters": (f"multipart/form-data; boundary={'b' * 71}", (OWN + END).replace("--b", "--" + "b" * 71)),
    "a character set in which names are others": (
        f"{FORM}; charset=cp037",
        OWN.encode() + OTHER.encode().replace(b"model", "model".encode("cp037")).replace(b"other", "other".encode("cp037")) + END.encode(),
    ),
    "a blank behind a boundary": (FORM, OWN + OTHER.replace("--b\r\n", "--b \r\n") + END),
    "a line feed first": (FORM, "\n" + OTHER + OWN + END),
    "words first": (FORM, "words\r\n" + OWN + END),
    "a line feed before a boundary": (FORM, OWN.replace("simulated\r\n", "simulated\n") + OTHER + END),
    "no end": (FORM, SOUND + OWN),
    "words behind an empty line at the end": (FORM, OWN + SOUND + END + "\r\nx"),
    "another form behind an empty line at the end": (FORM, OWN + SOUND + END + "\r\n" + OTHER + END),
    "1,001 parts": (FORM, OWN + SOUND * 1000 + END),
    "a part without headers": (FORM, OWN + "--b\r\n\r\nx\r\n" + END),
    "two dispositions": (FORM, OWN + f'--b\r\n{DISPOSITION}name="x"\r\n{DISPOSITION}name="model"\r\n\r\nother\r\n' + END),
    "a folded disposition": (FORM, OWN + f'--b\r\n{DISPOSITION}name="x"\r\n ; name="model"\r\n\r\nother\r\n' + END),
    "a disposition that ends with a line feed": (FORM, OWN + f'--b\r\nX: y\n{DISPOSITION}name="model"\r\n\r\nother\r\n' + END),
    "two names": (FORM, OWN + f'--b\r\n{DISPOSITION}name="x"; name="model"\r\n\r\nother\r\n' + END),
    "an encoded name": (FORM, OWN + f"--b\r\n{DISPOSITION}name=\"x\"; name*=utf-8''model\r\n\r\nother\r\n" + END),
    "a name with an escape": (FORM, OWN + f'--b\r\n{DISPOSITION}name="mod\\el"\r\n\r\nother\r\n' + END),
    "a name in a file's name": (FORM, f'--b\r\n{DISPOSITION}filename="; name=model"; name="x"\r\n\r\nother\r\n' + OWN + END),
    "a file's name that does not end": (FORM, OWN + f'--b\r\n{DISPOSITION}name="x"; filename="\\\\"; name="model"; y="\r\n\r\nother\r\n' + END),
    "a model that is a file": (FORM, OWN.replace('"model"', '"model"; filename="m"') + END),
    "a model in base64": (FORM, OWN.replace("\r\n\r\n", "\r\nContent-Transfer-Encoding: base64\r\n\r\n") + END),
    "a model in another character set": (FORM, OWN.replace("\r\n\r\n", "\r\nContent-Type: text/plain; charset=utf-16\r\n\r\n") + END),
}

ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
# What a key for the model `simulated` may not send. Name, path, headers, body.
FORBIDDEN = {
    "a priority below 0": ("/v1/completions", JSON, BODY.replace(b"{", b'{"priority":-1,')),
    "a priority below 32 bits": ("/v1/completions", JSON, BODY.replace(b"{", b'{"priority":-3000000000,')),
    "a priority as text": ("/v1/completions", JSON, BODY.replace(b"{", b'{"priority":"-1",')),
    "a priority with an escape in its name": ("/v1/completions", JSON, BODY.replace(b"{", b'{"pri\\u006frity":-1,')),
    "a priority by vLLM's header": ("/v1/completions", f"{JSON}X-Vllm-Priority: -1\r\n", BODY),
    "a priority that only Python reads": ("/v1/completions", f"{JSON}X-Vllm-Priority: -1_0\r\n", BODY),
    "a priority in JSON by another name": ("/v1/completions", "Content-Type: application/x+json\r\n", BODY.replace(b"{", b'{"priority":-1,')),
    "an invocation of the engine's default": ("/invocations", JSON, BODY),
    "an invocation of another model": ("/invocations", f"{JSON}{ADAPTER}: other\r\n", BODY),
    "an invocation of two models": ("/invocations", f"{JSON}{ADAPTER}: simulated\r\n", BODY.replace(b"simulated", b"other")),
    "two models, the second another": ("/v1/completions", JSON, BODY.replace(b"}", b',"mod\\u0065l":"other"}')),
    "JSON under the name of text": ("/v1/completions", "Content-Type: text/plain\r\n", BODY),
}


def refused(path: str, headers: str, body: bytes, *statuses: int):
    """A case that is refused by the router, in its own words."""

    def run(target) -> str:
        seen = wire.request(target.address, "POST", path, body, headers + target.key)
        check(len(seen.statuses) == 1 and seen.statuses[0] in statuses and b'"message"' in seen.data, f"{seen}: {seen.text[-300:]}")
        answer = json.loads(seen.text.partition("\r\n\r\n")[2])
        return f"{seen}: {answer['error']['message']}"

    return run


def passed(path: str, headers: str, body: bytes, status: int, said: str):
    """A case that reaches an engine, which answers it."""

    def run(target) -> str:
        seen = wire.request(target.address, "POST", path, body, headers + target.key)
        check(seen.statuses == [status] and said in seen.text, f"{seen}: {seen.text[-300:]}")
        return str(seen)

    return run


def unblanked(kind: str):
    """A case over HTTP/2 that is refused for a content type that is JSON to an engine only."""

    def run(target) -> str:
        with h2.dial(target.address) as stream:
            sent = h2.request(1, "POST", "/v1/chat/completions", ("content-type", kind), body=FETCHING)
            seen = h2.said(wire.flood(stream, [sent], wire.PATIENCE, quiet=0.2, enough=h2.says("400|reset|closed")))
        check(seen.statuses == {1: 400} or seen.resets == {1: "PROTOCOL_ERROR"}, seen)
        return str(seen)

    return run


def cases() -> list[Case]:
    """All of them."""
    audio, kind = "/v1/audio/transcriptions", f"Content-Type: {FORM}\r\n"
    forms = [(name, f"Content-Type: {kind}\r\n", body if isinstance(body, bytes) else body.encode()) for name, (kind, body) in FORMS.items()]
    plain = (OWN + SOUND + END).encode()
    invoked = f"{JSON}{ADAPTER}: simulated\r\n"
    return [
        *(case("escapes", name, "400", refused(path, JSON, BODY, 400)) for name, path in PATHS.items()),
        case("escapes", "letters that no route has", "404", passed("/v1/n%C3%BCchts%20", JSON, BODY, 404, "Not Found")),
        *(case("values", name, "400 or PROTOCOL_ERROR", unblanked(kind)) for name, kind in BLANKS.items()),
        *(
            case("values", name, "400", refused("/invocations", f"{invoked}Connection: {listed}\r\n", BODY, 400), keyed=True)
            for name, listed in LISTED.items()
        ),
        *(case("forms", name, "400 or 403", refused(audio, headers, body, 400, 403), keyed=True) for name, headers, body in forms),
        case("forms", "a plain one, whose sound looks like JSON", "404", passed(audio, kind, plain, 404, "Not Found"), keyed=True),
        case("forms", "an empty line at the end", "404", passed(audio, kind, plain + b"\r\n", 404, "Not Found"), keyed=True),
        *(case("keys", name, "403", refused(*asked, 403), keyed=True) for name, asked in FORBIDDEN.items()),
        case("keys", "a priority of 1", "200", passed("/v1/completions", JSON, BODY.replace(b"{", b'{"priority":1,'), 200, "choices"), keyed=True),
        case("keys", "an invocation of its model", "200", passed("/invocations", invoked, BODY, 200, "choices"), keyed=True),
    ]
