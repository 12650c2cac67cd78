"""What was measured, as medians with their ranges. Nothing here runs or waits."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Run:
    """One scenario on one way, once."""

    scenario: str
    way: str
    repetition: int
    figures: dict[str, float]
    """By the names that scenarios.py gives them."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median and the range around it."""

    median: float
    low: float
    high: float


class Runs:
    """All runs, asked for by scenario and way."""

    def __init__(self, runs: Iterable[Run]):
        """Of one measurement, or of several that were put together."""
        self.all = list(runs)

    def ways(self, *scenarios: str) -> list[str]:
        """The ways that have a run in one of the scenarios, in the order of their first."""
        return list(dict.fromkeys(run.way for run in self.all if run.scenario in scenarios))

    def spread(self, scenario: str, way: str, value: Callable[[Run], float | None]) -> Spread | None:
        """The median and range of what `value` says of each repetition; None where it says nothing."""
        runs = [run for run in self.all if (run.scenario, run.way) == (scenario, way)]
        known = [found for run in runs if (found := value(run)) is not None]
        return Spread(statistics.median(known), min(known), max(known)) if known else None

    def median(self, scenario: str, way: str, value: Callable[[Run], float | None]) -> float | None:
        """The median alone."""
        found = self.spread(scenario, way, value)
        return found.median if found else None


def figure(name: str) -> Callable[[Run], float | None]:
    """The figure of that name."""
    return lambda run: run.figures.get(name)


def total(*names: str) -> Callable[[Run], float | None]:
    """The sum of the figures of these names that a run has."""

    def value(run: Run) -> float | None:
        found = [run.figures[name] for name in names if name in run.figures]
        return sum(found) if found else None

    return value


def at_edge(kind: str) -> Callable[[Run], float | None]:
    """The figure of what stands between client and engine at the edge: hostler's router, or a peer."""
    return total(f"{kind}.router", f"{kind}.proxy")


def on_path(kind: str) -> Callable[[Run], float | None]:
    """The figure of all between client and engine: hostler's router and agent, or a peer."""
    return total(f"{kind}.router", f"{kind}.agent", f"{kind}.proxy")
