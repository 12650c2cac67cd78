"""What is measured of a way: each scenario is a load together with what is read of it. README.md has them as a table.

A scenario's `measure` returns figures by name. `cpu.PART` is CPU time for one unit in microseconds, of the processes between client and engine
(`router`, `agent`, `proxy`), of the `engines` and of the `load` generators; `rss.PART` and `idle.PART` are MB, `resting.PART` CPU in ms a
second; the others say what they are.
"""

import asyncio
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from loads import Chat, Closed, Failed, spent_by_children
from ways import MODEL, Direct, Way

Figures = dict[str, float]

# Engines that spend no time on tokens, with room for every prompt and every stream at once.
ENGINE_FLAGS = (
    *("--sim-prefill-us", "0", "--max-num-seqs", "4096", "--max-num-batched-tokens", "10000000"),
    *("--max-model-len", "131072", "--num-gpu-blocks-override", "262144"),
)
# Streams that wait, and how long all of them may take to be there, in seconds.
IDLE_STREAMS = 1000
IDLE_SECONDS = 30
# How long processes may go on after the last answer, and what one that rests may use: CPU for wall time, looked at so often, in seconds.
REST_SECONDS = 20
REST_SHARE = 0.05
REST_PAUSE = 0.1


@dataclass(frozen=True)
class Cost:
    """CPU time for an event, or for a request, under a fixed number of requests."""

    name: str
    unit: str
    """What is counted: `event` or `request`."""
    warm_up: Closed
    measured: Closed
    engines: tuple[str, ...]
    """Flags of the engines that it needs; scenarios with the same ones share them."""
    policies: bool
    """Whether a router's policy can matter: its other policy is measured, too."""
    direct: ClassVar[bool] = True
    """Whether it says something where nothing is between client and engine."""
    fresh: ClassVar[bool] = False
    """Whether every repetition starts all ways anew."""

    def measure(self, way: Way, _: Direct) -> Figures:
        """One load, with the CPU time that each part took for it until all of them were at rest."""
        self.warm_up.run(way.targets)
        way.settle()
        pids = {**way.parts, "engines": way.engines}
        wait_for_rest(pids)
        before, load_before = cpu_of(pids), spent_by_children()
        reports = self.measured.run(way.targets)
        # After 600 answers to prompts of 100 kB, router and agent read their KV events for one to two seconds more.
        wait_for_rest(pids)
        after, load_after = cpu_of(pids), spent_by_children()
        units = sum(events(report) if self.unit == "event" else report["requests"] for report in reports)
        seconds = max(report["seconds"] for report in reports)
        spent = {part: after[part] - before[part] for part in pids} | {"load": load_after - load_before}
        edge = spent.get("router", spent.get("proxy"))
        return {
            **{f"cpu.{part}": cpu * 1e6 / units for part, cpu in spent.items()},
            **({} if edge is None else {"share": edge / seconds}),
            "units": units,
            "per_second": units / seconds,
            "p50_ms": statistics.mean(report["e2e_ms"]["p50"] for report in reports),
            "p99_ms": statistics.mean(report["e2e_ms"]["p99"] for report in reports),
        }


@dataclass(frozen=True)
class Pinned:
    """The same with the router alone on the first CPU, and everything else on the others."""

    name: str
    cost: Cost
    engines: tuple[str, ...]
    policies: bool = True
    direct: ClassVar[bool] = False
    fresh: ClassVar[bool] = False

    def measure(self, way: Way, direct: Direct) -> Figures:
        """The load's figures; `share` says whether the router was what held it up."""
        cpus = os.sched_getaffinity(0)
        first, others = {min(cpus)}, cpus - {min(cpus)}
        edge = way.parts.get("router") or way.parts["proxy"]
        rest = [*way.parts.get("agent", []), *way.engines, os.getpid()]
        try:
            pin(edge, first)
            # Load generators inherit it from this process.
            pin(rest, others)
            return self.cost.measure(way, direct)
        finally:
            pin([*edge, *rest], cpus)


@dataclass(frozen=True)
class Latency:
    """Times of streamed answers at a low rate, and at half of what the way itself can do."""

    name: str
    engines: tuple[str, ...]
    low: Chat
    most: Chat
    half_seconds: float
    policies: bool = False
    direct: ClassVar[bool] = True
    fresh: ClassVar[bool] = False
    maxima: dict[str, float] = field(default_factory=dict)
    """Requests in a second that each way gave under as many clients as `most` has; measured once."""

    def measure(self, way: Way, direct: Direct) -> Figures:
        """Both rates; the half beside the same rate directly, since every way has its own."""
        figures = {f"low.{name}": value for name, value in times(self.low.run(way.targets)).items()}
        if way.name not in self.maxima:
            self.maxima[way.name] = sum(report["requests_per_second"] for report in self.most.run(way.targets))
            way.settle()
        if way is direct:
            return figures
        half = Chat(self.half_seconds, self.most.input_tokens, self.most.output_tokens, rate=self.maxima[way.name] / 2)
        beside = times(half.run(direct.targets))
        own = times(half.run(way.targets))
        figures |= {"most": self.maxima[way.name], "half.rate": half.rate}
        return figures | {f"half.{name}": value for name, value in own.items()} | {f"direct.{name}": value for name, value in beside.items()}


@dataclass(frozen=True)
class Footprint:
    """How soon a way answers after its start, and the memory that it needs at rest and with streams that wait."""

    name: str
    engines: tuple[str, ...]
    policies: bool = False
    direct: ClassVar[bool] = False
    fresh: ClassVar[bool] = True

    def measure(self, way: Way, _: Direct) -> Figures:
        """What it uses in the second second after its start, and with idle streams what its memory is more than that."""
        time.sleep(1)
        before = cpu_of(way.parts)
        time.sleep(1)
        after = cpu_of(way.parts)
        rest = {part: memory_mb(pids) for part, pids in way.parts.items()}
        waiting = asyncio.run(beside_idle_streams(way.targets[0], lambda: {part: memory_mb(pids) for part, pids in way.parts.items()}))
        return {
            "start_seconds": way.start_seconds,
            **{f"resting.{part}": (after[part] - before[part]) * 1000 for part in way.parts},
            **{f"rss.{part}": megabytes for part, megabytes in rest.items()},
            **{f"idle.{part}": (waiting[part] - rest[part]) * 1000 / IDLE_STREAMS for part in rest},
        }


@dataclass(frozen=True)
class Observed:
    """What it costs requests that somebody watches: CPU time for each, and times at a low rate."""

    name: str
    engines: tuple[str, ...]
    cost: Cost
    low: Chat
    policies: bool = False
    direct: ClassVar[bool] = False
    fresh: ClassVar[bool] = False

    def measure(self, way: Way, direct: Direct) -> Figures:
        """Both loads, one after the other."""
        figures = self.cost.measure(way, direct)
        return figures | {f"low.{name}": value for name, value in times(self.low.run(way.targets)).items()}


Scenario = Cost | Pinned | Latency | Footprint | Observed

STEPS_OF_100_MS = ("--sim-step-ms", "100", "--sim-decode-us", "0")
STEPS_OF_5_MS = ("--sim-step-ms", "5", "--sim-decode-us", "0")
STEPS_OF_2_MS = ("--sim-step-ms", "2", "--sim-decode-us", "0")
STEPS_OF_1_MS = ("--sim-step-ms", "1", "--sim-decode-us", "0")
# Each sequence makes a step longer: one request is answered at once, and a thousand streams get an event in two seconds.
SLOW_WHEN_FULL = ("--sim-step-ms", "1", "--sim-decode-us", "4000")


def streams(number: int) -> Cost:
    """Every client asks for one stream, all at once; an event each 100 ms for 4 s."""
    return Cost(f"events-{number}", "event", Closed(number, number, 2), Closed(number, number, 40), STEPS_OF_100_MS, policies=False)


def saturated(name: str, clients: int, input_tokens: int, requests: int) -> Cost:
    """Every client asks for one token at a time, again and again."""
    warm_up = Closed(clients, requests // 10, 1, input_tokens, streams=False)
    return Cost(name, "request", warm_up, Closed(clients, requests, 1, input_tokens, streams=False), STEPS_OF_1_MS, policies=True)


SCENARIOS: tuple[Scenario, ...] = (
    *(streams(number) for number in (64, 256, 1000, 2000)),
    saturated("requests-tiny", 256, 16, 20_000),
    saturated("requests-100kB", 64, 25_000, 600),
    Pinned("core", saturated("core", 256, 16, 10_000), STEPS_OF_1_MS),
    Latency("latency", STEPS_OF_5_MS, Chat(4, 128, 64, rate=100), Chat(3, 128, 64, clients=256), half_seconds=4),
    Footprint("footprint", SLOW_WHEN_FULL),
    Observed("observed", STEPS_OF_2_MS, saturated("observed", 256, 16, 20_000), Chat(8, 128, 16, rate=200)),
)


def events(report: dict) -> int:
    """Events with text: the first of each answer, and those that followed another."""
    return report["ttft_ms"]["count"] + report["itl_ms"]["count"]


def times(reports: list[dict]) -> Figures:
    """The quantiles that count, in milliseconds; of two halves of a load their mean."""
    wanted = {"ttft": "ttft_ms", "itl": "itl_ms", "late": "late_ms"}
    return {
        f"{name}_{quantile}": statistics.mean(report[key][quantile] for report in reports)
        for name, key in wanted.items()
        for quantile in ("p50", "p99")
    }


def cpu_of(parts: dict[str, list[int]]) -> dict[str, float]:
    """CPU seconds that the processes of each part have used so far."""
    return {part: sum(map(cpu_seconds, pids)) for part, pids in parts.items()}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads, those that have ended included.

    It is what utime and stime of /proc/PID/stat add up to, in nanoseconds instead of hundredths of a second. The
    number names the process's CPU clock as clock_getcpuclockid(3) does, which Python does not offer.
    """
    return time.clock_gettime((~pid << 3) | 2)


def wait_for_rest(parts: dict[str, list[int]]) -> None:
    """Waits until these processes together use next to no CPU; raises `Failed` when they go on."""
    deadline = time.monotonic() + REST_SECONDS
    used = sum(cpu_of(parts).values())
    while True:
        time.sleep(REST_PAUSE)
        earlier, used = used, sum(cpu_of(parts).values())
        if used - earlier < REST_SHARE * REST_PAUSE:
            return
        if time.monotonic() > deadline:
            raise Failed(f"{', '.join(parts)}: still busy {REST_SECONDS} s after the last answer")


def memory_mb(pids: list[int]) -> float:
    """What these processes have in memory."""
    fields = (line.split() for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(words[1]) for words in fields if words[0] == "VmRSS:") * 1024 / 1e6


def pin(pids: list[int], cpus: set[int]) -> None:
    """Lets the processes run on these CPUs only, each thread of them."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended while we looked
                os.sched_setaffinity(int(thread.name), cpus)


async def beside_idle_streams(url: str, look: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Opens streams, waits until each has had an event and a little longer, and returns what `look` sees."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": "Take your time.", "max_tokens": 1000, "stream": True})
    request = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"

    async def begin() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request.encode())
        await reader.readuntil(b"data: ")
        return writer

    try:
        async with asyncio.timeout(IDLE_SECONDS):
            writers = await asyncio.gather(*(begin() for _ in range(IDLE_STREAMS)))
            await asyncio.sleep(0.5)
    except (OSError, EOFError, TimeoutError) as failure:
        raise Failed(f"{IDLE_STREAMS} idle streams: {failure!r}") from failure
    seen = look()
    for writer in writers:
        writer.close()
    return seen
