"""Whether two routers know what their engines have cached, and use it: on simulated engines and, marked `vllm`, on real
ones, all with so small a cache that old blocks soon make way.

`hostler explain` says what a router took to be cached on each replica when it chose one; the `usage` of the answer says
what the engine found there.
"""

import contextlib
import dataclasses
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from fleet import BLOCK, MODEL, Fleet, Router, own_model
from processes import ask as hostler
from processes import wait_until

# What an engine has stored is known to every router within this, on a machine that is busy, in seconds.
KNOWN_SECONDS = 60
# Tokens of most prompts here that can be found again. They have one more: an engine computes the last one in any case.
CACHEABLE = 10 * BLOCK
# Words that are a token each for a simulated engine.
WORDS = ["the", "people", "must", "find", "some", "water", "when", "night", "is", "near", "then", "go", "home"]


@dataclasses.dataclass(frozen=True)
class Placed:
    """An answer, and what the router knew when it chose a replica for it."""

    answer: dict
    replica: str
    level: str
    """`exact` where the prompt's tokens and the engine's blocks were known."""
    matched: dict[str, int]
    """Prompt tokens that the router took to be cached, for each replica that it could have chosen."""

    @property
    def predicted(self) -> int:
        """Cached prompt tokens, as the router thought."""
        return self.matched[self.replica]

    @property
    def cached(self) -> int:
        """Cached prompt tokens, as the engine says."""
        return self.answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def is_right(self) -> bool:
        """Whether both agree. An engine computes the last token of a prompt again, and with it perhaps its block."""
        return self.level == "exact" and abs(self.predicted - self.cached) <= BLOCK

    def __str__(self) -> str:
        """For a failure's report."""
        prompt = self.answer["usage"]["prompt_tokens"]
        return f"{self.replica} by {self.level}, {self.matched}, cached {self.cached} of {prompt}"


def place(router: Router, path: str = "completions", **asked) -> Placed:
    """Sends one request through a router and asks it why the answer came from where it did."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 1, "ignore_eos": True, **asked}
    answer = httpx2.post(f"{router.edge}/{path}", json=body, headers={"x-hostler-explain": "1"}, timeout=300)
    assert answer.status_code == 200, answer.text
    reason = dict(word.split("=", 1) for word in answer.headers["x-hostler-reason"].split())
    explained = json.loads(hostler("explain", answer.headers["x-hostler-id"], "--admin", router.socket, "--json"))
    [decision] = explained["decisions"]
    matched = {scored["replica"]: scored["matched"] for scored in decision["scored"]}
    assert matched[reason["replica"]] == int(reason["matched"]), "the header and `hostler explain` say the same"
    return Placed(answer.json(), reason["replica"], reason["level"], matched)


def caches(fleet: Fleet) -> list[list[dict]]:
    """For each router, what it knows of each replica's cache."""
    return [[replica.cache for replica in router.replicas()] for router in fleet.routers]


def known_blocks(fleet: Fleet, node: str) -> list[int]:
    """For each router, how many blocks it knows of a node's engine; -1 where it does not know them exactly."""
    known = [replica.cache for router in fleet.routers for replica in router.replicas() if replica.node == node]
    return [cache["blocks"] if cache["exact"] and cache["matches"] else -1 for cache in known]


def wait_known(fleet: Fleet, node: str, tokens: int) -> None:
    """Returns when every router knows at least the whole blocks of so many tokens on this node."""

    def known() -> bool:
        return all(blocks >= tokens // BLOCK for blocks in known_blocks(fleet, node))

    wait_until(known, KNOWN_SECONDS, f"the blocks of {tokens} tokens known of {node}")


def wait_in_sync(fleet: Fleet) -> None:
    """Returns when the routers' knowledge is what the agents reported last, and no longer changes."""
    seen = [caches(fleet)]

    def is_in_sync() -> bool:
        seen.append(caches(fleet))
        return seen[-1] == seen[-2] and all(cache["matches"] for of in seen[-1] for cache in of)

    wait_until(is_in_sync, KNOWN_SECONDS, "the routers know what agents report", pause=0.1)


def empty(fleet: Fleet, node: str) -> None:
    """Has the engine of a node forget its cache. It says so with the next step that it takes."""
    with fleet.direct(fleet.replica(node)) as engine:
        wait_until(lambda: engine.post("/reset_prefix_cache").json()["success"], KNOWN_SECONDS, "the engine holds no block")
        engine.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1}).raise_for_status()
    wait_until(lambda: known_blocks(fleet, node) == [0, 0], KNOWN_SECONDS, f"{node} is known to have forgotten")


def store(fleet: Fleet, node: str, prompt: list[int]) -> None:
    """Has the engine of a node compute a prompt that no router has seen, and waits until they know of it."""
    with fleet.direct(fleet.replica(node)) as engine:
        engine.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1}).raise_for_status()
    wait_known(fleet, node, len(prompt))


def random_tokens(dice: random.Random, count: int) -> list[int]:
    """A prompt as tokens; both kinds of engine have these."""
    return [dice.randrange(300, 900) for _ in range(count)]


@pytest.fixture(scope="module", params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm("small"))])
def ready_fleet(request):
    """A fleet of each kind in turn whose routers read prompts as its engines do."""
    small = request.getfixturevalue(f"small_{request.param}_fleet")
    whole = " ".join(WORDS * 4)
    for router in small.routers:
        wait_until(lambda to=router: place(to, prompt=whole).level == "exact", 60, "prompts read as tokens", pause=0.2)
    return small


@pytest.fixture
def fleet(ready_fleet: Fleet):
    """The fleet whole, idle and with empty caches."""
    ready_fleet.wait_ready()
    ready_fleet.wait_idle()
    for node in Fleet.NODES:
        empty(ready_fleet, node)
    yield ready_fleet
    ready_fleet.wait_idle()


@pytest.fixture
def dice():
    """Random numbers; a failure's report shows their seed."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def chat(fleet: Fleet) -> list[Placed]:
    """Ten turns of a chat, each through the other router; all went where the most was cached, as the router thought."""
    messages = [{"role": "system", "content": " ".join(WORDS * 12)}]
    turns: list[Placed] = []
    for turn in range(10):
        messages.append({"role": "user", "content": " ".join([f"turn {turn}", *WORDS])})
        placed = place(fleet.routers[turn % 2], "chat/completions", messages=messages, max_tokens=16)
        turns.append(placed)
        # An answer of control tokens alone has no text, and not every template takes an empty message.
        said = placed.answer["choices"][0]["message"]["content"] or "nothing"
        messages.append({"role": "assistant", "content": said})
        # The last token of an answer is not computed.
        wait_known(fleet, placed.replica.partition("/")[0], placed.answer["usage"]["total_tokens"] - 1)
    told = "\n".join(map(str, turns))
    print(told)
    assert all(placed.is_right for placed in turns), told
    assert all(placed.predicted == max(placed.matched.values()) for placed in turns[1:]), told
    # A turn finds at least what the one before it found, and the first one's whole prompt is known to the second.
    found = [placed.predicted for placed in turns]
    assert found == sorted(found) and found[1] >= turns[0].answer["usage"]["prompt_tokens"] - 2 * BLOCK, told
    return turns


@pytest.mark.smoke
def test_a_chat_stays_where_its_beginning_is_cached(fleet: Fleet):
    chat(fleet)


@pytest.mark.vllm("tekken")
def test_a_chat_that_only_engines_can_read_stays_there_too(small_tekken_fleet: Fleet):
    fleet = small_tekken_fleet
    fleet.wait_ready()
    whole = " ".join(WORDS * 12)
    for router in fleet.routers:
        wait_until(lambda to=router: place(to, prompt=whole).level == "exact", 60, "engines asked", pause=0.2)
    wait_in_sync(fleet)
    turns = chat(fleet)
    assert all(placed.predicted == placed.cached for placed in turns[1:]), "\n".join(map(str, turns))
    # What the agent has opened for routers is not for clients.
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    assert httpx2.post(f"{fleet.routers[0].edge}/chat/completions/render", json=asked).status_code == 404


def test_a_prompt_goes_where_more_of_it_is_cached(fleet: Fleet, dice):
    prompt = random_tokens(dice, 20 * BLOCK)
    for node, share in [("a", 4), ("b", 16)]:
        store(fleet, node, prompt[: share * BLOCK])
    for router in fleet.routers:
        placed = place(router, prompt=prompt)
        assert placed.replica.startswith("b/") and placed.is_right, placed
        if router is fleet.routers[0]:
            assert sorted(placed.matched.values()) == [4 * BLOCK, 16 * BLOCK], placed
        wait_in_sync(fleet)


def test_a_restarted_engines_cache_is_known_again(fleet: Fleet, dice):
    prompt, other = random_tokens(dice, CACHEABLE + 1), random_tokens(dice, CACHEABLE + 1)
    store(fleet, "a", prompt)
    before = fleet.replica("a")
    hostler("restart", before.id, "--force", "--admin", fleet.routers[0].socket)
    wait_until(lambda: fleet.replica("a").engine_pid != before.engine_pid, KNOWN_SECONDS, "the engine is started again", pause=0.1)
    wait_until(lambda: fleet.replica("a").phase == "ready", fleet.engine.start_seconds, "it is ready")
    became_ready = time.monotonic()
    wait_until(lambda: known_blocks(fleet, "a") == [0, 0], KNOWN_SECONDS, "its empty cache known exactly")
    print(f"known {time.monotonic() - became_ready:.2f} s after it was ready")

    store(fleet, "a", other)
    for router in fleet.routers:
        placed = place(router, prompt=other)
        assert placed.replica == before.id and placed.predicted == CACHEABLE and placed.is_right, placed
        wait_in_sync(fleet)
    placed = place(fleet.routers[0], prompt=prompt)
    assert placed.matched[before.id] == 0 and placed.cached == 0, placed


def test_an_emptied_cache_is_forgotten_by_both_routers(fleet: Fleet, dice):
    prompt = random_tokens(dice, CACHEABLE + 1)
    store(fleet, "a", prompt)
    there = fleet.replica("a").id
    for router in fleet.routers:
        placed = place(router, prompt=prompt)
        assert placed.replica == there and placed.predicted == CACHEABLE and placed.is_right, placed
        wait_in_sync(fleet)
    empty(fleet, "a")
    placed = place(fleet.routers[0], prompt=prompt)
    assert set(placed.matched.values()) == {0} and placed.cached == 0, placed


def test_requests_with_different_salts_share_nothing(fleet: Fleet, dice):
    prompt = random_tokens(dice, CACHEABLE + 1)
    first, second = fleet.routers
    fresh = place(first, prompt=prompt, cache_salt="one")
    wait_known(fleet, fresh.replica.partition("/")[0], len(prompt))
    other = place(second, prompt=prompt, cache_salt="two")
    wait_in_sync(fleet)
    again = place(second, prompt=prompt, cache_salt="one")
    assert (fresh.cached, other.predicted, other.cached) == (0, 0, 0), f"{fresh}\n{other}"
    assert again.replica == fresh.replica and again.predicted == CACHEABLE and again.is_right, again


def test_two_hundred_random_requests_leave_both_routers_right(fleet: Fleet, dice):
    families = [random_tokens(dice, 28 * BLOCK) for _ in range(6)]
    models = [MODEL, MODEL, *map(own_model, Fleet.NODES)]

    def asked() -> dict:
        shared, tail = dice.choice(families)[: dice.randrange(8, 800)], random_tokens(dice, dice.randrange(300))
        length = {"max_tokens": dice.randrange(1, 24), "ignore_eos": True}
        return {"model": dice.choice(models), "prompt": shared + tail, "temperature": 0, **length}

    def one(router: Router, body: dict, seconds: float) -> int | None:
        # A client that leaves has its blocks given back at some moment of their making.
        with contextlib.suppress(httpx2.TimeoutException):
            return httpx2.post(f"{router.edge}/completions", json=body, timeout=seconds).status_code
        return None

    rounds = [(fleet.routers[number % 2], asked(), 0.05 if number % 8 == 7 else 60.0) for number in range(200)]
    resyncs = [cache["resyncs"] for of in caches(fleet) for cache in of]
    with ThreadPoolExecutor(4) as clients:
        statuses = set(clients.map(lambda round: one(*round), rounds))
    assert statuses <= {200, None} and 200 in statuses, statuses
    fleet.wait_idle()
    wait_in_sync(fleet)

    assert [cache["resyncs"] for of in caches(fleet) for cache in of] == resyncs, "a router had lost track"
    for node in Fleet.NODES:
        blocks = known_blocks(fleet, node)
        print(f"{node} holds {blocks} blocks")
        # One of the 64 is never used; all others were, many times, and most of them hold something.
        assert blocks[0] == blocks[1] and 40 <= blocks[0] <= 63, f"{node}: {blocks}"
    for number, family in enumerate(families):
        placed = place(fleet.routers[number % 2], prompt=family)
        assert placed.is_right, placed
        wait_in_sync(fleet)
