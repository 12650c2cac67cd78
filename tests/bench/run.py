#!/usr/bin/env python3
"""Measures what hostler costs between client and engine, beside other routers and proxies.

The same load goes to the same simulated engines directly, through hostler, and through each peer. README.md says how to run this and how to
read what it prints. Timing never makes it fail; a request of hostler's that fails does.
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from figures import Runs
from lab import NAMES, Lab, say
from loads import Failed
from page import bars_table, page
from record import Record, hostler_version, load_average, machine
from scenarios import SCENARIOS
from tables import tables

REPOSITORY = Path(__file__).resolve().parents[2]
# `--quick`: what can be had without installing anything, and the scenarios that show most.
QUICK_WAYS = ["direct", "hostler", "nginx"]
QUICK_SCENARIOS = ["events-256", "events-1000", "requests"]


def main() -> int:
    """Runs everything, prints the tables, and returns the exit code."""
    options = parse()
    try:
        record, failure = (together(options.merge), None) if options.merge else measure(options)
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        sys.exit(f"{problem}")
    if options.json:
        record.write(options.json)
    show(record)
    if failure:
        say(f"failed: {failure}")
        return 1
    if options.markdown:
        options.markdown.write_text(page(record))
    return 0


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(scenario.name for scenario in SCENARIOS)
    parser.add_argument("--ways", type=words, metavar="A,B", help=f"what to compare; all of: {', '.join(NAMES)}")
    parser.add_argument("--scenarios", type=words, metavar="A,B", help=f"what to measure, by names or how they begin; all of: {names}")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="how often each is measured (3)")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK_WAYS)} and {', '.join(QUICK_SCENARIOS)}; installs nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run and the machine to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page to this file")
    parser.add_argument("--from", type=Path, nargs="+", metavar="FILE", dest="merge", help="measure nothing; put these files of --json together")
    options = parser.parse_args()
    options.ways = options.ways or (QUICK_WAYS if options.quick else list(NAMES))
    options.scenarios = options.scenarios or (QUICK_SCENARIOS if options.quick else [""])
    if unknown := set(options.ways) - set(NAMES):
        parser.error(f"no such way: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if unknown := [word for word in options.scenarios if not any(scenario.name.startswith(word) for scenario in SCENARIOS)]:
        parser.error(f"no such scenario: {', '.join(unknown)}; there are {names}")
    if options.repetitions < 1:
        parser.error("at least one repetition")
    return options


def words(text: str) -> list[str]:
    """A list as one argument."""
    return [word.strip() for word in text.split(",") if word.strip()]


def measure(options: argparse.Namespace) -> tuple[Record, str | None]:
    """Runs the scenarios on the ways. What ends a run early comes with what had been measured until then."""
    choose_binary()
    # A client and an upstream connection for each of 2,000 streams.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # An end from outside unwinds as a failure does, so that nothing stays behind and what was measured is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lab = Lab(options.ways, options.repetitions, may_install=not options.quick)
    lab.prepare()
    record = Record(machine(), {"hostler": hostler_version(), **lab.versions}, lab.left_out, [], lab.runs)
    say(", ".join(f"{name} {value}" for name, value in (record.machine | record.versions).items()))
    before, failure = load_average(), None
    try:
        lab.measure([scenario for scenario in SCENARIOS if scenario.name.startswith(tuple(options.scenarios))])
        lab.check_events()
    except (Failed, AssertionError, OSError, subprocess.SubprocessError) as problem:
        failure = str(problem)
    except KeyboardInterrupt:
        failure = "interrupted"
    record.load_averages.append(f"{before} and {load_average()}")
    return record, failure


def together(files: list[Path]) -> Record:
    """What was measured in parts."""
    first, *others = (Record.read(file) for file in files)
    for other in others:
        first.add(other)
    # Parts may have had them in another order.
    first.runs.sort(key=lambda run: NAMES.index(run.way))
    return first


def choose_binary() -> None:
    """Settles which program is measured, for this process and for those that look at HOSTLER_BIN."""
    chosen = Path(os.environ.get("HOSTLER_BIN", REPOSITORY / "target" / "release" / "hostler")).resolve()
    if not chosen.is_file():
        sys.exit(f"{chosen} does not exist: run `cargo build --release`, or set HOSTLER_BIN")
    os.environ["HOSTLER_BIN"] = str(chosen)


def show(record: Record) -> None:
    """The tables and the bars, and what is missing."""
    runs = Runs(record.runs)
    for table in [*tables(runs), bars_table(runs)]:
        print(f"\n{table.text()}")
    for what, why in sorted(record.left_out.items()):
        print(f"\nleft out, or not as it should be: {what}: {why}")


if __name__ == "__main__":
    sys.exit(main())
