"""What the project wants of its speed, as ratios within one run, and whether it was met. Nothing here fails a run."""

from collections.abc import Iterator
from dataclasses import dataclass

from figures import Runs, at_edge, figure, on_path
from peers import PEERS
from tables import added_at_half, at_full_core, number


@dataclass(frozen=True)
class Bar:
    """One thing that is wanted."""

    what: str
    limit: float
    measured: float | None
    """None when the run does not say."""
    unit: str = ""
    at_least: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it was; None when nobody knows."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def row(self) -> list[str]:
        """As tables show it."""
        sign = "≥" if self.at_least else "≤"
        measured = "-" if self.measured is None else f"{number(self.measured)}{self.unit}"
        word = {True: "met", False: "**missed**", None: "not measured"}[self.met]
        return [self.what + (f" ({self.note})" if self.note else ""), f"{sign} {number(self.limit)}{self.unit}", measured, word]


def bars(runs: Runs) -> list[Bar]:
    """All of them, in the order of the project's list."""
    return [*_streaming(runs), *_requests(runs), *_rest(runs)]


def _streaming(runs: Runs) -> Iterator[Bar]:
    event = "CPU per event at 1,000 streams"
    router = runs.median("events-1000", "hostler", figure("cpu.router"))
    both = runs.median("events-1000", "hostler", on_path("cpu"))
    nginx = runs.median("events-1000", "nginx", at_edge("cpu"))
    peer, cpu = _best_router(runs, "events-1000", affinity=False)
    yield Bar(f"{event}: router, of nginx", 0.6, _ratio(router, nginx))
    yield Bar(f"{event}: router, of the best Rust router", 0.5, _ratio(router, cpu), note=peer)
    yield Bar(f"{event}: router and agent, of nginx", 1, _ratio(both, nginx))


def _requests(runs: Runs) -> Iterator[Bar]:
    request = "CPU per tiny request"
    router = runs.median("requests-tiny", "hostler", figure("cpu.router"))
    peer, cpu = _best_router(runs, "requests-tiny", affinity=True)
    yield Bar(f"{request}: router, of nginx", 1.5, _ratio(router, runs.median("requests-tiny", "nginx", at_edge("cpu"))))
    yield Bar(f"{request}: router, of the best Rust router with affinity", 0.25, _ratio(router, cpu), note=peer)
    share = runs.median("core", "hostler", figure("share"))
    through = at_full_core if share is not None and share < 0.9 else figure("per_second")
    note = f"by its cost: it used {share:.2f} of its core" if through is at_full_core else ""
    yield Bar("tiny requests a second through one router core", 45_000, runs.median("core", "hostler", through), at_least=True, note=note)


def _rest(runs: Runs) -> Iterator[Bar]:
    for name, what, limit in (("ttft_p99", "the first token", 1), ("itl_p99", "the time between tokens", 0.5)):
        added = runs.spread("latency", "hostler", added_at_half(name))
        # A range that is wide beside the limit says that the machine was too busy to tell.
        note = f"from {number(added.low)} to {number(added.high)}" if added else ""
        yield Bar(f"added to the p99 of {what} at half of maximum", limit, added and added.median, " ms", note=note)
    large = runs.median("requests-100kB", "hostler", figure("cpu.router"))
    yield Bar("CPU per request of 100 kB: router, of nginx", 1.3, _ratio(large, runs.median("requests-100kB", "nginx", at_edge("cpu"))))
    # One that failed would have ended the run.
    yield Bar("requests that failed under 2,000 streams", 0, 0 if "hostler" in runs.ways("events-2000") else None)
    for part in ("router", "agent"):
        yield Bar(f"memory at rest: {part}", 40, runs.median("footprint", "hostler", figure(f"rss.{part}")), " MB")
        yield Bar(f"memory per 1,000 idle streams: {part}", 25, runs.median("footprint", "hostler", figure(f"idle.{part}")), " MB")


def _best_router(runs: Runs, scenario: str, *, affinity: bool) -> tuple[str, float | None]:
    """The cheapest of the routers of hostler's kind, and what it takes."""
    names = [peer.name for peer in PEERS if peer.router and (peer.affinity or not affinity)]
    known = {name: cpu for name in names if (cpu := runs.median(scenario, name, at_edge("cpu"))) is not None}
    best = min(known, key=known.get, default="")
    return best, known.get(best)


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None
