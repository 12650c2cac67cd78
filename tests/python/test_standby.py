"""A standby of real vLLM, which takes over the streams of a model's only engine; with the tiny model on the CPU. What each kill cost is printed (`-s`)."""

import json
import os
import signal
import threading
import time

import httpx2
import pytest

import fleet as fleets
from fleet import MODEL, Up
from test_warm_starts import FLAGS, START, core, described, ready

pytestmark = pytest.mark.vllm("own")

STREAMS = 8
TOKENS = 300


@pytest.fixture(scope="module")
def up(engines, tmp_path_factory):
    engines.stop()
    cache = fleets.cache_folder()
    options = ["--model", str(cache / "tiny-model"), "--vllm-bin", str(cache / "vllm-0.32" / "bin" / "vllm"), "--standby"]
    running = Up(tmp_path_factory.mktemp("standby"), FLAGS, options=options, kind="vllm", engines=1, start_seconds=START)
    yield running
    running.stop()


class Stream(threading.Thread):
    """A stream that notes its text and the longest time without a token, in seconds."""

    def __init__(self, up: Up, number: int):
        super().__init__()
        self.url, self.number = f"{up.edge}/completions", number
        self.text, self.pieces, self.longest, self.is_whole = "", 0, 0.0, False
        self.start()

    def run(self):
        body = {"model": MODEL, "prompt": f"{self.number} is a number", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", self.url, json=body, timeout=120) as answer:
            last = None
            for line in answer.iter_lines():
                self.is_whole |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                    self.pieces += 1
                    now = time.monotonic()
                    self.longest = max(self.longest, now - (last or now))
                    last = now


def test_streams_of_the_only_engine_go_on_at_its_standby(up: Up):
    ready(up, 1)
    engine = ready(up, 0)
    assert (engine["is_standby"], described(up, 1)["is_standby"]) == (False, True)
    undisturbed = [Stream(up, number) for number in range(STREAMS)]
    for stream in undisturbed:
        stream.join()
    assert all(stream.is_whole for stream in undisturbed) and described(up, 1)["served"] == 0
    for _ in range(2):
        streams = [Stream(up, number) for number in range(STREAMS)]
        while min(stream.pieces for stream in streams) < 5:
            time.sleep(0.01)
        began = time.monotonic()
        os.kill(core(engine), signal.SIGKILL)
        for stream in streams:
            stream.join()
        assert [stream.is_whole for stream in streams] == [True] * STREAMS
        assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
        engine = ready(up, 0, engine["engine_pid"])
        longest = max(stream.longest for stream in streams)
        print(f"\n{STREAMS} streams went on after {longest:.2f} s, the engine was back after {time.monotonic() - began:.1f} s", end="")
    before = described(up, 1)["served"]
    assert before > 0
    answer = httpx2.post(f"{up.edge}/completions", json={"model": MODEL, "prompt": "once", "max_tokens": 4}, timeout=60)
    assert answer.status_code == 200 and described(up, 1)["served"] == before
