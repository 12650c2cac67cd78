"""The service under attack: `hostler up` with simulated engines, asked after each case whether it still serves, and at what cost."""

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import wire

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from processes import Process, ask, binary  # noqa: E402 - it stands beside the other suites

# `hostler` itself cannot be told how long clients may stall. The same program for tests, built beside it, can.
os.environ["HOSTLER_BIN"] = str(binary().with_name("hostler-under-test"))

# Another client is answered within this time, in seconds, while or after something is wrong, on a machine that does more than that.
PROMPT = 20.0
# By so many MiB the process may grow in a case, unless the case says otherwise.
GROWTH = 192
COMPLETION = b'{"model":"simulated","prompt":"still there?","max_tokens":2}'


class Target:
    """One running service and what is measured of it."""

    def __init__(self, *flags: str, stall: float, keyed: bool = False):
        """Starts it; `flags` are settings of the router, which lets clients stall for so many seconds. With `keyed` it wants a key, and there is one for the model that it serves."""
        self.folder = Path(tempfile.mkdtemp(prefix="hostler-hardening-"))
        self.key = ""
        if keyed:
            file = self.folder / "keys.toml"
            key = ask("keys", "create", "--model", "simulated", "--file", str(file)).strip()
            self.key = f"Authorization: Bearer {key}\r\n"
            flags = (*flags, "--keys-file", str(file))
        own = ["--engine", "simulated", "--replicas", "2", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        own += ["--operators-socket", str(self.folder / "router.sock")]
        variables = {"HOSTLER_TEST_CLIENT_STALL_MS": str(round(stall * 1000))}
        self.process = Process("up", ["up", *own, *flags, "--", "--sim-step-ms", "5"], self.folder, variables)
        self.address, self.admin = (host_and_port(self.process.printed(word, 60)) for word in ("edge", "admin"))
        self.socket = self.process.printed("socket", 60)
        self.process.printed("ready", 120)
        self.log_read = 0
        self.resident = self.memory("VmRSS")

    def memory(self, field: str) -> int:
        """A line of /proc/PID/status in MiB."""
        status = Path(f"/proc/{self.process.child.pid}/status").read_text()
        return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) // 1024

    def begin(self) -> None:
        """Forgets the peak of before."""
        Path(f"/proc/{self.process.child.pid}/clear_refs").write_text("5")
        self.resident = self.memory("VmRSS")

    def peak(self) -> int:
        """Most MiB since `begin`."""
        return self.memory("VmHWM")

    def answers(self) -> float:
        """Whether another client is answered promptly; how long that took."""
        begun = time.monotonic()
        seen = wire.request(self.address, "POST", "/v1/completions", COMPLETION, f"Content-Type: application/json\r\n{self.key}")
        took = time.monotonic() - begun
        assert seen.statuses == [200], f"another client saw {seen.statuses}: {seen.text[:300]}"
        assert took < PROMPT, f"another client waited {took:.1f} s"
        return took

    def wait_idle(self, seconds: float = 60) -> None:
        """Returns when no request is in flight any more."""
        deadline = time.monotonic() + seconds
        while (left := self.in_flight()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"{left:g} requests are still in flight after {seconds} s"

    def in_flight(self) -> float:
        """Requests of which engines have not finished, as the metrics page says."""
        page = wire.request(self.admin, "GET", "/metrics").text
        return sum(float(value) for value in re.findall(r"^hostler_in_flight(?:\{.*\})? (\S+)$", page, re.MULTILINE))

    def new_log(self) -> str:
        """What it logged since this was asked last."""
        text = self.process.log.read_text(errors="replace")
        new, self.log_read = text[self.log_read :], len(text)
        return new

    def is_sound(self) -> None:
        """It runs, has not panicked, and no engine has died."""
        assert self.process.child.poll() is None, f"it exited {self.process.child.returncode}"
        log = self.new_log()
        assert "panicked" not in log, f"it panicked: {log[log.find('panicked') - 200 :][:600]}"

    def replicas(self) -> list[dict]:
        """Its replicas, as `hostler ps --json` shows them."""
        nodes = json.loads(ask("ps", "--admin", self.socket, "--json"))["nodes"]
        return [replica for node in nodes for replica in node["replicas"]]

    def restarts(self) -> int:
        """How often its engines were started anew."""
        return sum(replica["restarts"] for replica in self.replicas())

    def stop(self) -> None:
        """Ends it."""
        self.process.stop()


def host_and_port(url: str) -> tuple[str, int]:
    """The address in `http://127.0.0.1:8000/v1`."""
    host, _, port = re.sub(r"^\w+://", "", url).partition("/")[0].rpartition(":")
    return host, int(port)
