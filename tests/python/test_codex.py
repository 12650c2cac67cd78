"""Codex, unmodified, works for two turns with a tool call, with either of vLLM's front-ends; left out where npm cannot install it."""

import json
import shutil
import subprocess

import pytest

from fleet import Up, cache_folder
from processes import environment

VERSION = "0.171.0"
SETTINGS = """\
model = "codex-test"
model_provider = "hostler"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.hostler]
name = "hostler"
base_url = "{edge}"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def codex():
    """The program, as npm installs it."""
    folder = cache_folder() / f"codex-{VERSION}"
    program = folder / "node_modules" / ".bin" / "codex"
    if not program.exists() and (npm := shutil.which("npm")):
        folder.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--no-audit", "--no-fund", "--silent", f"@openai/codex@{VERSION}"]
        subprocess.run(install, cwd=folder, timeout=120, check=False, capture_output=True)
    if not program.exists():
        pytest.skip("npm does not install Codex here")
    return program


@pytest.mark.parametrize("front_end", ["rust", "python"])
def test_codex_calls_a_tool_and_goes_on(codex, front_end, tmp_path):
    # Codex's own instructions are 12,000 tokens.
    flags = ["--served-model-name", "codex-test", "--sim-call-tools", "--max-model-len", "200000"]
    flags += ["--num-gpu-blocks-override", "20000", "--sim-step-ms", "2"]
    running = Up(tmp_path, flags, engines=1, options=["--front-end", front_end])
    try:
        home, work = tmp_path / "home", tmp_path / "work"
        home.mkdir()
        work.mkdir()
        (home / "config.toml").write_text(SETTINGS.format(edge=running.edge))
        asked = [codex, "exec", "--skip-git-repo-check", "--json", "List the files."]
        ended = subprocess.run(
            asked,
            cwd=work,
            env=environment() | {"CODEX_HOME": str(home), "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        events = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        done = [event for event in events if event["type"] == "turn.completed"]
        assert done, ended.stdout
        # A call was made, and its result went back with a second request.
        assert running.replicas()[0].served == 2
    finally:
        running.stop()
