#!/usr/bin/env python3
"""Measures the CPU time that hostler's router takes for a request and for a streamed event, beside nginx.

The same load goes to the same two simulated engines in three ways: directly, through hostler, and through nginx.
README.md says how to run this and how to read what it prints. Timing never makes it fail; a request that fails does.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from figures import Bar, Run, table, verdicts
from ways import Direct, Hostler, Nginx, nginx_program

REPOSITORY = Path(__file__).resolve().parents[2]
# A load takes 2 to 7 s on a machine with nothing else to do; past this, something hangs. In seconds.
LOAD_SECONDS = 60

STARTED = time.monotonic()

Way = Direct | Hostler | Nginx


@dataclasses.dataclass(frozen=True)
class Load:
    """What the load generators send."""

    clients: int
    """At a time; as many requests are in flight until the last ones."""
    requests: int
    """In all. A number, not a time, so that every way does the same work."""
    max_tokens: int
    flags: tuple[str, ...] = ()

    def arguments(self, shares: int) -> list[str]:
        """Of one load generator out of so many that share the load."""
        numbers = {
            "--streams": self.clients // shares,
            "--requests": self.requests // shares,
            "--max-tokens": self.max_tokens,
        }
        return [*(word for name, number in numbers.items() for word in (name, str(number))), *self.flags]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One load, what is counted of it, and a shorter one that goes before."""

    name: str
    unit: str
    warm_up: Load
    measured: Load


def streams(number: int) -> Scenario:
    """Every client asks for one stream, all at once; an event each 100 ms for 6 s."""
    return Scenario(f"{number:,} streams", "event", Load(number, number, 2), Load(number, number, 60))


def saturated(name: str, clients: int, prompt_bytes: int, requests: int) -> Scenario:
    """Every client asks for one token at a time, again and again; on an idle machine for about 2 s."""
    flags = ("--no-stream", "--prompt-bytes", str(prompt_bytes))
    return Scenario(name, "request", Load(clients, requests // 10, 1, flags), Load(clients, requests, 1, flags))


# Engines that spend no time on tokens, with room for every prompt at once.
ENGINE_FLAGS = (
    *(
        "--sim-prefill-us",
        "0",
        "--sim-decode-us",
        "0",
        "--max-num-seqs",
        "1024",
        "--max-num-batched-tokens",
        "10000000",
    ),
    *("--max-model-len", "65536", "--num-gpu-blocks-override", "262144"),
)
# By the engines' step time in milliseconds.
SCENARIOS = {
    100: (streams(256), streams(1000)),
    1: (saturated("saturated, tiny body", 256, 64, 40_000), saturated("saturated, 100 kB body", 64, 100_000, 1_200)),
}
BARS = (Bar("saturated, tiny body", "request", 40), Bar("1,000 streams", "event", 14))


class Failed(Exception):
    """Something did not run as it must, whatever the time it took."""


def main() -> int:
    """Runs everything, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="how often each load runs (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run and the machine to this file")
    options = parser.parse_args()
    choose_binary()
    # A client and an upstream connection for each of 1,000 streams.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # An end from outside unwinds as a failure does, so that nothing stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not nginx_program():
        say("nginx is not installed, so its rows are missing (Debian, Ubuntu: apt-get install nginx-light)")
    about = machine()
    say(", ".join(f"{name} {value}" for name, value in about.items()))
    try:
        runs = [
            run for step_ms, scenarios in SCENARIOS.items() for run in measure(step_ms, scenarios, options.repetitions)
        ]
        check_events(runs)
    except (Failed, AssertionError, subprocess.TimeoutExpired) as failure:
        say(f"failed: {failure}")
        return 1
    about["load average after"] = load_average()
    met = verdicts(runs, BARS)
    report(runs, met, about)
    if options.json:
        document = {"machine": about, "runs": [dataclasses.asdict(run) for run in runs], "bars": met}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def choose_binary() -> None:
    """Settles which program is measured, for this process and for those that look at HOSTLER_BIN."""
    chosen = Path(os.environ.get("HOSTLER_BIN", REPOSITORY / "target" / "release" / "hostler")).resolve()
    if not chosen.is_file():
        sys.exit(f"{chosen} does not exist: run `cargo build --release`, or set HOSTLER_BIN")
    os.environ["HOSTLER_BIN"] = str(chosen)


def measure(step_ms: int, scenarios: tuple[Scenario, ...], repetitions: int) -> Iterator[Run]:
    """Starts the engines and all ways to them, and runs each scenario on each way, in alternating order."""
    with ExitStack() as stack:
        # Engines listen on Unix sockets below this folder, whose paths must stay short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostler-bench-", dir="/tmp")))
        hostler = Hostler(folder, ("--sim-step-ms", str(step_ms), *ENGINE_FLAGS))
        stack.callback(hostler.stop)
        # Their logs go with the folder.
        stack.push(lambda _, failure, __: say(hostler.logs()) if isinstance(failure, Exception) else None)
        ways: dict[str, Way] = {"direct": Direct(hostler.sockets), "hostler": hostler}
        if nginx_program():
            ways["nginx"] = Nginx(folder / "nginx", hostler.sockets)
            stack.callback(ways["nginx"].stop)
        for repetition in range(repetitions):
            for scenario in scenarios:
                for name in sorted(ways, reverse=repetition % 2 == 1):
                    say(f"{scenario.name}, {name}, {repetition + 1} of {repetitions}")
                    pids = {**ways[name].pids, "engines": hostler.engine_pids}
                    run_load(ways[name].targets, scenario.warm_up)
                    hostler.settle()
                    yield measured_run(scenario, name, repetition, ways[name].targets, pids)
                    hostler.settle()


def measured_run(scenario: Scenario, way: str, repetition: int, targets: list[str], pids: dict[str, list[int]]) -> Run:
    """One load, with the CPU time that each part took meanwhile."""
    before = {part: sum(map(cpu_seconds, numbers)) for part, numbers in pids.items()}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    reports = run_load(targets, scenario.measured)
    spent = {part: sum(map(cpu_seconds, numbers)) - before[part] for part, numbers in pids.items()}
    # The load generators are the only children that ended meanwhile.
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent["load"] = ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime
    units = sum(report["events" if scenario.unit == "event" else "requests"] for report in reports)
    return Run(
        scenario=scenario.name,
        way=way,
        repetition=repetition,
        unit=scenario.unit,
        units=units,
        seconds=max(report["seconds"] for report in reports),
        cpu_us={part: round(seconds * 1e6 / units, 2) for part, seconds in spent.items()},
        request_p50_ms=max(report["request_ms"]["p50"] for report in reports),
        request_p99_ms=max(report["request_ms"]["p99"] for report in reports),
    )


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads, those that have ended included.

    It is what utime and stime of /proc/PID/stat add up to, in nanoseconds instead of hundredths of a second. The
    number names the process's CPU clock as clock_getcpuclockid(3) does, which Python does not offer.
    """
    return time.clock_gettime((~pid << 3) | 2)


def run_load(targets: list[str], load: Load) -> list[dict]:
    """Splits one load evenly over the targets and returns what each load generator reports."""
    arguments = load.arguments(len(targets))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children: list[subprocess.Popen] = []
    try:
        for target in targets:
            command = [os.environ["HOSTLER_BIN"], "sim", "load", "--json", "--target", target, *arguments]
            # A session of its own, as all others have: Linux shares the CPUs out by session first.
            children.append(subprocess.Popen(command, start_new_session=True, **pipes))
        return [outcome(child) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def outcome(child: subprocess.Popen) -> dict:
    """What a load generator reports once it has ended; raises when any request failed."""
    said, complaint = child.communicate(timeout=LOAD_SECONDS)
    if child.returncode:
        raise Failed(f"the load generator exited {child.returncode}: {complaint.strip()}")
    report = json.loads(said)
    if report["succeeded"] != report["requests"]:
        failures = ", ".join(f"{count} {how}" for how, count in report["errors"].items() if count)
        raise Failed(f"of {report['requests']} requests some failed: {failures}")
    return report


def check_events(runs: list[Run]) -> None:
    """Every way must deliver every event of a scenario."""
    for scenario in {run.scenario for run in runs if run.unit == "event"}:
        counts = {(run.way, run.units) for run in runs if run.scenario == scenario}
        if len({units for _, units in counts}) != 1:
            raise Failed(f"{scenario}: the ways delivered different numbers of events: {sorted(counts)}")


def machine() -> dict[str, str]:
    """What a reader must know to compare figures."""
    models = [
        line.partition(":")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": f"{os.cpu_count()} x {models[0].strip() if models else platform.machine()}",
        "kernel": platform.release(),
        "tcp": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "hostler": version([os.environ["HOSTLER_BIN"], "--version"]),
    }
    if program := nginx_program():
        about["nginx"] = version([program, "-v"])
    return about | {"load average before": load_average()}


def version(command: list[str]) -> str:
    """The last word of what a program says of its version."""
    said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return (said.stdout + said.stderr).split()[-1]


def load_average() -> str:
    """Processes that wanted a CPU, on average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def report(runs: list[Run], met: list[dict], about: dict[str, str]) -> None:
    """The table and the bars."""
    print("\nCPU time for one unit in microseconds: median (lowest-highest)\n")
    print("\n".join(table(runs)))
    loads = f"{about['load average before']} before and {about['load average after']} after"
    print(f"\nload average {loads}, {os.cpu_count()} CPUs\n")
    for bar in met:
        word = "met" if bar["met"] else "MISSED"
        print(
            f"{bar['scenario']}: router {bar['measured_us']:.1f} us per {bar['unit']}, bar {bar['limit_us']} us: {word}"
        )


def say(line: str) -> None:
    """Progress, apart from the result, with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:4.0f}  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
