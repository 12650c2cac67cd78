"""What `hostler controller` keeps: jobs of the stand-in for PBS, while jobs end, controllers die, nobody asks.

Jobs have one simulated engine each. What is wanted is written into `fleet.toml`, as `hostler up` and `scale` do.
"""

import contextlib
import json
import os
import shutil
import ssl
import tempfile
import textwrap
from pathlib import Path

import httpx2
import pytest

from batch import DONE, START_SECONDS, Pbs, Requests
from processes import Process, ask, wait_until

pytestmark = pytest.mark.jobs

# How long a controller takes at most to notice and to act, in seconds: a few steps.
NOTICED = 30
# It submits nothing for so long after a job has failed.
FIRST_PAUSE = 30


class Fleet:
    """A fleet of the user's: the files that `hostler init` makes, and a controller that is to be started."""

    def __init__(self, scheduler: Pbs):
        """`fleet.toml` is empty."""
        self.folder = Path(tempfile.mkdtemp(prefix="hostler-"))
        self.pbs = scheduler
        self.state, self.settings = self.folder / "state", self.folder / "hostler.toml"
        ask("init", "--config", str(self.settings))
        added = f"""
            max_queue_wait = "1s"

            [agent]
            engine = "simulated"
            run_dir = "{self.folder / "run"}"

            [cluster]
            scheduler = "pbs"
            resources = "1:ncpus=1"
            router_host = "127.0.0.1"
            state_dir = "{self.state}"
        """
        written = self.settings.read_text().partition("\n[cluster]")[0]
        self.settings.write_text(written + textwrap.dedent(added))
        self.key = (self.folder / "user.key").read_text().strip()
        self.trust = ssl.create_default_context(cafile=self.folder / "fleet" / "ca.crt")
        self.state.mkdir(mode=0o700)
        self.controller: Process | None = None
        self.starts = 0

    def want(self, *entries: str) -> None:
        """Replaces `fleet.toml` as other commands do: a name and the rest of its entry each."""
        texts = [f'[[model]]\nname = "{name}"\nmodel = "{name}"\n{rest}\n' for name, rest in map(split, entries)]
        draft = self.state / "draft"
        draft.write_text("\n".join(texts))
        draft.replace(self.state / "fleet.toml")

    def start(self, **settings: str) -> None:
        """Starts a controller, with these variables for settings of its own."""
        self.starts += 1
        variables = {"HOME": str(self.pbs.folder), "PATH": f"{self.pbs.folder}/bin:/usr/bin:/bin"}
        # Its socket is apart, so that `hostler ps` of a test beside it does not find it.
        variables |= {"XDG_RUNTIME_DIR": str(self.folder), "XDG_STATE_HOME": "", "XDG_CACHE_HOME": ""}
        variables |= {"HOSTLER_STEP_INTERVAL_MS": "500"} | settings
        command = ["controller", "--config", str(self.settings)]
        self.controller = Process(f"controller-{self.starts}", command, self.folder, variables)

    def endpoint(self) -> dict:
        """Where the controller says that the fleet is reached."""
        self.controller.printed("edge", 90)
        path = self.state / "endpoint.json"

        def written() -> dict | None:
            found = json.loads(path.read_text()) if path.exists() else {}
            return found if found.get("pid") == self.controller.child.pid else None

        return wait_until(written, DONE, "the endpoint is written")

    def job_name(self, name: str) -> str:
        """The name of an entry's jobs, which the fleet's tag is a part of."""
        return f"hostler-{name}-{(self.state / 'tag').read_text().strip()}"

    def jobs(self, name: str) -> dict[str, str]:
        """The jobs of an entry that have not ended, by id with the letter of their state."""
        listed = json.loads(self.pbs.call("qstat", "-t", "-f", "-F", "json")).get("Jobs", {})
        return {
            id: job["job_state"]
            for id, job in listed.items()
            if "[]" not in id and job["Job_Name"] == self.job_name(name) and job["job_state"] not in "FX"
        }

    def shown(self) -> dict:
        """What `hostler ps --json` prints."""
        socket = self.endpoint()["operators_socket"]
        return json.loads(ask("ps", "--config", str(self.settings), "--admin", socket, "--json"))

    def wait_ready(self, name: str, nodes: int, seconds: float = START_SECONDS) -> list[str]:
        """Returns the jobs of an entry when so many serve."""

        def ready() -> list[str]:
            ids = [job["id"] for job in self.shown()["jobs"] if job["fleet"] == name and job["state"] == "ready"]
            return ids if len(ids) == nodes else []

        return wait_until(ready, seconds, f"{nodes} jobs of {name} serve", pause=0.2)

    def ask(self, model: str) -> httpx2.Response:
        """One short request."""
        edge, headers = self.endpoint()["edge"], {"authorization": f"Bearer {self.key}"}
        body = {"model": model, "prompt": "hello", "max_tokens": 2}
        return httpx2.post(f"{edge}/v1/completions", json=body, headers=headers, timeout=30, verify=self.trust)

    def submitted(self) -> int:
        """How many jobs were ever submitted under any name; the stand-in counts from 11."""
        return int(self.pbs.call("qsub", "-N", "count", "--", "/bin/true").partition(".")[0]) - 11

    def stop(self) -> None:
        """Ends the controller; its jobs end with their scheduler."""
        if self.controller:
            with contextlib.suppress(AssertionError):
                self.controller.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def split(entry: str) -> tuple[str, str]:
    """The name, and what follows it, a setting for each semicolon."""
    name, _, rest = entry.partition(": ")
    return name, rest.replace("; ", "\n")


def running(hosts: int):
    """A fixture's body."""
    folder = Path(tempfile.mkdtemp(prefix="hostler-"))
    pbs = Pbs(folder / "pbs", hosts)
    fleet = Fleet(pbs)
    try:
        yield fleet
    except BaseException:
        print(*(f"\n--- {name}\n{text}" for name, text in pbs.printed().items()))
        raise
    finally:
        fleet.stop()
        pbs.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def fleet():
    """As many hosts as jobs come."""
    yield from running(0)


@pytest.fixture
def full():
    """One host."""
    yield from running(1)


def test_a_controller_keeps_nodes_and_gives_them_back(fleet: Fleet):
    fleet.want('chat: nodes = 2; walltime = "1h"')
    fleet.start()
    jobs = fleet.wait_ready("chat", 2)
    assert sorted(fleet.jobs("chat")) == sorted(jobs)
    assert fleet.ask("chat").status_code == 200

    before = fleet.endpoint()
    fleet.controller.kill()
    fleet.start()
    after = fleet.endpoint()
    ports = ("edge", "agents", "admin")
    assert [after[name] for name in ports] == [before[name] for name in ports]
    assert sorted(fleet.wait_ready("chat", 2)) == sorted(jobs), "its agents are back, and no job was doubled"
    assert fleet.ask("chat").status_code == 200

    fleet.pbs.call("qdel", jobs[0])
    within = FIRST_PAUSE + 2 * NOTICED
    wait_until(lambda: len(set(fleet.jobs("chat")) - set(jobs)) == 1, within, "another is submitted", pause=0.2)
    assert jobs[1] in fleet.wait_ready("chat", 2)

    fleet.controller.child.terminate()
    assert fleet.controller.child.wait(DONE) == 0
    assert len(fleet.jobs("chat")) == 2, "jobs run on without a controller"
    fleet.start()
    fleet.wait_ready("chat", 2)

    fleet.want()
    assert fleet.controller.child.wait(60) == 0
    assert not fleet.jobs("chat") and not (fleet.state / "endpoint.json").exists()
    wait_until(lambda: not fleet.pbs.left(), DONE, "no process of a job is left")
    fleet.start()
    assert fleet.controller.child.wait(DONE) == 0, "a controller of nothing ends"


def test_jobs_find_a_controller_that_starts_with_other_ports(fleet: Fleet):
    fleet.want('chat: nodes = 2; walltime = "1h"')
    fleet.start()
    jobs, before = fleet.wait_ready("chat", 2), fleet.endpoint()
    fleet.controller.kill()
    fleet.start(HOSTLER_ROUTER_LISTEN="127.0.0.1:0", HOSTLER_ROUTER_AGENTS_LISTEN="0.0.0.0:0")
    after = fleet.endpoint()
    assert after["agents"] != before["agents"] and after["edge"] != before["edge"]
    # Far less than a new job's agent and engine would need.
    assert sorted(fleet.wait_ready("chat", 2, NOTICED)) == sorted(jobs)
    assert fleet.ask("chat").status_code == 200
    assert fleet.submitted() == 1, "nothing was submitted beside the first array"


def test_a_killed_submission_is_not_submitted_again(fleet: Fleet):
    qsub = fleet.pbs.folder / "bin" / "qsub"
    real = qsub.rename(qsub.with_name("real-qsub"))
    asked, go = fleet.folder / "asked", fleet.folder / "go"
    qsub.write_text(f'#!/bin/sh\ntouch {asked}\nwhile [ ! -e {go} ]; do sleep 0.05; done\nexec {real} "$@"\n')
    qsub.chmod(0o755)
    fleet.want('chat: nodes = 1; walltime = "1h"')
    fleet.start()
    wait_until(asked.exists, START_SECONDS, "it submits")
    # Other hosts see by the time of this file that it lives, also while a command of the scheduler takes long.
    endpoint = fleet.state / "endpoint.json"
    os.utime(endpoint, (0, 0))
    wait_until(lambda: endpoint.stat().st_mtime, DONE, "the endpoint is renewed", pause=0.2)
    fleet.controller.kill()
    assert not fleet.jobs("chat")
    fleet.start()
    go.touch()
    fleet.wait_ready("chat", 1)
    assert len(fleet.jobs("chat")) == fleet.submitted() == 1


def test_two_fleets_of_one_user_leave_each_other_alone(fleet: Fleet):
    other = Fleet(fleet.pbs)
    try:
        for one in (fleet, other):
            one.want('chat: nodes = 1; walltime = "1h"')
            one.start()
        (job,), (others,) = fleet.wait_ready("chat", 1), other.wait_ready("chat", 1)
        assert (list(fleet.jobs("chat")), list(other.jobs("chat"))) == ([job], [others])
        fleet.want()
        assert fleet.controller.child.wait(60) == 0
        assert not fleet.jobs("chat") and list(other.jobs("chat")) == [others]
        assert other.ask("chat").status_code == 200
        assert fleet.submitted() == 2
    finally:
        other.stop()


def test_a_displaced_controller_ends_and_leaves_jobs_alone(fleet: Fleet):
    fleet.want('chat: nodes = 1; walltime = "1h"')
    fleet.start()
    jobs = fleet.wait_ready("chat", 1)
    path = fleet.state / "endpoint.json"
    # As the controller of another host writes it, where locks do not hold between hosts.
    written = json.loads(path.read_text()) | {"host": "another-login-node", "instance": "another"}
    draft = fleet.state / "draft"
    draft.write_text(json.dumps(written))
    draft.replace(path)
    assert fleet.controller.child.wait(60) == 0
    assert "the fleet has another controller, on another-login-node" in fleet.controller.tail(20000)
    assert list(fleet.jobs("chat")) == jobs and json.loads(path.read_text()) == written

    # One that starts here waits until the other one shows no sign of life.
    os.utime(path, (0, 0))
    fleet.start()
    assert fleet.wait_ready("chat", 1) == jobs
    assert fleet.submitted() == 1


def test_jobs_are_replaced_before_they_end_and_no_request_fails(fleet: Fleet):
    fleet.want('short: nodes = 1; walltime = "150s"')
    fleet.start()
    (first,) = fleet.wait_ready("short", 1)
    requests = Requests(f"{fleet.endpoint()['edge']}/v1", "short", fleet.key, fleet.trust)
    # It is due two minutes before its end, and about what its start took.
    wait_until(lambda: first not in fleet.jobs("short"), 90, "the first job has left", pause=0.2)
    assert fleet.pbs.job(first)["resources_used"]["walltime"] < "00:01:30", "it left because the other one was ready"
    requests.stop()


def test_a_model_comes_by_request_and_goes_when_idle(full: Fleet):
    other = full.pbs.call("qsub", "--", "/bin/sleep", "1000")
    full.want('rare: min = 0; max = 1; idle_after = "60s"; walltime = "1h"')
    full.start()

    def refused(words: str) -> httpx2.Response | None:
        answer = full.ask("rare")
        return answer if answer.status_code == 503 and words in answer.text else None

    words = "1 job waits: Not Running: Insufficient amount of resource: ncpus"
    answer = wait_until(lambda: refused(words), 2 * NOTICED, "the client is told")
    assert int(answer.headers["retry-after"]) >= 1
    (waiting,) = full.jobs("rare")
    (shown,) = full.shown()["jobs"]
    assert (shown["id"], shown["state"], shown["fleet"]) == (waiting, "queued", "rare")
    assert shown["comment"].startswith("Not Running")
    text = ask("ps", "--config", str(full.settings), "--admin", full.endpoint()["operators_socket"])
    assert f"job {waiting}" in text and "Not Running" in text

    full.pbs.call("qdel", other)
    wait_until(lambda: full.ask("rare").status_code == 200, START_SECONDS, "it serves", pause=0.2)
    wait_until(lambda: not full.jobs("rare"), 60 + 2 * NOTICED, "nobody asks, so its job is given back", pause=0.2)
    wait_until(lambda: full.ask("rare").status_code == 200, START_SECONDS + NOTICED, "it serves again", pause=0.2)
    assert len(full.jobs("rare")) == 1
