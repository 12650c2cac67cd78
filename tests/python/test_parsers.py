"""The parsers that the plan gives real vLLM: for small models of five families, a call comes back as one, with no flag of the user's."""

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from fleet import Up, behind_the_rest, cache_folder
from processes import REPOSITORY, environment

pytestmark = pytest.mark.vllm("own")

VLLM = cache_folder() / "vllm-0.32" / "bin" / "vllm"
ARGUMENTS = {"city": "Bern"}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
WRITTEN = {
    "qwen3": ("hermes", "qwen3", f"<tool_call>\n{CALL}\n</tool_call>"),
    "llama3": ("llama3_json", None, json.dumps({"name": "get_weather", "parameters": ARGUMENTS})),
    "mistral": ("mistral", None, f"[TOOL_CALLS][{CALL}]"),
    "deepseek": (
        "deepseek_v3",
        None,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{json.dumps(ARGUMENTS)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "qwen3-coder": (
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>",
    ),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a small model of each family."""
    folder = tmp_path_factory.mktemp("families")
    recipe = REPOSITORY / "tests" / "engine" / "family_models.py"
    subprocess.run(
        [VLLM.with_name("python"), recipe, folder], check=True, capture_output=True, timeout=300, env=environment()
    )
    return folder


@pytest.mark.parametrize("family", WRITTEN)
def test_the_plan_gives_a_model_the_parsers_of_its_family(family, models, tmp_path):
    tools, reasoning, written = WRITTEN[family]
    program = ["--model", str(models / family), "--vllm-bin", str(behind_the_rest(VLLM))]
    running = Up(tmp_path, ["--dtype", "float32"], engines=1, options=program, kind="vllm", start_seconds=600)
    try:
        flags = Path(f"/proc/{running.replicas()[0].engine_pid}/cmdline").read_text().split("\0")
        given = [(flag, flags[flags.index(flag) + 1]) for flag in ("--tool-call-parser", "--reasoning-parser") if flag in flags]
        expected = [("--tool-call-parser", tools), ("--reasoning-parser", reasoning)]
        assert given == [(flag, name) for flag, name in expected if name]
        asked = {
            "model": str(models / family),
            "messages": [{"role": "user", "content": "How is the weather in Bern?"}],
            "tools": [TOOL],
            # A model of random weights writes a call only where it cannot write anything else.
            "structured_outputs": {"choice": [written]},
            "chat_template_kwargs": {"enable_thinking": False},
            "max_tokens": 500,
        }
        answer = httpx.post(f"{running.edge}/chat/completions", json=asked, timeout=300)
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ARGUMENTS)
    finally:
        running.stop()
