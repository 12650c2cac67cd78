"""Clients that take their time, as slowhttptest has them: slow heads, slow bodies, slow readers, by the hundred. Each is ended in time, and
meanwhile others are answered.
"""

import contextlib
import selectors
import socket
import time
from pathlib import Path

import h2
import wire
from cases import Case, case, check

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
BY_LENGTH = HEAD + b"Content-Length: 9999\r\n\r\n"
IN_CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
# Clients that take little of much: what they ask for costs the simulated engines more than anything else here.
READERS = 5
# How long engines may take for that where others use the cores too.
BUSY = 60
# How long after its limit a client may still be there on a machine that is busy: limits are looked at now and then. Far less than what a limit
# is that nobody sets.
LATE = 6
# What a client is given of that where it waits for all of it.
SLACK = 2.5


def herd(target, count: int, first: bytes, drip: bytes, limit: float) -> tuple[list[bytes], float]:
    """Many clients that send `first` and then `drip` again and again. Returns what each was told and when the last one was ended."""
    told: dict[socket.socket, bytes] = {}
    pause = limit / 5
    with contextlib.ExitStack() as open_ones, selectors.DefaultSelector() as selector:
        for _ in range(count):
            stream = open_ones.enter_context(wire.connect(target.address))
            stream.setblocking(False)
            stream.send(first)
            told[stream] = b""
            selector.register(stream, selectors.EVENT_READ)
        last = next_drip = time.monotonic()
        while selector.get_map() and time.monotonic() - last < limit + LATE:
            for key, _ in selector.select(pause / 4):
                try:
                    data = key.fileobj.recv(65536)
                except ConnectionError:
                    data = b""
                told[key.fileobj] += data
                if not data:
                    selector.unregister(key.fileobj)
            if time.monotonic() >= next_drip:
                next_drip += pause
                target.answers()
                for key in list(selector.get_map().values()):
                    with contextlib.suppress(OSError):
                        key.fileobj.send(drip)
        check(not selector.get_map(), f"{len(selector.get_map())} of {count} are still there after {time.monotonic() - last:.1f} s")
        return list(told.values()), time.monotonic() - last


def ended(count: int, first: bytes, drip: bytes, limit: float, status: int | None = None):
    """All are ended within the limit, with an answer of this status where there is one to give."""

    def run(target) -> str:
        told, seconds = herd(target, count, first, drip, limit)
        statuses = [wire.Seen(data, True, 0).statuses for data in told]
        right = [[], [status]] if status is None else [[status]]
        allowed = right + ([[400], [408]] if status is None else [])
        check(all(seen in allowed for seen in statuses), f"they were told {sorted(set(map(str, statuses)))}")
        return f"{count} ended within {seconds:.1f} s" + (f", {status}" if status else "")

    return run


def ended_h2(count: int, frames: bytes, drip: bytes, limit: float, word: str = "closed"):
    """The same for HTTP/2: the connection is closed, or the stream answered, within the limit."""

    def run(target) -> str:
        begun = time.monotonic()
        with contextlib.ExitStack() as open_ones:
            streams = [open_ones.enter_context(h2.dial(target.address)) for _ in range(count)]
            for stream in streams:
                stream.sendall(frames)
            seen = dict.fromkeys(streams, b"")
            closed: set[socket.socket] = set()
            while time.monotonic() - begun < limit + LATE:
                target.answers()
                for stream in streams:
                    stream.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        try:
                            seen[stream] += (data := stream.recv(65536))
                        except ConnectionError:
                            data = b""
                        if not data:
                            closed.add(stream)
                    with contextlib.suppress(OSError):
                        stream.send(drip)
                said = [str(h2.said(wire.Seen(seen[stream], stream in closed, 0))) for stream in streams]
                if all(word in words for words in said):
                    return f"{count} × {said[0]} within {time.monotonic() - begun:.1f} s"
                time.sleep(limit / 8)
        raise AssertionError(f"after {limit + LATE:.1f} s: {sorted(set(said))}")

    return run


def sockets(target) -> int:
    """Connections of clients that the service holds. What the kernel still sends of one that was closed has no inode, and is not counted."""
    rows = (row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(row[1].endswith(f":{target.address[1]:04X}") and row[3] != "0A" and row[9] != "0" for row in rows)


def readers(count: int, limit: float, rate: int):
    """Clients that ask for much and take `rate` bytes each quarter of the limit; 0 takes nothing. The service lets go of them, at the latest
    when what is left lies with the kernel and the connection is idle.
    """
    text = b"a word, " * 50_000
    body = b'{"model":"simulated","prompt":"%s"}' % text
    ask = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    def run(target) -> str:
        begun = time.monotonic()
        with contextlib.ExitStack() as open_ones:
            streams = []
            for _ in range(count):
                stream = open_ones.enter_context(wire.connect(target.address, receive_buffer=2048))
                stream.sendall(ask + body)
                streams.append(stream)
            while not sockets(target):
                check(time.monotonic() - begun < 30, "none was accepted")
            while (left := sockets(target)) and time.monotonic() - begun < 4 * limit + BUSY:
                target.answers()
                for stream in streams if rate else []:
                    stream.setblocking(False)
                    with contextlib.suppress(OSError):
                        stream.recv(rate)
                time.sleep(limit / 4)
        check(not left, f"{left} of {count} are still there after {time.monotonic() - begun:.1f} s")
        return f"{count} let go within {time.monotonic() - begun:.1f} s"

    return run


STREAM = b'{"model":"simulated","prompt":"a","stream":true,"max_tokens":%d,"ignore_eos":true}'
JSON = (("content-type", "application/json"),)


def no_window(streams: int, limit: float, first_has: int = 0):
    """A client of HTTP/2 whose window is and stays empty, with many streams. The first may have one, so that its answer is taken. Each of the
    others is reset, and the first is answered to its end, which comes after that.
    """
    # A step of the engines takes 5 ms.
    lengths = [int((limit + SLACK) * 200) if first_has and not at else 100 for at in range(streams)]
    asks = b"".join(h2.request(1 + 2 * at, "POST", "/v1/completions", *JSON, body=STREAM % length) for at, length in enumerate(lengths))
    stalled = streams - bool(first_has)

    def run(target) -> str:
        with h2.dial(target.address, h2.settings(INITIAL_WINDOW_SIZE=0)) as stream:
            opened = [h2.frame(h2.WINDOW_UPDATE, 0, which, first_has.to_bytes(4, "big")) for which in (0, 1)] if first_has else []
            seen = wire.flood(stream, [asks, *opened], 3 * (limit + SLACK), quiet=limit + SLACK)
        said = h2.said(seen)
        check(len(said.resets) == stalled and set(said.resets.values()) == {"CANCEL"}, said)
        check(not first_has or (1 not in said.resets and b"data: [DONE]" in seen.data), f"the first ended early: {said}")
        return f"{stalled} reset" + (", the first answered to its end" if first_has else "")

    return run


HEALTH = h2.block("POST", "/grpc.health.v1.Health/Check", ("content-type", "application/grpc"), ("te", "trailers"))


def health(count: int, announced: int, sent: int):
    """Health checks, which need no key, of which the rest does not come: whatever they send, another client's large body finds room."""
    body = b'{"model":"simulated","prompt":"a","max_tokens":1,"padding":"%s"}' % (b"x" * 2_000_000)
    data = b"\0" + announced.to_bytes(4, "big") + b"x" * sent
    pieces = [h2.frame(h2.DATA, 0, 1, data[at : at + 16_000]) for at in range(0, len(data), 16_000)]

    def run(target) -> str:
        with contextlib.ExitStack() as open_ones:
            for _ in range(count):
                stream = open_ones.enter_context(h2.dial(target.address))
                wire.flood(stream, [h2.frame(h2.HEADERS, h2.END_HEADERS, 1, HEALTH), *pieces], 5, quiet=0.02)
            seen = wire.request(target.address, "POST", "/v1/completions", body, "Content-Type: application/json\r\n")
        check(seen.statuses == [200], f"{seen}: {seen.text[-300:]}")
        return f"after {count} checks: {seen}"

    return run


def cases(scale) -> list[Case]:
    """All of them."""
    clients, few = scale.clients, max(5, scale.clients // 20)
    half_headers = h2.frame(h2.HEADERS, h2.END_STREAM, 1, h2.block("GET", "/v1/models"))
    open_body = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.block("POST", "/v1/completions"))
    drip, data = h2.frame(h2.CONTINUATION, 0, 1, h2.header("x", "y")), h2.frame(h2.DATA, 0, 1, b"x")
    call = h2.block("POST", "/hostler.inference.v1.Inference/Generate", ("content-type", "application/grpc"), ("te", "trailers"))
    open_call = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, call)
    slow_check = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, HEALTH) + h2.frame(h2.DATA, 0, 1, b"\0\0\0\3\0")
    growth = 64 + clients // 4
    return [
        case("slow", f"{clients} clients that say nothing", f"closed in {scale.head:g} s", ended(clients, b"", b"", scale.head), growth),
        case("slow", f"{clients} slow heads", f"closed in {scale.head:g} s", ended(clients, HEAD, b"X-a: b\r\n", scale.head), growth),
        case("slow", f"{few} heads of one byte", f"closed in {scale.head:g} s", ended(few, b"P", b"", scale.head), growth),
        case("slow", f"{few} clients that send blank lines", f"closed in {scale.head:g} s", ended(few, b"\r\n", b"\r\n", scale.head), growth),
        case("slow", f"{clients} slow bodies", f"408 in {scale.body:g} s", ended(clients, BY_LENGTH, b"x", scale.body, 408), growth),
        case(
            "slow", f"{clients} slow bodies in chunks", f"408 in {scale.body:g} s", ended(clients, IN_CHUNKS, b"1\r\nx\r\n", scale.body, 408), growth
        ),
        case("slow", f"{READERS} clients that read nothing", "let go", readers(READERS, scale.stall, 0), 256),
        case("slow", f"{READERS} clients that read a few bytes a second", "let go", readers(READERS, scale.stall, 4), 256),
        case("slow", f"h2: {few} prefaces and nothing more", f"closed in {scale.head:g} s", ended_h2(few, b"", b"", scale.head), growth),
        case("slow", f"h2: {few} heads without end", f"closed in {scale.head:g} s", ended_h2(few, half_headers, b"", scale.head), growth),
        case("slow", f"h2: {few} heads that drip in", f"closed in {scale.head:g} s", ended_h2(few, half_headers, drip, scale.head), growth),
        case("slow", f"h2: {few} slow bodies", f"408 in {scale.body:g} s", ended_h2(few, open_body, data, scale.body, "408"), growth),
        case(
            "slow", f"h2: {few} slow messages of gRPC", f"answered in {scale.body:g} s", ended_h2(few, open_call, data, scale.body, "1×200"), growth
        ),
        case("slow", "h2: 200 streams without a window", f"reset in {scale.stall:g} s", no_window(200, scale.stall)),
        case("slow", "h2: 100 streams without a window and one with", "the one is answered", no_window(101, scale.stall, 1 << 20)),
        case("slow", f"h2: {few} slow health checks", f"answered in {scale.head:g} s", ended_h2(few, slow_check, data, scale.head, "1×200"), growth),
        case("slow", "h2: 80 health checks that send 900 KB", "a large body finds room", health(80, 12 << 20, 900_000)),
        case("slow", "h2: 20 health checks that lack their end", "a large body finds room", health(20, 20, 3)),
    ]
