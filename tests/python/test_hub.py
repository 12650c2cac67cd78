"""Models that are named as on Hugging Face and not downloaded: their description is fetched by vLLM's own `huggingface_hub`, here from a stand-in of the hub."""

import hashlib
import http.server
import json
import subprocess
import threading
from pathlib import Path

import pytest

import fleet as fleets
from processes import binary, environment

pytestmark = pytest.mark.vllm("own")

COMMIT = "5" * 40
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what `snapshot_download` asks, with the files of the tiny model and one of weights."""

    folder: Path
    asked: list[str]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(self.path)
        names = [name for name in SMALL if (self.folder / name).exists()]
        if self.path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
            files = {name: (self.folder / name).stat().st_size for name in names} | {"model.safetensors": 1 << 30}
            listed = [{"type": "file", "path": name, "size": size, "oid": COMMIT} for name, size in files.items()]
            self.answer(json.dumps(listed).encode(), "application/json")
        elif self.path.startswith("/api/models/org/tiny"):
            listed = [{"rfilename": name} for name in [*names, "model.safetensors"]]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": listed}).encode(), "application/json")
        elif self.path.rsplit("/", 1)[-1] in names and self.path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self.answer((self.folder / self.path.rsplit("/", 1)[-1]).read_bytes(), "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self, content: bytes, kind: str):
        self.send_response(200)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "X-Repo-Commit": COMMIT}
        for name, value in {**headers, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    folder = fleets.cache_folder() / "tiny-model"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("TinyHub", (Hub,), {"folder": folder, "asked": []}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def plan(hub, tmp_path: Path, model: str) -> dict:
    kept = {name: value for name, value in environment().items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    kept |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
    vllm = fleets.cache_folder() / "vllm-0.32" / "bin" / "vllm"
    command = [binary(), "plan", model, "--vllm-bin", str(vllm), "--gpus", "1x24", "--json"]
    planned = subprocess.run(command, capture_output=True, text=True, timeout=100, env=kept, check=False)
    document = json.loads(planned.stdout)
    assert (planned.returncode != 0) == ("unknown" in document["model"]), planned.stderr
    return document


def test_a_model_that_is_not_downloaded_is_planned_from_its_small_files(hub, tmp_path: Path):
    facts = plan(hub, tmp_path, "org/tiny")["model"]
    assert facts["parameters"] > 0 and facts["architecture"], facts
    assert not any(path.endswith("model.safetensors") for path in hub.RequestHandlerClass.asked), hub.RequestHandlerClass.asked
    asked = len(hub.RequestHandlerClass.asked)
    assert plan(hub, tmp_path, "org/tiny")["model"] == facts
    assert len(hub.RequestHandlerClass.asked) == asked, "it is here now"


def test_a_model_that_the_hub_does_not_have_is_planned_without_its_size(hub, tmp_path: Path):
    facts = plan(hub, tmp_path, "org/none")["model"]
    assert "the hub has no such model" in facts["unknown"], facts
