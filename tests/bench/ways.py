"""The ways to the engines that run.py compares, each as the processes it consists of.

`Hostler` is a router and an agent, whose two simulated engines the others use as well; `Nginx` is one nginx worker as
a reverse proxy to those engines' sockets. A way is ready when its constructor returns and ends, with all that it
started, in `stop`. hostler's own processes are started and ended by ../python/processes.py.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from processes import Process, ask, wait_until  # noqa: E402

# How long a process may take to listen and engines to become ready, in seconds.
START_SECONDS = 20
# How long requests that have been answered may still be counted as in flight, in seconds.
SETTLE_SECONDS = 2
# The user's own configuration file must not decide what is measured.
NO_CONFIG = ("--config", os.devnull)

NGINX_CONFIG = """\
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
{user}
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream engines {{
        least_conn;
        {servers}
        keepalive 1024;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        keepalive_requests 1000000000;
        # As hostler's limit; and a body that is held in memory, not written to a file.
        client_max_body_size 16m;
        client_body_buffer_size 256k;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 60s;
        }}
    }}
}}
"""


class Hostler:
    """A router and an agent with two simulated engines."""

    def __init__(self, folder: Path, flags: tuple[str, ...]):
        """Starts both and waits for the engines; `flags` are the engines'."""
        any_port = "127.0.0.1:0"
        with contextlib.ExitStack() as undo:
            listeners = ("--listen", any_port, "--agents-listen", any_port, "--admin-listen", any_port)
            self._router = Process("router", ["router", *NO_CONFIG, *listeners], folder)
            undo.callback(self._router.stop)
            words = ("edge", "agents", "admin")
            edge, agents, self._admin = (self._router.printed(word, START_SECONDS) for word in words)
            options = ("--router", agents, "--engine", "simulated", "--replicas", "2")
            folders = ("--run-dir", str(folder / "run"), "--log-dir", str(folder / "log"))
            self._agent = Process("agent", ["agent", *NO_CONFIG, *options, *folders, "--", *flags], folder)
            undo.callback(self._agent.stop)
            replicas = wait_until(self._ready, START_SECONDS, "both engines ready", pause=0.1)
            self.stop = undo.pop_all().close
        self.targets = [edge.removesuffix("/v1")]
        self.pids = {"router": [self._router.child.pid], "agent": [self._agent.child.pid]}
        self.sockets = [replica["engine_socket"] for replica in replicas]
        self.engine_pids = [replica["engine_pid"] for replica in replicas]

    def settle(self) -> None:
        """Waits until nothing is in flight; fails when something stays."""
        wait_until(
            lambda: not any(replica["in_flight"] + replica["own_in_flight"] for replica in self._replicas()),
            SETTLE_SECONDS,
            "nothing in flight",
            pause=0.05,
        )

    def logs(self) -> str:
        """What both said, for a failure's report."""
        return f"{self._router.tail()}\n{self._agent.tail()}"

    def _replicas(self) -> list[dict]:
        nodes = json.loads(ask("ps", "--admin", self._admin, "--json"))["nodes"]
        return [replica for node in nodes for replica in node["replicas"]]

    def _ready(self) -> list[dict]:
        replicas = self._replicas()
        return replicas if [replica["phase"] for replica in replicas] == ["ready"] * 2 else []


class Direct:
    """The load generator on the engines' own sockets, half of it on each."""

    def __init__(self, sockets: list[str]):
        """Nothing to start."""
        self.targets = [f"unix:{path}" for path in sockets]
        self.pids: dict[str, list[int]] = {}

    def stop(self) -> None:
        """Nothing to end."""


class Nginx:
    """nginx in front of the engines' sockets."""

    def __init__(self, folder: Path, sockets: list[str]):
        """Starts it and waits until it listens."""
        folder.mkdir()
        with socket.socket() as chooser:
            chooser.bind(("127.0.0.1", 0))
            port = chooser.getsockname()[1]
        config = folder / "nginx.conf"
        servers = " ".join(f"server unix:{path};" for path in sockets)
        # Started by root, its worker would else become another user, who may not open the engines' sockets.
        user = "user root;" if os.geteuid() == 0 else ""
        config.write_text(NGINX_CONFIG.format(folder=folder, user=user, servers=servers, port=port))
        with (folder / "stderr").open("ab") as log:
            command = [nginx_program(), "-e", folder / "error.log", "-p", folder, "-c", config]
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_until(lambda: self._listens(port), START_SECONDS, f"nginx listens ({folder}/error.log)")
        except BaseException:
            self.stop()
            raise
        self.targets = [f"http://127.0.0.1:{port}"]
        self.pids = {"nginx": [self._child.pid, *children(self._child.pid)]}

    def _listens(self, port: int) -> bool:
        assert self._child.poll() is None, f"nginx exited {self._child.returncode}"
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    def stop(self) -> None:
        """Ends the master, which ends its worker."""
        left = children(self._child.pid)
        self._child.terminate()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(timeout=5)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):  # it ended with its master
                    os.kill(pid, 9)


def nginx_program() -> str | None:
    """Where nginx is; Debian keeps it where only root's PATH looks."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def children(parent: int) -> list[int]:
    """The processes that this one started and that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            # The name may hold spaces and brackets; the fields after the last bracket do not.
            state, its_parent = entry.read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state not in "ZX":
                found.append(int(entry.parent.name))
    return found
