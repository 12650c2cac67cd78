"""The loads: `hostler bench` with a fixed number of requests, or with a fixed time. A load in which a request failed raises `Failed`."""

import json
import os
import resource
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ways import MODEL

# A load takes 2 to 20 s on a machine with nothing else to do; past this, something hangs. In seconds.
LOAD_SECONDS = 90


class Failed(Exception):
    """Something did not run as it must, whatever the time it took."""


@dataclass(frozen=True)
class Closed:
    """Clients that each ask for a completion again when they have their answer."""

    clients: int
    """At a time; as many requests are in flight until the last ones."""
    requests: int
    """In all. A number, not a time, so that every way does the same work."""
    output_tokens: int
    input_tokens: int = 16
    """A word of `hostler bench` has four bytes, so these are 64 bytes."""
    streams: bool = True

    def run(self, targets: list[str]) -> list[dict]:
        """Splits the load evenly over the targets and returns each one's figures."""
        share = len(targets)
        numbers = {"--concurrency": self.clients // share, "--requests": self.requests // share}
        lengths = {"--input-tokens": self.input_tokens, "--output-tokens": self.output_tokens, "--output-spread": 0}
        flags = [word for name, number in (numbers | lengths).items() for word in (name, str(number))]
        return sustained(targets, ["--api", "completions", "--warm-up", "0s", *flags, *([] if self.streams else ["--no-stream"])])


@dataclass(frozen=True)
class Chat:
    """Streamed answers to messages of about so many tokens: at a rate, at random times, or by so many clients."""

    seconds: float
    input_tokens: int
    output_tokens: int
    rate: float | None = None
    clients: int | None = None

    def run(self, targets: list[str]) -> list[dict]:
        """Splits the load evenly over the targets and returns each one's figures."""
        share = len(targets)
        pace = ("--rate", f"{self.rate / share:.3f}") if self.rate else ("--concurrency", str(self.clients // share))
        lengths = ("--input-tokens", str(self.input_tokens), "--output-tokens", str(self.output_tokens), "--ignore-eos")
        return sustained(targets, ["--warm-up", "1s", "--duration", f"{self.seconds}s", *pace, *lengths])


def sustained(targets: list[str], flags: list[str]) -> list[dict]:
    """Runs one `hostler bench sustained` for each target, all at once, and returns what each reports of all its requests."""
    with tempfile.TemporaryDirectory(prefix="hostler-bench-") as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(targets))]
        command = ["bench", "sustained", "--quiet", "--model", MODEL, *flags]
        together([[*command, "--target", target, "--json", str(file)] for target, file in zip(targets, files, strict=True)])
        reports = [json.loads(file.read_text())["targets"][0]["rounds"][0]["all"] for file in files]
    for report in reports:
        if report["failed"]:
            failures = ", ".join(f"{count} {how}" for how, count in report["failed"].items())
            raise Failed(f"of {report['requests']} requests some failed: {failures}")
    return reports


def together(commands: list[list[str]]) -> None:
    """Runs hostler with each of the arguments at the same time."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children: list[subprocess.Popen] = []
    try:
        for arguments in commands:
            # A session of its own, as all others have: Linux shares the CPUs out by session first.
            children.append(subprocess.Popen([os.environ["HOSTLER_BIN"], *arguments], start_new_session=True, **pipes))
        for child in children:
            try:
                said, _ = child.communicate(timeout=LOAD_SECONDS)
            except subprocess.TimeoutExpired:
                raise Failed(f"a load was not over after {LOAD_SECONDS} s") from None
            if child.returncode:
                raise Failed(f"the load generator exited {child.returncode}:\n{said.strip()}")
    finally:
        for child in children:
            child.kill()
            child.wait()


def spent_by_children() -> float:
    """CPU seconds of all processes that this one has started and seen end; load generators are the only ones meanwhile."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
