"""A measurement as a document: what was measured, where, with which versions, and what is missing. Several are put together into one."""

import collections
import dataclasses
import datetime
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from figures import Run

FORMAT = "hostler-lab"


@dataclass
class Record:
    """All that is known of one measurement."""

    machine: dict[str, str]
    versions: dict[str, str]
    """Of hostler and of the peers."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Peers that are missing, or what was wrong with them, with the reason."""
    load_averages: list[str] = field(default_factory=list)
    """Before and after each part."""
    runs: list[Run] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Record":
        """What `write` wrote."""
        document = json.loads(path.read_text())
        if document.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is no document of this program")
        return cls(**{**document, "runs": [Run(**run) for run in document["runs"]]})

    def add(self, other: "Record") -> None:
        """Puts another part of the same measurement beside this one; refuses one of another machine or program.

        What both measured are further repetitions.
        """
        for name, own in (self.machine | self.versions).items():
            theirs = (other.machine | other.versions).get(name, own)
            if name != "date" and theirs != own:
                raise ValueError(f"these were not measured alike: {name} is {own}, and {theirs}")
        self.versions |= other.versions
        self.left_out |= other.left_out
        self.load_averages += other.load_averages
        done = collections.Counter()
        for run in self.runs:
            done[run.scenario] = max(done[run.scenario], run.repetition + 1)
        self.runs += [dataclasses.replace(run, repetition=run.repetition + done[run.scenario]) for run in other.runs]


def machine() -> dict[str, str]:
    """What a reader must know to compare figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "CPUs": f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.machine()}",
        "memory": f"{memory * 1024 / 1e9:.0f} GB",
        "kernel": platform.release(),
        "TCP": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
    }


def hostler_version() -> str:
    """What the program under test calls itself."""
    said = subprocess.run([os.environ["HOSTLER_BIN"], "--version"], capture_output=True, text=True, timeout=10, check=True)
    return said.stdout.split()[-1]


def load_average() -> str:
    """Processes that wanted a CPU, on average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"
