"""What operators order of real vLLM, on the CPU with the tiny model: LoRA adapters on one replica of two, through
restarts, and what an engine cannot do. A rolling restart is in test_supervision.py.

The tests share a fleet and run in the order they are written.
"""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest

import fleet as fleets
from fleet import MODEL, Fleet, Router, own_model
from processes import ASK_SECONDS, REPOSITORY, ask, binary, environment, wait_until

pytestmark = pytest.mark.vllm("small")

# What an order has changed is known to every router within this, in seconds.
KNOWN_SECONDS = 60
PROMPT = "the people must find some water"


@dataclasses.dataclass
class Lent:
    """A fleet whose engines take adapters, and two adapters of random weights."""

    fleet: Fleet
    poet: Path
    ghost: Path
    """The same; its folder disappears."""

    def order(self, *words: str) -> str:
        """What a hostler command prints that asks the first router."""
        return ask(*words, "--admin", self.fleet.routers[0].socket)

    def refused(self, *words: str) -> str:
        """What a hostler command complains about that must fail."""
        command = [binary(), *words, "--admin", self.fleet.routers[0].socket]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_SECONDS, env=environment(), check=False
        )
        assert ended.returncode == 1, ended.stdout + ended.stderr
        return ended.stderr

    def findings(self) -> list[dict]:
        """What `hostler advise` says about node `a`."""
        return json.loads(self.order("advise", "a", "--json"))["findings"]


@pytest.fixture(scope="module")
def lent(small_vllm_fleet: Fleet):
    """The fleet whose engines take adapters."""
    engine, folder = small_vllm_fleet.engine, small_vllm_fleet.folder
    small_vllm_fleet.wait_ready()
    model, poet, ghost = Path(engine.options[engine.options.index("--model") + 1]), folder / "poet", folder / "ghost"
    python = model.parent / "vllm-0.32" / "bin" / "python"
    subprocess.run([python, REPOSITORY / "tests/engine/tiny_adapter.py", model, poet], check=True, timeout=300)
    shutil.copytree(poet, ghost)
    return Lent(small_vllm_fleet, poet, ghost)


def complete(router: Router, model: str) -> httpx2.Response:
    """One greedy completion."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return httpx2.post(f"{router.edge}/completions", json=body, timeout=300)


def text(router: Router, model: str) -> str:
    """What a model answers."""
    answer = complete(router, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def wait_models(fleet: Fleet, node: str, *adapters: str) -> None:
    """Returns when every router knows that the engine of a node serves its own names and exactly these adapters."""
    expected = {MODEL, own_model(node), *adapters}

    def known() -> bool:
        seen = [replica for router in fleet.routers for replica in router.replicas() if replica.node == node]
        return all(set(replica.models) == expected for replica in seen)

    wait_until(known, KNOWN_SECONDS, f"{node} serves {expected}")


def test_an_adapters_requests_go_to_the_replica_with_it(lent: Lent):
    fleet = lent.fleet
    own = text(fleet.routers[0], MODEL)
    assert complete(fleet.routers[0], "poet").status_code == 404
    for name, path in [("poet", lent.poet), ("ghost", lent.ghost)]:
        assert lent.order("lora", "load", name, str(path), "--on", "a/0") == f"loaded {name} on a/0\n"
    wait_models(fleet, "a", "poet", "ghost")
    wait_models(fleet, "b")
    served = {node: fleet.replica(node).served for node in Fleet.NODES}
    poems = [text(router, "poet") for router in fleet.routers for _ in range(3)]
    assert len(set(poems)) == 1 and poems[0] != own, "the adapter answers, and not as the model does"
    assert text(fleet.routers[1], "ghost") == poems[0], "the same weights under another name"
    assert text(fleet.routers[1], MODEL) == own, "the model itself is as before"
    fleet.wait_idle()
    wait_until(lambda: fleet.replica("a").served >= served["a"] + 7, KNOWN_SECONDS, "seven answers of the one engine")
    assert fleet.replica("b").served <= served["b"] + 1


def test_a_senseless_order_is_refused_with_what_to_do(lent: Lent):
    assert "No adapter found for /no/where" in lent.refused("lora", "load", "lost", "/no/where")
    assert f"poet is loaded from {lent.poet}" in lent.refused("lora", "load", "poet", "/elsewhere", "--on", "a/0")
    assert 'no replica has an adapter called "lost"; adapters: ' in lent.refused("lora", "unload", "lost")
    # Here the engine has the routes, for VLLM_SERVER_DEV_MODE is set, and would only pretend.
    assert "cannot sleep: start it with --enable-sleep-mode" in lent.refused("sleep", "b/0")
    assert "only a sleeping one can do this" in lent.refused("wake", "b/0")
    assert [lent.fleet.replica(node).phase for node in Fleet.NODES] == ["ready", "ready"]


@pytest.mark.parametrize("route", ["load_lora_adapter", "unload_lora_adapter"])
def test_clients_cannot_change_adapters(lent: Lent, route: str):
    for router in lent.fleet.routers:
        body = {"lora_name": "poet", "lora_path": str(lent.ghost)}
        answer = httpx2.post(f"{router.edge}/{route}", json=body, timeout=10)
        assert answer.status_code == 403 and "hostler lora" in answer.text, answer.text
    wait_models(lent.fleet, "a", "poet", "ghost")


def test_a_restarted_engine_has_its_adapters_before_it_serves(lent: Lent):
    fleet, before = lent.fleet, lent.fleet.replica("a")
    poem = text(fleet.routers[0], "poet")
    shutil.rmtree(lent.ghost)
    lent.order("restart", "a/0", "--force")

    def back() -> fleets.Replica | None:
        now = fleet.replica("a")
        return now if now.phase == "ready" and now.engine_pid != before.engine_pid else None

    after = wait_until(back, fleet.engine.start_seconds, "the engine is ready again", pause=0.01)
    assert set(after.models) == {MODEL, own_model("a"), "poet"}, "known from the first moment"
    assert [text(router, "poet") for router in fleet.routers] == [poem, poem]
    [finding] = wait_until(lent.findings, KNOWN_SECONDS, "the adapter that is gone is told of")
    assert finding["replica"] == "a/0" and finding["kind"] == "adapter", finding
    assert "ghost" in finding["evidence"] and "hostler lora" in finding["advice"], finding
    assert lent.order("lora", "unload", "ghost", "--on", "a/0") == "unloaded ghost on a/0\n"
    wait_until(lambda: not lent.findings(), KNOWN_SECONDS, "nobody wants it any more")


def test_an_unloaded_adapter_is_gone_everywhere(lent: Lent):
    assert lent.order("lora", "unload", "poet") == "unloaded poet on a/0, b/0\n"
    wait_models(lent.fleet, "a")
    for router in lent.fleet.routers:
        answer = complete(router, "poet")
        assert answer.status_code == 404 and "poet" in answer.text, answer.text
        assert text(router, own_model("a"))
    assert lent.order("lora", "list") == "no adapters are loaded\n"
