"""Answers as they are on the wire, for what an SDK hides: how a stream ended, and requests no client would send."""

import contextlib
import dataclasses
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence

import httpx2

from fleet import MODEL, host_and_port
from processes import wait_until

# No answer in these suites takes longer between two bytes, in seconds.
SILENCE_SECONDS = 300
# No two streams are the same request: one that was in flight when an engine died is suspected, and let in alone from
# then on.
stories = itertools.count()
# Made once: it takes 20 ms, and streams are to begin together.
certificates = ssl.create_default_context()


@dataclasses.dataclass(frozen=True)
class Access:
    """What the clients of a fleet show and check."""

    key: str
    trust: ssl.SSLContext


class Stream:
    """One streamed answer, read in a thread of its own until it ends, is cut, or `leave` is called."""

    def __init__(
        self,
        edge: str,
        tokens: int,
        model: str = MODEL,
        prompt: str | None = None,
        chat: bool = False,
        route: str | None = None,
        access: "Access | None" = None,
        **parameters,
    ):
        """Sends the request; `tokens` is how many are asked for, end-of-text or not, `parameters` are more of its body,
        or take out of it what is None. `access` is for an edge that wants a key."""
        self.status: int | None = None
        self.events: list[dict] = []
        self.arrivals: list[float] = []
        """When each of the events came."""
        self.seams: list[tuple[int, float]] = []
        """How many events had come each time that it was to go on elsewhere, and when that was."""
        self.done = False
        """Whether `[DONE]` was seen."""
        self.cut: Exception | None = None
        """How the connection broke, where the body did not end as HTTP says it must."""
        self._leaving = False
        length = {"max_tokens": tokens, "ignore_eos": True}
        prompt = prompt or f"a long story, number {next(stories)}"
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        body = {"model": model, "temperature": 0, "stream": True, **asked, **length, **parameters}
        body = {name: value for name, value in body.items() if value is not None}
        route = route or ("chat/completions" if chat else "completions")
        sent = {"json": body, "verify": certificates}
        if access:
            sent |= {"headers": {"authorization": f"Bearer {access.key}"}, "verify": access.trust}
        self._thread = threading.Thread(target=self._read, args=(f"{edge}/{route}", sent), daemon=True)
        self._thread.start()

    def _read(self, url: str, sent: dict) -> None:
        try:
            with httpx2.stream("POST", url, timeout=SILENCE_SECONDS, **sent) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line == ": resumed":
                        self.seams.append((len(self.events), time.monotonic()))
                    elif line.startswith("data: "):
                        self.arrivals.append(time.monotonic())
                        self.events.append(json.loads(line.removeprefix("data: ")))
                    if self._leaving:
                        return
        except httpx2.TransportError as error:
            self.cut = error

    @property
    def errors(self) -> list[dict]:
        """The error events among its events."""
        return [event["error"] for event in self.events if "error" in event]

    @property
    def choices(self) -> list[dict]:
        """Those of all its events, in order."""
        return [choice for event in self.events for choice in event.get("choices", [])]

    @property
    def text(self) -> str:
        """All that it said."""
        return said(self.events)

    @property
    def finish_reason(self) -> str | None:
        """Why the engine ended it; None while it runs, and where it broke."""
        return next((choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")), None)

    @property
    def complete(self) -> bool:
        """Whether a client may take it for a whole answer."""
        return self.finish_reason is not None and self.done and not self.errors and self.cut is None

    def end(self) -> str:
        """How it ended, in words for a failure's report."""
        last = self.events[-1] if self.events else None
        return f"status {self.status}, {len(self.events)} events, done {self.done}, cut {self.cut!r}, last {last}"

    @property
    def running(self) -> bool:
        """Whether more may come."""
        return self._thread.is_alive()

    def leave(self) -> None:
        """Closes the connection at the next event, as a client that has lost interest."""
        self._leaving = True

    def join(self, seconds: float) -> None:
        """Waits for its end."""
        self._thread.join(seconds)
        assert not self.running, f"a stream still ran after {seconds} s, with {len(self.events)} events"


def said(events: Sequence[dict]) -> str:
    """The text of these events."""
    choices = [choice for event in events for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def all_streaming(streams: list[Stream], seconds: float = 60) -> None:
    """Returns when each of the streams has brought a first event."""
    wait_until(lambda: all(stream.events or not stream.running for stream in streams), seconds, "every stream began")
    ended = [stream.end() for stream in streams if stream.errors or not stream.running]
    assert not ended, f"streams ended before the test began: {ended}"


def connect(to: str, seconds: float) -> socket.socket:
    """A silent connection to an edge's URL or to an engine's Unix socket; each wait on it ends after `seconds`."""
    if to.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        connection.connect(to)
        return connection
    address, _, port = host_and_port(to).rpartition(":")
    return socket.create_connection((address, int(port)), timeout=seconds)


def send_completion(to: str, asked: dict) -> socket.socket:
    """Sends one completion on a connection that the caller reads, or closes without having read."""
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: hostler\r\nContent-Length: {len(body)}\r\n"
    connection = connect(to, SILENCE_SECONDS)
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection


def raw_answer(edge: str, request: bytes, seconds: float = 5) -> tuple[int, bytes]:
    """Sends bytes as they are and returns the status and everything received until the edge closes, as it must."""
    received = b""
    with connect(edge, seconds) as connection:
        connection.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                received += piece
    assert received.startswith(b"HTTP/1.1 "), f"no HTTP answer but {received[:80]!r}"
    return int(received.split(b" ", 2)[1]), received
