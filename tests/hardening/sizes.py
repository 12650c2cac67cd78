"""Too much of something: heads, targets, bodies, what bodies become, bodies at once, connections at once. Each has a bound and an answer."""

import contextlib
import itertools
import time
import zlib

import h2
import wire
from cases import Case, case, check

# What all bodies that are arriving may take, as the service under test is told.
READING_BYTES = 64 << 20
MEGABYTE = 1 << 20
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
GZIP, DEFLATE = b"Content-Encoding: gzip\r\n" + CHUNKED, b"Content-Encoding: deflate\r\n" + CHUNKED
BODY = b'{"model":"simulated","prompt":"a","max_tokens":1}'


def head(lines: bytes, *statuses: int):
    """A head that is too much: refused, or the connection is ended before an answer could be read."""

    def run(target) -> str:
        seen = wire.exchange(target.address, lines, wire.CLOSED)
        check(seen.closed and (seen.statuses == [] or seen.statuses[0] in statuses), seen)
        check(seen.statuses == [] or f'"code":{seen.statuses[0]}' in seen.text, f"no words: {seen.text[-300:]}")
        return str(seen)

    return run


def heads_h2(frames: list[bytes], expected: str):
    """The same in HTTP/2."""

    def run(target) -> str:
        with h2.dial(target.address) as stream:
            seen = wire.flood(stream, frames, wire.PATIENCE, quiet=0.5, enough=h2.says(expected))
        said = h2.said(seen)
        check(h2.says(expected)(seen) and 200 not in said.statuses.values(), said)
        return str(said)

    return run


def body(fields: bytes, pieces, *statuses: int, most: int = 64 << 20):
    """A body that is too much: refused long before all of it came."""

    def run(target) -> str:
        with wire.connect(target.address) as stream:
            seen = wire.flood(stream, itertools.chain([POST + fields + b"\r\n"], pieces()), 30)
        check(seen.closed and (seen.statuses[:1] == [] or seen.statuses[0] in statuses) and seen.sent < most, f"{seen}, {seen.sent} sent")
        return f"{seen}, took {seen.sent / MEGABYTE:.1f} MiB"

    return run


def chunks_without_end():
    """10 GB in chunks of a megabyte."""
    return (b"100000\r\n" + b"x" * MEGABYTE + b"\r\n" for _ in range(10_000))


def bomb(window_bits: int):
    """10 GiB of blanks, compressed piece by piece: about ten megabytes to send."""
    blanks = b" " * (64 << 20)
    if window_bits == 31:
        # Parts of a gzip body follow each other, so one of them is enough.
        compressor = zlib.compressobj(9, zlib.DEFLATED, window_bits)
        part = compressor.compress(blanks) + compressor.flush()
        parts = itertools.repeat(part, 160)
    else:
        compressor = zlib.compressobj(1, zlib.DEFLATED, window_bits)
        parts = (compressor.compress(blanks) + compressor.flush(zlib.Z_SYNC_FLUSH) for _ in range(160))
    return (b"%x\r\n" % len(part) + part + b"\r\n" for part in parts)


def compressed(data: bytes, status: int, coding: bytes = b"gzip"):
    """A small body with a Content-Encoding."""

    def run(target) -> str:
        length = b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (coding, len(data))
        seen = wire.exchange(target.address, POST + length + data)
        check(seen.statuses == [status], f"{seen}: {seen.text[-300:]}")
        return str(seen)

    return run


def nested(target) -> str:
    """Ten million brackets: an engine refuses them."""
    data = b'{"model":"simulated","prompt":' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}"
    seen = wire.request(target.address, "POST", "/v1/completions", data, "Content-Type: application/json\r\n")
    check(seen.statuses[:1] and 400 <= seen.statuses[0] < 500, f"{seen}: {seen.text[-300:]}")
    return str(seen)


def many_bodies(target) -> str:
    """Forty bodies of 15 MB that lack their last byte: together they get no more memory than is set."""
    most, piece = b"Content-Length: 15000000\r\n\r\n", b"x" * 1_000_000
    refused, arriving = 0, []
    with contextlib.ExitStack() as open_ones:
        for _ in range(40):
            stream = open_ones.enter_context(wire.connect(target.address))
            seen = wire.flood(stream, itertools.chain([POST + most], itertools.repeat(piece, 14)), 5, quiet=0.05)
            told = 429 in seen.statuses or seen.closed
            refused += told
            arriving += [] if told else [stream]
        target.answers()
        # Where cores are few, some are not answered yet, and the first ones are given up for being slow.
        while refused < 20 and arriving:
            seen = wire.flood(arriving.pop(), [], wire.PATIENCE, quiet=0.05, enough=lambda seen: bool(seen.statuses))
            refused += 429 in seen.statuses or seen.closed
        check(refused >= 20, f"{refused} refused, {len(arriving)} arriving")
    return f"{refused} refused with 429, {len(arriving)} arriving"


def held(count: int):
    """So many connections that have asked once and stay. The service may close them, for they ask nothing more."""

    def run(target) -> str:
        with contextlib.ExitStack() as open_ones:
            streams = []
            for _ in range(count):
                stream = open_ones.enter_context(wire.connect(target.address))
                stream.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                streams.append(stream)
            answered = sum(stream.recv(4096).startswith(b"HTTP/1.1 200 ") for stream in streams)
            slowest = max(target.answers() for _ in range(5))
        check(answered == count, f"{answered} of {count} were answered")
        return f"{count} answered, others wait {slowest * 1000:.0f} ms"

    return run


def packed() -> list[bytes]:
    """A header of 4,000 bytes that the other side remembers, then named ten thousand times by one byte each."""
    block = h2.block("GET", "/v1/models") + h2.header("x", "y" * 4000, indexed=True) + b"\xbe" * 10_000
    return [h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, block)]


def long_head() -> list[bytes]:
    """A megabyte of headers over CONTINUATION frames."""
    fields = h2.header("x", "y" * 16_000)
    frames = [h2.frame(h2.HEADERS, h2.END_STREAM, 1, h2.block("GET", "/v1/models"))]
    return frames + [h2.frame(h2.CONTINUATION, h2.END_HEADERS if last else 0, 1, fields) for last in [False] * 64 + [True]]


def cases(scale) -> list[Case]:
    """All of them."""
    get = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
    count = scale.connections
    zipped = zlib.compressobj(9, zlib.DEFLATED, 31)
    zipped = zipped.compress(BODY) + zipped.flush()
    many = b"".join(b"X-%d: %s\r\n" % (at, b"y" * 40) for at in range(20_000))
    too_large = "413 before 64 MiB"
    return [
        case("sizes", "1 MB in one header", "431", head(get + b"X: " + b"y" * MEGABYTE + b"\r\n\r\n", 431), 32),
        case("sizes", "1 MB in 20 000 headers", "431", head(get + many + b"\r\n", 431), 32),
        case("sizes", "200 headers", "431", head(get + b"X: y\r\n" * 200 + b"\r\n", 431), 32),
        case("sizes", "a target of 1 MB", "414 or 431", head(b"GET /v1/" + b"x" * MEGABYTE + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, 431), 32),
        case("sizes", "1 MB of trailers", "400 or 413", body(CHUNKED, lambda: [b"0\r\n" + b"X: y\r\n" * 200_000 + b"\r\n"], 400, 413), 32),
        case("sizes", "h2: 1 MB of headers", "431, reset or closed", heads_h2(long_head(), "431|reset|closed"), 32),
        case("sizes", "h2: 40 MB of headers packed into 15 KB", "431, reset or closed", heads_h2(packed(), "431|reset|closed"), 32),
        case("sizes", "10 GB announced", "413", body(b"Content-Length: 10000000000\r\n", lambda: [], 413, most=MEGABYTE), 32),
        case("sizes", "10 GB in chunks", too_large, body(CHUNKED, chunks_without_end, 413)),
        case("sizes", "a gzip bomb of 10 GB, not decompressed", "415", body(GZIP, lambda: bomb(31), 415), 32),
        case("sizes", "Content-Encoding: zstd", "415", compressed(b"(\xb5/\xfd", 415, b"zstd"), 32),
        case("sizes", "ten million brackets", "4xx", nested, 256),
        case("sizes", "40 bodies of 15 MB arriving at once", "429 beyond 64 MiB", many_bodies, 256),
        case("sizes", f"{count} connections held open", "another is answered", held(count), 64 + count * 48 // 1024),
        case("sizes", "decompressing: a body in gzip", "200", compressed(zipped, 200), 32, inflates=True),
        case("sizes", "decompressing: no gzip at all", "400", compressed(b"no gzip at all", 400), 32, inflates=True),
        case("sizes", "decompressing: half a body", "400", compressed(zipped[:-9], 400), 32, inflates=True),
        case("sizes", "decompressing: gzip twice", "415", compressed(zipped, 415, b"gzip, gzip"), 32, inflates=True),
        case("sizes", "decompressing: a gzip bomb of 10 GB", "413", body(GZIP, lambda: bomb(31), 413, most=8 << 20), 64, inflates=True),
        case("sizes", "decompressing: a deflate bomb of 10 GB", "413", body(DEFLATE, lambda: bomb(15), 413, most=8 << 20), 64, inflates=True),
    ]
