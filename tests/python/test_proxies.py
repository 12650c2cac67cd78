"""Proxies as they are, configured as docs/proxies.md says, before a router: events come one by one, and a stream lives
through a silence that is longer than the proxy's timeout. Each is left out where the machine does not have it.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx2
import openai
import pytest

from fleet import MODEL, Fleet, Up, host_and_port
from processes import free_port, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "proxies.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hostler" / "peers"
# Within how many seconds a proxy listens.
START_SECONDS = 20
COMMENT = ": keep-alive\n\n"
# Less than a third of the proxies' timeout, which is a second here.
EVERY = "300ms"
NGINX = """\
{user}
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""
PROXIES = {
    "nginx": ("nginx", lambda file: ["-e", f"{file}.log", "-p", str(file.parent), "-c", str(file)]),
    "haproxy": ("haproxy", lambda file: ["-db", "-f", str(file)]),
    "caddyfile": ("caddy", lambda file: ["run", "--adapter", "caddyfile", "--config", str(file)]),
    "yaml": ("envoy", lambda file: ["-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]),
}


def program(name: str) -> str | None:
    """Where a proxy is; Debian keeps some where only root's PATH looks, and Envoy comes with `make bench-compare`."""
    installed = sorted(CACHE.glob(f"*/bin/{name}"))
    return shutil.which(name) or shutil.which(name, path="/usr/sbin") or (str(installed[-1]) if installed else None)


def documented(language: str) -> str:
    """The configuration that the page shows in this language."""
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"docs/proxies.md has {len(found)} configurations in {language}"
    return found[0]


def listens(child: subprocess.Popen, port: int, log: Path) -> bool:
    """Whether the proxy has got as far."""
    assert child.poll() is None, f"it exited {child.returncode}: {log.read_text(errors='replace')[-2000:]}"
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def kept_alive(tmp_path_factory):
    """A router before one engine of some twenty tokens a second, whose clients hear something every 300 ms."""
    flags = ["--served-model-name", MODEL, "--sim-step-ms", "50"]
    running = Up(tmp_path_factory.mktemp("up"), flags, engines=1, options=["--stream-keepalive", EVERY])
    yield running
    running.stop()


@pytest.fixture(params=PROXIES)
def proxy(request, kept_alive: Up, tmp_path):
    """A client of one of the proxies, whose timeout is a second."""
    name, arguments = PROXIES[request.param]
    found = program(name)
    if not found:
        pytest.skip(f"there is no {name} here")
    port = free_port()
    config = documented(request.param).replace("127.0.0.1:8000", host_and_port(kept_alive.edge)).replace("1800s", "1s")
    config = config.replace("port_value: 8000", f"port_value: {host_and_port(kept_alive.edge).partition(':')[2]}")
    config = config.replace("8080", str(port))
    if name == "nginx":
        user = "user root;" if os.geteuid() == 0 else ""
        config = NGINX.format(user=user, folder=tmp_path, server=config)
    if name == "caddy":
        config = "{\n\tadmin off\n}\n" + config
    # Envoy goes by the suffix.
    file, log = tmp_path / f"{name}.{request.param}", tmp_path / f"{name}.stderr"
    file.write_text(config)
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [found, *arguments(file)],
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            env=os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)},
        )
    try:
        wait_until(lambda: listens(child, port, log), START_SECONDS, f"{name} on port {port}")
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            yield client
    finally:
        child.terminate()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(timeout=5)


def chat(tokens: int, stream: bool = True) -> dict:
    """A chat of so many tokens."""
    asked = [{"role": "user", "content": "Say something about locomotives"}]
    return {"model": MODEL, "messages": asked, "max_tokens": tokens, "stream": stream}


def fault(up: Up, kind: str) -> None:
    """Has the one engine hang, or go on."""
    with Fleet.direct(up.replicas()[0]) as engine:
        engine.post("/sim/fault", json={"kind": kind}).raise_for_status()


def test_events_come_one_by_one(proxy: httpx2.Client):
    with proxy.stream("POST", "/v1/chat/completions", json=chat(30)) as answer:
        assert answer.status_code == 200
        pieces = [piece for piece in answer.iter_raw() if b"data: " in piece]
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert len(pieces) > 15, f"thirty events came in {len(pieces)} lumps"


def test_a_silence_that_is_longer_than_the_timeout_is_survived(proxy: httpx2.Client, kept_alive: Up):
    fault(kept_alive, "hang")
    try:
        with proxy.stream("POST", "/v1/chat/completions", json=chat(4)) as answer:
            assert answer.status_code == 200, answer.read()
            text = ""
            for piece in answer.iter_text():
                text += piece
                # Three seconds, of which the proxy allows one.
                if text.count(COMMENT) == 10:
                    fault(kept_alive, "ok")
        assert text.replace(COMMENT, "").endswith("data: [DONE]\n\n"), text
        assert text.count(COMMENT) >= 10 and json.loads(text.replace(COMMENT, "").split("\n\n")[0][6:])["model"] == MODEL
    finally:
        fault(kept_alive, "ok")


def test_the_sdk_reads_a_stream_that_was_kept_alive(kept_alive: Up):
    client = openai.OpenAI(base_url=kept_alive.edge, api_key="unused", max_retries=0, timeout=30)
    fault(kept_alive, "hang")
    try:
        # The engine hangs until the SDK has an answer: it has the head, and comments.
        stream = client.chat.completions.create(**chat(4))
        fault(kept_alive, "ok")
        chunks = list(stream)
    finally:
        fault(kept_alive, "ok")
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_whole_answer_needs_the_manuals_timeout(proxy: httpx2.Client, kept_alive: Up):
    fault(kept_alive, "hang")
    try:
        assert proxy.post("/v1/chat/completions", json=chat(4, stream=False)).status_code in (502, 504)
    finally:
        fault(kept_alive, "ok")
    wait_until(lambda: kept_alive.in_flight() == 0, 10, "nothing in flight")


def test_a_body_of_some_megabytes_is_not_refused(proxy: httpx2.Client):
    asked = chat(1, stream=False) | {"user": "x" * 2_000_000}
    # Where cores are few, it takes longer than the proxy waits here.
    assert proxy.post("/v1/chat/completions", json=asked).status_code in (200, 504)
