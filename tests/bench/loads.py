"""What load generators send, and what they say of it: the closed loop of `hostler sim load`, whose prompts have exact sizes, and
`hostler bench`, which begins requests at their times. A load in which a request failed raises `Failed`.
"""

import itertools
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
# Prompts of `hostler sim load` are numbered; each load has numbers of its own, so that none finds an earlier one's prompts in a cache.
PROMPTS = itertools.count(step=1_000_000)


class Failed(Exception):
    """Something did not run as it must, whatever the time it took."""


@dataclass(frozen=True)
class Closed:
    """Clients that each ask again when they have their answer."""

    clients: int
    """At a time; as many requests are in flight until the last ones."""
    requests: int
    """In all. A number, not a time, so that every way does the same work."""
    max_tokens: int
    prompt_bytes: int = 64
    streams: bool = True

    def run(self, targets: list[str]) -> list[dict]:
        """Splits the load evenly over the targets and returns what each load generator reports."""
        numbers = {
            "--streams": self.clients // len(targets),
            "--requests": self.requests // len(targets),
            "--max-tokens": self.max_tokens,
            "--prompt-bytes": self.prompt_bytes,
        }
        flags = [word for name, number in numbers.items() for word in (name, str(number))]
        flags += ["--model", MODEL, *([] if self.streams else ["--no-stream"])]
        said = together([["sim", "load", "--json", "--target", target, "--first-prompt", str(next(PROMPTS)), *flags] for target in targets])
        reports = [json.loads(text) for text in said]
        for report in reports:
            if report["succeeded"] != report["requests"]:
                failures = ", ".join(f"{count} {how}" for how, count in report["errors"].items() if count)
                raise Failed(f"of {report['requests']} requests some failed: {failures}")
        return reports


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
        with tempfile.TemporaryDirectory(prefix="hostler-bench-") as folder:
            files = [Path(folder) / f"{number}.json" for number in range(share)]
            flags = ("--quiet", "--model", MODEL, "--warm-up", "1s", "--duration", f"{self.seconds}s", *pace, *lengths)
            together([["bench", "sustained", "--target", target, "--json", str(file), *flags] for target, file in zip(targets, files, strict=True)])
            reports = [json.loads(file.read_text())["targets"][0]["rounds"][0]["all"] for file in files]
        for report in reports:
            if report["failed"]:
                failures = ", ".join(f"{count} {how}" for how, count in report["failed"].items())
                raise Failed(f"of {report['requests']} requests some failed: {failures}")
        return reports


def together(commands: list[list[str]]) -> list[str]:
    """Runs hostler with each of the arguments at the same time and returns what each printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children: list[subprocess.Popen] = []
    try:
        for arguments in commands:
            # A session of its own, as all others have: Linux shares the CPUs out by session first.
            children.append(subprocess.Popen([os.environ["HOSTLER_BIN"], *arguments], start_new_session=True, **pipes))
        said = []
        for child in children:
            try:
                text, complaint = child.communicate(timeout=LOAD_SECONDS)
            except subprocess.TimeoutExpired:
                raise Failed(f"a load was not over after {LOAD_SECONDS} s") from None
            if child.returncode:
                raise Failed(f"the load generator exited {child.returncode}: {complaint.strip()}")
            said.append(text)
        return said
    finally:
        for child in children:
            child.kill()
            child.wait()


def spent_by_children() -> float:
    """CPU seconds of all processes that this one has started and seen end; load generators are the only ones meanwhile."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
