"""Requests made from `/openapi.json` by schemathesis, sound ones and broken ones: none is answered by 500 or more, or otherwise than the
document says.
"""

import json
import re
import subprocess
from urllib.request import urlopen

from cases import Case, case, check

# What an answer must be: no fault of the server's, and of the status, type and shape that the document gives.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

# What the document leaves open: the largest numbers, and fields that must be there, so that most answers are short.
LARGEST = {"max_tokens": 64, "max_completion_tokens": 64, "max_output_tokens": 64, "num_predict": 64, "min_tokens": 16, "n": 4}
REQUIRED = ("options",)

# How long one answer may take, in seconds. Requests that leave the length of their answer open get as much as fits the engine's context:
# 8,192 steps of 5 ms, on a machine that is busy with this.
ANSWER_SECONDS = 120


def bound(part) -> None:
    """Bounds all schemas within a part of the document."""
    if isinstance(part, dict):
        fields = part.get("properties")
        if isinstance(fields, dict):
            for name in LARGEST.keys() & fields.keys():
                fields[name]["maximum"] = LARGEST[name]
            part["required"] = [*part.get("required", ()), *(name for name in REQUIRED if name in fields)]
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        bound(inner)


def cases(scale, program: str | None) -> list[Case]:
    """The one case."""

    def run(target) -> str:
        check(program, "schemathesis is not installed: run `make hardening`")
        host, port = target.address
        with urlopen(f"http://{host}:{port}/openapi.json", timeout=ANSWER_SECONDS) as answer:
            document = json.load(answer)
        bound(document)
        bounded = target.folder / "openapi.json"
        bounded.write_text(json.dumps(document))
        arguments = [program, "run", str(bounded), "--url", f"http://{host}:{port}", "--checks", CHECKS, "--max-time", str(scale.document)]
        arguments += ["--phases", "coverage,fuzzing", "--workers", "1", "--request-timeout", str(ANSWER_SECONDS)]
        arguments += ["--no-color", "--warnings", "off"]
        limit = scale.document + 2 * ANSWER_SECONDS
        ended = subprocess.run(arguments, capture_output=True, text=True, timeout=limit, check=False, cwd=target.folder)
        summary = re.findall(r"^ +\d+ generated.*$", ended.stdout, re.MULTILINE)
        # What it found comes before the requests that show it, which can be long.
        found = ended.stdout[max(ended.stdout.find("= ERRORS ="), ended.stdout.find("= FAILURES ="), 0) :]
        check(ended.returncode == 0, f"{' '.join(summary)}\n{found[:4000]}\n…\n{found[-2000:]}{ended.stderr[-2000:]}")
        return " ".join(line.strip() for line in summary)

    return [case("document", f"{scale.document} s of requests from the OpenAPI document", "as the document says", run, 256)]
