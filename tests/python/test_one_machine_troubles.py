"""What goes wrong with `hostler up` on one machine, and what a person is told then."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from one_machine import END, START, answers, beside, run, start
from processes import Process, free_port, running, wait_until

ANY_PORT = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
SIMULATED = ("--engine", "simulated", "--replicas", "1")


def models(edge: str) -> list[str]:
    """The names that `/v1/models` lists there."""
    return [model["id"] for model in httpx2.get(f"{edge}/models", timeout=START).json()["data"]]


def asking(runtime: dict[str, str], up: Process) -> dict[str, str]:
    """The environment of commands that ask this router: root sees those of all users."""
    return runtime | {"HOSTLER_ADMIN": up.printed("socket", START)}


def suspend(pid: int):
    """Suspends a process, as Ctrl-Z does."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: [one for one in running() if one.pid == pid and one.state == "T"], START, f"{pid} is suspended")


def test_models_that_start_at_the_same_moment_have_nodes_of_their_own(tmp_path, runtime):
    first, edge = start(tmp_path, runtime, "one-machine-host")
    address = edge.split("/")[2]

    def up(model: str) -> subprocess.CompletedProcess:
        return run(runtime, "up", *SIMULATED, "--listen", address, "--detach", "--", "--served-model-name", model)

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(up, ["one-machine-same", "one-machine-same", "one-machine-other", "one-machine-third"]))
    assert sorted(one.returncode for one in said) == [0, 0, 0, 1], said
    assert ["up here already: one-machine-same" in one.stderr for one in said[:2]].count(True) == 1, said
    nodes = json.loads(run(asking(runtime, first), "ps", "--json").stdout)["nodes"]
    assert len({node["node"] for node in nodes}) == len(nodes) == 4, nodes
    assert all(answers(edge, f"one-machine-{name}") for name in ("host", "same", "other", "third"))
    assert run(runtime, "down").returncode == 0
    assert first.child.wait(END) == 0


def test_a_model_that_was_taken_down_is_gone_and_comes_up_again(tmp_path, runtime):
    first, edge = start(tmp_path, runtime, "one-machine-gone")
    second = beside(tmp_path, runtime, edge, "one-machine-stays")
    assert run(runtime, "down", "one-machine-gone").returncode == 0
    assert models(edge) == ["one-machine-stays"]
    for command in (["env", "one-machine-gone"], ["down", "one-machine-gone"]):
        said = run(runtime, *command)
        assert said.returncode == 1 and "is not up here; up is one-machine-stays" in said.stderr, said
    doctor = run(runtime, "doctor")
    assert doctor.returncode == 0 and "ok       up         one-machine-gone (taken down" in doctor.stdout, doctor
    assert run(asking(runtime, first), "logs").returncode == 0, "there is one replica to mean"

    again = beside(tmp_path, runtime, edge, "one-machine-gone")
    assert sorted(models(edge)) == ["one-machine-gone", "one-machine-stays"]
    assert answers(edge, "one-machine-gone")
    assert run(runtime, "down", "one-machine-gone").returncode == 0
    assert again.child.wait(END) == 0 and first.child.poll() is None
    assert run(runtime, "down").returncode == 0
    assert second.child.wait(END) == 0 and first.child.wait(END) == 0


def test_a_suspended_router_is_said_to_be_so_and_ends(tmp_path, runtime):
    first, edge = start(tmp_path, runtime, "one-machine-suspended")
    second = beside(tmp_path, runtime, edge, "one-machine-behind-it")
    suspend(first.child.pid)
    for command in (["ps"], ["env"], ["env", "one-machine-behind-it"], ["doctor"]):
        said = run(asking(runtime, first), *command)
        assert said.returncode == 1, said
        assert f"`kill -CONT {first.child.pid}` lets it go on" in said.stdout + said.stderr, said
    third = run(runtime, "up", *SIMULATED, "--listen", edge.split("/")[2], "--", "--served-model-name", "one-machine-third")
    assert third.returncode == 1 and f"`kill -CONT {first.child.pid}`" in third.stderr, third
    assert "kill -CONT" in run(runtime, "wait", "one-machine-suspended", "--timeout", "2s").stderr
    ended = run(runtime, "down", "one-machine-suspended")
    assert ended.returncode == 0 and "resumed   one-machine-suspended" in ended.stdout, ended
    assert answers(edge, "one-machine-behind-it")
    suspend(second.child.pid)
    assert run(runtime, "down").returncode == 0
    assert second.child.wait(END) == 0 and first.child.wait(END) == 0


def test_a_router_that_answers_nothing_is_killed_and_its_engines_end(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-stuck")
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "one-machine-stuck", "prompt": "a b c", "max_tokens": 16000}
        answer = pool.submit(httpx2.post, f"{edge}/completions", json=body, timeout=300)
        asked = asking(runtime, up)
        wait_until(lambda: '"in_flight": 1' in run(asked, "ps", "--json").stdout, START, "the request runs")
        down = Process("down", ["down"], tmp_path, runtime)
        down.printed("ending", START)
        suspend(up.child.pid)
        assert down.child.wait(END * 2) == 0, down.tail()
        assert "it has answered nothing for 20s" in down.printed("killing", START)
        with pytest.raises(httpx2.HTTPError):
            answer.result()
    up.killed = True
    up.stop()


def test_detach_fails_where_nobody_would_find_the_process(tmp_path, runtime):
    folder = tmp_path / "state" / "hostler" / "up"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    said = run(runtime, "up", *SIMULATED, *ANY_PORT, "--detach")
    assert said.returncode == 1 and f"`chmod 700 {folder}`" in said.stderr, said
    assert not list(folder.iterdir())


def test_detach_says_that_it_was_taken_down_while_it_loaded(tmp_path, runtime):
    options = ["--detach", "--", "--served-model-name", "one-machine-early", "--sim-start-ms", "60000"]
    detach = Process("detach", ["up", *SIMULATED, *ANY_PORT, *options], tmp_path, runtime)
    wait_until(lambda: run(runtime, "down", "one-machine-early").returncode == 0, START, "it is up")
    assert detach.child.wait(END) == 1
    wait_until(lambda: "error: it was taken down before it served" in detach.tail(), START, "it says so")
    detach.killed = True
    detach.stop()


def test_named_gpus_are_refused_where_no_engine_has_any(tmp_path, runtime):
    said = run(runtime, "up", *SIMULATED, *ANY_PORT, "--gpus", "0,1")
    assert said.returncode == 1 and "--gpus (agent.gpus) names `0,1`, but the simulated engine needs none" in said.stderr, said
    said = run(runtime, "plan", "--engine", "simulated", "--gpus", "0,1")
    assert said.returncode == 1 and "names `0,1`" in said.stderr, "it means the same there"
    assert "2 x GPU of 80 GiB" in run(runtime, "plan", "--engine", "simulated", "--gpus", "2x80").stdout


def test_engines_that_run_already_have_no_plan(runtime):
    said = run(runtime, "plan", "--attach", "http://127.0.0.1:9")
    assert said.returncode == 1 and "there is nothing to plan: leave --attach out" in said.stderr, said


def test_a_server_that_is_no_engine_is_said_to_be_none(tmp_path, runtime):
    port = free_port()
    up = Process("up", ["up", "--attach", f"http://127.0.0.1:{port}", *ANY_PORT], tmp_path, runtime)
    waits = f"waits for http://127.0.0.1:{port}, which is not ours"

    def says(words: str) -> bool:
        return words in run(asking(runtime, up), "ps").stdout and any(words in line for line in up.lines)

    wait_until(lambda: says(f"{waits}: cannot connect: Connection refused"), START, "nobody listens")
    server = subprocess.Popen(
        ["python3", "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: says(f"{waits}: /v1/models has status 404"), START, "a web server listens")
    finally:
        server.kill()
        server.wait()
    up.stop()


def test_the_line_of_curl_works_as_it_is_printed(tmp_path, runtime):
    home = {"XDG_CONFIG_HOME": str(tmp_path / "a config"), "HOME": str(tmp_path)}
    options = ["--api-key", "--", "--served-model-name", "one-machine-curl"]
    up = Process("up", ["up", *SIMULATED, *ANY_PORT, *options], tmp_path, runtime | home)
    line = "curl " + up.printed("curl", START)
    answered = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=START, check=False)
    assert "data: [DONE]" in answered.stdout, (line, answered)
    up.stop()


def test_logs_take_a_model_and_list_the_replicas_to_choose_from(tmp_path, runtime):
    first, edge = start(tmp_path, runtime, "one-machine-a")
    second = beside(tmp_path, runtime, edge, "one-machine-b")
    for model in ("one-machine-a", "one-machine-b"):
        assert "of this engine begins" in run(asking(runtime, first), "logs", model).stdout
    several = run(asking(runtime, first), "logs")
    assert several.returncode == 1 and "there are 2 replicas, so name one of them: " in several.stderr, several
    second.stop()
    first.stop()


def test_a_router_that_was_started_by_hand_is_named_where_nothing_is_up(tmp_path, runtime):
    router = Process("router", ["router", *ANY_PORT, "--agents-listen", "127.0.0.1:0"], tmp_path, runtime)
    socket = router.printed("socket", START)
    for command in (["env"], ["down"], ["wait", "--timeout", "60s"]):
        said = run(runtime, *command)
        assert said.returncode == 1 and f"`hostler ps --admin {socket}`" in said.stderr, said
        assert f"`kill {router.child.pid}` ends it" in said.stderr, said
    assert f"(process {router.child.pid})" in run(runtime, "doctor").stdout
    router.stop()


def test_the_log_of_a_process_in_the_background_begins_anew_when_it_is_large(tmp_path, runtime):
    said = run(runtime, "up", *SIMULATED, *ANY_PORT, "--detach", "--", "--served-model-name", "one-machine-log")
    assert said.returncode == 0, said
    (log,) = (tmp_path / "state" / "hostler" / "up").glob("*.log")
    with log.open("ab") as grown:
        grown.write(b"x" * (17 << 20))
    wait_until(lambda: log.with_name(log.name + ".1").exists(), START, "the log begins anew", 0.5)
    edge = next(line.split()[1] for line in said.stdout.splitlines() if line.startswith("edge "))
    assert answers(edge, "one-machine-log")
    wait_until(lambda: "/v1/completions" in log.read_text(), START, "it goes on in the new file")
    assert run(runtime, "down").returncode == 0


@pytest.mark.parametrize("end", ["killed", "wrong"])
def test_up_serves_again_when_the_one_that_took_its_place_ends(tmp_path, runtime, end):
    up, edge = start(tmp_path, runtime, "one-machine-again")
    guest = beside(tmp_path, runtime, edge, "one-machine-guest-again")
    flags = ["--sim-start-ms", "60000"] if end == "killed" else ["--no-such-flag", "1"]
    options = [*SIMULATED, "--listen", edge.split("/")[2], "--takeover"]
    second = Process("second", ["up", *options, "--", "--served-model-name", "one-machine-again", *flags], tmp_path, runtime)
    second.killed = True
    if end == "killed":
        wait_until(lambda: "takeover_done" in up.tail(), START, "the place is taken")
        second.child.kill()
    assert second.child.wait(START) != 0
    wait_until(lambda: "place_taken_back" in up.tail(), START, "the first takes it back")
    wait_until(lambda: answers(edge, "one-machine-again"), START, "its engine serves again")
    wait_until(lambda: answers(edge, "one-machine-guest-again"), START, "and the one beside it")
    assert run(runtime, "down", "one-machine-again", "one-machine-guest-again").returncode == 0
    assert up.child.wait(END) == 0 and guest.child.wait(END) == 0


def test_a_second_down_waits_and_cuts_nothing(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-patient")
    body = {"model": "one-machine-patient", "prompt": "a b c", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor() as pool, httpx2.stream("POST", f"{edge}/completions", json=body, timeout=START) as streamed:
        lines = streamed.iter_lines()
        next(lines)
        downs = [pool.submit(run, runtime, "down", "one-machine-patient")]
        wait_until(lambda: "drain_begun" in up.tail(), START, "it drains")
        wait_until(lambda: "leaving" in run(runtime, "down", "nothing").stderr, START, "others see that it leaves")
        downs.append(pool.submit(run, runtime, "down", "one-machine-patient"))
        assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert [one.result().returncode for one in downs] == [0, 0]
    assert up.child.wait(END) == 0


def test_a_router_does_not_take_the_place_of_up_and_says_so(tmp_path, runtime):
    up, edge = start(tmp_path, runtime, "one-machine-place")
    said = run(runtime, "router", "--takeover", "--listen", edge.split("/")[2], "--admin-listen", "127.0.0.1:0")
    assert said.returncode == 1 and "up here already is one-machine-place" in said.stderr, said
    assert "another program" not in said.stderr and "docs/upgrade.md" in said.stderr, said
    assert answers(edge, "one-machine-place")
    up.stop()


def test_a_unit_of_systemd_has_the_words_of_the_command(tmp_path, runtime):
    home = runtime | {"XDG_CONFIG_HOME": str(tmp_path), "HOSTLER_ADMIN_KEY": "secret"}
    said = run(home, "up", *SIMULATED, "--service", "--", "--served-model-name", "org/one-machine-unit")
    assert said.returncode == 0 and "systemctl --user enable --now hostler-up-one-machine-unit" in said.stdout, said
    text = (tmp_path / "systemd" / "user" / "hostler-up-one-machine-unit.service").read_text()
    words = '"up" "--engine" "simulated" "--replicas" "1" "--" "--served-model-name" "org/one-machine-unit"\n'
    assert words in text and "secret" not in text, text
