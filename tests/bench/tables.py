"""What was measured as tables, for a terminal and for a page.

A cell is the median of the repetitions and their range; hostler has a row for its router, for its agent, and for both together.
"""

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from figures import Run, Runs, Spread, at_edge, figure, on_path

Value = Callable[[Run], float | None]
QUANTILES = {"first p50": "ttft_p50", "first p99": "ttft_p99", "between p50": "itl_p50", "between p99": "itl_p99"}
COSTS = ("events-64", "events-256", "events-1000", "events-2000", "requests-tiny", "requests-100kB")
TITLES = {
    **{f"events-{number}": f"{number:,} streams" for number in (64, 256, 1000, 2000)},
    "requests-tiny": "tiny body",
    "requests-100kB": "100 kB body",
}


@dataclass(frozen=True)
class Table:
    """Rows below a title; nothing in it is computed any more."""

    title: str
    about: str
    """What the figures are, for somebody who has not seen the lab."""
    rows: list[list[str]]
    """The first one names the columns."""
    words: int = 1
    """So many columns are words, the others figures."""

    def text(self) -> str:
        """For a terminal: words to the left, figures to the right."""
        columns = []
        for number, column in enumerate(zip(*self.rows, strict=True)):
            width = max(map(len, column))
            columns.append([cell.ljust(width) if number < self.words else cell.rjust(width) for cell in column])
        return "\n".join([self.title, *("  ".join(line).rstrip() for line in zip(*columns, strict=True))])

    def markdown(self) -> str:
        """For a page: a section of its own."""
        return "\n\n".join([f"## {self.title}", textwrap.fill(self.about, 100), self.grid()])

    def grid(self) -> str:
        """The rows alone, for a page."""
        first, *others = ("| " + " | ".join(row) + " |" for row in self.rows)
        rule = "|" + "".join(" --- |" if number < self.words else " ---: |" for number in range(len(self.rows[0])))
        return "\n".join([first, rule, *others])


def tables(runs: Runs) -> list[Table]:
    """Every table that there are figures for."""
    return [table for make in (events, requests, core, low_latency, half_latency, footprint, observed, context) if (table := make(runs))]


def events(runs: Runs) -> Table | None:
    """CPU for a streamed event."""
    about = (
        "CPU time in microseconds for one event. All streams are open at once; every engine gives one event to each of its streams every 100 "
        "ms. The figure after the range is the share of nginx's median."
    )
    return costs(runs, "CPU time for a streamed event", about, COSTS[:4])


def requests(runs: Runs) -> Table | None:
    """CPU for a request."""
    about = (
        "CPU time in microseconds for one request without streaming and its answer of one token. 256 clients have prompts of 64 bytes, 64 "
        "clients have prompts of 100 kB; each sends its next request as soon as it has its answer. The figure after the range is the share of"
        " nginx's median."
    )
    return costs(runs, "CPU time for a request", about, COSTS[4:])


def costs(runs: Runs, title: str, about: str, scenarios: Iterable[str]) -> Table | None:
    """A column for each scenario that was measured."""
    scenarios = [name for name in scenarios if runs.ways(name)]
    rows = [["", *(TITLES[name] for name in scenarios)]]
    for label, way, value in subjects(runs, scenarios, "cpu"):
        row = []
        for name in scenarios:
            found, reference = runs.spread(name, way, value), runs.median(name, "nginx", at_edge("cpu"))
            share = f" · {found.median / reference:.2f}" if found and reference and way != "nginx" else ""
            row.append(cell(found) + share)
        rows.append([label, *row])
    return table(title, about, rows)


def core(runs: Runs) -> Table | None:
    """Requests in a second through one CPU."""
    about = (
        "The tiny requests again, with the router (or the peer) alone on one CPU and everything else on the others. `used` is how much of its"
        " CPU it used. Well below 1, the engines, the agent and the load generator were the limit. `at all of it` is what the same cost would"
        " give with nothing else in the way: requests a second divided by the part used."
    )
    rows = [["", "requests/s", "used", "at all of it", "held up by"]]
    for way in runs.ways("core"):
        used = runs.median("core", way, figure("share"))
        rows.append(
            [
                way,
                cell(runs.spread("core", way, figure("per_second"))),
                cell(runs.spread("core", way, figure("share"))),
                cell(runs.spread("core", way, at_full_core)),
                "itself" if used >= 0.9 else "the rest",
            ]
        )
    return table("Requests through one core", about, rows)


def at_full_core(run: Run) -> float | None:
    """Requests in a second that would take the whole of one CPU."""
    return run.figures["per_second"] / run.figures["share"]


def low_latency(runs: Runs) -> Table | None:
    """What a way adds when little is going on."""
    about = (
        "Streamed chats of about 128 tokens in and 64 out, 100 a second at random times, engines with steps of 5 ms. The columns are "
        "milliseconds to the first token and between tokens, p50 and p99. `direct` is the time itself; the others are what they add to the "
        "same quantile in the same repetition. The load generator knows times to 3 %, so less than some 0.2 ms is nothing. `late` is how late"
        " it began requests itself (p99), which counts as waiting."
    )
    rows = [["", *QUANTILES, "late"]]
    for way in runs.ways("latency"):
        values = [_beside_direct(runs, way, f"low.{name}") for name in QUANTILES.values()]
        rows.append([way, *(cell(runs.spread("latency", way, value), digits=2) for value in (*values, figure("low.late_p99")))])
    return table("Latency at a low rate", about, rows)


def half_latency(runs: Runs) -> Table | None:
    """What a way adds at half of what it can do."""
    about = (
        "The same at half of what the way itself gave 256 clients (`chats/s`). The figures are what it adds to the engines alone at that same"
        " rate, which were measured just before and have columns of their own. At this rate load generator, engines and router share a busy "
        "machine: p99 is mostly the wait for a CPU."
    )
    rows = [["", "chats/s", *QUANTILES, "direct: first p99", "between p99", "late"]]
    for way in runs.ways("latency"):
        if way != "direct":
            added = [added_at_half(name) for name in QUANTILES.values()]
            values = [figure("half.rate"), *added, figure("direct.ttft_p99"), figure("direct.itl_p99"), figure("half.late_p99")]
            rows.append([way, *(cell(runs.spread("latency", way, value)) for value in values)])
    return table("Added latency at half of the way's maximum", about, rows)


def added_at_half(name: str) -> Value:
    """What a way adds to that quantile, over the engines alone at the same rate."""
    return lambda run: run.figures[f"half.{name}"] - run.figures[f"direct.{name}"] if f"half.{name}" in run.figures else None


def _beside_direct(runs: Runs, way: str, name: str) -> Value:
    """What a way adds to that figure of `direct` in the same repetition; of `direct` the figure itself."""
    direct = {run.repetition: run.figures[name] for run in runs.all if (run.scenario, run.way) == ("latency", "direct")}
    if way == "direct":
        return figure(name)
    return lambda run: run.figures[name] - direct[run.repetition] if run.repetition in direct else None


def footprint(runs: Runs) -> Table | None:
    """Memory and start."""
    about = (
        "Resident memory in MB two seconds after the start, and how much more it is with 1,000 open streams that wait for their next event, "
        "when each has had one. `start` is the time from the start until a request through it is answered. Hostler's includes the start of "
        "its agent and of both engines; the others find engines that run."
    )
    rows = [["", "MB at rest", "MB per 1,000 idle streams", "CPU at rest, ms/s", "start, seconds"]]
    kinds = [subjects(runs, ["footprint"], kind) for kind in ("rss", "idle", "resting")]
    for alike in zip(*kinds, strict=True):
        label, way, _ = alike[0]
        start = cell(runs.spread("footprint", way, figure("start_seconds")), digits=2) if label in (way, f"{way}, both") else ""
        rows.append([label, *(cell(runs.spread("footprint", way, value)) for _, _, value in alike), start])
    return table("Memory and start", about, rows)


def observed(runs: Runs) -> Table | None:
    """What it costs to be watched."""
    about = (
        "Hostler alone, and with its tracing and its page in use. CPU time of the router in microseconds for one of the tiny requests of above, "
        "and its share of the same without; milliseconds to the first token of 200 streamed chats a second, p50 and p99. Every request has a "
        "trace, which is the default where a collector is named. One collector takes connections and never answers, nobody listens at the other: "
        "then spans are dropped. `make guard` counts what traces cost that are taken."
    )
    rows = [["", "router", "of it alone", "first p50", "first p99"]]
    alone = runs.median("observed", "hostler", figure("cpu.router"))
    for way in runs.ways("observed"):
        cpu = runs.median("observed", way, figure("cpu.router"))
        times = (cell(runs.spread("observed", way, figure(f"low.ttft_{quantile}")), digits=2) for quantile in ("p50", "p99"))
        share = number(cpu / alone) if cpu and alone else "-"
        rows.append([way, cell(runs.spread("observed", way, figure("cpu.router"))), share, *times])
    return table("What it costs to be watched", about, rows)


def context(runs: Runs) -> Table | None:
    """What else happened meanwhile, to judge the figures by."""
    about = (
        "Medians, to judge the other tables by: CPU time of both engines and of the load generator for one event or request, how many of "
        "these there were in a second, the time of whole requests in milliseconds, and how many CPUs the router or the peer used. Where "
        "engines and load differ between ways, so did the machine, or a way made them work differently. All share the CPUs, so requests a "
        "second are no limit of a router."
    )
    columns = {"engines": "cpu.engines", "load": "cpu.load", "per second": "per_second", "p50": "p50_ms", "p99": "p99_ms", "CPUs": "share"}
    rows = [["", "", *columns]]
    for scenario in COSTS:
        for way in runs.ways(scenario):
            found = [runs.median(scenario, way, figure(name)) for name in columns.values()]
            rows.append([TITLES[scenario], way, *("-" if value is None else number(value) for value in found)])
    return table("Beside it", about, rows, words=2)


def subjects(runs: Runs, scenarios: Iterable[str], kind: str) -> list[tuple[str, str, Value]]:
    """The rows of a table of parts: label, way, and the figure of that kind."""
    found = []
    for way in runs.ways(*scenarios):
        if way == "hostler":
            parts = ("router", figure(f"{kind}.router")), ("agent", figure(f"{kind}.agent")), ("both", on_path(kind))
            found += [(f"hostler, {part}", way, value) for part, value in parts]
        elif way != "direct":
            found.append((way, way, at_edge(kind)))
    return found


def table(title: str, about: str, rows: list[list[str]], words: int = 1) -> Table | None:
    """A table, if it has rows."""
    return Table(title, about, rows, words) if len(rows) > 1 else None


def cell(found: Spread | None, digits: int | None = None) -> str:
    """A spread as tables show it, or that there is none."""
    if not found:
        return "-"
    median, low, high = (number(value, digits) for value in (found.median, found.low, found.high))
    return f"{median} ({low} to {high})" if low != high else median


def number(value: float, digits: int | None = None) -> str:
    """With three figures or so, unless told."""
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
