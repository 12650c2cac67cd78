"""HTTP/2 by the ten thousand frames: what costs the sender little and a careless server much. The connection is cut, or costs it little too."""

import itertools
import time
from collections.abc import Iterable, Iterator

import h2
import wire
from cases import Case, case, check

BATCH = 100
LONG = b'{"model":"simulated","prompt":"a","stream":true,"max_tokens":2000,"ignore_eos":true}'
JSON = ("content-type", "application/json")


def batches(frames: Iterable[bytes]) -> Iterator[bytes]:
    """So many frames at a time, as one would send them."""
    batch = []
    for frame in frames:
        batch.append(frame)
        if len(batch) == BATCH:
            yield b"".join(batch)
            batch = []
    yield b"".join(batch)


def streams(count: int) -> range:
    """Numbers of a client's streams."""
    return range(1, 2 * count, 2)


def flooded(frames, expected: str, read: bool = True, seconds: float = 30):
    """Sends all frames. `expected` are words one of which must be in what was said; an empty one is content with anything."""

    def run(target) -> str:
        with h2.dial(target.address) as stream:
            seen = wire.flood(stream, batches(frames()), seconds, quiet=0.3, read=read, enough=h2.says(expected))
        said = h2.said(seen)
        check(h2.says(expected)(seen), f"{said}, {seen.sent} bytes taken")
        return f"{said}, took {seen.sent / 1024:.0f} KiB in {seen.seconds:.1f} s"

    return run


def one(frame: bytes, expected: str):
    """One frame that is wrong."""
    return flooded(lambda: [frame], expected)


def reset_later(rounds: int):
    """Resets after a moment, when the requests are on their way to engines."""

    def frames() -> Iterator[bytes]:
        at = 1
        for _ in range(rounds):
            opened = list(range(at, at + 2 * BATCH, 2))
            at += 2 * BATCH
            yield b"".join(h2.request(stream, "POST", "/v1/completions", JSON, body=LONG) for stream in opened)
            time.sleep(0.05)
            yield b"".join(h2.frame(h2.RST_STREAM, 0, stream, b"\0\0\0\x08") for stream in opened)

    def run(target) -> str:
        with h2.dial(target.address) as stream:
            said = h2.said(wire.flood(stream, frames(), 20, quiet=0.5))
        target.wait_idle()
        check(500 not in said.statuses.values(), said)
        return f"{rounds * BATCH} sent and taken back; {'closed, ' if said.closed else ''}none in flight after"

    return run


def refused_streams(target) -> str:
    """A thousand streams at once: the service takes 256."""
    opened = (h2.frame(h2.HEADERS, h2.END_HEADERS, stream, h2.block("POST", "/v1/completions", JSON)) for stream in streams(1000))

    def enough(seen: wire.Seen) -> bool:
        said = h2.said(seen)
        return bool(said.goaway) or sum(code == "REFUSED_STREAM" for code in said.resets.values()) >= 700

    with h2.dial(target.address) as stream:
        seen = wire.flood(stream, batches(opened), wire.PATIENCE, quiet=0.5, enough=enough)
    check(enough(seen), h2.said(seen))
    return str(h2.said(seen))


def opened(stream: int) -> bytes:
    """A request that is answered for long."""
    return h2.request(stream, "POST", "/v1/completions", JSON, body=LONG)


def cases(scale) -> list[Case]:
    """All of them."""
    count = scale.flood
    reset = h2.frame(h2.RST_STREAM, 0, 0, b"\0\0\0\x08")
    cut, calm = "GOAWAY|closed", "ENHANCE_YOUR_CALM|closed"

    def rapid():
        return (h2.request(stream, "GET", "/v1/models") + reset[:5] + stream.to_bytes(4, "big") + reset[9:] for stream in streams(10_000))

    def rapid_posts():
        return (opened(stream) + reset[:5] + stream.to_bytes(4, "big") + reset[9:] for stream in streams(10_000))

    def continuations():
        yield h2.frame(h2.HEADERS, h2.END_STREAM, 1, h2.block("GET", "/v1/models"))
        for _ in range(count):
            yield h2.frame(h2.CONTINUATION, 0, 1, h2.header("x", "y" * 1000))

    def empty_continuations():
        yield h2.frame(h2.HEADERS, h2.END_STREAM, 1, h2.block("GET", "/v1/models"))
        for _ in range(count):
            yield h2.frame(h2.CONTINUATION, 0, 1)

    def open_stream(then: bytes):
        def frames():
            yield h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.block("POST", "/v1/completions", JSON))
            for _ in range(count):
                yield then

        return frames

    def repeated(frame: bytes, times: int = 1):
        # Behind a request: who asks nothing is closed by the limit for heads.
        return lambda: itertools.chain([h2.request(1, "GET", "/v1/models")], (frame for _ in range(count * times)))

    def made_to_reset():
        # The service itself resets a stream whose window is opened by nothing; who opens many makes it do so many times.
        return (opened(stream) + h2.frame(h2.WINDOW_UPDATE, 0, stream, bytes(4)) for stream in streams(10_000))

    def window_abuse():
        yield h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.block("POST", "/v1/completions", JSON))
        for _ in range(4000):
            yield h2.frame(h2.DATA, 0, 1, b"x" * 16_384)

    most, ping = b"\x7f\xff\xff\xff", h2.frame(h2.PING, 0, 0, b"8 bytes.")
    return [
        case("floods", "rapid reset, 10 000", calm, flooded(rapid, calm), 64),
        case("floods", "rapid reset of long requests, 10 000", calm, flooded(rapid_posts, calm), 96),
        case("floods", "resets a moment later, 2 000", "none in flight after", reset_later(20)),
        case("floods", "made to reset, 10 000", cut, flooded(made_to_reset, cut), 96),
        case("floods", f"CONTINUATION, {count}", cut, flooded(continuations, cut), 64),
        case("floods", f"empty CONTINUATION, {count}", cut, flooded(empty_continuations, cut), 64),
        case("floods", f"empty DATA, {count}", cut, flooded(open_stream(h2.frame(h2.DATA, 0, 1)), cut), 64),
        case("floods", f"padded DATA of nothing, {count}", "bounded", flooded(open_stream(h2.frame(h2.DATA, 8, 1, b"\xff" + bytes(255))), ""), 64),
        case("floods", "DATA beyond the window, 64 MB", "FLOW_CONTROL_ERROR", flooded(window_abuse, "FLOW_CONTROL_ERROR|closed"), 64),
        case("floods", f"PING, {count}", "bounded", flooded(repeated(ping), ""), 64),
        case("floods", f"PING with unread answers, {count * 10}", "bounded", flooded(repeated(ping, 10), "", read=False, seconds=4), 64),
        case("floods", f"SETTINGS, {count}", "bounded", flooded(repeated(h2.settings(INITIAL_WINDOW_SIZE=1)), ""), 64),
        case("floods", f"SETTINGS with unread answers, {count * 10}", "bounded", flooded(repeated(h2.settings(), 10), "", read=False, seconds=4), 64),
        case("floods", f"PRIORITY, {count}", "bounded", flooded(repeated(h2.frame(h2.PRIORITY, 0, 1, bytes(5))), ""), 64),
        case("floods", f"WINDOW_UPDATE, {count}", "bounded", flooded(repeated(h2.frame(h2.WINDOW_UPDATE, 0, 0, b"\0\0\0\x01")), ""), 64),
        case("floods", "frames of unknown kinds", "bounded", flooded(repeated(h2.frame(0x42, 0, 0, bytes(100))), ""), 64),
        case("floods", "WINDOW_UPDATE of nothing", "PROTOCOL_ERROR", one(h2.frame(h2.WINDOW_UPDATE, 0, 0, bytes(4)), "PROTOCOL_ERROR|closed"), 32),
        case(
            "floods", "WINDOW_UPDATE over 31 bits", "FLOW_CONTROL_ERROR", one(h2.frame(h2.WINDOW_UPDATE, 0, 0, most), "FLOW_CONTROL_ERROR|closed"), 32
        ),
        case("floods", "a frame of 1 MB", "FRAME_SIZE_ERROR", one(h2.frame(h2.PING, 0, 0, bytes(1 << 20)), "FRAME_SIZE_ERROR|closed"), 32),
        case(
            "floods", "headers that are no HPACK", "COMPRESSION_ERROR", one(h2.frame(h2.HEADERS, 5, 1, b"\xff" * 100), "COMPRESSION_ERROR|closed"), 32
        ),
        case("floods", "1 000 streams at once", "REFUSED_STREAM beyond 256", refused_streams, 96),
    ]
