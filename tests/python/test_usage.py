"""`hostler usage` adds up: tokens against the access log, and node time against the scheduler's own, over a takeover and kills."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import httpx2
import pytest

from batch import whole
from login_node import LoginNode
from one_machine import BOUND, END, START, beside, run, start
from processes import Process, wait_until


def ask(edge: str, model: str, count: int, stream: bool = False):
    """Sends so many requests, one after another."""
    for number in range(count):
        body = {"model": model, "prompt": f"{number} " * (number + 1), "max_tokens": 3 + number, "ignore_eos": True, "stream": stream}
        assert httpx2.post(f"{edge}/completions", json=body, timeout=START).status_code == 200


def logged(*logs: Path) -> dict[str, list[int]]:
    """Requests, prompt tokens and answer tokens by model, as the lines of access logs have them."""
    sums: dict[str, list[int]] = {}
    for line in "".join(log.read_text() for log in logs).splitlines():
        if "tokens_in=" in line:
            fields = dict(re.findall(r"(\w+)=(\S+)", line))
            row = sums.setdefault(fields["model"], [0, 0, 0])
            row[0] += 1
            row[1] += int(fields["tokens_in"])
            row[2] += int(fields["tokens_out"])
    return sums


def counted(runtime: dict[str, str]) -> dict[str, list[int]]:
    """The same, as `hostler usage` has them."""
    shown = run(runtime, "usage", "--json")
    assert shown.returncode == 0, shown
    sums: dict[str, list[int]] = {}
    for row in json.loads(shown.stdout)["tokens"]:
        mine = sums.setdefault(row["model"], [0, 0, 0])
        for place, name in enumerate(("requests", "prompt_tokens", "answer_tokens")):
            mine[place] += row[name]
    return sums


def test_tokens_add_up_over_a_kill_and_a_takeover(tmp_path, runtime):
    home = runtime | {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert run(home, "usage").returncode == 1, "nothing was counted yet"
    logs = [tmp_path / f"access-{number}.log" for number in range(3)]
    first, edge = start(tmp_path, home, "usage-a", "--access-log-file", str(logs[0]))
    guest = beside(tmp_path, home, edge, "usage-b")
    ask(edge, "usage-a", 5)
    ask(edge, "usage-b", 3)
    wait_until(lambda: counted(home) == logged(logs[0]) and len(logged(logs[0])) == 2, START, "the first router's files are written")
    os.kill(first.child.pid, signal.SIGKILL)
    first.killed = guest.killed = True
    guest.child.terminate()
    second, edge = start(tmp_path, home, "usage-a", "--access-log-file", str(logs[1]))
    ask(edge, "usage-a", 4, stream=True)
    address = edge.removeprefix("http://").removesuffix("/v1")
    options = ["--engine", "simulated", "--replicas", "1", "--listen", address, "--admin-listen", "127.0.0.1:0", "--takeover"]
    words = ["up", *options, "--access-log-file", str(logs[2]), "--", "--served-model-name", "usage-a", *BOUND]
    third = Process("third", words, tmp_path, home)
    third.printed("ready", START)
    assert second.child.wait(START + END) == 0, second.tail()
    ask(edge, "usage-a", 2)
    assert run(home, "down", "usage-a").returncode == 0
    assert third.child.wait(END) == 0
    assert counted(home) == logged(*logs) and counted(home)["usage-a"][0] == 11
    shown = run(home, "usage", "--by", "model").stdout.splitlines()
    assert shown[0].startswith("MODEL") and shown[1].startswith("usage-a") and shown[-1].startswith("all"), shown


@pytest.mark.jobs
@pytest.mark.smoke
def test_node_time_is_that_of_the_scheduler(tmp_path):
    login = LoginNode("pbs")
    try:
        login.initialise()
        login.succeed("up", "org/chat", "--nodes", "2", "--walltime", "0:10:00", "--", "--served-model-name", "chat")
        os.kill(login.endpoint()["pid"], signal.SIGKILL)
        # Any command that wants the controller starts another one, which goes on with the jobs.
        login.succeed("scale", "--nodes", "1")
        login.succeed("scale", "--nodes", "2")
        # It is long enough to be seen in a step.
        whole(login.streams(1, 3))
        login.succeed("down")
        ended = json.loads(login.scheduler.call("qstat", "-x", "-t", "-f", "-F", "json"))["Jobs"].items()
        ran = [job for id, job in ended if "[]" not in id and job["Job_Name"] == login.name("chat") and "resources_used" in job]
        used = [job["resources_used"]["walltime"] for job in ran]
        hours = [[int(part) for part in clock.split(":")] for clock in used]
        held = sum(3600 * hour + 60 * minute + second for hour, minute, second in hours)
        usage = json.loads(login.succeed("usage", "--json"))
        node_seconds = [sum(row["node_seconds"].values()) for row in usage["nodes"]]
        # The stand-in says whole seconds, and a step takes half of one.
        assert abs(sum(node_seconds) - held) <= 0.01 * held + 1.5 * len(used), (usage["nodes"], used)
        assert usage["nodes"][0]["model"] == "org/chat" and usage["nodes"][0]["node_seconds"]["serving"] > 0, usage["nodes"]
        assert sum(row["requests"] for row in usage["tokens"]) == 1, usage["tokens"]
        table = login.succeed("usage", "--by", "model")
        assert "NODE-HOURS" in table and "org/chat" in table, table
    finally:
        print(login.log())
        login.stop()


@pytest.mark.jobs
def test_a_budget_ends_a_model_by_itself(tmp_path):
    login = LoginNode("pbs")
    try:
        login.initialise()
        up = ["up", "org/chat", "--nodes", "2", "--walltime", "0:10:00"]
        login.succeed(*up, "--node-hours", "0.006", "--", "--served-model-name", "chat")
        assert "of 0.006 node-hours are used" in login.succeed("ps")
        streams = login.streams(1, 5)
        wait_until(lambda: not login.jobs(), START, "no job is left")
        whole(streams)
        assert "node-hours are used; it has ended, and its nodes leave" in login.succeed("ps")
        refused = login.in_shell(
            "curl -s --cacert $SSL_CERT_FILE $OPENAI_BASE_URL/completions -H \"Authorization: Bearer $OPENAI_API_KEY\" "
            "-H 'content-type: application/json' -d '{\"model\": \"chat\", \"prompt\": \"a\"}'"
        )
        assert "its budget has ended" in refused.stdout, refused
        log = (login.state / "controller.log").read_text()
        assert 'event="budget_near"' in log and 'event="budget_over"' in log, log
        used = sum(sum(row["node_seconds"].values()) for row in json.loads(login.succeed("usage", "--json"))["nodes"])
        assert used >= 21.6, used
        login.succeed(*up, "--", "--served-model-name", "chat")
        assert login.answers()
        login.succeed("down")
    finally:
        print(login.log())
        login.stop()


@pytest.mark.jobs
def test_a_colleague_is_invited_to_a_shared_fleet_and_counted(tmp_path):
    login = LoginNode("pbs")
    try:
        assert login.hostler("init", "--share").returncode == 0
        text = login.settings.read_text()
        assert 'listen = "0.0.0.0:8443"' in text, text
        # Tests have no fixed ports.
        login.settings.write_text(text.replace(":8443", ":0").partition("\n[cluster]")[0] + login.cluster)
        refused = login.hostler("keys", "create", "--name", "bob", "--invite", str(tmp_path / "early.json"))
        assert refused.returncode == 1 and not (tmp_path / "early.json").exists(), refused
        login.succeed("up", "org/chat", "--nodes", "1", "--walltime", "0:10:00", "--", "--served-model-name", "chat")
        invitation = tmp_path / "bob.json"
        made = login.hostler("keys", "create", "--name", "bob", "--requests-per-minute", "3", "--invite", str(invitation))
        assert made.returncode == 0 and "give " in made.stderr and invitation.stat().st_mode & 0o77 == 0, made
        assert set(json.loads(invitation.read_text())) == {"host", "base_url", "api_key", "authority"}

        # Bob has nothing of the owner's but this file and the program.
        home = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
        ask = (
            f'set -e; lines=$("{login.program}" env --access {invitation}); eval "$lines"; '
            "curl -s $OPENAI_BASE_URL/completions -H \"Authorization: Bearer $OPENAI_API_KEY\" "
            "-H 'content-type: application/json' -d '{\"model\": \"chat\", \"prompt\": \"a\", \"max_tokens\": 4}'"
        )
        variables = {"PATH": os.environ["PATH"]} | home
        def answer() -> dict:
            asked = subprocess.run(["bash", "-c", ask], env=variables, capture_output=True, text=True, timeout=START, check=False)
            assert asked.returncode == 0, asked
            return json.loads(asked.stdout)

        # The router looks at its keys every second.
        answers: list[dict] = []
        wait_until(lambda: (answers.append(answer()) or "usage" in answers[-1]), START, "the key counts")
        answers = answers[-1:] + [answer() for _ in range(3)]
        assert [("usage" in answer) for answer in answers] == [True, True, True, False], answers
        assert "rate_limit" in json.dumps(answers[3]), answers[3]
        wait_until(lambda: any(row["tenant"] == "bob" for row in json.loads(login.succeed("usage", "--json"))["tokens"]), START, "bob is counted")
        rows = [row for row in json.loads(login.succeed("usage", "--json"))["tokens"] if row["tenant"] == "bob" and row["model"] == "chat"]
        assert sum(row["answer_tokens"] for row in rows) == 12, rows
        login.succeed("down")
    finally:
        print(login.log())
        login.stop()
