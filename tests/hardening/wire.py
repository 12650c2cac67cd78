"""HTTP/1.1 byte by byte: sends what no client library would send, and reads whatever comes back until the end."""

import contextlib
import dataclasses
import re
import selectors
import socket
import time
from collections.abc import Callable, Iterable

# How long an answer may take before a case counts as hung, in seconds.
PATIENCE = 20
# More answers than ever come, where only the end of a connection is waited for.
CLOSED = 99


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a connection gave until it ended or nothing more came."""

    data: bytes
    closed: bool
    """Whether the other side ended it."""
    seconds: float
    sent: int = 0

    @property
    def statuses(self) -> list[int]:
        """The status of each answer, interim ones included."""
        return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", self.data)]

    @property
    def text(self) -> str:
        """All of it, as far as it is text."""
        return self.data.decode(errors="replace")

    def __str__(self) -> str:
        """For the table."""
        statuses = "+".join(map(str, self.statuses)) or "nothing"
        return f"{statuses}{', closed' if self.closed else ', open'}"


def connect(address: tuple[str, int], receive_buffer: int | None = None) -> socket.socket:
    """A connection; a small receive buffer makes a client that can take little."""
    stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_buffer:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    stream.settimeout(PATIENCE)
    stream.connect(address)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def flood(
    stream: socket.socket,
    pieces: Iterable[bytes],
    seconds: float,
    quiet: float = 1.0,
    read: bool = True,
    enough: Callable[[Seen], bool] = lambda _: True,
) -> Seen:
    """Sends pieces as fast as they are taken while it reads, until the other side ends the connection, nothing has come for `quiet` seconds
    after the last piece, or the time is over. With `read` false nothing is read before all is sent. What is waited for is `enough`: without
    it silence means nothing, for the machine may be busy.
    """
    begun = last = time.monotonic()
    received, closed, sent, waiting = bytearray(), False, 0, b""
    pieces, more = iter(pieces), True
    stream.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while not closed and time.monotonic() - begun < seconds:
            if more and not waiting and (piece := next(pieces, None)) is not None:
                waiting = piece
            elif not waiting:
                more = False
            wanted = (selectors.EVENT_READ if read or not more else 0) | (selectors.EVENT_WRITE if waiting else 0)
            selector.modify(stream, wanted)
            ready = dict((key.fileobj, events) for key, events in selector.select(0.05)).get(stream, 0)
            try:
                if ready & selectors.EVENT_READ:
                    data = stream.recv(1 << 18)
                    closed = not data
                    received += data
                    last = time.monotonic()
                if ready & selectors.EVENT_WRITE and waiting:
                    count = stream.send(waiting)
                    waiting, sent, last = waiting[count:], sent + count, time.monotonic()
            except (ConnectionError, BrokenPipeError):
                # What was on its way when the other side closed is lost with the reset; what it had said before may still be there.
                with contextlib.suppress(OSError):
                    received += stream.recv(1 << 18)
                closed = True
            is_quiet = not more and not waiting and time.monotonic() - last > quiet
            if is_quiet and enough(Seen(bytes(received), closed, 0)):
                break
    return Seen(bytes(received), closed, time.monotonic() - begun, sent)


def exchange(address: tuple[str, int], data: bytes, answers: int = 1) -> Seen:
    """Sends bytes on a connection of their own and reads until its end, or after so many answers."""
    with connect(address) as stream:
        return flood(stream, [data], PATIENCE, 0.2, enough=lambda seen: len(seen.statuses) >= answers)


def request(address: tuple[str, int], method: str, path: str, body: bytes = b"", headers: str = "", host: str = "localhost") -> Seen:
    """An ordinary request on a connection of its own."""
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{length}{headers}\r\n".encode()
    with connect(address) as stream:
        return flood(stream, [head + body], PATIENCE, quiet=PATIENCE)
