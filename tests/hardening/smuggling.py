"""Requests whose end, target or headers two proxies could read differently: each is refused, or read in the one way RFC 9112 and 9113 allow.

Whatever is refused closes the connection, and the request that a laxer reader would find behind it gets no answer.
"""

import h2
import wire
from cases import Case, case, check

BODY = b'{"model":"simulated","prompt":"a","max_tokens":1}'
POST = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
# The request that must never be found: its path gives a 404 that no other case gives.
HIDDEN = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
LIST = "GET /v1/models HTTP/1.1\r\nHost: a\r\n"
BOTH = f"{LIST}Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n"
# A chunk in which a reader that lost its place finds a request with a body without end.
DECOY = "X\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 99999\r\n\r\n"
CHUNKED = f"{POST}Transfer-Encoding: chunked\r\n\r\n"
WHOLE = f"{len(BODY):x}\r\n{BODY.decode()}\r\n0\r\n\r\n"

# Name, and what is sent before the hidden request. All are answered 400 and closed.
REFUSED = {
    "Content-Length, then Transfer-Encoding": f"{POST}Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "Transfer-Encoding, then Content-Length": f"{POST}Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\nG",
    "the same behind a sound request": f"{LIST}\r\n{BOTH}",
    "the same behind a chunk with a long size": f"{CHUNKED}{'0' * 30}{len(DECOY):x}\r\n{DECOY}\r\n0\r\n\r\n{BOTH}",
    "the same behind a chunk with an extension": f"{CHUNKED}{len(DECOY):x};name=a-long-value\r\n{DECOY}\r\n0\r\n\r\n{BOTH}",
    "Transfer-Encoding: xchunked": f"{POST}Transfer-Encoding: xchunked\r\n\r\n{WHOLE}",
    "Transfer-Encoding: chunked, identity": f"{POST}Transfer-Encoding: chunked, identity\r\n\r\n{WHOLE}",
    "Transfer-Encoding: identity, chunked": f"{POST}Transfer-Encoding: identity, chunked\r\n\r\n{WHOLE}",
    "Transfer-Encoding twice": f"{POST}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n{WHOLE}",
    "Transfer-Encoding after a vertical tab": f"{POST}Transfer-Encoding: \x0bchunked\r\n\r\n{WHOLE}",
    "Transfer-Encoding, blank before the colon": f"{POST}Transfer-Encoding : chunked\r\n\r\n{WHOLE}",
    "Transfer-Encoding on a folded line": f"{POST}Transfer-Encoding:\r\n chunked\r\n\r\n{WHOLE}",
    "Transfer-Encoding in HTTP/1.0": f"{CHUNKED.replace('/1.1', '/1.0')}{WHOLE}",
    "two Content-Lengths that differ": f"{POST}Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "Content-Length: 3, 3": f"{POST}Content-Length: 3, 3\r\n\r\nabc",
    "Content-Length: +3": f"{POST}Content-Length: +3\r\n\r\nabc",
    "Content-Length: -1": f"{POST}Content-Length: -1\r\n\r\nabc",
    "Content-Length: 0x3": f"{POST}Content-Length: 0x3\r\n\r\nabc",
    "Content-Length over 64 bits": f"{POST}Content-Length: {2**64 + 3}\r\n\r\nabc",
    "two Content-Types": f"{POST}Content-Type: text/plain\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY.decode()}",
    "a Content-Type beyond ASCII": f"{POST[:-2]}; charset=\xe9\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY.decode()}",
    "Connection: content-length": f"{POST}Connection: content-length, host\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY.decode()}",
    "no Host": "GET /v1/models HTTP/1.1\r\n\r\n",
    "two Hosts": "GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "two hosts in one Host": "GET /v1/models HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "Host with somebody's name": "GET /v1/models HTTP/1.1\r\nHost: b@a\r\n\r\n",
    "a target of another host": "GET http://b/v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "a head of bare line feeds": "GET /v1/models HTTP/1.1\nHost: a\n\n",
    "one bare line feed in a head": "GET /v1/models HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
    "a bare carriage return in a header": "GET /v1/models HTTP/1.1\r\nHost: a\r\nX: y\rZ: 1\r\n\r\n",
    "a zero byte in a header": "GET /v1/models HTTP/1.1\r\nHost: a\r\nX: y\0z\r\n\r\n",
    "a header without a name": "GET /v1/models HTTP/1.1\r\nHost: a\r\n: y\r\n\r\n",
    "a header without a colon": "GET /v1/models HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n",
    "a blank line's worth of folding first": "GET /v1/models HTTP/1.1\r\n Host: a\r\n\r\n",
    "two blanks in the request line": "GET  /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "a version that is none": "GET /v1/models HTTP/1.1x\r\nHost: a\r\n\r\n",
    "HTTP/0.9": "GET /v1/models\r\n\r\n",
    "chunk size 0x5": f"{CHUNKED}0x{WHOLE}",
    "chunk size -5": f"{CHUNKED}-{WHOLE}",
    "chunk size after a blank": f"{CHUNKED} {WHOLE}",
    "chunk size over 64 bits": f"{CHUNKED}F{'0' * 16}\r\nabc\r\n0\r\n\r\n",
    "chunk size before a bare line feed": f"{CHUNKED}{WHOLE.replace(chr(13), '', 1)}",
    "a bare line feed in a chunk extension": f"{CHUNKED}{WHOLE.replace(chr(13), ';a' + chr(10) + 'b' + chr(13), 1)}",
    "more in a chunk than its size": f"{CHUNKED}3\r\nabcdef\r\n0\r\n\r\n",
    "a trailer that frames: Content-Length": f"{CHUNKED}{WHOLE[:-2]}Content-Length: 50\r\n\r\n",
    "a trailer that frames: Transfer-Encoding": f"{CHUNKED}{WHOLE[:-2]}Transfer-Encoding: chunked\r\n\r\n",
    "a trailer that routes: Host": f"{CHUNKED}{WHOLE[:-2]}Host: b\r\n\r\n",
    "a trailer with a key": f"{CHUNKED}{WHOLE[:-2]}Authorization: Bearer b\r\n\r\n",
    "20 KB of chunk extensions": f"{CHUNKED}3;{'e' * 20_000}\r\nabc\r\n0\r\n\r\n",
}

# Sound, if odd: name, what is sent before the hidden request (which then is a request of its own), statuses of the answers.
TAKEN = {
    "a blank line first": ("\r\nGET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", [200, 404]),
    "the hidden request as a sound body": (f"{POST}Content-Length: {len(HIDDEN)}\r\n\r\n{HIDDEN}", [400, 404]),
    "a chunk with an extension": (f"{CHUNKED}{WHOLE.replace(chr(13), ';name=' + chr(34) + 'a:b' + chr(34) + chr(13), 1)}", [200, 404]),
    "a chunk with a long size": (f"{CHUNKED}{'0' * 30}{WHOLE}", [200, 404]),
    "a trailer that says nothing": (f"{CHUNKED}{WHOLE[:-2]}X-Checksum: 50\r\n\r\n", [200, 404]),
    "Upgrade: h2c": (f"{LIST}Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n", [200, 404]),
    "Expect: 100-continue": (f"{POST}Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY.decode()}", [100, 200, 404]),
}


def refused(sent: str):
    """A case that is refused: one answer after those of the sound requests before, and the end."""

    def run(target) -> str:
        seen = wire.exchange(target.address, (sent + HIDDEN).encode("latin-1"), wire.CLOSED)
        check(seen.closed and seen.statuses[-1:] == [400] and set(seen.statuses[:-1]) <= {200, 400}, seen)
        check('"code":400' in seen.text, f"no words: {seen.text[-300:]}")
        return str(seen)

    return run


def taken(sent: str, expected: list[int]):
    """A case that is sound. Where the first answer closes the connection, there is no second."""

    def run(target) -> str:
        seen = wire.exchange(target.address, (sent + HIDDEN).encode("latin-1"), len(expected))
        statuses = seen.statuses if 100 in expected else [status for status in seen.statuses if status != 100]
        check(statuses == expected or (seen.closed and statuses == expected[:1]), f"{seen}: {seen.text[-200:]}")
        return str(seen)

    return run


# HTTP/2: name, frames, the status or the error code that answers them.
def headers(*fields: tuple[str, str], end: bool = True) -> bytes:
    """A HEADERS frame of just these fields."""
    block = b"".join(h2.header(name, value) for name, value in fields)
    return h2.frame(h2.HEADERS, h2.END_HEADERS | (h2.END_STREAM if end else 0), 1, block)


GET = ((":method", "GET"), (":scheme", "http"), (":path", "/v1/models"))
SENT = ((":method", "POST"), (":scheme", "http"), (":path", "/v1/completions"), (":authority", "a"), ("content-type", "application/json"))
H2 = {
    "h2: no :authority and no host": (headers(*GET), "400"),
    "h2: host is not :authority": (headers(*GET, (":authority", "a"), ("host", "b")), "400"),
    "h2: two hosts": (headers(*GET, ("host", "a"), ("host", "a")), "400"),
    "h2: :authority twice": (headers(*GET, (":authority", "a"), (":authority", "b")), "PROTOCOL_ERROR"),
    "h2: two paths": (headers(*GET, (":path", "/smuggled"), (":authority", "a")), "PROTOCOL_ERROR"),
    "h2: a pseudo-header after the others": (headers((":authority", "a"), ("x", "y"), *GET), "PROTOCOL_ERROR"),
    "h2: transfer-encoding": (headers(*SENT, ("transfer-encoding", "chunked")), "PROTOCOL_ERROR"),
    "h2: connection": (headers(*GET, (":authority", "a"), ("connection", "close")), "PROTOCOL_ERROR"),
    "h2: te that is not trailers": (headers(*GET, (":authority", "a"), ("te", "chunked")), "PROTOCOL_ERROR"),
    "h2: a line end in a value": (headers(*GET, (":authority", "a"), ("x", "y\r\nhost: b")), "PROTOCOL_ERROR"),
    "h2: a line end in a path": (headers(*GET[:2], (":path", "/v1/models HTTP/1.1\r\nHost: b\r\n\r\n"), (":authority", "a")), "PROTOCOL_ERROR|400"),
    "h2: a name in capitals": (headers(*GET, (":authority", "a"), ("X-Upper", "y")), "PROTOCOL_ERROR"),
    "h2: a trailer content-length": (
        headers(*SENT, end=False)
        + h2.frame(h2.DATA, 0, 1, BODY)
        + h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, h2.header("content-length", "50")),
        "PROTOCOL_ERROR|400",
    ),
    "h2: less than content-length": (
        headers(*SENT, ("content-length", "99"), end=False) + h2.frame(h2.DATA, h2.END_STREAM, 1, BODY),
        "PROTOCOL_ERROR|400",
    ),
    "h2: more than content-length": (
        headers(*SENT, ("content-length", "3"), end=False) + h2.frame(h2.DATA, h2.END_STREAM, 1, BODY),
        "PROTOCOL_ERROR|400",
    ),
    "h2: two content-lengths": (
        headers(*SENT, ("content-length", "3"), ("content-length", str(len(BODY))), end=False) + h2.frame(h2.DATA, h2.END_STREAM, 1, BODY),
        "PROTOCOL_ERROR|400",
    ),
}


def framed(frames: bytes, expected: str):
    """A case of HTTP/2: refused with a status, or by ending the stream or the connection."""

    def run(target) -> str:
        with h2.dial(target.address) as stream:
            said = h2.said(wire.flood(stream, [frames], wire.PATIENCE, quiet=0.2, enough=h2.says(f"{expected}|closed|reset")))
        answers = {str(status) for status in said.statuses.values()} | set(said.resets.values()) | {said.goaway}
        check(answers & set(expected.split("|")) and 200 not in said.statuses.values(), said)
        return str(said)

    return run


def cases() -> list[Case]:
    """All of them."""
    return [
        *(case("smuggling", name, "400, closed", refused(sent)) for name, sent in REFUSED.items()),
        *(case("smuggling", name, "+".join(map(str, expected)), taken(sent, expected)) for name, (sent, expected) in TAKEN.items()),
        *(case("smuggling", name, expected, framed(frames, expected)) for name, (frames, expected) in H2.items()),
    ]
