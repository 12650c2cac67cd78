"""Runs scenarios on ways: starts what they need, keeps the order fair, and sorts out what failed.

What a peer fails at is written down beside its figures and ends nothing. What fails directly or through hostler ends the run.
"""

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from figures import Run
from install import Missing
from loads import Failed
from observed import OBSERVED, observed_ways
from peers import PEERS, Peer
from scenarios import ENGINE_FLAGS, Observed, Scenario
from ways import Direct, Engines, Hostler, Proxy, Way

STARTED = time.monotonic()
OURS = ("direct", "hostler", *OBSERVED)
NAMES = (*OURS, *(peer.name for peer in PEERS))


@dataclass
class Lab:
    """What is compared, and what came of it."""

    ways: list[str]
    repetitions: int
    may_install: bool
    runs: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Why a peer is missing or has no figures somewhere, or what was wrong with it."""
    versions: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Finds or installs the peers; those that cannot be had are left out from now on."""
        for peer in self._peers():
            try:
                if not peer.package.find():
                    if not self.may_install:
                        raise Missing(f"{peer.package.package} is not installed, and nothing was to be installed")
                    say(f"installing {peer.package.package}")
                    peer.package.install()
                self.versions[peer.package.package] = peer.package.version()
            except Missing as reason:
                self._leave_out(peer.name, str(reason))

    def measure(self, scenarios: list[Scenario]) -> None:
        """All scenarios; those with the same engines share them and everything that is started before them."""
        for flags in dict.fromkeys(scenario.engines for scenario in scenarios):
            alike = [scenario for scenario in scenarios if scenario.engines == flags]
            everything = range(self.repetitions)
            for repetitions in ([number] for number in everything) if alike[0].fresh else [everything]:
                self._round(flags, alike, repetitions)

    def check_events(self) -> None:
        """Every way must deliver every event of a scenario."""
        events = [run for run in self.runs if run.scenario.startswith("events")]
        expected = {run.scenario: run.figures["units"] for run in reversed(events) if run.way in OURS}
        for run in events:
            units, wanted = run.figures["units"], expected.get(run.scenario)
            if wanted is None or units == wanted:
                continue
            what = f"in repetition {run.repetition + 1}, {units:.0f} events arrived of {wanted:.0f}"
            if run.way in OURS:
                raise Failed(f"{run.scenario}, {run.way}: {what}")
            self._leave_out(f"{run.way}, {run.scenario}", what)

    def _round(self, flags: tuple[str, ...], scenarios: list[Scenario], repetitions: Iterable[int]) -> None:
        """Starts the engines and all ways to them, and runs each scenario on each way, in alternating order."""
        with ExitStack() as stack:
            # Engines listen on Unix sockets below this folder, whose paths must stay short.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostler-bench-", dir="/tmp")))
            hostler = Hostler(folder, (*flags, *ENGINE_FLAGS))
            stack.callback(hostler.stop)
            # Their logs go with the folder.
            stack.push(lambda _, failure, __: say(hostler.logs()) if isinstance(failure, Exception) else None)
            direct = Direct(hostler)
            ways: dict[str, Way] = {"direct": direct, "hostler": hostler}
            if any(isinstance(scenario, Observed) for scenario in scenarios):
                ways |= stack.enter_context(observed_ways(folder, (*flags, *ENGINE_FLAGS)))
            ways |= {way.name: way for way in self._proxies(stack, folder, hostler, flags, scenarios)}
            for repetition in repetitions:
                for scenario in scenarios:
                    names = [name for name in self.ways if name in ways and self._takes_part(name, scenario)]
                    for name in reversed(names) if repetition % 2 else names:
                        self._run(scenario, ways[name], direct, repetition)
                        hostler.settle()

    def _proxies(self, stack: ExitStack, folder: Path, hostler: Hostler, flags: tuple[str, ...], scenarios: list[Scenario]) -> Iterator[Way]:
        """The peers that some scenario wants, running."""
        peers = [peer for peer in self._peers() if any(self._takes_part(peer.name, scenario) for scenario in scenarios)]
        if not peers:
            return
        engines = Engines(folder, (*flags, *ENGINE_FLAGS))
        stack.callback(engines.stop)
        for peer in peers:
            try:
                proxy = Proxy(peer, folder / peer.name.replace(" ", "-"), hostler, engines)
            except (Missing, OSError) as reason:
                self._leave_out(peer.name, f"it does not start: {reason}")
                continue
            stack.callback(proxy.stop)
            yield proxy

    def _run(self, scenario: Scenario, way: Way, direct: Direct, repetition: int) -> None:
        say(f"{scenario.name}, {way.name}, {repetition + 1} of {self.repetitions}")
        try:
            figures = scenario.measure(way, direct)
        except (Failed, OSError) as failure:
            if way.name in OURS:
                raise Failed(f"{scenario.name}, {way.name}: {failure}") from failure
            self._leave_out(f"{way.name}, {scenario.name}", str(failure))
            return
        self.runs.append(Run(scenario.name, way.name, repetition, {name: round(value, 4) for name, value in figures.items()}))

    def _peers(self) -> list[Peer]:
        return [peer for peer in PEERS if peer.name in self.ways and peer.name not in self.left_out]

    def _takes_part(self, name: str, scenario: Scenario) -> bool:
        if name not in self.ways or f"{name}, {scenario.name}" in self.left_out:
            return False
        if name in OBSERVED or isinstance(scenario, Observed):
            return isinstance(scenario, Observed) and name in ("hostler", *OBSERVED)
        if name == "direct":
            return scenario.direct
        affinity = any(peer.affinity for peer in PEERS if peer.name == name)
        return scenario.policies or not affinity

    def _leave_out(self, what: str, why: str) -> None:
        say(f"left out: {what}: {why}")
        self.left_out[what] = why


def say(line: str) -> None:
    """Progress, apart from the result, with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:4.0f}  {line}", file=sys.stderr, flush=True)
