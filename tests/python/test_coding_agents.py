"""Coding agents, unmodified, work for two turns with either of vLLM's front-ends; left out where npm or pip cannot install them.

The engine calls the first tool that an agent offers, with arguments of random words, and says something when the tool's
result has come back.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet import Up, cache_folder
from processes import wait_until

INSTALL_SECONDS = 120
# Most of them are done in 3 s.
RUN_SECONDS = 60
MODEL = "coder"
PROMPT = "List the files."
# Where an agent says how long answers may be, they are as long as that.
ANSWER = 400
# Nothing listens there. Whatever their settings say, some agents ask the world: opencode npm's registry, Cline its
# maker.
NOWHERE = "http://127.0.0.1:9"
# Node knows no proxies, and Continue asks its maker which version is the newest.
NO_NAMES = """require("dns").lookup = (name, options, done) => (done ?? options)(new Error(`no ${name} here`))"""
OFFLINE = {
    "HTTP_PROXY": NOWHERE,
    "HTTPS_PROXY": NOWHERE,
    "NO_PROXY": "127.0.0.1,localhost",
    "NODE_OPTIONS": "--require HOME/no-names.cjs",
}


@dataclasses.dataclass(frozen=True)
class Agent:
    """One coding agent and its settings, in which EDGE and HOME stand for the service's URL and the agent's folder."""

    name: str
    package: str
    """As npm or pip is to install it."""
    program: str
    arguments: str
    result: str
    """What it prints or keeps when it has a tool's result; nothing for one that calls no tools."""
    setup: str = ""
    """Arguments of a run before, if there is one."""
    files: dict[str, object] = dataclasses.field(default_factory=dict)
    """Settings by their path in its folder, text or JSON."""
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    leaves_at_done: bool = False
    """Whether it closes its connection once it has read `[DONE]`, which may be before the end of the answer."""

    def installed(self) -> Path:
        """The program, as npm or pip installs it; skips the test where they do not."""
        folder = cache_folder() / self.package.replace("==", "-").replace("@", "-").replace("/", "-").strip("-")
        python = "==" in self.package
        program = folder / ("bin" if python else "node_modules/.bin") / self.program
        if not program.exists():
            if not python and not shutil.which("npm"):
                pytest.skip(f"{self.name} needs npm")
            folder.mkdir(parents=True, exist_ok=True)
            if python:
                steps = [f"{sys.executable} -m venv .", f"bin/python -m pip install --quiet --retries 0 {self.package}"]
            else:
                steps = [f"npm install --no-audit --no-fund --silent --fetch-retries 0 {self.package}"]
            try:
                for step in steps:
                    subprocess.run(
                        step.split(), cwd=folder, timeout=INSTALL_SECONDS, check=True, capture_output=True, text=True
                    )
            except subprocess.SubprocessError as error:
                shutil.rmtree(folder, ignore_errors=True)
                pytest.skip(f"{self.name} cannot be installed here: {error} {error.stderr or ''}")
        return program


# What programs on LiteLLM are told by the environment.
LITELLM = {"OPENAI_API_BASE": "EDGE", "OPENAI_API_KEY": "any", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
AGENTS = [
    Agent(
        "opencode",
        "opencode-ai@1.18.33",
        "opencode",
        # Without a title it asks the model for one.
        f"run --auto --format json --title files --model hostler/{MODEL} '{PROMPT}'",
        result='"type":"tool_use"',
        files={
            "opencode.json": {
                "autoupdate": False,
                "share": "disabled",
                "provider": {
                    "hostler": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "EDGE", "apiKey": "any"},
                        "models": {MODEL: {"limit": {"context": 100_000, "output": ANSWER}}},
                    }
                },
            }
        },
        variables={
            "OPENCODE_CONFIG": "HOME/opencode.json",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
    ),
    Agent(
        "qwen-code",
        "@qwen-code/qwen-code@0.24.4",
        "qwen",
        f"--auth-type openai --yolo --output-format json '{PROMPT}'",
        result='"type":"tool_result"',
        files={
            ".qwen/settings.json": {
                "general": {"enableAutoUpdate": False},
                "privacy": {"usageStatisticsEnabled": False},
                # Tools that come first: one starts another agent, one has long arguments.
                "tools": {"exclude": ["agent", "edit"]},
            }
        },
        variables={
            "OPENAI_BASE_URL": "EDGE",
            "OPENAI_API_KEY": "any",
            "OPENAI_MODEL": MODEL,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(ANSWER),
            "QWEN_TELEMETRY_ENABLED": "0",
        },
    ),
    Agent(
        "cline",
        "cline@3.0.65",
        "cline",
        f"--json --provider openai-compatible --model {MODEL} '{PROMPT}'",
        result='"hookEventName":"tool_result"',
        setup=f"auth --provider openai --apikey any --modelid {MODEL} --baseurl EDGE",
        files={"settings.json": {"telemetryOptOut": True, "autoUpdateEnabled": False}},
        # With another backend it leaves a daemon behind.
        variables={
            "CLINE_GLOBAL_SETTINGS_PATH": "HOME/settings.json",
            "CLINE_NO_AUTO_UPDATE": "1",
            "CLINE_SESSION_BACKEND_MODE": "local",
        },
    ),
    Agent(
        "continue",
        "@continuedev/cli@1.5.47",
        "cn",
        f"--config HOME/config.yaml --auto --print '{PROMPT}'",
        result='"toolCallStates"',
        files={
            # JSON is YAML.
            "config.yaml": {
                "name": "hostler",
                "version": "1.0.0",
                "schema": "v1",
                "models": [
                    {
                        "name": MODEL,
                        "model": MODEL,
                        "provider": "openai",
                        "apiBase": "EDGE",
                        "apiKey": "any",
                        "capabilities": ["tool_use"],
                        "defaultCompletionOptions": {"contextLength": 100_000, "maxTokens": ANSWER},
                    }
                ],
            }
        },
        variables={"CONTINUE_CLI_ENABLE_TELEMETRY": "0", "CONTINUE_METRICS_ENABLED": "0"},
    ),
    Agent(
        "pi",
        "@mariozechner/pi-coding-agent@0.73.1",
        "pi",
        f"--provider hostler --model {MODEL} --mode json --print '{PROMPT}'",
        result='"role":"toolResult"',
        files={
            ".pi/agent/models.json": {
                "providers": {
                    "hostler": {
                        "baseUrl": "EDGE",
                        "api": "openai-completions",
                        "apiKey": "any",
                        "models": [{"id": MODEL, "contextWindow": 100_000, "maxTokens": ANSWER}],
                    }
                }
            }
        },
        variables={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    ),
    Agent(
        "aider",
        "aider-chat==0.86.2",
        "aider",
        f"--model openai/{MODEL} --model-metadata-file HOME/models.json --no-git --yes-always --no-pretty --no-check-update"
        " --no-show-release-notes --analytics-disable --load HOME/first --message 'And now?'",
        result="",
        files={
            "first": f"/ask {PROMPT}\n",
            "models.json": {f"openai/{MODEL}": {"max_input_tokens": 100_000, "litellm_provider": "openai"}},
        },
        variables=LITELLM,
        leaves_at_done=True,
    ),
    Agent(
        "mini-swe-agent",
        "mini-swe-agent==2.4.6",
        "mini",
        # It ends with a certain command, which the engine does not find, or with a number of steps.
        "--yolo --agent-class default --config mini.yaml --config agent.step_limit=2"
        f" --model openai/{MODEL} --output HOME/trajectory.json --task '{PROMPT}'",
        result='"role": "tool"',
        variables=LITELLM
        | {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_GLOBAL_CONFIG_DIR": "HOME/mini"},
    ),
]


@pytest.fixture(scope="module", params=["rust", "python"])
def running(request, tmp_path_factory):
    """A service with one engine, which calls tools."""
    # The instructions and tools of one of them are 37,000 tokens.
    flags = ["--served-model-name", MODEL, "--sim-call-tools", "--max-model-len", "200000"]
    flags += ["--num-gpu-blocks-override", "20000", "--sim-step-ms", "2"]
    service = Up(tmp_path_factory.mktemp(request.param), flags, engines=1, options=["--front-end", request.param])
    yield service
    service.stop()


def run(command: list, work: Path, variables: dict[str, str], output: Path) -> int | None:
    """Runs a program and ends what it started; its exit code, or none where it took too long."""
    with output.open("wb") as printed:
        child = subprocess.Popen(
            command,
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return child.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_calls_a_tool_and_goes_on(agent, running, tmp_path):
    program = agent.installed()
    home, work, output = tmp_path / "home", tmp_path / "work", tmp_path / "output"

    def told(text: str) -> str:
        return text.replace("EDGE", running.edge).replace("HOME", str(home))

    work.mkdir()
    for path, content in {"no-names.cjs": NO_NAMES, **agent.files}.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(told(content if isinstance(content, str) else json.dumps(content)))
    # No more of this process's environment: keys and addresses of models may be in it.
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)}
    variables |= {name: told(value) for name, value in (OFFLINE | agent.variables).items()}
    served, logged = running.replicas()[0].served, len(running.log.read_bytes())

    for arguments in filter(None, [agent.setup, agent.arguments]):
        code = run([program, *map(told, shlex.split(arguments))], work, variables, output)
        assert code == 0, f"{agent.name} exited {code}\n{output.read_text(errors='replace')[-4000:]}"

    # A call was made, and its result went back with a second request: without one, the engine would have called again.
    # The agent of the node reports what its engine has served a moment later.
    wait_until(lambda: running.replicas()[0].served - served >= 2, 10, "two requests served")
    assert running.replicas()[0].served - served == 2, output.read_text(errors="replace")[-4000:]
    log = running.log.read_bytes()[logged:].decode()
    requests = [line for line in log.splitlines() if " method=" in line]
    ends = "(complete|client_left)" if agent.leaves_at_done else "complete"
    assert requests and all(re.search(f"status=200 outcome={ends} ", line) for line in requests), log
    kept = [path.read_text(errors="replace") for path in [output, *home.rglob("*.json")]]
    assert any(agent.result in text for text in kept), output.read_text(errors="replace")[-4000:]
