"""What run.py measured, as medians with their ranges: the table it prints and the project's bars.

Nothing here runs or waits; a `Run` is one measured load on one way.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Run:
    """One measured load."""

    scenario: str
    way: str
    repetition: int
    unit: str
    """What was counted: `event` or `request`."""
    units: int
    seconds: float
    cpu_us: dict[str, float]
    """CPU time for one unit, in microseconds, by part: router, agent, nginx, engines, load."""
    request_p50_ms: float
    request_p99_ms: float

    @property
    def proxy_us(self) -> float | None:
        """CPU of what stands at the edge: the router, or nginx; None where nothing does."""
        return self.cpu_us.get("router", self.cpu_us.get("nginx"))

    @property
    def path_us(self) -> float | None:
        """CPU of all between client and engine: the router with the agent, or nginx."""
        return None if self.proxy_us is None else self.proxy_us + self.cpu_us.get("agent", 0)


@dataclasses.dataclass(frozen=True)
class Bar:
    """The most CPU time that the router may take for one unit."""

    scenario: str
    unit: str
    limit_us: float


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median and the range around it."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """The median and range of the values that there are; None without any."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


# With their ranges, as what is compared.
COLUMNS: dict[str, Callable[[Run], float | None]] = {
    "router or nginx": lambda run: run.proxy_us,
    "agent": lambda run: run.cpu_us.get("agent"),
    "together": lambda run: run.path_us,
}
# As medians only.
CONTEXT: dict[str, Callable[[Run], float]] = {
    "engines": lambda run: run.cpu_us["engines"],
    "load": lambda run: run.cpu_us["load"],
}


def table(runs: list[Run]) -> list[str]:
    """One row for each scenario and way, in the order of the runs."""
    rows = [["scenario", "way", "per", *COLUMNS, "of nginx", *CONTEXT, "per second", "p50 ms", "p99 ms"]]
    for scenario in dict.fromkeys(run.scenario for run in runs):
        for way in sorted({run.way for run in runs if run.scenario == scenario}):
            own = select(runs, scenario, way)
            ratio = ratios(runs, scenario, way)
            rows.append(
                [
                    scenario,
                    way,
                    own[0].unit,
                    *(cell(spread(map(value, own))) for value in COLUMNS.values()),
                    " / ".join(f"{part:.2f}" for part in ratio) if ratio else "-",
                    *(f"{statistics.median(map(value, own)):,.1f}" for value in CONTEXT.values()),
                    f"{statistics.median(run.units / run.seconds for run in own):,.0f}",
                    f"{statistics.median(run.request_p50_ms for run in own):.1f}",
                    f"{statistics.median(run.request_p99_ms for run in own):.1f}",
                ]
            )
    return aligned(rows, words=3)


def cell(figure: Spread | None) -> str:
    """A spread as the table shows it, or that there is none."""
    return f"{figure.median:.1f} ({figure.low:.1f}-{figure.high:.1f})" if figure else "-"


def aligned(rows: list[list[str]], words: int) -> list[str]:
    """The rows as lines of columns: the first `words` to the left, figures to the right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([text.ljust(width) if number < words else text.rjust(width) for text in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def select(runs: list[Run], scenario: str, way: str) -> list[Run]:
    """The repetitions of one row."""
    return [run for run in runs if (run.scenario, run.way) == (scenario, way)]


def ratios(runs: list[Run], scenario: str, way: str) -> tuple[float, float] | None:
    """CPU against nginx's in the same run: of the edge alone, and of all between client and engine."""
    own, nginx = select(runs, scenario, way), select(runs, scenario, "nginx")
    reference = spread(run.proxy_us for run in nginx)
    alone, whole = spread(run.proxy_us for run in own), spread(run.path_us for run in own)
    if way == "nginx" or not (reference and alone and whole):
        return None
    return alone.median / reference.median, whole.median / reference.median


def verdicts(runs: list[Run], bars: Iterable[Bar]) -> list[dict]:
    """Each bar with the router's median and whether it was met."""
    found = []
    for bar in bars:
        if measured := spread(run.proxy_us for run in select(runs, bar.scenario, "hostler")):
            median = round(measured.median, 2)
            found.append(dataclasses.asdict(bar) | {"measured_us": median, "met": median <= bar.limit_us})
    return found
