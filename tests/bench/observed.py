"""Hostler while somebody watches it: with traces of all requests, to a collector that does not take them, and with viewers of the router's page."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from ways import Hostler, ask

HANGING, DEAD, VIEWERS = OBSERVED = ("traces to a collector that hangs", "traces to a dead collector", "ten viewers of its page")
# How long a picture may take to come; there is one each second.
PICTURE_SECONDS = 10


@contextlib.contextmanager
def observed_ways(folder: Path, flags: tuple[str, ...]) -> Iterator[dict[str, Hostler]]:
    """Routers with agents and engines of their own, by name, watched until the end."""
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", 0))))
        # It keeps its port, and does not listen.
        dead = stack.enter_context(contextlib.closing(socket.socket()))
        dead.bind(("127.0.0.1", 0))
        collectors = {HANGING: silent, DEAD: dead}
        found = {}
        for number, name in enumerate(OBSERVED):
            variables = traced(collectors[name]) if name in collectors else {}
            own = folder / str(number)
            own.mkdir()
            found[name] = Hostler(own, flags, name, variables)
            stack.callback(found[name].stop)
        for _ in range(10):
            stack.enter_context(viewer(found[VIEWERS]))
        yield found


def traced(collector: socket.socket) -> dict[str, str]:
    """The environment of a router with traces alone."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.getsockname()[1]}", "OTEL_LOGS_EXPORTER": "none"}


@contextlib.contextmanager
def viewer(hostler: Hostler) -> Iterator[None]:
    """One who has opened the page, as its script does, and reads what comes."""
    token = ask("page", "--no-open", "--admin", hostler.socket).split("#token=")[1].split()[0]
    address = hostler.admin.removeprefix("http://")
    entry = http.client.HTTPConnection(address, timeout=PICTURE_SECONDS)
    with contextlib.closing(entry):
        entry.request("POST", "/page/session", json.dumps({"token": token}), {"content-type": "application/json"})
        session = json.load(entry.getresponse())["session"]
    events = http.client.HTTPConnection(address, timeout=PICTURE_SECONDS)
    events.request("GET", "/page/events", headers={"authorization": f"Bearer {session}"})
    answer = events.getresponse()
    assert answer.status == 200 and answer.read1(1 << 20), "a viewer has a picture"
    reading = threading.Thread(target=read, args=(answer,), daemon=True)
    reading.start()
    try:
        yield
        assert reading.is_alive(), "a viewer sees the page until the end"
    finally:
        with contextlib.suppress(OSError):  # the router is gone
            events.sock.shutdown(socket.SHUT_RDWR)
        reading.join(PICTURE_SECONDS)
        events.close()


def read(answer: http.client.HTTPResponse) -> None:
    """Everything, until the connection ends."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        while answer.read1(1 << 20):
            pass
