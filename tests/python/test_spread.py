"""A replica over two nodes with real vLLM on the CPU: head and member on this host, each with its part. What each loss cost is printed (`-s`)."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

import fleet as fleets
from fleet import MODEL, Up
from processes import Process, running, shared_memory, wait_until
from test_standby import Stream
from test_warm_starts import START, described, ready

pytestmark = pytest.mark.vllm("own")

FLAGS = ["--max-model-len", "2048", "--dtype", "float32", "--served-model-name", MODEL]


class Spread:
    """`hostler up` as the head, and an agent as the member."""

    def __init__(self, folder: Path, division: list[str], flags: list[str]):
        cache = fleets.cache_folder()
        options = ["--model", str(cache / "tiny-model"), "--vllm-bin", str(cache / "vllm-0.32" / "bin" / "vllm")]
        options += ["--nodes-per-replica", "2", "--head-file", str(folder / "head.json"), *division]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Sockets have short paths.
        self.run_dir = tempfile.mkdtemp(prefix="hostler-")
        member = ["agent", "--node", "far", "--member", "1", "--run-dir", self.run_dir, *options, "--engine", "vllm", "--", *FLAGS, *flags]
        self.member = Process("member", member, folder)
        self.up = Up(folder, [*FLAGS, *flags], options=options, kind="vllm", engines=1, start_seconds=START)

    def stop(self):
        self.up.stop()
        self.member.stop()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def far_processes(spread: Spread, word: str) -> list[int]:
    """Processes of the member's part with this word in their command line."""

    def has(pid: int) -> bool:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return word in line and "keeper exec" not in line

    return [pid for pid in family(spread.member.child.pid) if has(pid)]


# In eager mode a pipeline of vLLM 0.32 fails its first request on the CPU.
@pytest.mark.parametrize(("division", "flags"), [(["--tp", "2"], ["--enforce-eager"]), ([], [])], ids=["tensor", "pipeline"])
def test_a_stream_goes_on_after_the_far_part_has_died(engines, tmp_path, division: list[str], flags: list[str]):
    engines.stop()
    spread = Spread(tmp_path, division, flags)
    try:
        replica = ready(spread.up, 0)
        assert [member["state"] for member in replica["members"]] == ["runs its part"]
        undisturbed = Stream(spread.up, 0)
        undisturbed.join()
        assert undisturbed.is_whole
        for word in ["VLLM::Worker", "--headless"]:
            stream = Stream(spread.up, 0)
            wait_until(lambda: stream.pieces >= 5, 120, "a stream runs")
            killed = far_processes(spread, word)[:1]
            mapped = shared_memory(os.getpgid(killed[0]))
            began = time.monotonic()
            os.kill(killed[0], signal.SIGKILL)
            wait_until(lambda: described(spread.up, 0)["phase"] != "ready", 10, "the head knows of the loss", pause=0.02)
            noticed = time.monotonic() - began
            ready(spread.up, 0, replica["engine_pid"])
            took = time.monotonic() - began
            stream.join()
            assert stream.is_whole and stream.text == undisturbed.text
            assert killed[0] not in {process.pid for process in running()}
            assert not any(Path(path).exists() for path in mapped), "nor is its shared memory left"
            replica = described(spread.up, 0)
            print(f"\nkill -9 of {word}: known after {noticed:.2f} s, serves again after {took:.1f} s, the stream waited {stream.longest:.1f} s", end="")
    finally:
        spread.stop()
