"""HTTP/2 frame by frame (RFC 9113), with as much of HPACK (RFC 7541) as it takes to say a request and to read a status."""

import dataclasses
import socket
import struct

from wire import Seen, connect

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ERRORS = [
    *("NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED", "FRAME_SIZE_ERROR"),
    *("REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM", "INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED"),
]
# The static table's whole statuses.
STATUSES = {0x88: 200, 0x89: 204, 0x8A: 206, 0x8B: 304, 0x8C: 400, 0x8D: 404, 0x8E: 500}


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame, however wrong."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(**values: int) -> bytes:
    """A SETTINGS frame; names are those of this module."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", globals()[name], value) for name, value in values.items()))


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """HPACK's integers."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    out, value = bytearray([first | most]), value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def header(name: str | bytes, value: str | bytes, indexed: bool = False) -> bytes:
    """One header, spelt out; `indexed` puts it into the other side's table."""
    name, value = (text.encode() if isinstance(text, str) else text for text in (name, value))
    return (b"\x40" if indexed else b"\x00") + integer(len(name), 7) + name + integer(len(value), 7) + value


def block(method: str, path: str, *more: tuple[str, str], authority: str | None = "hostler") -> bytes:
    """The headers of a request."""
    pairs = [(":method", method), (":scheme", "http"), (":path", path)]
    if authority is not None:
        pairs.append((":authority", authority))
    return b"".join(header(name, value) for name, value in [*pairs, *more])


def request(stream: int, method: str, path: str, *more: tuple[str, str], body: bytes = b"") -> bytes:
    """A whole request."""
    flags = END_HEADERS | (0 if body else END_STREAM)
    return frame(HEADERS, flags, stream, block(method, path, *more)) + (frame(DATA, END_STREAM, stream, body) if body else b"")


def dial(address: tuple[str, int], first: bytes | None = None) -> socket.socket:
    """A connection that has sent its preface and settings."""
    stream = connect(address)
    stream.sendall(PREFACE + (settings() if first is None else first))
    return stream


def digits(data: bytes) -> int:
    """The number that Huffman-coded digits make."""
    bits, text = "".join(f"{byte:08b}" for byte in data), ""
    while len(text) < 3:
        size, low = (5, int(bits[:5], 2)) if int(bits[:5], 2) < 3 else (6, int(bits[:6], 2) - 25 + 3)
        text, bits = text + str(low), bits[size:]
    return int(text)


def status(payload: bytes) -> int | None:
    """The status with which an answer's headers begin."""
    # The other side may first change the size of its table.
    while payload and payload[0] & 0xE0 == 0x20:
        payload = payload[1:]
    if payload[0] in STATUSES:
        return STATUSES[payload[0]]
    if payload[0] & 0x3F == 8 or payload[0] & 0x0F == 8:
        value = payload[2 : 2 + (payload[1] & 0x7F)]
        return digits(value) if payload[1] & 0x80 else int(value)
    return None


@dataclasses.dataclass
class Said:
    """What the other side said in frames."""

    statuses: dict[int, int | None]
    resets: dict[int, str]
    goaway: str | None
    counts: dict[int, int]
    closed: bool

    def __str__(self) -> str:
        """For the table."""
        words = [f"{count}×{status}" for status, count in tally(self.statuses.values())]
        words += [f"{count} reset {code}" for code, count in tally(self.resets.values())]
        words += [f"GOAWAY {self.goaway}"] if self.goaway else []
        return ", ".join([*words, "closed" if self.closed else "open"])


def tally(values) -> list[tuple]:
    """Each value and how often it is there."""
    values = list(values)
    return sorted(((value, values.count(value)) for value in set(values)), key=str)


def said(seen: Seen) -> Said:
    """Reads the frames that came."""
    result, at = Said({}, {}, None, {}, seen.closed), 0
    while at + 9 <= len(seen.data):
        length = int.from_bytes(seen.data[at : at + 3], "big")
        kind, _flags, stream = struct.unpack(">BBI", seen.data[at + 3 : at + 9])
        payload = seen.data[at + 9 : at + 9 + length]
        at += 9 + length
        result.counts[kind] = result.counts.get(kind, 0) + 1
        if kind == HEADERS and stream not in result.statuses and payload:
            result.statuses[stream] = status(payload)
        elif kind == RST_STREAM and len(payload) == 4:
            result.resets[stream] = error(payload)
        elif kind == GOAWAY and len(payload) >= 8:
            result.goaway = error(payload[4:8])
    return result


def says(words: str):
    """Whether one of these words, between bars, is in what was said; an empty one always is."""
    return lambda seen: any(word in str(said(seen)) for word in words.split("|"))


def error(code: bytes) -> str:
    """An error code's name."""
    number = int.from_bytes(code, "big")
    return ERRORS[number] if number < len(ERRORS) else str(number)
