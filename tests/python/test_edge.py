"""Requests that no HTTP client would send: the edge refuses what two readers could read in two ways, and waits for
nobody who does not speak."""

import re
import time

import pytest

from fleet import MODEL, Up
from wire import connect, raw_answer

BODY = b'{"model": "%s", "prompt": "x", "max_tokens": 1}' % MODEL.encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HOST = b"Host: hostler\r\n"
CLOSE = b"Connection: close\r\n"
# The edge's deadline for the whole head of a request, in seconds.
HEAD_SECONDS = 10


def request(headers: bytes, body: bytes = BODY) -> bytes:
    """A completion with these headers and no others but its type."""
    return b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + headers + b"\r\n" + body


def test_the_same_request_with_sound_headers_is_answered(up: Up):
    assert raw_answer(up.edge, request(HOST + LENGTH + CLOSE))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(HOST + LENGTH + CHUNKED, id="length, then chunked"),
        pytest.param(HOST + CHUNKED + LENGTH, id="chunked, then length"),
        pytest.param(HOST + HOST + LENGTH, id="the same host twice"),
        pytest.param(HOST + LENGTH + b"Host: elsewhere\r\n", id="two hosts"),
        pytest.param(LENGTH, id="no host"),
    ],
)
def test_ambiguous_headers_are_refused(up: Up, headers):
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if CHUNKED in headers else BODY
    status, answer = raw_answer(up.edge, request(headers, body))
    assert status == 400, answer
    assert len(re.findall(rb"^HTTP/1\.1 \d", answer, re.MULTILINE)) == 1, (
        "the rest of the refused request was read as another one"
    )


def test_a_head_that_does_not_end_is_not_waited_for(up: Up):
    with connect(up.edge, HEAD_SECONDS + 5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: hostler\r\nX-Slow: ")
        began = time.monotonic()
        while connection.recv(4096):
            pass  # an answer before the close is allowed
    assert time.monotonic() - began > HEAD_SECONDS / 2, "closed long before its time was over"
