"""Requests made from docs/openapi.yaml by schemathesis, sound ones and broken ones: none is answered by 500 or more, or otherwise than the
document says.
"""

import re
import subprocess
from pathlib import Path

from cases import Case, case, check

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "openapi.yaml"
# What an answer must be: no fault of the server's, and of the status, type and shape that the document gives.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


# How long one answer may take, in seconds. Requests that leave the length of their answer open get as much as fits the engine's context:
# 8,192 steps of 5 ms, on a machine that is busy with this.
ANSWER_SECONDS = 120


def cases(scale, program: str | None) -> list[Case]:
    """The one case."""

    def run(target) -> str:
        check(program, "schemathesis is not installed: run `make hardening`")
        host, port = target.address
        arguments = [program, "run", str(DOCUMENT), "--url", f"http://{host}:{port}", "--checks", CHECKS, "--max-time", str(scale.document)]
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
