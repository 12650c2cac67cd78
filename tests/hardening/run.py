#!/usr/bin/env python3
"""Attacks a running service over HTTP/1.1 and HTTP/2 and prints one table: case, expected, seen. Exits 1 when a row fails.

After each case the service still runs and has not panicked, another client is answered promptly, no request is left in flight, no engine
was lost, and the process has not grown beyond the case's bound. Any answer of 500 or more fails the case.
"""

import argparse
import dataclasses
import json
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import browser
import document
import floods
import readings
import sizes
import slow
import smuggling
from cases import Case
from target import Target


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much and how long."""

    name: str
    head: float
    """Seconds that a head may take, and a body, and a client that takes nothing."""
    body: float
    stall: float
    clients: int
    """Clients at once that are slow."""
    connections: int
    """Connections that are held open."""
    flood: int
    """Frames of a flood."""
    document: int
    """Seconds of requests made from the OpenAPI document."""


QUICK = Scale("quick", head=0.6, body=0.8, stall=0.8, clients=100, connections=1500, flood=10_000, document=6)
FULL = Scale("full", head=3, body=4, stall=4, clients=1000, connections=10_000, flood=100_000, document=100)


@dataclasses.dataclass
class Row:
    """What became of a case."""

    case: Case
    seen: str
    failure: str
    seconds: float
    resident: int
    peak: int

    def __str__(self) -> str:
        """A line of the table."""
        verdict = "FAIL" if self.failure else "ok"
        seen = self.failure or self.seen
        name = f"{self.case.group}: {self.case.name}"
        figures = f"{self.seconds:6.1f} s  {self.peak:5} MiB (+{max(0, self.peak - self.resident)})"
        return f"{verdict:4}  {name:62.62}  {self.case.expected:34.34}  {figures:28}  {seen.splitlines()[0] if seen else '':.110}"


def perform(case: Case, target: Target) -> Row:
    """Runs one case and looks at what is left."""
    target.begin()
    begun, seen, failure = time.monotonic(), "", ""
    try:
        seen = case.run(target)
        target.is_sound()
        target.answers()
        target.wait_idle()
        assert not re.search(r"(?<!\d)5\d\d(?!\d)[×+,]|×5\d\d", seen), f"an answer of 500 or more: {seen}"
    except (AssertionError, OSError) as error:
        failure = str(error) or type(error).__name__
    resident, peak = target.resident, target.peak() if target.process.child.poll() is None else 0
    if not failure and peak - resident > case.growth:
        failure = f"it grew by {peak - resident} MiB, more than {case.growth}: {seen}"
    return Row(case, seen, failure, time.monotonic() - begun, resident, peak)


def rows(scale: Scale, wanted: str, requests: str | None) -> Iterator[Row]:
    """Starts the services and runs the cases one after the other."""
    all_cases = [*smuggling.cases(), *browser.cases(), *readings.cases()]
    all_cases += [*sizes.cases(scale), *slow.cases(scale), *floods.cases(scale)]
    all_cases += document.cases(scale, requests)
    chosen = [case for case in all_cases if re.search(wanted, f"{case.group}: {case.name}")]
    limits = ["--header-timeout", f"{scale.head}s", "--body-timeout", f"{scale.body}s"]
    limits += ["--keep-alive", f"{4 * scale.stall}s", "--max-buffered-body-bytes", str(sizes.READING_BYTES)]
    limits += ["--max-body-bytes", str(sizes.READING_BYTES // 4)]
    for inflates, keyed in ((False, False), (True, False), (False, True)):
        mine = [case for case in chosen if (case.inflates, case.keyed) == (inflates, keyed)]
        if not mine:
            continue
        target = Target(*limits, *(["--decompress-bodies"] if inflates else []), stall=scale.stall, keyed=keyed)
        try:
            restarts = target.restarts()
            for case in mine:
                row = perform(case, target)
                yield row
                if target.process.child.poll() is not None:
                    break
            else:
                assert target.restarts() == restarts, "an engine was started anew"
        finally:
            target.stop()


def main() -> int:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="at most 40 s: shorter limits, fewer clients, a few seconds of the document")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose `group: name` this matches")
    parser.add_argument("--connections", type=int, help="connections that are held open (10 000; with --quick 1 500)")
    parser.add_argument("--document-seconds", type=int, help="how long requests are made from the OpenAPI document (100; with --quick 6)")
    parser.add_argument("--schemathesis", help="the `st` program; without it that row fails")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    if options.connections:
        scale = dataclasses.replace(scale, connections=options.connections)
    if options.document_seconds is not None:
        scale = dataclasses.replace(scale, document=options.document_seconds)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    begun, seen = time.monotonic(), []
    for row in rows(scale, options.only, options.schemathesis):
        print(row, flush=True)
        seen.append(row)
    failed = [row for row in seen if row.failure]
    for row in failed:
        print(f"\n{row.case.group}: {row.case.name}\n  expected {row.case.expected}\n  {row.failure}")
    peak = max((row.peak for row in seen), default=0)
    print(f"\n{len(seen) - len(failed)} of {len(seen)} as expected in {time.monotonic() - begun:.0f} s ({scale.name}); peak {peak} MiB")
    if options.json:
        fields = ({"case": f"{row.case.group}: {row.case.name}", "expected": row.case.expected} | dataclasses.asdict(row) for row in seen)
        options.json.write_text(json.dumps([{**row, "case": row["case"]["name"]} for row in fields], indent=1, default=str))
    return 1 if failed or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
