"""A user on a login node of PBS (the stand-in of tests/pbs) or of real Slurm, with jobs of one simulated engine."""

import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from batch import Pbs, Requests, kill_all, tokens
from processes import binary, environment, running
from slurm import Slurm
from wire import Access, Stream, all_streaming

# How long a command may take that waits for jobs: their start, or that of an engine three times in vain.
WAITS = 120
# A line of `cluster.setup` has it.
SECRET = "A_TOKEN=not-for-others"
# A client as users write it: all that it knows of the fleet is in its environment.
ASK = """
from openai import OpenAI
answer = OpenAI(max_retries=0, timeout=20).chat.completions.create(model="chat", messages=[{"role": "user", "content": "Hello"}])
print(answer.choices[0].message.content)
"""


class LoginNode:
    """A scheduler with room for a few jobs, and a user who has run `hostler init`."""

    def __init__(self, kind: str, hosts: int = 3, further: str = ""):
        """Nothing is up; `further` are more lines of `[cluster]`."""
        self.kind, self.program = kind, binary()
        self.folder = Path(tempfile.mkdtemp(prefix="hostler-"))
        self.settings, self.state = self.folder / "hostler.toml", self.folder / "state"
        self.variables = {"HOSTLER_STEP_INTERVAL_MS": "500", "XDG_STATE_HOME": "", "XDG_CACHE_HOME": ""}
        # With the sockets of its routers apart, `hostler ps` finds no router of a test beside it.
        self.variables |= {"XDG_RUNTIME_DIR": str(self.folder)}
        if kind == "pbs":
            self.scheduler = Pbs(self.folder / "pbs", hosts=hosts)
            self.variables |= {"HOME": str(self.scheduler.folder), "PATH": f"{self.scheduler.folder}/bin:/usr/bin:/bin"}
            resources, variables = "1:ncpus=1", "HOSTLER_STEP_INTERVAL_MS=500"
        else:
            self.scheduler = Slurm(self.folder / "s")
            # Its jobs need this user's own home, where records of every `hostler up` beside this test would be.
            self.variables |= {"SLURM_CONF": f"{self.scheduler.folder}/slurm.conf", "XDG_STATE_HOME": str(self.folder / "own")}
            # Two jobs on each of its two nodes.
            variables = f"HOSTLER_STEP_INTERVAL_MS=500 SLURM_CONF={self.scheduler.folder}/slurm.conf"
            resources = "--cpus-per-task=32"
        self.cluster = textwrap.dedent(f"""
            [agent]
            engine = "simulated"
            run_dir = "{self.folder / "run"}"

            [cluster]
            scheduler = "{kind}"
            resources = "{resources}"
            setup = ["export {SECRET} {variables} XDG_RUNTIME_DIR={self.folder}"]
            router_host = "127.0.0.1"
            state_dir = "{self.state}"
        """)
        self.cluster += textwrap.dedent(further)

    def initialise(self) -> None:
        """Runs `hostler init`, and fills in what a user would."""
        assert self.hostler("init").returncode == 0
        self.settings.write_text(self.settings.read_text().partition("\n[cluster]")[0] + self.cluster)

    def hostler(self, *arguments: str, seconds: float = WAITS) -> subprocess.CompletedProcess:
        """Runs a command to its end."""
        command, *rest = arguments
        return subprocess.run(
            [self.program, command, "--config", str(self.settings), *rest],
            **{"capture_output": True, "text": True, "timeout": seconds, "check": False},
            env=environment() | self.variables,
        )

    def in_shell(self, command: str) -> subprocess.CompletedProcess:
        """Runs a command as a user does: after `eval "$(hostler env)"`."""
        script = f'set -e; lines=$("{binary()}" env --config "{self.settings}"); eval "$lines"; {command}'
        return subprocess.run(
            ["bash", "-c", script],
            **{"capture_output": True, "text": True, "timeout": 60, "check": False},
            env=environment() | self.variables,
        )

    def access(self) -> tuple[str, Access]:
        """The edge's URL now, and what its clients show and check."""
        shown = json.loads(self.succeed("env", "--json"))
        trust = ssl.create_default_context(cadata=shown["authority"])
        return shown["base_url"], Access(shown["api_key"], trust)

    def streams(self, count: int, seconds: float) -> list[Stream]:
        """So many streams of this length, each with a first event."""
        edge, access = self.access()
        streams = [Stream(edge, tokens(seconds), "chat", access=access) for _ in range(count)]
        all_streaming(streams)
        return streams

    def requests(self) -> Requests:
        """Short requests from now on, until `stop`."""
        edge, access = self.access()
        return Requests(edge, "chat", access.key, access.trust)

    def endpoint(self) -> dict:
        """What the controller has written of itself; empty where none has."""
        path = self.state / "endpoint.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def answers(self) -> bool:
        """Whether a client of OpenAI's gets an answer after `eval "$(hostler env)"`."""
        asked = self.in_shell(f"exec '{sys.executable}' -c '{ASK}'")
        return asked.returncode == 0 and bool(asked.stdout.strip())

    def succeed(self, *arguments: str) -> str:
        """Runs a command that has to succeed, and returns what it prints."""
        ended = self.hostler(*arguments)
        assert ended.returncode == 0, f"{arguments}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}\n{self.log()}"
        return ended.stdout

    def log(self) -> str:
        """The end of what the controller has logged."""
        path = self.state / "controller.log"
        return path.read_text()[-4000:] if path.exists() else ""

    def name(self, entry: str) -> str:
        """The name of an entry's jobs, which the fleet's tag is a part of."""
        return f"hostler-{entry}-{(self.state / 'tag').read_text().strip()}"

    def jobs(self) -> list[str]:
        """The names of the jobs that have not ended."""
        if self.kind == "slurm":
            return self.scheduler.call("squeue", "--noheader", "--array", "--format=%j").split()
        listed = json.loads(self.scheduler.call("qstat", "-t", "-f", "-F", "json")).get("Jobs", {})
        return [job["Job_Name"] for id, job in listed.items() if "[]" not in id and job["job_state"] not in "FX"]

    def processes(self) -> list[str]:
        """All that the user has started: controller, agents, keepers and engines."""
        own = [one for one in running() if str(self.settings) in one.command or str(self.folder / "run") in one.command]
        return [f"{one.pid} {one.command}" for one in own]

    def stop(self) -> None:
        """Ends all, by force where something is left."""
        kill_all(lambda: [int(shown.split()[0]) for shown in self.processes()])
        self.scheduler.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
