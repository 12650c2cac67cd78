"""pairs.py -- two ways to set Hostler up, both ready on the same GPUs, loaded in turn: what the difference is worth.

    pairs.py --hostler PROGRAM --vllm PROGRAM --model FOLDER [--engine=--load-format --engine=dummy]
             --a="WORDS" --b="WORDS" [--load plain:512:6] [--seconds 8] [--json FILE] [--logs FOLDER]

WORDS are arguments of `hostler up`, with those of the engines after `--`: --a="" --b="--profile latency", or --b="-- --block-size 64". Each way has
half of each GPU's memory. `--load WORKLOAD:STREAMS:PAIRS` (repeat) says what is asked, by how many clients for each GPU, and how often of each way; the
order turns with every pair. Prints every load, then the ratio of a's tokens to b's in each pair, and medians. See docs/gpus.md.
"""

import argparse
import contextlib
import copy
import shlex
import statistics
import tempfile
from pathlib import Path

from common import Up, begin, flags, hostler_up, say
from peers import WORKLOADS, Peers

# Of each GPU's memory for each way; the rest is for CUDA and what vLLM does not count, twice.
UTILIZATION = 0.44
FIGURES = ["ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "cached_share", "cpu_us_per_event"]


def way(options: argparse.Namespace, name: str, words: str, folder: Path) -> contextlib.AbstractContextManager[Up]:
    """`hostler up` with these words, as a node of its own whose engines' logs are in `folder`."""
    up, _, engine = f" {words} ".partition(" -- ")
    options = copy.copy(options)
    options.up = [*options.up, "--node", name, "--log-dir", str(folder / name), *shlex.split(up)]
    options.engine = ["--gpu-memory-utilization", str(UTILIZATION), *options.engine, *shlex.split(engine)]
    return hostler_up(options, f"up-{name}")


def said(folder: Path, name: str, words: str) -> str:
    """The last line with these words in the log of a way's first engine."""
    lines = (line for log in sorted(folder.glob(f"{name}/*-e0.log")) for line in log.read_text(errors="replace").splitlines())
    return ([line for line in lines if words in line] or [f"nothing of «{words}»"])[-1]


def measure(peers: Peers, ups: dict[str, Up], workload: str, streams: int, pairs: int) -> None:
    """So many pairs of one kind, and what they come to."""
    peers.options.streams = streams
    for name, up in ups.items():
        peers.load(f"warm-up {name}", workload, [up.edge] * len(up.replicas), seconds=3)
    of: dict[str, list[dict]] = {name: [] for name in ups}
    for number in range(pairs):
        for name in list(ups)[:: -1 if number % 2 else 1]:
            up = ups[name]
            of[name].append(peers.load(name, workload, [up.edge] * len(up.replicas), up.pid))
            peers.loads.append(of[name][-1])
    ratios = [first["tokens_per_second"] / second["tokens_per_second"] for first, second in zip(*of.values(), strict=True)]
    failed = sum(load["failed"] for loads in of.values() for load in loads)
    print(f"\n{workload}, {streams} streams for each GPU, {pairs} pairs, {failed} failed: a/b {statistics.median(ratios):.3f}", end="")
    print(" (" + " ".join(f"{ratio:.3f}" for ratio in ratios) + ")")
    for name, loads in of.items():
        medians = {figure: round(statistics.median(load[figure] for load in loads), 3) for figure in ["tokens_per_second", *FIGURES]}
        print(f"  {name}: " + ", ".join(f"{figure} {value:,}" for figure, value in medians.items()), flush=True)


def main() -> None:
    """Starts both ways, one after the other as engines that share a GPU must, and measures."""
    parser = flags()
    parser.add_argument("--a", default="", help="arguments of hostler up for the one way")
    parser.add_argument("--b", required=True, help="and for the other")
    parser.add_argument("--load", action="append", help="WORKLOAD:STREAMS:PAIRS; plain:512:6 unless given")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--logs", type=Path, help="folder in which the engines' logs stay")
    options = parser.parse_args()
    loads = [text.split(":") for text in options.load or ["plain:512:6"]]
    for load in loads:
        if len(load) != 3 or load[0] not in WORKLOADS or not load[1].isdigit() or not load[2].isdigit():
            parser.error(f"--load {':'.join(load)}: WORKLOAD:STREAMS:PAIRS, WORKLOAD one of {', '.join(WORKLOADS)}")
    peers = Peers(options)
    begin(options)
    with tempfile.TemporaryDirectory(prefix="pairs-") as text, contextlib.ExitStack() as stack:
        folder = options.logs or Path(text)
        ups = {name: stack.enter_context(way(options, name, words, folder)) for name, words in (("a", options.a), ("b", options.b))}
        for name in ups:
            say(f"{name}: {said(folder, name, 'take turns')}; {said(folder, name, 'KV cache size')}")
        try:
            for workload, streams, pairs in loads:
                measure(peers, ups, workload, int(streams), int(pairs))
        finally:
            peers.write()


if __name__ == "__main__":
    main()
