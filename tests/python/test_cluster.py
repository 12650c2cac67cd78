"""A user's day on a login node: `hostler up`, `wait`, `scale` and `down`, with jobs of the stand-in for PBS and of real Slurm.

Jobs have one simulated engine each. tests/slurm/run.sh runs these tests on Slurm.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import httpx2
import pytest

from batch import DONE, STEP_MS, whole
from login_node import ASK, SECRET, LoginNode
from processes import Process, binary, running, wait_until

pytestmark = pytest.mark.jobs

# Exit codes, see `hostler wait --help`.
FAILING, LATE, INTERRUPTED = 3, 4, 130

CHAT = ("up", "org/chat", "--nodes", "1", "--walltime", "1h", "--", "--served-model-name", "chat")
CHAT += ("--sim-step-ms", str(STEP_MS))


def alive(pid: int) -> bool:
    """Whether this process runs."""
    return any(one.pid == pid for one in running())


@pytest.fixture(params=["pbs", pytest.param("slurm", marks=pytest.mark.slurm)])
def login(request: pytest.FixtureRequest):
    """A login node of each scheduler."""
    node = LoginNode(request.param)
    try:
        yield node
    except BaseException:
        print(*(f"\n--- {name}\n{text}" for name, text in node.scheduler.printed().items()))
        raise
    finally:
        node.stop()


@pytest.mark.smoke
def test_a_model_is_brought_up_used_scaled_and_ended(login: LoginNode):
    login.settings.write_text(login.cluster)
    refused = login.hostler("up", "chat", "--nodes", "2", "--walltime", "0:10:00")
    assert refused.returncode == 1 and "`hostler init`" in refused.stderr, refused.stderr
    login.settings.unlink()
    login.initialise()

    shutil.rmtree(login.state)
    tagless = login.hostler("up", "org/chat", "--nodes", "2", "--walltime", "0:10:00", "--dry-run")
    assert "hostler-chat-TAG" in tagless.stdout and "TAG is chosen" in tagless.stderr, tagless
    assert not login.state.exists()
    assert login.hostler("env").returncode == 1 and not login.state.exists()
    login.hostler("doctor")
    assert login.state.exists(), "whether jobs can use it is tried"
    shown = login.succeed("up", "org/chat", "--nodes", "2", "--walltime", "0:10:00", "--dry-run")
    assert shown.startswith("install -D -m 600 " if login.kind == "pbs" else "sbatch "), shown
    other = login.succeed("up", "org/chat", "--nodes", "1", "--walltime", "0:10:00", "--queue", "other-queue", "--dry-run")
    assert "other-queue" in other and "other-queue" not in shown, other
    assert login.name("chat") in shown and "00:10:00" in shown and "agent --config" in shown and SECRET in shown, shown
    assert not login.jobs() and not login.processes(), "it has started something"

    shown = login.succeed("up", "org/chat", "--nodes", "2", "--walltime", "0:10:00", "--", "--served-model-name", "chat")
    assert "ready     2 of 2 nodes" in shown and "hostler env" in shown and "with the model chat" in shown, shown
    assert login.jobs() == [login.name("chat")] * 2
    listed = login.scheduler.call(*(["qstat", "-t", "-f", "-F", "json"] if login.kind == "pbs" else ["scontrol", "show", "job"]))
    assert login.name("chat") in listed and SECRET not in listed, listed
    assert not [one for one in running() if SECRET in one.command]
    access = json.loads(login.succeed("env", "--json"))
    # Who takes the port when the controller is gone gets neither key nor prompt.
    assert access["base_url"].startswith("https://127.0.0.1:") and "BEGIN CERTIFICATE" in access["authority"], access
    assert login.answers(), login.in_shell(f"exec '{sys.executable}' -c '{ASK}'")
    assert "ready" in login.succeed("ps")
    # Programs without TLS come in by a socket that other users cannot reach, and show their key there, too.
    socket = Path(access["socket"])
    assert (socket.stat().st_mode & 0o777, socket.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    question = {"model": "chat", "prompt": "Hello", "max_tokens": 4, "stream": True}
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(socket)), base_url="http://localhost/v1/") as local:
        assert local.post("completions", json=question).status_code == 401
        told = local.post("completions", json=question, headers={"authorization": f"Bearer {access['api_key']}"})
        assert told.status_code == 200 and told.text.endswith("data: [DONE]\n\n"), told.text

    # A batch ends the jobs of the model that it is told, and of no other.
    login.succeed("up", "org/bulk", "--nodes", "1", "--walltime", "0:10:00", "--", "--served-model-name", "bulk")
    body = {"model": "bulk", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    asked = [{"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body} for number in range(20)]
    (login.folder / "in.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in asked))
    login.variables["OPENAI_API_KEY"] = access["api_key"]
    files = [str(login.folder / name) for name in ("in.jsonl", "out.jsonl")]
    login.succeed("batch", *files, "--target", access["base_url"], "--down", "bulk")
    answers = [json.loads(line) for line in (login.folder / "out.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == [str(number) for number in range(20)]
    assert all(one["response"]["status_code"] == 200 for one in answers), answers
    assert login.jobs() == [login.name("chat")] * 2
    login.succeed("bench", "sustained", "--target", access["base_url"], "--model", "chat", "--requests", "20", "--quiet")

    assert "ready     2 of 2 nodes" in login.succeed("wait")
    unknown = login.hostler("wait", "nothing")
    assert unknown.returncode == 1 and "there is chat" in unknown.stderr, unknown.stderr
    assert "ready     3 of 3 nodes" in login.succeed("scale", "chat", "--nodes", "3")
    assert login.jobs() == [login.name("chat")] * 3

    shown = login.succeed("down")
    assert "ending    " in shown and "ended     chat" in shown and "failed" not in shown, shown
    assert not login.jobs()
    wait_until(lambda: not login.processes(), DONE, f"nothing is left: {login.processes()}", pause=0.2)
    assert not (login.state / "endpoint.json").exists()


def test_wait_takes_the_place_of_a_leaving_controller(login: LoginNode):
    login.initialise()
    login.succeed(*CHAT)
    first, streams, requests = login.endpoint(), login.streams(8, 20), login.requests()
    os.kill(first["pid"], signal.SIGTERM)
    assert "ready     1 of 1 node" in login.succeed("wait")
    second = login.endpoint()
    assert second["pid"] != first["pid"] and second["edge"] == first["edge"], (first, second)
    whole(streams)
    requests.stop()
    wait_until(lambda: not alive(first["pid"]), DONE, "the first one has ended", pause=0.2)
    assert login.answers() and login.jobs() == [login.name("chat")]
    login.succeed("down")


def test_up_of_another_program_replaces_the_controller(login: LoginNode):
    login.initialise()
    login.succeed(*CHAT)
    first, requests = login.endpoint(), login.requests()
    # Longer than the old one would drain.
    streams = login.streams(8, 40)
    assert "replaced" not in login.succeed(*CHAT) and login.endpoint() == first
    # As one that was installed anew.
    login.program = Path(shutil.copy(binary(), login.folder / "hostler"))
    shown = login.succeed(*CHAT)
    assert "replaced  the controller ran hostler" in shown and "ready     1 of 1 node" in shown, shown
    second = login.endpoint()
    assert second["pid"] != first["pid"] and second["edge"] == first["edge"], (first, second)
    assert second["program"]["path"] == str(login.program)
    whole(streams)
    requests.stop()
    wait_until(lambda: not alive(first["pid"]), DONE, "the first one has ended", pause=0.2)
    login.succeed("down")


def test_jobs_without_any_router_end(login: LoginNode):
    login.initialise()
    login.settings.write_text(login.settings.read_text().replace("[agent]", '[agent]\nrouter_timeout = "10s"'))
    login.succeed(*CHAT)
    os.kill(login.endpoint()["pid"], signal.SIGKILL)
    wait_until(lambda: not login.jobs(), DONE, "its jobs have ended", pause=0.2)
    assert any("agent.router_timeout" in log.read_text() for log in (login.state / "jobs").rglob("*") if log.is_file())
    login.succeed("down")


def test_wait_says_why_a_model_is_late_or_fails(login: LoginNode):
    login.initialise()
    assert login.hostler("wait").stderr.startswith("error: nothing is up")
    login.succeed("up", "org/large", "--nodes", "5", "--walltime", "2h", "--detach")
    late = login.hostler("wait", "--timeout", "15s")
    assert late.returncode == LATE and "`hostler down large` ends them" in late.stderr, late
    # The scheduler's own word. Of parts of an array that has begun PBS has none.
    assert ("queued    11[4].head, 11[5].head\n" if login.kind == "pbs" else "Resources") in late.stdout, late.stdout

    waiting = Process("wait", ["wait", "--config", str(login.settings), "large"], login.folder, login.variables)
    waiting.printed("queued", DONE)
    waiting.child.send_signal(signal.SIGINT)
    assert waiting.child.wait(DONE) == INTERRUPTED
    assert login.name("large") in login.jobs(), "the fleet goes on"
    # Parts of an array and a job beside it, of which some wait, are ended together.
    login.succeed("scale", "large", "--nodes", "6", "--detach")
    wait_until(lambda: login.jobs() == [login.name("large")] * 6, DONE, "the sixth is submitted")
    login.succeed("down", "large")
    assert not login.jobs()

    failing = login.hostler("up", "org/bad", "--nodes", "1", "--walltime", "2h", "--", "--sim-fail-start")
    assert failing.returncode == FAILING, failing
    assert "engine" in failing.stdout and "hostler down bad" in failing.stderr, failing
    login.succeed("down")
    assert not login.jobs()
    wait_until(lambda: not login.processes(), DONE, "nothing is left", pause=0.2)


def test_up_says_why_jobs_cannot_start(login: LoginNode):
    login.initialise()
    text = login.settings.read_text()
    # Neither in PATH nor anywhere else that it is looked for.
    login.settings.write_text(text.replace('engine = "simulated"', 'engine = "vllm"\nvllm_bin = "/nowhere/vllm"'))
    failing = login.hostler("up", "org/chat", "--nodes", "2", "--walltime", "2h")
    assert failing.returncode == FAILING and "/nowhere/vllm" in failing.stderr, failing
    assert "srun" not in failing.stderr, failing
    # The corrected settings count at once, although jobs have failed.
    login.settings.write_text(text)
    assert "ready     2 of 2 nodes" in login.succeed("up", "org/chat", "--nodes", "2", "--walltime", "2h")
    login.succeed("down")
    assert not login.jobs()


def test_settings_count_for_waiting_jobs_once_up_is_said_again(login: LoginNode):
    def jobs(*states: str) -> set[str]:
        status = login.state / "status.json"
        entries = json.loads(status.read_text())["entries"] if status.exists() else []
        return {job["id"] for entry in entries for job in entry["jobs"] if job["state"] in states}

    login.initialise()
    up = ("up", "org/large", "--nodes", "5", "--walltime", "2h", "--detach")
    login.succeed(*up)
    wait_until(lambda: jobs("ready") and len(jobs("ready", "queued", "held")) == 5 != len(jobs("ready")), DONE, "some serve", pause=0.2)
    waiting, serving = jobs("queued", "held"), jobs("ready")
    assert "settings" not in login.succeed(*up), "nothing has changed"
    text = login.settings.read_text()
    login.settings.write_text(text.replace('setup = ["', 'setup = ["export MENDED=1; '))
    shown = login.succeed(*up)
    assert "settings  changed: what waits is submitted anew" in shown and "what runs stays" in shown, shown
    wait_until(lambda: len(jobs("queued", "held")) == len(waiting) and not jobs("queued", "held") & waiting, DONE, "others wait", pause=0.2)
    assert jobs("ready") == serving
    login.succeed("down")
    assert not login.jobs()


def test_a_fleet_of_another_cluster_is_neither_changed_nor_kept(login: LoginNode):
    login.initialise()
    login.succeed("up", "org/chat", "--nodes", "1", "--walltime", "0:10:00")
    recorded = login.state / "scheduler.json"
    known = json.loads(recorded.read_text())
    assert known == {"kind": login.kind, "name": "head" if login.kind == "pbs" else "test"}, known
    # As a host of another cluster sees it that shares the home.
    recorded.write_text(json.dumps(known | {"name": "elsewhere"}))
    up = ("up", "org/chat", "--nodes", "2", "--walltime", "0:10:00")
    for command in (up, (*up, "--dry-run"), ("scale", "--nodes", "2"), ("wait",), ("down",), ("controller",)):
        refused = login.hostler(*command)
        assert refused.returncode == 1 and "cluster.state_dir" in refused.stderr, (command, refused)
    recorded.write_text(json.dumps(known))
    assert login.jobs() == [login.name("chat")]
    login.succeed("down")
    assert not login.jobs()
