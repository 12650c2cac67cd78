"""streams.py -- streams that outlive their engine on a GPU: two engines share it, one is killed in the middle of many streams, one is drained.

    streams.py --hostler PROGRAM --vllm PROGRAM --model FOLDER [--engine=--load-format --engine=dummy]
               --engine=--gpu-memory-utilization --engine=0.42 [--streams 256] [--rounds 2] [--drained 512] [--json FILE]

All streams are asked for twice without a loss: the first answers are what the others are compared with, the second say how far the
engines agree with themselves. Then each round kills one of the engines. At the end one is drained under streams of 2,000 tokens.
See docs/streams.md.
"""

import argparse
import collections
import contextlib
import dataclasses
import http.client
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from common import begin, flags, gpu_processes, must_run, process, replicas, say, wait_until

NODES = ("a", "b")
# One process of Python reads some 8,000 events a second.
CLIENTS = 12
TOKENS = 300
DRAINED_TOKENS = 2000
SILENCE_SECONDS = 60
# By how a stream is sampled: what it asks for, beside its prompt and length.
KINDS = {
    "greedy": {"temperature": 0},
    "seeded, T = 1": {"temperature": 1, "seed": 7},
    "seeded, T = 0.7, top-p 0.9, top-k 50": {"temperature": 0.7, "seed": 7, "top_p": 0.9, "top_k": 50},
    "seeded, presence penalty": {"temperature": 1, "seed": 7, "presence_penalty": 0.5},
    "unseeded": {"temperature": 1},
}


@dataclasses.dataclass
class Ask:
    """One stream to ask for."""

    number: int
    kind: str
    tokens: int

    def body(self, model: str) -> tuple[str, dict]:
        """Its route and body; every second is a chat. No two bodies are alike: one that was there when an engine died is suspected."""
        said = f"{self.number} is the number of a long story about"
        chat = self.number % 2 == 1
        asked = {"messages": [{"role": "user", "content": said}]} if chat else {"prompt": said}
        more = {"max_tokens": self.tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        user = f"{self.number}-{time.time_ns()}"
        return ("/v1/chat/completions" if chat else "/v1/completions"), {"model": model, "user": user, **asked, **more, **KINDS[self.kind]}


@dataclasses.dataclass
class Told:
    """What a stream brought."""

    text: str = ""
    tokens: int = 0
    error: str = ""
    pause: float = 0.0
    """Seconds between the last event before it went on elsewhere and the first after it."""
    seams: int = 0
    events: int = 0
    """With a choice. Where they are fewer than the tokens, the front-end told of several at once."""

    def is_whole(self, ask: Ask) -> bool:
        """Whether all of it came, and its usage says so."""
        return not self.error and self.tokens == ask.tokens


def read(edge: str, model: str, ask: Ask) -> Told:
    """Asks for a stream and reads it to its end."""
    told, done, last, is_seam = Told(), False, 0.0, False
    connection = http.client.HTTPConnection(edge.removeprefix("http://"), timeout=SILENCE_SECONDS)
    try:
        route, body = ask.body(model)
        connection.request("POST", route, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            told.error = f"{answer.status} {answer.read(300)!r}"
            return told
        for line in answer:
            if line == b": resumed\n":
                told.seams, is_seam = told.seams + 1, True
            elif line == b"data: [DONE]\n":
                done = True
            elif line.startswith(b"data: "):
                now, event = time.monotonic(), json.loads(line[6:])
                if is_seam:
                    told.pause, is_seam = max(told.pause, now - last), False
                last = now
                if "error" in event:
                    told.error = json.dumps(event["error"])
                for choice in event.get("choices", []):
                    told.events += 1
                    told.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                told.tokens = (event.get("usage") or {}).get("completion_tokens", told.tokens)
    except OSError as error:
        told.error = repr(error)
    finally:
        connection.close()
    told.error = told.error or ("" if done else "it ended without [DONE]")
    return told


def read_all(edge: str, model: str, asks: list[Ask], results) -> None:
    """One client process: reads its part of the streams at once."""
    of: dict[int, Told] = {}

    def one(ask: Ask) -> None:
        of[ask.number] = read(edge, model, ask)

    threads = [threading.Thread(target=one, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(of)


class Lab:
    """A router, two agents on one GPU, and what was measured."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack):
        self.options = options
        self.figures: dict = {"rounds": []}
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        any_port = ("127.0.0.1:0",)
        listen = ["--listen", *any_port, "--agents-listen", *any_port, "--admin-listen", *any_port]
        listen += ["--operators-socket", str(self.folder / "op.sock")]
        router, log = stack.enter_context(process("router", [options.hostler, "router", *listen]))

        def printed(word: str) -> str:
            must_run(router, "hostler router", log)
            lines = (line.split() for line in log.read_text(errors="replace").splitlines())
            return next((words[1] for words in lines if len(words) > 1 and words[0] == word), "")

        self.edge = wait_until("the router's addresses", lambda: printed("edge"), 60).removesuffix("/v1")
        self.socket = wait_until("the operators' socket", lambda: printed("socket"), 60)
        # One after the other: two engines that profile the memory of one GPU at once fail.
        for node in NODES:
            own = ["--node", node, "--run-dir", str(self.folder / f"r{node}"), "--log-dir", str(self.folder / f"l{node}")]
            command = [options.hostler, "agent", "--router", printed("agents"), *own, "--model", options.model, "--vllm-bin", options.vllm]
            command += [*options.up, "--", *options.engine]
            agent, agent_log = stack.enter_context(process(f"agent-{node}", command))

            def ready(node=node, agent=agent, agent_log=agent_log) -> bool:
                must_run(agent, node, agent_log)
                if self.phase(node) == "failed":
                    logs = "".join(path.read_text(errors="replace") for path in (self.folder / f"l{node}").rglob("*.log"))
                    raise SystemExit(f"the engine of {node} failed:\n{logs[-20_000:]}")
                return self.phase(node) == "ready"

            wait_until(f"the engine of {node} is ready", ready, 300)
            say(f"{node} is ready")

    def replica(self, node: str) -> dict:
        """The replica of a node."""
        return [replica for replica in replicas(self.options.hostler, self.socket) if replica["id"].startswith(f"{node}/")][0]

    def phase(self, node: str) -> str:
        """What it does."""
        return self.replica(node)["phase"]

    def start(self, asks: list[Ask]) -> tuple[list[multiprocessing.Process], multiprocessing.Queue]:
        """Sends all requests at once."""
        results: multiprocessing.Queue = multiprocessing.Queue()
        parts = [asks[client::CLIENTS] for client in range(CLIENTS)]
        clients = [multiprocessing.Process(target=read_all, args=(self.edge, self.options.model, part, results)) for part in parts]
        for client in clients:
            client.start()
        return clients, results

    def finish(self, clients: list, results) -> dict[int, Told]:
        """What they brought, when all have ended."""
        of: dict[int, Told] = {}
        for _ in clients:
            of |= results.get(timeout=300)
        return of

    def all_of(self, asks: list[Ask]) -> dict[int, Told]:
        """The answers of engines that live."""
        since = time.monotonic()
        told = self.finish(*self.start(asks))
        bad = [one.error or f"{one.tokens} tokens" for ask in asks if not (one := told[ask.number]).is_whole(ask)]
        per_event = sum(one.tokens for one in told.values()) / max(sum(one.events for one in told.values()), 1)
        say(f"{len(asks)} streams without a loss in {time.monotonic() - since:.1f} s, {per_event:.2f} tokens an event; not whole: {len(bad)} {bad[:2]}")
        return told

    def kill(self, asks: list[Ask], node: str, first: dict[int, Told], seconds: float) -> None:
        """SIGKILL for the whole group of an engine in the middle of all streams."""
        clients = self.start(asks)
        time.sleep(seconds)
        victim = self.replica(node)
        os.killpg(victim["engine_pid"], signal.SIGKILL)
        told = self.finish(*clients)
        moved = [ask for ask in asks if told[ask.number].seams]
        errors = collections.Counter(told[ask.number].error[:160] for ask in asks if told[ask.number].error)
        short = [ask.number for ask in asks if not told[ask.number].error and not told[ask.number].is_whole(ask)]
        pauses = sorted(told[ask.number].pause for ask in moved)
        figure = {"killed": node, "in_flight": victim["in_flight"], "resumed": len(moved), "errors": dict(errors), "truncated": short}
        figure["equal"] = {kind: agreement(asks, kind, first, told) for kind in KINDS}
        if pauses:
            figure["pause"] = {"median": round(statistics.median(pauses), 3), "p99": round(pauses[int(len(pauses) * 0.99)], 3)}
        self.figures["rounds"].append(figure)
        say(json.dumps(figure))
        wait_until("the killed engine serves again", lambda: self.phase(node) == "ready" and self.replica(node)["restarts"] > victim["restarts"], 300)

    def drain(self, streams: int) -> None:
        """Drains a replica under long streams: when it is empty, and what becomes of them."""
        asks = [Ask(10_000 + number, "greedy", DRAINED_TOKENS) for number in range(streams)]
        clients = self.start(asks)
        time.sleep(5)
        before = self.replica(NODES[0])["in_flight"]
        since = time.monotonic()
        command = [self.options.hostler, "drain", f"{NODES[0]}/0", "--admin", self.socket]
        drain = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        # What waits for a drain may not be told of the very moment: the count is.
        wait_until("the drained replica is empty", lambda: self.replica(NODES[0])["in_flight"] == 0, 120)
        empty = time.monotonic() - since
        said = drain.communicate(timeout=120)[0]
        drained = time.monotonic() - since
        told = self.finish(*clients)
        failed = [one.error or f"{one.tokens} tokens" for ask in asks if not (one := told[ask.number]).is_whole(ask)]
        moved = sum(1 for one in told.values() if one.seams)
        pauses = sorted(one.pause for one in told.values() if one.seams)
        figure = {"in_flight": before, "empty_after": round(empty, 2), "drained_after": round(drained, 2), "moved": moved, "failed": len(failed)}
        if pauses:
            figure["pause"] = {"median": round(statistics.median(pauses), 3), "longest": round(pauses[-1], 3)}
        self.figures["drain"] = figure
        say(f"{json.dumps(figure)} {failed[:2]}\n{said.strip()}")


def agreement(asks: list[Ask], kind: str, first: dict[int, Told], told: dict[int, Told]) -> str:
    """How many of the answers of a kind are the same: of those that went on elsewhere, and of the others."""

    def same(of: list[Ask]) -> str:
        return f"{sum(first[ask.number].text == told[ask.number].text for ask in of)} of {len(of)}"

    mine = [ask for ask in asks if ask.kind == kind]
    return f"{same([ask for ask in mine if told[ask.number].seams])} resumed, {same([ask for ask in mine if not told[ask.number].seams])} others"


def main() -> None:
    """Starts everything and measures."""
    parser = flags()
    parser.set_defaults(streams=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--drained", type=int, default=512)
    options = parser.parse_args()
    begin(options)
    kinds = list(KINDS)
    asks = [Ask(number, kinds[number // 2 % len(kinds)], TOKENS) for number in range(options.streams)]
    with contextlib.ExitStack() as stack:
        lab = Lab(options, stack)
        try:
            lab.all_of(asks)
            first = lab.all_of(asks)
            since = time.monotonic()
            second = lab.all_of(asks)
            middle = (time.monotonic() - since) * 0.4
            lab.figures["undisturbed"] = {kind: agreement(asks, kind, first, second) for kind in KINDS}
            say(json.dumps(lab.figures["undisturbed"]))
            for number in range(options.rounds):
                lab.kill(asks, NODES[number % 2], first, middle)
            if options.drained:
                lab.drain(options.drained)
        finally:
            if options.json:
                options.json.write_text(json.dumps(lab.figures, indent=1))
    say("GPU processes left: " + gpu_processes())


if __name__ == "__main__":
    main()
