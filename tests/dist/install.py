"""Installs what `make dist` made, the wheel by pip and the tarball by tar, and has the program serve a request.

Called by run.sh with the folder of both. It runs in a Debian 11 too, so Python 3.9 and its library are enough.
"""

import http.client
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

# A start with simulated engines takes about a second, and so does a drain without requests.
DEADLINE_SECONDS = 30


def install_wheel(wheel: Path, environment: Path) -> Path:
    """The program of the wheel, in a fresh environment."""
    venv.create(environment, with_pip=True)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", wheel], check=True)
    return environment / "bin" / "hostler"


def unpack_tarball(tarball: Path, prefix: Path) -> Path:
    """The program of the tarball, below a prefix."""
    prefix.mkdir()
    subprocess.run(["tar", "-xzf", tarball, "-C", prefix, "--strip-components=1"], check=True)
    return prefix / "bin" / "hostler"


def version(program: Path) -> str:
    """What the program says of itself."""
    return subprocess.run([program, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def serve_and_drain(program: Path, home: Path) -> str:
    """Has `hostler up` answer one chat, then drains it; returns the answer's text."""
    options = ["--engine", "simulated", "--replicas", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    options += ["--operators-socket", home / "up.sock", "--run-dir", home / "run"]
    environment = {**os.environ, "HOME": str(home)}
    with subprocess.Popen([program, "up", *options], stdout=subprocess.PIPE, env=environment) as up:
        try:
            edge = await_ready(up)
            answer = ask(edge)
            up.send_signal(signal.SIGTERM)
            status = up.wait(DEADLINE_SECONDS)
        finally:
            up.kill()
    if status != 0:
        raise SystemExit(f"hostler up ended with {status} after SIGTERM, not with 0")
    return answer


def await_ready(up: subprocess.Popen) -> str:
    """Reads what `hostler up` prints until its replica is ready; returns the host and port of its edge."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    printed = b""
    with selectors.DefaultSelector() as selector:
        selector.register(up.stdout, selectors.EVENT_READ)
        while b"ready   1 of 1" not in printed:
            piece = os.read(up.stdout.fileno(), 4096) if selector.select(deadline - time.monotonic()) else b""
            if not piece:
                raise SystemExit(f"not ready within {DEADLINE_SECONDS} s; printed {printed.decode()!r}")
            printed += piece
    edges = [words[1] for words in map(str.split, printed.decode().splitlines()) if words[:1] == ["edge"]]
    return edges[0].split("/")[2]


def ask(edge: str) -> str:
    """The text of an answer to one chat."""
    connection = http.client.HTTPConnection(edge, timeout=DEADLINE_SECONDS)
    connection.request("GET", "/v1/models")
    model = json.load(connection.getresponse())["data"][0]["id"]
    chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    connection.request("POST", "/v1/chat/completions", json.dumps(chat), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"a chat was answered with {answer.status}: {answer.read()!r}")
    return json.load(answer)["choices"][0]["message"]["content"]


def main() -> None:
    """Both, and that they are one program."""
    folder = Path(sys.argv[1])
    (wheel,) = folder.glob("*.whl")
    (tarball,) = folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as home:
        installed = install_wheel(wheel, Path(home, "venv"))
        unpacked = unpack_tarball(tarball, Path(home, "prefix"))
        if installed.read_bytes() != unpacked.read_bytes():
            raise SystemExit("wheel and tarball have different programs")
        named = version(installed)
        answer = serve_and_drain(unpacked, Path(home))
    print(f"ok   {' '.join(platform.libc_ver())}: {named} was installed from both and answered {answer!r}")


if __name__ == "__main__":
    main()
