"""lab.py -- Hostler on real GPUs, beside the same engines driven directly and beside plain `vllm serve`, in one run.

    lab.py --hostler PROGRAM --vllm PROGRAM --model FOLDER [--engine=--load-format --engine=dummy]
           [--streams 512] [--seconds 30] [--rounds 2] [--json FILE]

Prints what it does and a table at the end; see docs/gpus.md. It needs nothing but Python and listens on loopback only. What it starts it ends,
also when it fails. Takes six to eight minutes, most of them the engines' starts.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from common import Up, begin, cpu_seconds, flags, free_port, generated, gpu_processes, hostler_up, must_run, process, replicas, run, say, wait_until

# A prompt of some 256 tokens (a word is 1.8 tokens of the tiny tokenizer), and the tokens of each answer.
PROMPT_WORDS = 140
ANSWER_TOKENS = 128
# The main load's answers are of all lengths between these, with the same mean. Where all answers are equally long, all streams of an engine
# end at the same step, begin again together and so keep in step for ever, which spares the engine the mixed steps of real work.
VARIED_TOKENS = (64, 192)
# All clients begin at once; until their requests have drifted apart, and while the last ones end, the load is not what it is meant to be.
RAMP_SECONDS = 5


@dataclasses.dataclass
class Load:
    """A load generator that runs, and the file that it writes at its end."""

    process: subprocess.Popen
    file: Path

    def report(self, seconds: float) -> dict:
        """What it says of all its requests, when it has ended."""
        if self.process.wait(seconds):
            raise SystemExit(f"a load generator ended with {self.process.returncode}")
        return json.loads(self.file.read_text())["targets"][0]["rounds"][0]["all"]


class Lab:
    """The programs and the size of the loads."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.figures: dict = {"loads": []}
        self.started = 0
        self.reports = tempfile.TemporaryDirectory(prefix="lab-")

    def start_load(self, target: str, streams: int, seconds: float, tokens: tuple[int, int] = VARIED_TOKENS) -> "Load":
        """Begins a closed loop of `streams` clients. The words of its prompts are new: `hostler bench` makes others each time."""
        self.started += 1
        file = Path(self.reports.name) / f"{self.started}.json"
        least, most = tokens
        flags = ["--target", target, "--concurrency", str(streams), "--warm-up", "0s", "--duration", f"{seconds}s", "--api", "completions"]
        flags += ["--output-tokens", str((least + most) // 2), "--output-spread", str((most - least) / (most + least)), "--ignore-eos"]
        flags += ["--input-tokens", str(PROMPT_WORDS), "--model", self.options.model, "--quiet", "--json", str(file)]
        return Load(subprocess.Popen([self.options.hostler, "bench", "sustained", *flags], stdout=subprocess.DEVNULL), file)

    def load(self, name: str, targets: list[str], engines: list[str], streams: int, tokens: tuple[int, int] = VARIED_TOKENS) -> dict:
        """Loads the targets at the same time. Tokens are counted by the engines, in the middle of the load."""
        seconds = self.options.seconds
        started = [self.start_load(target, streams, seconds, tokens) for target in targets]
        time.sleep(RAMP_SECONDS)
        first, since = sum(map(generated, engines)), time.monotonic()
        time.sleep(seconds - RAMP_SECONDS - 1)
        rate = (sum(map(generated, engines)) - first) / (time.monotonic() - since)
        reports = [each.report(seconds + 180) for each in started]
        figure = {
            "name": name,
            "streams": streams * len(targets),
            "tokens_per_second": round(rate),
            "requests": sum(report["requests"] for report in reports),
            "events": sum(report["ttft_ms"]["count"] + report["itl_ms"]["count"] for report in reports),
            "failed": sum(report["requests"] - report["complete"] for report in reports),
            "first_event_ms": {key: max(report["ttft_ms"][key] for report in reports) for key in ("p50", "p99")},
            "between_events_ms": {key: max(report["itl_ms"][key] for report in reports) for key in ("p50", "p99")},
        }
        self.figures["loads"].append(figure)
        say(json.dumps(figure))
        return figure

    def plain(self) -> None:
        """`vllm serve` with its defaults on the first GPU."""
        port = free_port()
        command = [self.options.vllm, "serve", self.options.model, *self.options.engine, "--host", "127.0.0.1", "--port", str(port)]
        since = time.monotonic()
        with process("plain", command, {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}) as (engine, log):

            def ready() -> bool:
                must_run(engine, "vllm serve", log)
                return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200

            wait_until("vllm serve answers", ready)
            say(f"vllm serve is ready after {time.monotonic() - since:.0f} s")
            target = f"http://127.0.0.1:{port}"
            self.load("warm-up", [target], [target], self.options.streams)
            self.load("vllm serve, defaults", [target], [target], self.options.streams)

    def fleet(self) -> None:
        """`hostler up` on all GPUs: through it, directly, the loss of an engine."""
        options = self.options
        with hostler_up(options) as up:
            self.figures["replicas"] = len(up.replicas)
            self.load("warm-up", up.sockets, up.sockets, options.streams)
            for _ in range(options.rounds):
                self.beside(up, "", VARIED_TOKENS)
            if not options.no_equal:
                self.beside(up, ", equal answers", (ANSWER_TOKENS, ANSWER_TOKENS))
            self.while_loaded(up)
            if len(up.replicas) > 1 and not options.no_kill:
                self.kill_one(up)
            say("plan and log of the agent:\n" + "\n".join(up.log.read_text(errors="replace").splitlines()[-30:]))
        say("GPU processes left: " + gpu_processes())

    def beside(self, up: Up, what: str, tokens: tuple[int, int]) -> None:
        """The engines directly, then through Hostler, and what that took of the CPU."""
        streams = self.options.streams
        self.load("the engines, directly" + what, up.sockets, up.sockets, streams, tokens)
        before = cpu_seconds(up.pid)
        through = self.load("through hostler" + what, [up.edge], up.sockets, streams * len(up.sockets), tokens)
        through["hostler_cpu_us_per_event"] = round((cpu_seconds(up.pid) - before) / max(through["events"], 1) * 1e6, 2)
        say(f"hostler's CPU: {through['hostler_cpu_us_per_event']} µs per event, router and agent together")

    def while_loaded(self, up: Up) -> None:
        """What `hostler ps` and the driver say of the GPUs under load."""
        load = self.start_load(up.edge, self.options.streams * len(up.replicas), 6)
        time.sleep(4)
        query = "--query-gpu=index,memory.used,utilization.gpu,power.draw,clocks.sm,temperature.gpu"
        say("nvidia-smi:\n" + run("nvidia-smi", query, "--format=csv"))
        say("hostler ps:\n" + run(self.options.hostler, "ps", "--admin", up.socket))
        say("hostler advise:\n" + run(self.options.hostler, "advise", "--admin", up.socket))
        self.figures["gpus"] = [replica.get("gpus") for replica in replicas(self.options.hostler, up.socket)]
        load.report(180)

    def kill_one(self, up: Up) -> None:
        """SIGKILL for the whole group of one engine under load: which streams end with an error, and when it serves again."""
        victim = up.replicas[0]

        def now() -> dict:
            return next(replica for replica in replicas(self.options.hostler, up.socket) if replica["id"] == victim["id"])

        load = self.start_load(up.edge, self.options.streams * len(up.replicas), 12, tokens=(512, 512))
        time.sleep(6)
        there = now()["in_flight"]
        os.killpg(victim["engine_pid"], signal.SIGKILL)
        killed = time.monotonic()
        report = load.report(180)
        say(f"killed {victim['id']} with about {there} requests in flight; of {report['requests']}: {json.dumps(report['failed'])}")

        def back() -> bool:
            state = now()
            return state["phase"] == "ready" and state["restarts"] == victim["restarts"] + 1

        wait_until("the killed engine serves again", back)
        self.figures["kill"] = {"in_flight": there, "failed": report["failed"], "back_after": round(time.monotonic() - killed)}
        say(f"it serves again after {self.figures['kill']['back_after']} s")

    def table(self) -> None:
        """The medians, and the ratios that are promised."""
        loads = [load for load in self.figures["loads"] if load["name"] != "warm-up"]
        print("\n| | streams | output tokens/s | failed | first event p50 / p99 ms | between events p50 / p99 ms |")
        print("| --- | --- | --- | --- | --- | --- |")
        medians = {}
        for name in dict.fromkeys(load["name"] for load in loads):
            same = [load for load in loads if load["name"] == name]
            medians[name] = statistics.median(load["tokens_per_second"] for load in same)
            middle = lambda key, of, same=same: statistics.median(load[key][of] for load in same)  # noqa: E731
            times = " | ".join(f"{middle(key, 'p50'):.1f} / {middle(key, 'p99'):.1f}" for key in ("first_event_ms", "between_events_ms"))
            print(f"| {name} | {same[0]['streams']} | {medians[name]:.0f} | {sum(load['failed'] for load in same)} | {times} |")
        print()
        for what in ("", ", equal answers"):
            through, direct = medians.get("through hostler" + what), medians.get("the engines, directly" + what)
            if through and direct:
                print(f"through hostler / directly{what}: {through / direct:.3f}")
        through = medians.get("through hostler")
        if through and "vllm serve, defaults" in medians:
            each = through / self.figures["replicas"]
            print(f"per GPU, through hostler / vllm serve with its defaults: {each / medians['vllm serve, defaults']:.2f}")


def main() -> None:
    """Runs everything."""
    parser = flags()
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-plain", action="store_true", help="without vllm serve beside it")
    parser.add_argument("--no-equal", action="store_true", help="without the load whose answers are all equally long")
    parser.add_argument("--no-kill", action="store_true", help="without killing an engine under load")
    options = parser.parse_args()
    lab = Lab(options)
    begin(options)
    say(run(options.hostler, "plan", "--model", options.model, "--vllm-bin", options.vllm))
    try:
        if not options.no_plain:
            lab.plain()
        lab.fleet()
    finally:
        if options.json:
            options.json.write_text(json.dumps(lab.figures, indent=1))
        lab.table()


if __name__ == "__main__":
    sys.exit(main())
