"""What a web page can have its reader's browser send to the admin listener of a router on the same host, or through a tunnel. Nothing is
drained, and no figures are shown to a name that is not this host's (DNS rebinding).
"""

import h2
import wire
from cases import Case, case, check

DRAIN = "/hostler.fleet.v1.Fleet/Drain"
TEXT = "Content-Type: text/plain\r\n"
GRPC = "Content-Type: application/grpc\r\n"
FOREIGN = "Origin: https://evil.example\r\n"


def drain(target) -> bytes:
    """The body of a call that drains the first replica."""
    name = target.replicas()[0]["id"].encode()
    message = b"\x0a" + bytes([len(name)]) + name
    return b"\0" + len(message).to_bytes(4, "big") + message


def posted(headers: str, status: int):
    """A drain, posted as a page would."""

    def run(target) -> str:
        seen = wire.request(target.admin, "POST", DRAIN, drain(target), headers)
        check(seen.statuses == [status], f"{seen}: {seen.text[-300:]}")
        check("access-control-allow" not in seen.text.lower(), seen.text)
        return serves(target, str(seen))

    return run


def called(*headers: tuple[str, str]):
    """A drain as gRPC over HTTP/2, without a key."""

    def run(target) -> str:
        call = h2.request(1, "POST", DRAIN, ("content-type", "application/grpc"), ("te", "trailers"), *headers, body=drain(target))
        with h2.dial(target.admin) as stream:
            seen = wire.flood(stream, [call], 5)
        return serves(target, str(h2.said(seen)))

    return run


def serves(target, seen: str) -> str:
    """Fails when a replica was drained."""
    phases = [replica["phase"] for replica in target.replicas()]
    check(phases == ["ready"] * len(phases), f"{seen}; replicas are {phases}")
    return f"{seen}; nothing drained"


def asked(path: str, host: str, status: int):
    """A page, under this name."""

    def run(target) -> str:
        seen = wire.request(target.admin, "GET", path, host=host)
        check(seen.statuses == [status], f"{seen}: {seen.text[:300]}")
        return str(seen)

    return run


def preflight(target) -> str:
    """Leave to send anything else than a form."""
    headers = f"{FOREIGN}Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\n"
    seen = wire.request(target.admin, "OPTIONS", DRAIN, headers=headers)
    check(seen.statuses == [403] and "access-control-allow" not in seen.text.lower(), seen.text)
    return str(seen)


def cases() -> list[Case]:
    """All of them."""
    return [
        case("browser", "a drain as text, from another site", "403", posted(TEXT + FOREIGN, 403)),
        case("browser", "the same from a sandboxed frame", "403", posted(TEXT + "Origin: null\r\n", 403)),
        case("browser", "the same from another site, by Sec-Fetch-Site", "403", posted(TEXT + "Sec-Fetch-Site: cross-site\r\n", 403)),
        case("browser", "a drain as text, from nowhere", "415", posted(TEXT, 415)),
        case("browser", "a drain as a form", "415", posted("Content-Type: application/x-www-form-urlencoded\r\n", 415)),
        case("browser", "a drain without a type", "415", posted("", 415)),
        case("browser", "gRPC over HTTP/1.1", "415", posted(GRPC, 415)),
        case("browser", "leave to send gRPC from another site", "403", preflight),
        case("browser", "gRPC without a key, over loopback", "nothing drained", called()),
        case("browser", "gRPC from another site", "nothing drained", called(("origin", "https://evil.example"))),
        case("browser", "metrics under another host's name", "403", asked("/metrics", "evil.example", 403)),
        case("browser", "metrics under this host's address", "200", asked("/metrics", "127.0.0.1", 200)),
        case("browser", "readiness under any name", "200", asked("/readyz", "evil.example", 200)),
    ]
