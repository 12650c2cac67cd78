"""A fleet whose controller is a batch job itself, as on clusters that end long processes on login nodes.

Clients and operators reach it in TLS at the job's host, which here is this host under the name 127.0.0.1.
"""

import http.client
import json
import os
import signal
import sys
import time

import pytest

from batch import DONE, STEP_MS, tokens, whole
from login_node import ASK, LoginNode
from processes import binary, environment, running, wait_until
from wire import Stream

pytestmark = pytest.mark.jobs

# How long the next controller may take from the end of the last one: scheduler, program, router and agents.
FOLLOWS = 120


class JobbedLogin(LoginNode):
    """A login node whose fleets have their controller in a job."""

    def __init__(self, kind: str, walltime: str):
        """Controllers run for so long."""
        further = f"""
            controller = "job"
            controller_walltime = "{walltime}"
        """
        super().__init__(kind, hosts=5, further=further)

    def controllers(self) -> list[str]:
        """The names of the controllers' jobs that have not ended."""
        return [name for name in self.jobs() if name.startswith("hostler_controller-")]

    def nodes(self) -> list[str]:
        """Those of the nodes' jobs."""
        return [name for name in self.jobs() if name.startswith("hostler-")]

    def follows(self, job: str) -> str:
        """Waits until another controller than that of this job answers; its job."""
        wait_until(
            lambda: self.endpoint().get("job") not in (None, job), FOLLOWS, "another controller is there", pause=0.2
        )
        wait_until(self.answers, FOLLOWS, "clients have answers again", pause=0.5)
        return self.endpoint()["job"]


def login_with(kind: str, walltime: str):
    """The body of the fixtures."""
    node = JobbedLogin(kind, walltime)
    try:
        yield node
    except BaseException:
        print(*(f"\n--- {name}\n{text}" for name, text in node.scheduler.printed().items()))
        print(node.log())
        raise
    finally:
        node.stop()


KINDS = ["pbs", pytest.param("slurm", marks=pytest.mark.slurm)]


@pytest.fixture(params=KINDS)
def login(request: pytest.FixtureRequest):
    """Controllers run for an hour."""
    yield from login_with(request.param, "1h")


@pytest.fixture(params=KINDS)
def short_login(request: pytest.FixtureRequest):
    """Controllers run for a minute."""
    yield from login_with(request.param, "1m")


@pytest.fixture(params=KINDS)
def two_minutes_login(request: pytest.FixtureRequest):
    """Controllers run for two minutes."""
    yield from login_with(request.param, "2m")


def ask_plain(host: str, port: int) -> None:
    """A request without TLS."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("GET", "/livez")
    connection.getresponse()


ENGINE = ("--served-model-name", "chat", "--sim-step-ms", str(STEP_MS))
UP = ("up", "org/chat", "--nodes", "1", "--walltime", "0:10:00")


def test_a_controller_in_a_job_is_used_replaced_and_ended(login: JobbedLogin):
    login.initialise()
    shown = login.succeed(*UP, "--dry-run")
    controller, _, node = shown.partition("agent --config")
    assert "hostler_controller-TAG" in controller and "controller --job" in controller and node, shown
    shown = login.succeed(*UP, "--", "--served-model-name", "chat")
    assert "kept by the controller in job" in shown and "ready     1 of 1 node" in shown, shown
    # One that runs, and one that follows its end.
    wait_until(lambda: len(login.controllers()) == 2, FOLLOWS, "the next controller's job is there", pause=0.2)
    assert login.nodes() == [login.name("chat")]

    access = json.loads(login.succeed("env", "--json"))
    assert access["base_url"].startswith("https://127.0.0.1:") and "BEGIN CERTIFICATE" in access["authority"], access
    assert login.answers(), login.in_shell(f"exec '{sys.executable}' -c '{ASK}'")
    curled = login.in_shell('curl -sS --fail -H "Authorization: Bearer $OPENAI_API_KEY" "$OPENAI_BASE_URL/models"')
    assert curled.returncode == 0 and '"chat"' in curled.stdout, curled
    bundle = (login.state / "ca-bundle.pem").read_text()
    assert bundle.count("BEGIN CERTIFICATE") > 1 or not os.path.exists("/etc/ssl/certs/ca-certificates.crt"), (
        "the host's own are missing"
    )
    keyless = login.in_shell('curl -sS -o /dev/null -w "%{http_code}" "$OPENAI_BASE_URL/models"')
    assert keyless.stdout == "401", keyless

    # A batch goes the same way.
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    call = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    asked = [call | {"custom_id": str(number)} for number in range(10)]
    (login.folder / "in.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in asked))
    files = f'"{login.folder}/in.jsonl" "{login.folder}/out.jsonl"'
    batch = login.in_shell(f'"{binary()}" batch --config "{login.settings}" {files}')
    assert batch.returncode == 0 and "10 requests answered" in batch.stdout, batch

    # Operators' commands go to the job's host, in TLS, with a key that the fleet's folder has.
    assert "ready" in login.succeed("ps")
    assert (login.state / "operator.key").stat().st_mode & 0o777 == 0o600
    host, _, port = login.endpoint()["admin"].rpartition(":")
    with pytest.raises((http.client.HTTPException, OSError)):
        ask_plain(host, int(port))

    # The scheduler itself brings the next one when one dies, and no node's job is doubled.
    first = login.endpoint()["job"]
    os.kill(login.endpoint()["pid"], signal.SIGKILL)
    second = login.follows(first)
    assert login.nodes() == [login.name("chat")]
    assert "ready     1 of 1 node" in login.succeed("wait")
    assert "ready     2 of 2 nodes" in login.succeed("scale", "chat", "--nodes", "2")
    wait_until(lambda: len(login.controllers()) == 2, FOLLOWS, "it has one that follows, too", pause=0.2)

    # Where all of them are gone, the next command submits one.
    own = [job for job in ids(login) if job != second]
    login.scheduler.call("qdel" if login.kind == "pbs" else "scancel", *own)
    login.scheduler.call("qdel" if login.kind == "pbs" else "scancel", second)
    wait_until(lambda: not login.controllers(), FOLLOWS, "no controller is left", pause=0.2)
    gone = login.hostler("env")
    assert gone.returncode == 1 and "hostler wait" in gone.stderr, gone
    assert "ready     2 of 2 nodes" in login.succeed("wait")
    assert login.answers() and login.nodes() == [login.name("chat")] * 2

    shown = login.succeed("down")
    assert "ended     chat" in shown, shown
    assert not login.jobs() and login.endpoint() == {}
    left = [name for name in ("operator.key", "controller") if (login.state / name).exists()]
    assert not left, left
    wait_until(lambda: not login.processes(), DONE, f"nothing is left: {login.processes()}", pause=0.2)


def ids(login: JobbedLogin) -> list[str]:
    """The ids of the controllers' jobs."""
    name = login.controllers()[0]
    if login.kind == "pbs":
        return login.scheduler.call("qselect", "-N", name).split()
    return login.scheduler.call("squeue", "--noheader", "--name", name, "--format=%i").split()


def test_a_controller_hands_over_when_its_time_ends(short_login: JobbedLogin):
    login = short_login
    login.initialise()
    login.succeed(*UP, "--", "--served-model-name", "chat")
    first, most = login.endpoint()["job"], 0
    ends = time.monotonic() + 300
    while login.endpoint().get("job") in (None, first):
        assert time.monotonic() < ends, f"nobody has followed:\n{login.log()}"
        most = max(most, len(login.controllers()))
        time.sleep(0.2)
    # While one leaves there may be the next one and what follows that.
    assert most <= 3, most
    wait_until(login.answers, FOLLOWS, "clients have answers again", pause=0.2)
    assert "leaves its place to the next one" in login.log()
    assert login.nodes() == [login.name("chat")]
    assert "ready" in login.succeed("ps")
    login.succeed("down")
    assert not login.jobs()
    left = [one.command for one in running() if str(login.settings) in one.command]
    assert not left, left


def test_no_stream_ends_early_at_a_planned_succession(two_minutes_login: JobbedLogin):
    login = two_minutes_login
    login.initialise()
    login.succeed(*UP, "--", *ENGINE)
    first, (edge, access) = login.endpoint()["job"], login.access()
    streams, ends = [], time.monotonic() + 300
    while login.endpoint().get("job") in (None, first):
        assert time.monotonic() < ends, f"nobody has followed:\n{login.log()}"
        streams.append(Stream(edge, tokens(8), "chat", access=access))
        time.sleep(0.5)
    whole(streams)
    wait_until(login.answers, FOLLOWS, "clients have answers again", pause=0.2)
    login.succeed("down")


def test_streams_of_a_deleted_controllers_job_get_error_events(login: JobbedLogin):
    login.initialise()
    login.succeed(*UP, "--", *ENGINE)
    streams = login.streams(8, 60)
    login.scheduler.call("qdel" if login.kind == "pbs" else "scancel", login.endpoint()["job"])
    for stream in streams:
        stream.join(DONE)
        assert len(stream.errors) == 1 and not stream.done, stream.end()
        assert "the router's batch job is being ended" in stream.errors[0]["message"], stream.end()
    login.succeed("down")


def test_a_fleet_ends_while_its_controller_waits_in_the_queue(login: JobbedLogin):
    if login.kind != "pbs":
        pytest.skip("the queue of the stand-in is filled here")
    login.initialise()
    fillers = [login.scheduler.call("qsub", "--", "/bin/sleep", "600") for _ in range(5)]
    shown = login.succeed(*UP, "--detach")
    assert "kept by the controller in job" in shown, shown
    late = login.hostler("wait", "--timeout", "8s")
    assert late.returncode == 4 and "queued    the controller's job" in late.stdout, late
    again = login.succeed(*UP, "--detach")
    assert len(login.controllers()) == 1 and again.split(" job ")[1] == shown.split(" job ")[1], "it is not doubled"
    login.succeed("down")
    assert not login.controllers() and not login.nodes()
    login.scheduler.call("qdel", *fillers)
    wait_until(lambda: not login.processes(), DONE, f"nothing is left: {login.processes()}", pause=0.2)
