"""peers.py -- Hostler over real engines on GPUs, beside SMG over the same engines and vLLM's own data parallelism, in one run.

    peers.py --hostler PROGRAM --vllm PROGRAM --model FOLDER --smg COMMAND [--engine=--load-format --engine=dummy]
             [--streams 512] [--seconds 14] [--rounds 1] [--ways direct,hostler,tcp,smg,vllm] [--json FILE]

Three phases, each over all GPUs: `hostler up`, whose engines are loaded directly and through Hostler; engines started again by the same command
lines on loopback TCP, loaded directly and through SMG with its default policy (cache-aware); and one `vllm serve --data-parallel-size` with the same
flags. `hostler bench` makes the loads, with one load generator for each GPU in every way, so that it costs the same in all. Prints a table at the
end; see docs/gpus.md.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from common import begin, cpu_seconds, flags, free_port, gpu_processes, hostler_up, must_run, process, run, say, wait_until

# Before each load counts: until the clients' requests have drifted apart, and what is common to prompts is cached.
WARM_UP_SECONDS = 5
# Answers of 64 to 192 tokens, as in lab.py.
ANSWERS = ["--output-tokens", "128", "--output-spread", "0.5", "--ignore-eos"]
# Prompts of some 256 tokens, and of 128 behind 2,048 that are common to a group: a word is 1.8 tokens of the tiny tokenizer.
WORKLOADS = {
    "plain": ["sustained", "--input-tokens", "140"],
    "shared prefix": ["prefix", "--groups", "64", "--prefix-tokens", "1150", "--input-tokens", "70"],
}
WAYS = {
    "direct": "the engines, directly",
    "hostler": "through Hostler",
    "tcp": "the engines over TCP, directly",
    "smg": "through SMG",
    "vllm": "vLLM's data parallelism",
}


@dataclasses.dataclass
class Engine:
    """How the agent started an engine: enough to start it again without the agent."""

    command: list[str]
    environment: dict[str, str]
    cores: set[int]

    @classmethod
    def of(cls, pid: int) -> "Engine":
        """That of a running process."""
        words = [word.decode() for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
        variables = (entry.decode().partition("=") for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if entry)
        return cls(words, {name: value for name, _, value in variables}, os.sched_getaffinity(pid))

    def on(self, port: int, folder: Path) -> "Engine":
        """The same on a port of loopback, its files elsewhere, without the events about its cache: nobody else would listen."""
        command = list(self.command)
        for flag in ("--uds", "--kv-events-config"):
            if flag in command:
                at = command.index(flag)
                del command[at : at + 2]
        environment = {**self.environment, "TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder)}
        # Without events there is nothing for the agent's plugin to do, and its folder is gone with the agent.
        if environment.pop("HOSTLER_SWITCH_INTERVAL", None):
            _, _, environment["PYTHONPATH"] = environment["PYTHONPATH"].partition(":")
        return Engine([*command, "--host", "127.0.0.1", "--port", str(port)], environment, self.cores)


class Peers:
    """The programs and what was measured."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.loads: list[dict] = []

    def generator(self, workload: str, target: str, seconds: float, file: Path) -> subprocess.Popen:
        """Begins one load generator. The words of its prompts are new: `hostler bench` makes others each time."""
        command = [self.options.hostler, "bench", *WORKLOADS[workload], *ANSWERS, "--target", target, "--model", self.options.model, "--quiet"]
        command += ["--concurrency", str(self.options.streams), "--warm-up", f"{WARM_UP_SECONDS}s", "--duration", f"{seconds}s", "--json", str(file)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def load(self, way: str, workload: str, targets: list[str], pid: int | None = None, seconds: float | None = None) -> dict:
        """One load on all targets at once: tokens and requests of all generators together, quantiles of the one that had it worse."""
        seconds = seconds or self.options.seconds
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{index}.json" for index in range(len(targets))]
            started = [self.generator(workload, target, seconds, file) for target, file in zip(targets, files, strict=True)]
            time.sleep(WARM_UP_SECONDS + 1)
            before, since = cpu_seconds(pid) if pid else 0.0, time.monotonic()
            time.sleep(seconds - 2)
            cores = (cpu_seconds(pid) - before) / (time.monotonic() - since) if pid else None
            ended = [each.wait(seconds + 180) for each in started]
            if any(ended):
                raise SystemExit(f"a load generator ended with {max(ended)}")
            reports = [json.loads(file.read_text())["targets"][0]["rounds"][0]["all"] for file in files]
        figure = {"way": way, "workload": workload, "streams": self.options.streams * len(targets), **merged(reports)}
        if cores is not None:
            figure["cores_per_gpu"] = round(cores / len(targets), 3)
            figure["cpu_us_per_event"] = round(cores * 1e6 / max(figure["events_per_second"], 1), 2)
        say(json.dumps(figure))
        return figure

    def rounds_of(self, ways: dict[str, tuple[list[str], int | None]]) -> None:
        """All workloads on these ways (each its targets and the process whose CPU time counts), as often as was asked for, in alternating order."""
        for number in range(self.options.rounds):
            for workload in WORKLOADS:
                for way in list(ways)[:: -1 if number % 2 else 1]:
                    self.loads.append(self.load(way, workload, *ways[way]))

    def warm(self, targets: list[str]) -> None:
        """A short load that does not count, for what engines do only once."""
        self.load("warm-up", "plain", targets, seconds=3)

    def hostler(self) -> list[Engine]:
        """`hostler up`: the engines directly and through it, and how the agent started them."""
        with hostler_up(self.options) as up:
            engines = [Engine.of(replica["engine_pid"]) for replica in up.replicas]
            say("an engine: " + shlex.join(engines[0].command))
            ways = {"direct": (up.sockets, None), "hostler": ([up.edge] * len(engines), up.pid)}
            ways = {way: where for way, where in ways.items() if way in self.options.ways}
            if ways:
                self.warm(up.sockets)
            self.rounds_of(ways)
            say("hostler ps:\n" + run(self.options.hostler, "ps", "--admin", up.socket))
        say("GPU processes left: " + gpu_processes())
        return engines

    def smg(self, engines: list[Engine], folder: Path) -> None:
        """The engines again, on loopback TCP: directly and through SMG."""
        with contextlib.ExitStack() as stack:
            started = []
            for index, engine in enumerate(engines):
                own, port = folder / str(index), free_port()
                own.mkdir()
                engine = engine.on(port, own)
                entered = stack.enter_context(process(f"engine{index}", engine.command, engine.environment, engine.cores))
                started.append((f"http://127.0.0.1:{port}", *entered))
            for each in started:
                ready(*each)
            urls = [url for url, _, _ in started]
            self.warm(urls)
            port, metrics = free_port(), free_port()
            command = [*shlex.split(self.options.smg), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
            command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "warn"]
            command += ["--model-path", self.options.model]
            smg, log = stack.enter_context(process("smg", command))
            target = f"http://127.0.0.1:{port}"
            wait_until("SMG passes requests on", lambda: must_run(smg, "SMG", log) or asked(target, self.options.model), 60)
            directly = {"tcp": (urls, None)} if "tcp" in self.options.ways else {}
            self.rounds_of(directly | {"smg": ([target] * len(urls), smg.pid)})
        say("GPU processes left: " + gpu_processes())

    def vllm(self, engines: list[Engine], folder: Path) -> None:
        """One `vllm serve` that shares the requests out among the GPUs itself."""
        port = free_port()
        target = f"http://127.0.0.1:{port}"
        engine = engines[0].on(port, folder)
        # All GPUs are its own, by the numbers that it expects.
        environment = {name: value for name, value in engine.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
        if inherited := os.environ.get("CUDA_VISIBLE_DEVICES"):
            environment["CUDA_VISIBLE_DEVICES"] = inherited
        cores = set().union(*(each.cores for each in engines))
        command = [*engine.command, "--data-parallel-size", str(len(engines))]
        with process("vllm", command, environment, cores) as (started, log):
            ready(target, started, log)
            self.warm([target] * len(engines))
            self.rounds_of({"vllm": ([target] * len(engines), None)})
        say("GPU processes left: " + gpu_processes())

    def write(self) -> None:
        """All loads, to the file that was asked for."""
        if self.options.json:
            self.options.json.write_text(json.dumps(self.loads, indent=1))

    def table(self) -> None:
        """The medians of the rounds, and Hostler's tokens a second to those of the others."""
        heads = ["", "workload", "prompt tokens", "streams", "output tokens/s", "requests", "failed"]
        heads += ["first token p50 / p99 ms", "between tokens p50 / p99 ms", "cached"]
        print(f"\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
        medians: dict[tuple[str, str], float] = {}
        for workload in WORKLOADS:
            for way, name in WAYS.items():
                same = [load for load in self.loads if (load["way"], load["workload"]) == (way, workload)]
                if not same:
                    continue
                middle = lambda key, same=same: statistics.median(load[key] for load in same)  # noqa: E731
                medians[way, workload] = middle("tokens_per_second")
                times = " | ".join(f"{middle(kind + '_p50_ms'):.1f} / {middle(kind + '_p99_ms'):.1f}" for kind in ("ttft", "itl"))
                counts = f"{sum(load['requests'] for load in same)} | {sum(load['failed'] for load in same)}"
                sizes = f"{middle('prompt_tokens'):,.0f} | {same[0]['streams']:,} | {medians[way, workload]:,.0f}"
                print(f"| {name} | {workload} | {sizes} | {counts} | {times} | {middle('cached_share'):.1%} |")
        print()
        for workload in WORKLOADS:
            own = medians.get(("hostler", workload))
            others = {name: medians.get((way, workload)) for way, name in WAYS.items() if way != "hostler"}
            ratios = [f"{own / tokens:.3f} of {name}" for name, tokens in others.items() if own and tokens]
            if ratios:
                print(f"{workload}: Hostler gave " + ", ".join(ratios))
        for load in self.loads:
            if "cores_per_gpu" in load:
                name, cpu, cores = WAYS[load["way"]], load["cpu_us_per_event"], load["cores_per_gpu"]
                print(f"CPU {name}, {load['workload']}: {cpu} µs per event, {cores} cores per GPU")


def merged(reports: list[dict]) -> dict:
    """What several generators' reports come to, at the same time."""
    total = lambda key: sum(report[key] for report in reports)  # noqa: E731
    tokens, complete = total("output_tokens_per_second"), max(total("complete"), 1)
    # Engines may put several tokens into one event.
    events = sum(report["itl_ms"]["count"] + report["complete"] for report in reports)
    counted = sum(report["complete"] * report["output_tokens_mean"] for report in reports if report["output_tokens_mean"])
    mean = lambda key: sum((report[key] or 0) * report["complete"] for report in reports) / complete  # noqa: E731
    errors: dict[str, int] = {}
    for report in reports:
        for kind, count in report["failed"].items():
            errors[kind] = errors.get(kind, 0) + count
    return {
        "tokens_per_second": round(tokens),
        "events_per_second": round(tokens * events / max(counted, 1)),
        "requests": total("requests"),
        "failed": sum(errors.values()),
        "errors": errors,
        **{f"{kind}_{of}_ms": round(max(report[f"{kind}_ms"][of] for report in reports), 2) for kind in ("ttft", "itl") for of in ("p50", "p99")},
        "prompt_tokens": round(mean("prompt_tokens_mean")),
        "cached_share": round(mean("cached_share"), 4),
    }


def ready(url: str, engine: subprocess.Popen, log: Path) -> None:
    """Waits until an engine serves."""

    def healthy() -> bool:
        must_run(engine, f"the engine at {url}", log)
        return urllib.request.urlopen(url + "/health", timeout=2).status == 200

    since = time.monotonic()
    wait_until(f"the engine at {url} answers", healthy)
    say(f"the engine at {url} is ready after {time.monotonic() - since:.0f} s more")


def asked(target: str, model: str) -> bool:
    """Whether a question is answered."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
    request = urllib.request.Request(target + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=10).status == 200


def main() -> None:
    """Runs what was asked for. A way that fails does not keep the next from being measured."""
    parser = flags()
    parser.add_argument("--smg", default="smg launch", help="command that starts SMG")
    parser.add_argument("--seconds", type=float, default=14)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help=f"some of {','.join(WAYS)}")
    options = parser.parse_args()
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(unknown)} is none of {', '.join(WAYS)}")
    peers = Peers(options)
    begin(options)
    failed = False
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        try:
            engines = peers.hostler()
            for way in ("smg", "vllm"):
                if way not in options.ways or (way == "vllm" and len(engines) == 1):
                    continue
                (Path(folder) / way).mkdir()
                try:
                    getattr(peers, way)(engines, Path(folder) / way)
                except (Exception, SystemExit) as error:
                    failed = True
                    say(f"{WAYS[way]}: {error!r}")
        finally:
            peers.write()
            peers.table()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
