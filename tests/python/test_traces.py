"""One request is one trace, from the router into real vLLM: a collector of this test's own gets spans of both."""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx2
import pytest

import fleet as fleets
from fleet import MODEL
from processes import Process, wait_until

pytestmark = pytest.mark.vllm("own")

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def fields(message: bytes):
    """The fields of an encoded message of protocol buffers that are bytes: number and value."""
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte, at = message[at], at + 1
            number, shift = number | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return number

    while at < len(message):
        tag = varint()
        match tag & 7:
            case 0:
                varint()
            case 1:
                at += 8
            case 5:
                at += 4
            case _:
                length = varint()
                at += length
                yield tag >> 3, message[at - length : at]


def within(message: bytes, *path: int):
    """The fields that this path of numbers leads to."""
    for number, value in fields(message):
        if number == path[0]:
            yield from within(value, *path[1:]) if path[1:] else [value]


class Collector:
    """Takes spans over gRPC, from whoever sends them."""

    def __init__(self):
        """Listens on a free port."""
        self.spans: list[dict[str, str]] = []
        self.server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        service, method = EXPORT.strip("/").split("/")
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def _export(self, request: bytes, _) -> bytes:
        # resource_spans, scope_spans, spans; of a span trace_id, span_id, parent_span_id and name.
        for span in within(request, 1, 2, 2):
            known = dict(fields(span))
            trace, own, parent = (known.get(number, b"").hex() for number in (1, 2, 4))
            self.spans.append({"trace": trace, "id": own, "parent": parent, "name": known[5].decode()})
        return b""


@pytest.fixture
def collector():
    """A collector for one test."""
    running = Collector()
    yield running
    running.server.stop(0)


def test_the_engines_span_is_in_its_requests_trace(collector, engines):
    engines.stop()
    engine = fleets.vllm()
    with tempfile.TemporaryDirectory(prefix="hostler-") as folder:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        options = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        options += ["--operators-socket", f"{folder}/up.sock"]
        options += ["--run-dir", f"{folder}/run", "--log-dir", f"{folder}/log"]
        began = time.monotonic()
        up = Process("up", ["up", *options, *engine.command("a")], Path(folder), variables)
        try:
            edge = up.printed("edge", 60)
            up.printed("ready", engine.start_seconds)
            print(f"\nan engine ready after {time.monotonic() - began:.0f} s")
            body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
            answer = httpx2.post(f"{edge}/chat/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text

            def find(key: str, value: str) -> dict[str, str] | None:
                return next((span for span in collector.spans if span[key] == value), None)

            engines = wait_until(lambda: find("name", "llm_request"), 60, "the engine's span")
            attempt = wait_until(lambda: find("id", engines["parent"]), 30, "its parent")
        finally:
            up.stop()
    assert (attempt["name"], attempt["trace"]) == (f"chat {MODEL}", engines["trace"])
    root = next(span for span in collector.spans if span["id"] == attempt["parent"])
    assert (root["name"], root["parent"]) == ("POST /v1/chat/completions", "")
    # Neither the agent's own test completions nor the engine's start are traces.
    assert {span["trace"] for span in collector.spans} == {root["trace"]}, collector.spans
