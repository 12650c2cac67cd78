"""Takes the manual's picture of the page: two hosts of four simulated engines each, on the GPUs of the stand-in for the
driver (`cargo build -p hostler-fake-nvml`), under a load of conversations, and a model asked on the page.

    python picture.py ../../docs/page.png
"""

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2

from browser import Browser
from fleet import Router
from processes import REPOSITORY, Process, ask, wait_until

MODEL = "Qwen/Qwen3-8B"
HOSTS = ("gpu-host-1", "gpu-host-2")
GPUS = 4
CLIENTS = 24
# So long the lines of the picture have to grow, in seconds.
LOAD_SECONDS = 90
QUESTION = "Why do trains have flanges on the inner side of their wheels?"


def install_driver(folder: Path, host: int) -> Path:
    """A driver of its own for each host, whose GPUs are free."""
    library = folder / f"driver-{host}.so"
    shutil.copy(REPOSITORY / "target" / "debug" / "libhostler_fake_nvml.so", library)
    load_gpus(library, host, (1, 1))
    return library


def load_gpus(library: Path, host: int, used_gib: tuple[int, int]) -> None:
    """Has so much of each GPU's memory in use. Engines start only on free ones."""
    drawn = random.Random(host)
    devices = [
        {
            "uuid": f"GPU-{host}-{index}",
            "name": "NVIDIA H100 80GB HBM3",
            "pci": f"00000000:{index + 1:02X}:00.0",
            "used": drawn.randint(*used_gib) << 30,
            "utilisation": drawn.randint(70, 96),
            "milliwatts": drawn.randint(420, 640) * 1000,
            "celsius": drawn.randint(49, 64),
        }
        for index in range(GPUS)
    ]
    Path(f"{library}.json").write_text(json.dumps({"devices": devices}))


def converse(edge: str, number: int, stopping: threading.Event) -> None:
    """One client, whose conversations begin alike and grow."""
    drawn = random.Random(number)
    while not stopping.is_set():
        topic = drawn.randint(0, 9)
        messages = [{"role": "system", "content": f"You are guide number {topic}. " * drawn.choice((20, 60))}]
        for turn in range(drawn.randint(1, 5)):
            messages.append({"role": "user", "content": f"Question {turn} of {number}: " + "tell me more " * 10})
            body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": drawn.randint(40, 220)}
            httpx2.post(f"{edge}/chat/completions", json=body, timeout=60)
            messages.append({"role": "assistant", "content": "as you wish " * drawn.randint(5, 40)})
            if stopping.wait(drawn.uniform(0, 2)):
                return


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="h-", dir="/tmp"))
    processes: list[Process] = []
    drivers: list[Path] = []
    browser = None
    stopping = threading.Event()
    clients: list[threading.Thread] = []
    try:
        router = Router("router", folder)
        processes.append(router)
        for host, name in enumerate(HOSTS):
            arguments = [
                "agent",
                "--router",
                router.agents,
                "--node",
                name,
                "--engine",
                "simulated",
                "--replicas",
                str(GPUS),
            ]
            arguments += [
                "--agent-admin",
                "127.0.0.1:0",
                "--run-dir",
                str(folder / f"run-{name}"),
                "--log-dir",
                str(folder / f"log-{name}"),
            ]
            arguments += ["--", "--served-model-name", MODEL, "--sim-step-ms", "24"]
            drivers.append(install_driver(folder, host))
            processes.append(Process(name, arguments, folder, {"HOSTLER_NVML_LIB": str(drivers[host])}))

        def are_ready() -> bool:
            return sum(replica.phase == "ready" for replica in router.replicas()) == len(HOSTS) * GPUS

        wait_until(are_ready, 60, "all engines are ready")
        for host, driver in enumerate(drivers):
            load_gpus(driver, host, (68, 74))
        clients = [threading.Thread(target=converse, args=(router.edge, number, stopping)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(LOAD_SECONDS)
        browser = Browser(folder)
        browser.look(1440, 900, "light")
        browser.open(ask("page", "--no-open", "--admin", router.socket).strip())
        browser.wait("document.querySelectorAll('#chat-model option').length === 1")
        browser.evaluate("document.getElementById('chat-text').focus()")
        browser.call("Input.insertText", text=QUESTION)
        browser.press("Enter")
        browser.wait("!!document.querySelector('#chat-log .note')")
        browser.evaluate("document.activeElement.blur()")
        time.sleep(2)
        browser.screenshot(Path(sys.argv[1]))
    finally:
        stopping.set()
        for client in clients:
            client.join()
        if browser:
            browser.close()
        for process in reversed(processes):
            process.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
