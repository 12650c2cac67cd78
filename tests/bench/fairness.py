#!/usr/bin/env python3
"""Measures what a tenant notices of another one that floods the fleet, and what the fleet still does at ten times its load.

A router, an agent and simulated engines; this program sends to them at fixed rates, whatever comes back, in three parts: the light
tenant alone, the flooding one alone with as much in flight as the fleet is good for (the peak), then both, the flooding one with ten
times the peak and the light one with a hundredth of that. README.md says how to read it. It exits 1 when a bar is missed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from processes import Process, ask, wait_until  # noqa: E402

# How long the engines may take to become ready, in seconds.
START_SECONDS = 30
# How long a request may take before it counts as failed, in seconds: many times what the queue is worth.
REQUEST_SECONDS = 60
# The user's own configuration file must not decide what is measured.
NO_CONFIG = ("--config", os.devnull)

ENGINES = 16
# A step of 512 tokens takes 0.2 s, a prompt of 2,100 five of them: prompts decide how much an engine does. An engine has one such prompt at a
# time, since the router counts it until its first token.
ENGINE_FLAGS = (
    *("--sim-step-ms", "5", "--sim-prefill-us", "400", "--sim-decode-us", "10", "--max-num-batched-tokens", "512"),
    # Few events, so that this program is not what is measured.
    *("--num-gpu-blocks-override", "8192", "--stream-interval", "16"),
)
# Places in the router's queue: some seconds of work, so that it is full soon.
MOST_HELD = 128
# Tokens of an answer.
OUTPUT = 16

LIGHT_BAR = 1.5
GOODPUT_BAR = 0.9
REFUSAL_BAR_MS = 50
# What a full queue, its connections and their buffers may take beyond a router that has seen the peak, and what may come in the second
# half of the overload beyond the first.
MEMORY_BAR_MB, GROWTH_BAR_MB = 128, 16


@dataclass
class Tally:
    """What came of one tenant's requests in one part."""

    first: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    sent: int = 0


class Fleet:
    """A router and an agent with simulated engines."""

    def __init__(self, folder: Path):
        """Starts both and waits for the engines."""
        any_port = "127.0.0.1:0"
        with contextlib.ExitStack() as undo:
            listeners = ("--listen", any_port, "--agents-listen", any_port, "--admin-listen", any_port)
            settings = ("--max-queued", str(MOST_HELD), "--log-level", "warn")
            self.router = Process("router", ["router", *NO_CONFIG, *listeners, *settings], folder)
            undo.callback(self.router.stop)
            edge, agents, self._socket = (self.router.printed(word, START_SECONDS) for word in ("edge", "agents", "socket"))
            options = ("--router", agents, "--engine", "simulated", "--replicas", str(ENGINES))
            folders = ("--run-dir", str(folder / "run"), "--log-dir", str(folder / "log"))
            agent = Process("agent", ["agent", *NO_CONFIG, *options, *folders, "--", *ENGINE_FLAGS], folder)
            undo.callback(agent.stop)
            wait_until(self._is_ready, START_SECONDS, "all engines ready", pause=0.1)
            self.stop = undo.pop_all().close
        host, _, port = edge.removesuffix("/v1").removeprefix("http://").rpartition(":")
        self.address = (host, int(port))

    def _is_ready(self) -> bool:
        nodes = json.loads(ask("ps", "--admin", self._socket, "--json"))["nodes"]
        phases = [replica["phase"] for node in nodes for replica in node["replicas"]]
        return phases == ["ready"] * ENGINES

    def memory_mb(self) -> float:
        """What the router has in memory."""
        status = Path(f"/proc/{self.router.child.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024

    def cpu_seconds(self) -> float:
        """What the router has computed."""
        fields = Path(f"/proc/{self.router.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask_once(fleet: Fleet, tenant: str, prompt_bytes: int, tally: Tally) -> None:
    """One stream, on a connection of its own."""
    tally.sent += 1
    # No two share a beginning. Their lengths differ, or else all engines would end in the same moment for ever.
    prompt_bytes = int(prompt_bytes * random.uniform(0.75, 1.25))
    prompt = f"{tenant}{tally.sent} {random.getrandbits(64):x} ".ljust(prompt_bytes, "w")
    body = json.dumps({"model": "simulated", "prompt": prompt, "max_tokens": OUTPUT, "stream": True, "ignore_eos": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {tenant}\r\ncontent-type: application/json\r\n"
        f"x-request-id: {tenant}-{tally.sent}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    begun = time.monotonic()
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            reader, writer = await asyncio.open_connection(*fleet.address)
            with contextlib.closing(writer):
                writer.write((head + body).encode())
                answer = b""
                first = None
                while piece := await reader.read(65536):
                    answer += piece
                    if first is None and b"data: " in answer:
                        first = time.monotonic() - begun
        status = answer[9:12]
        if status == b"429":
            tally.refused.append(time.monotonic() - begun)
        elif status == b"200" and b"data: [DONE]" in answer:
            tally.first.append(first)
            tally.answered.append(time.monotonic())
        else:
            tally.failed.append(answer[:300].decode(errors="replace") or "no answer")
    except (OSError, TimeoutError) as error:
        tally.failed.append(repr(error))


async def at_rate(fleet: Fleet, tenant: str, prompt_bytes: int, rate: float, seconds: float) -> Tally:
    """Sends at random moments, so many a second on average; returns when all have been answered."""
    tally, chance, end = Tally(), random.Random(tenant), time.monotonic() + seconds
    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while (due := due + chance.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(ask_once(fleet, tenant, prompt_bytes, tally))
    return tally


async def in_flight(fleet: Fleet, tenant: str, prompt_bytes: int, count: int, seconds: float) -> Tally:
    """Keeps so many in flight."""
    tally, end = Tally(), time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            await ask_once(fleet, tenant, prompt_bytes, tally)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(client())
    return tally


def per_second(tallies: list[Tally], begin: float, end: float) -> float:
    """Whole answers in a second, from one moment to another."""
    return sum(begin <= at < end for tally in tallies for at in tally.answered) / (end - begin)


def quantile(times: list[float], share: float) -> float:
    """Of times in seconds, in milliseconds."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000 if ordered else float("nan")


async def measure(fleet: Fleet, options: argparse.Namespace) -> bool:
    """Runs the three parts, prints the table, and says whether all bars were met."""
    light_prompt, flood_prompt = options.light_prompt, options.flood_prompt
    # Engines, tokenizers and what the router learns of both: warm.
    await in_flight(fleet, "warm", flood_prompt, 16, 3)

    begun = time.monotonic()
    peak_tally = await in_flight(fleet, "peak", flood_prompt, options.in_flight, options.seconds * 0.2)
    # Without the beginning, when the fleet fills, and the end.
    peak = per_second([peak_tally], begun + 3, begun + options.seconds * 0.2)
    light_rate = peak / 10

    alone = await at_rate(fleet, "light", light_prompt, light_rate, options.seconds * 0.25)

    before, cpu, begun = fleet.memory_mb(), fleet.cpu_seconds(), time.monotonic()
    warm, length = 4.0, options.seconds * 0.55
    flood = asyncio.create_task(at_rate(fleet, "flood", flood_prompt, 100 * light_rate, length))
    # The light one comes into a fleet that is full already.
    await asyncio.sleep(warm)
    light = asyncio.create_task(at_rate(fleet, "light", light_prompt, light_rate, length - warm))
    await asyncio.sleep((length - warm) / 2)
    middle = fleet.memory_mb()
    await asyncio.sleep(length - (time.monotonic() - begun))
    after, cpu, end = fleet.memory_mb(), fleet.cpu_seconds() - cpu, time.monotonic()
    flood, light = await flood, await light
    goodput = per_second([flood, light], begun + warm, end)

    for name, tally in (("peak", peak_tally), ("alone", alone), ("flood", flood), ("light", light)):
        line = f"{name}: {tally.sent} sent, {len(tally.first)} answered, {len(tally.refused)} refused, {len(tally.failed)} failed"
        print(f"{line}; first token p50 {quantile(tally.first, 0.5):.0f} ms, p99 {quantile(tally.first, 0.99):.0f} ms")
        for failure in tally.failed[:3]:
            print(f"  {failure!r}")
    print(f"router: {cpu / (end - begun):.2f} CPUs during the overload of {flood.sent / length:.0f} requests a second\n")

    ratio = quantile(light.first, 0.99) / quantile(alone.first, 0.99)
    refusal = quantile(flood.refused + light.refused, 0.99)
    rows = [
        ("light tenant's p99 to the first token, of alone", f"{ratio:.2f}", f"<= {LIGHT_BAR}", ratio <= LIGHT_BAR and not light.refused),
        ("goodput at 10x overload, of the peak", f"{goodput / peak:.2f}", f">= {GOODPUT_BAR}", goodput >= GOODPUT_BAR * peak),
        ("429 within, p99", f"{refusal:.1f} ms", f"<= {REFUSAL_BAR_MS} ms", refusal <= REFUSAL_BAR_MS),
        (
            "router's memory: overload, its second half",
            f"{after - before:+.0f} MB, {after - middle:+.0f} MB",
            f"<= {MEMORY_BAR_MB} MB, {GROWTH_BAR_MB} MB",
            after - before <= MEMORY_BAR_MB and after - middle <= GROWTH_BAR_MB,
        ),
        ("requests that failed", str(sum(len(tally.failed) for tally in (alone, flood, light))), "0", not (flood.failed or light.failed)),
    ]
    print(f"{'':52}{'measured':>18}{'bar':>18}")
    for name, measured, bar, met in rows:
        print(f"{name:52}{measured:>18}{bar:>18}  {'met' if met else 'MISSED'}")
    return all(met for *_, met in rows)


def main() -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80, help="length of all three parts together, about (80)")
    parser.add_argument("--in-flight", type=int, default=64, help="requests in flight at the peak (64)")
    parser.add_argument("--light-prompt", type=int, default=2100, help="tokens of the light tenant's prompts, about (2100)")
    parser.add_argument("--flood-prompt", type=int, default=2100, help="tokens of the other one's, about (2100)")
    options = parser.parse_args()
    # A connection for each request that waits.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    random.seed(5)
    with tempfile.TemporaryDirectory(prefix="hostler-fair-", dir="/tmp") as folder:
        fleet = Fleet(Path(folder))
        try:
            return 0 if asyncio.run(measure(fleet, options)) else 1
        finally:
            fleet.stop()


if __name__ == "__main__":
    sys.exit(main())
