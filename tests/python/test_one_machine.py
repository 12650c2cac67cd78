"""What a person does with `hostler up` on one machine: end it, wait for it, reach it, follow its log, start it twice or wrongly."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from one_machine import BOUND, END, START, answers, beside, run, start
from processes import Process, binary, environment, free_port, running, wait_until
from terminal import Screen


# Only names that nobody else has, so that the test ends nothing of whoever runs it.
def test_down_ends_what_up_serves_from_this_machine(tmp_path, runtime):
    up, _ = start(tmp_path, runtime, "one-machine-down")
    unknown = run(runtime, "down", "one-machine-nobody")
    assert unknown.returncode == 1 and "one-machine-nobody is not up here" in unknown.stderr, unknown.stderr
    assert "one-machine-down (simulated, `hostler up`, process" in unknown.stderr
    ended = run(runtime, "down", "one-machine-down")
    assert ended.returncode == 0 and "ended     one-machine-down" in ended.stdout, ended
    assert up.child.wait(END) == 0
    assert run(runtime, "down", "one-machine-down").returncode == 1


def test_up_is_found_whatever_stands_before_its_name_on_the_command_line(tmp_path, runtime):
    settings = tmp_path / "hostler.toml"
    settings.write_text('[router]\nlisten = "127.0.0.1:0"\nadmin_listen = "127.0.0.1:0"\n')
    options = ["--engine", "simulated", "--replicas", "1", "--", "--served-model-name", "one-machine-config"]
    up = Process("up", ["--config", str(settings), "up", *options], tmp_path, runtime)
    up.printed("ready", START)
    address = up.printed("edge", START).removeprefix("http://").removesuffix("/v1")
    again = run(runtime, "up", "--engine", "simulated", "--listen", address, "--", "--served-model-name", "one-machine-config")
    assert again.returncode == 1 and again.stderr.count("one-machine-config (simulated, `hostler up`, process") == 1, again.stderr
    ended = run(runtime, "down", "one-machine-config")
    assert ended.returncode == 0 and ended.stdout.count("ended     one-machine-config") == 1, ended
    assert up.child.wait(END) == 0


def test_the_same_model_again_is_said_to_be_up(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-first")
    address = edge.removeprefix("http://").removesuffix("/v1")
    again = run(runtime, "up", "--engine", "simulated", "--listen", address, "--", "--served-model-name", "one-machine-first")
    assert again.returncode == 1
    assert "up here already: one-machine-first (simulated, `hostler up`, process" in again.stderr, again.stderr
    assert f"at {edge}" in again.stderr and "`hostler down one-machine-first` ends it" in again.stderr
    up.child.terminate()
    assert up.child.wait(END) == 0


def test_another_model_joins_the_router_and_ends_alone(tmp_path, runtime):
    first, edge = start(tmp_path, runtime, "one-machine-a")
    second = beside(tmp_path, runtime, edge, "one-machine-b")
    assert any(line.startswith("joined  one-machine-a") for line in second.lines)
    assert answers(edge, "one-machine-a") and answers(edge, "one-machine-b")
    assert f"export OPENAI_BASE_URL={edge}" in run(runtime, "env", "one-machine-b").stdout.splitlines()
    assert f"one-machine-b at {edge}" in run(runtime, "wait", "one-machine-b").stdout
    lost = run(runtime, "up", "--engine", "simulated", "--listen", edge.split("/")[2], "--max-queued", "1", "--", "--served-model-name", "c")
    assert lost.returncode == 1 and "router.max_queued would be for the router, which runs already" in lost.stderr, lost.stderr

    ended = run(runtime, "down", "one-machine-b")
    assert ended.returncode == 0 and "ended     one-machine-b" in ended.stdout and "one-machine-a" not in ended.stdout, ended
    assert second.child.wait(END) == 0 and first.child.poll() is None
    assert answers(edge, "one-machine-a") and not answers(edge, "one-machine-b")
    assert run(runtime, "down", "one-machine-a").returncode == 0
    assert first.child.wait(END) == 0


def test_the_first_model_ends_without_the_second_which_ends_the_router_too(tmp_path, runtime):
    first, edge = start(tmp_path, runtime, "one-machine-host")
    second = beside(tmp_path, runtime, edge, "one-machine-guest")
    ended = run(runtime, "down", "one-machine-host")
    assert ended.returncode == 0 and "its process goes on as the router of the others" in ended.stdout, ended
    assert first.child.poll() is None and answers(edge, "one-machine-guest") and not answers(edge, "one-machine-host")
    ended = run(runtime, "down", "one-machine-guest")
    assert ended.returncode == 0 and "ended     one-machine-host" in ended.stdout, ended
    assert second.child.wait(END) == 0 and first.child.wait(END) == 0


def test_up_takes_over_from_up(tmp_path, runtime):
    first, edge = start(tmp_path, runtime, "one-machine-old")
    guest = beside(tmp_path, runtime, edge, "one-machine-stays")
    address = edge.removeprefix("http://").removesuffix("/v1")
    ends, statuses = threading.Event(), set()

    def ask(model: str):
        while not ends.is_set():
            body = {"model": model, "prompt": "a b c", "max_tokens": 2}
            statuses.add(httpx2.post(f"{edge}/completions", json=body, timeout=START).status_code)

    def stream() -> str:
        body = {"model": "one-machine-old", "prompt": "a b c", "max_tokens": 300, "ignore_eos": True, "stream": True}
        return httpx2.post(f"{edge}/completions", json=body, timeout=START).text

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask, model) for model in ("one-machine-old", "one-machine-stays", "one-machine-old")]
        streamed = pool.submit(stream)
        options = ["--engine", "simulated", "--replicas", "1", "--listen", address, "--admin-listen", "127.0.0.1:0", "--takeover"]
        words = ["up", *options, "--", "--served-model-name", "one-machine-old", "--sim-start-ms", "1000", *BOUND]
        second = Process("second", words, tmp_path, runtime)
        try:
            second.printed("ready", START)
            # Idle connections keep the old router for a while.
            assert first.child.wait(START + END) == 0, first.tail()
        finally:
            ends.set()
        assert streamed.result().endswith("data: [DONE]\n\n")
        assert all(one.result() is None for one in asking)
    assert statuses == {200}
    assert "another router has taken this one's place" in first.tail()
    assert answers(edge, "one-machine-old") and answers(edge, "one-machine-stays")
    nodes = json.loads(run(runtime | {"HOSTLER_ADMIN": second.printed("socket", START)}, "ps", "--json").stdout)["nodes"]
    assert len(nodes) == 2, nodes
    assert run(runtime, "down", "one-machine-old", "one-machine-stays").returncode == 0
    assert second.child.wait(END) == 0 and guest.child.wait(END) == 0


def test_a_name_that_two_have_ends_none_and_a_process_ends_one(tmp_path, runtime):
    first, _ = start(tmp_path, runtime, "one-machine-twin")
    second, edge = start(tmp_path, runtime, "one-machine-twin")
    asked = run(runtime, "down", "one-machine-twin")
    assert asked.returncode == 1 and f"process {first.child.pid} at" in asked.stderr, asked
    assert f"process {second.child.pid} at {edge}" in asked.stderr, asked
    assert first.child.poll() is None and second.child.poll() is None
    assert run(runtime, "down", str(first.child.pid)).returncode == 0
    assert first.child.wait(END) == 0 and answers(edge, "one-machine-twin")
    assert run(runtime, "down", "one-machine-twin").returncode == 0
    assert second.child.wait(END) == 0


def test_a_model_beside_another_ends_when_the_router_has_gone(tmp_path, runtime):
    first, edge = start(tmp_path, runtime, "one-machine-leaver")
    address = edge.removeprefix("http://").removesuffix("/v1")
    options = ["--engine", "simulated", "--listen", address, "--router-timeout", "1s", "--", "--served-model-name", "one-machine-left"]
    second = Process("left", ["up", *options], tmp_path, runtime)
    second.printed("ready", START)
    first.child.terminate()
    assert first.child.wait(END) == 0
    assert second.child.wait(END) == 3, "no router has it"
    assert "agent.router_timeout" in second.tail()
    second.killed = True


def test_a_flag_that_the_engine_does_not_have_ends_up_with_the_reason(tmp_path, runtime):
    options = ["--engine", "simulated", "--replicas", "2", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    ended = run(runtime, "up", *options, "--", "--no-such-flag")
    assert ended.returncode == 4, ended
    assert "--no-such-flag" in ended.stderr


def test_a_storm_of_refusals_is_seen_although_every_replica_is_ready(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-storm", "--max-queued", "1")
    body = {"model": "one-machine-storm", "prompt": "a b c", "max_tokens": 200}

    def status(_) -> int:
        return httpx2.post(f"{edge}/completions", json=body, timeout=60).status_code

    assert run(runtime, "ps", "--admin", up.printed("socket", START)).stdout.count("TROUBLE") == 0
    with ThreadPoolExecutor(24) as pool:
        statuses = list(pool.map(status, range(24)))
    refused = len([one for one in statuses if one != 200])
    assert refused >= 5, statuses
    socket = up.printed("socket", START)
    shown = run(runtime, "ps", "--admin", socket)
    assert f"TROUBLE  {refused} of the 24 requests that ended in the last minute failed: {refused} found the router full" in shown.stdout, shown
    assert "ready" in shown.stdout, "its replica is well"
    assert "TROUBLE" in run(runtime, "advise", "--admin", socket).stdout
    findings = json.loads(run(runtime, "ps", "--json", "--admin", socket).stdout)["findings"]
    assert [finding["kind"] for finding in findings] == ["requests-fail"]
    up.child.terminate()
    assert up.child.wait(END) == 0


def test_env_says_how_programs_reach_what_up_serves(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-env")
    said = run(runtime, "env", "one-machine-env")
    assert said.returncode == 0, said.stderr
    assert f"export OPENAI_BASE_URL={edge}" in said.stdout.splitlines() and "export OPENAI_API_KEY=none" in said.stdout
    unknown = run(runtime, "env", "one-machine-nobody")
    assert unknown.returncode == 1 and "one-machine-nobody is not up here; up is" in unknown.stderr, unknown.stderr
    up.child.terminate()
    assert up.child.wait(END) == 0


def test_env_has_the_users_key_where_the_edge_wants_one(tmp_path, runtime):
    settings = tmp_path / "config" / "hostler.toml"
    made = run(runtime, "--config", str(settings), "init")
    assert made.returncode == 0, made.stderr
    options = ["--engine", "simulated", "--replicas", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    up = Process("up", ["--config", str(settings), "up", *options, "--", "--served-model-name", "one-machine-key"], tmp_path, runtime)
    up.printed("ready", START)
    said = run(runtime, "--config", str(settings), "env", "one-machine-key", "--json")
    assert said.returncode == 0, said.stderr
    key = (settings.parent / "user.key").read_text().strip()
    assert json.loads(said.stdout)["api_key"] == key
    up.child.terminate()
    assert up.child.wait(END) == 0


def test_words_of_other_programs_choose_port_and_key(tmp_path, runtime):
    port, home = free_port(), {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}
    arguments = ["serve", "--port", str(port), "--api-key", "--engine", "simulated", "--", "--served-model-name", "one-machine-words"]
    up = Process("up", arguments, tmp_path, runtime | home)
    up.printed("ready", START)
    assert up.printed("edge", START) == f"http://127.0.0.1:{port}/v1"
    access = json.loads(run(runtime | home, "env", "one-machine-words", "--json").stdout)
    models = f"{access['base_url']}/models"
    assert httpx2.get(models).status_code == 401
    assert httpx2.get(models, headers={"authorization": f"Bearer {access['api_key']}"}).status_code == 200
    assert "one-machine-words" in run(runtime | home, "status").stdout
    assert run(runtime | home, "stop", "one-machine-words").returncode == 0
    assert up.child.wait(END) == 0


def test_wait_ends_when_the_model_of_up_serves(tmp_path, runtime):
    options = ["--engine", "simulated", "--replicas", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    up = Process("up", ["up", *options, "--", "--served-model-name", "one-machine-wait", "--sim-start-ms", "2000"], tmp_path, runtime)
    waited = run(runtime, "wait", "one-machine-wait")
    assert waited.returncode == 0 and "ready     one-machine-wait at http://127.0.0.1:" in waited.stdout, waited
    never = run(runtime, "wait", "one-machine-nobody", "--timeout", "20s")
    assert never.returncode == 3 and "up is" in never.stderr, never
    up.child.terminate()
    assert up.child.wait(END) == 0


def test_doctor_speaks_of_this_machine_where_no_scheduler_is(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-doctor")
    said = run(runtime, "doctor")
    assert "squeue" not in said.stdout + said.stderr and "scheduler" not in said.stdout, said
    assert "one-machine-doctor (simulated, `hostler up`, process" in said.stdout and f"1 of 1 replicas ready at {edge}" in said.stdout
    up.child.terminate()
    assert up.child.wait(END) == 0


def test_an_engine_that_never_starts_ends_up_with_the_reason(tmp_path, runtime):
    options = ["--engine", "simulated", "--replicas", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    ended = run(runtime, "up", *options, "--", "--sim-fail-start")
    assert ended.returncode == 4, ended
    assert "what to do: read the engine's last lines with `hostler logs " in ended.stderr, ended.stderr
    assert "REPLICA" not in ended.stdout + ended.stderr and "by itself" not in ended.stderr.splitlines()[-1]


def test_a_log_is_followed_and_each_line_is_said_once(tmp_path, runtime):
    up, _ = start(tmp_path, runtime, "one-machine-logs")
    socket = up.printed("socket", START)
    replica = json.loads(run(runtime, "ps", "--json", "--admin", socket).stdout)["nodes"][0]["replicas"][0]["id"]
    follower = Process("follower", ["logs", "-f", "--admin", socket], tmp_path, runtime)
    # The agent begins each life with a line of its own.
    def lives() -> list[str]:
        return [line for line in follower.lines if line.endswith("of this engine begins")]

    wait_until(lambda: len(lives()) == 1, START, "the first life is shown")
    assert run(runtime, "restart", replica, "--force", "--admin", socket).returncode == 0
    wait_until(lambda: len(lives()) == 2, START, "the second life is followed")
    assert len(set(lives())) == 2
    follower.kill()
    up.child.terminate()
    assert up.child.wait(END) == 0


def test_detach_leaves_a_model_in_the_background_until_it_is_ended(tmp_path, runtime):
    variables = runtime | {"XDG_STATE_HOME": str(tmp_path)}
    options = ["--engine", "simulated", "--replicas", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--detach"]
    said = run(variables, "up", *options, "--", "--served-model-name", "one-machine-detached")
    assert said.returncode == 0, said
    edge = re.search(r"^edge +(\S+)$", said.stdout, re.MULTILINE)[1]
    assert answers(edge, "one-machine-detached")
    assert "curl -N " in said.stdout and "`hostler down one-machine-detached` ends it" in said.stdout, said.stdout
    (log,) = (tmp_path / "hostler" / "up").glob("*.log")
    assert str(log) in said.stdout and "engine is ready" in log.read_text()
    pid = int(re.search(r"as process (\d+)", said.stdout)[1])
    assert os.getsid(pid) == pid, "it has left the terminal"
    assert run(variables, "down", "one-machine-detached").returncode == 0
    assert not [one for one in running() if one.pid == pid]


def test_detach_says_why_nothing_serves(tmp_path, runtime):
    variables = runtime | {"XDG_STATE_HOME": str(tmp_path)}
    options = ["--engine", "simulated", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--detach"]
    said = run(variables, "up", *options, "--", "--no-such-flag")
    assert said.returncode == 4 and "error: no engine of this agent can be started" in said.stderr, said
    assert "--no-such-flag" in said.stderr and "INFO" not in said.stderr, said


def test_simulated_engines_are_said_first_and_in_ps(tmp_path, runtime):
    up, _ = start(tmp_path, runtime, "one-machine-simulated")
    assert up.lines[0].startswith("engine  simulated: its words mean nothing"), up.lines
    shown = run(runtime, "ps", "--admin", up.printed("socket", START)).stdout.splitlines()
    assert [line.endswith(" simulated") for line in shown if "/0 " in line] == [True], shown
    up.child.terminate()
    assert up.child.wait(END) == 0


def shown_on_a_terminal(tmp_path, runtime: dict[str, str], variables: dict[str, str]) -> bytes:
    """All bytes that `hostler up` writes to a terminal until its engine serves."""
    ours, theirs = pty.openpty()
    arguments = ["up", "--engine", "simulated", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    variables = environment() | runtime | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color"} | variables
    up = subprocess.Popen([binary(), *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True)
    os.close(theirs)
    written = b""
    while b"curl -N" not in written:
        readable, _, _ = select.select([ours], [], [], START)
        assert readable, written
        written += os.read(ours, 4096)
    up.terminate()
    assert up.wait(END) == 0
    os.close(ours)
    return written


def test_colours_are_left_out_where_nobody_wants_them(tmp_path, runtime):
    colour = re.compile(rb"\x1b\[[0-9;]*m")
    assert colour.search(shown_on_a_terminal(tmp_path, runtime, {}))
    plain = shown_on_a_terminal(tmp_path, runtime, {"NO_COLOR": "1"})
    # Sequences that set an attribute back do no harm.
    assert not [found for found in colour.findall(plain) if found != b"\x1b[0m"]


@pytest.mark.skipif(not shutil.which("tmux"), reason="there is no tmux here")
def test_a_terminal_shows_a_few_lines_and_the_log_is_in_a_file(tmp_path, runtime):
    state = tmp_path / "state"
    options = "--engine simulated --replicas 2 --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0"
    # The shell outlives Ctrl-C and says how the command ended.
    script = f"trap : INT; {binary()} up {options} -- --served-model-name quiet --sim-start-ms 3000; echo exit $?; sleep 600"
    folder = Path(tempfile.mkdtemp(prefix="hostler-"))
    screen = Screen(folder, script, runtime | {"XDG_STATE_HOME": str(state)})
    try:
        screen.wait("/0  \N{BOX DRAWINGS HEAVY HORIZONTAL}", "loading weights", "starting  2 replicas", seconds=START)
        ready = screen.wait("serving  2 of 2 replicas; 0 requests in flight", seconds=START)
        assert "ready   2 of 2 replicas" in ready and "curl -N http" in ready and "page    http" in ready, ready
        assert "INFO" not in ready and "loading" not in ready and len(ready.strip().splitlines()) <= 10, ready
        edge = re.search(r"edge +(http\S+)", ready)[1]
        assert answers(edge, "quiet")
        screen.wait("1 answered")
        (log,) = (state / "hostler" / "up").glob("*.log")
        assert f"/{log.name}" in screen.text("-J")
        wait_until(lambda: "/v1/completions" in log.read_text(), START, "the access log is there")
        assert "engine is ready" in log.read_text()
        screen.press("C-c")
        ended = screen.wait("exit 0", seconds=END)
        assert "serving" not in ended and "leaving" not in ended, ended
    finally:
        screen.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.skipif(not shutil.which("tmux"), reason="there is no tmux here")
def test_a_terminal_shows_why_no_engine_starts(tmp_path, runtime):
    options = "--engine simulated --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0"
    folder = Path(tempfile.mkdtemp(prefix="hostler-"))
    screen = Screen(folder, f"{binary()} up {options} -- --no-such-flag; echo exit $?; sleep 600", runtime | {"XDG_STATE_HOME": str(tmp_path)})
    try:
        ended = screen.wait("exit 4", "error: no engine of this agent can be started", "--no-such-flag", seconds=START)
        assert "INFO" not in ended, ended
    finally:
        screen.end()
        shutil.rmtree(folder, ignore_errors=True)
