"""`hostler report`: what an archive for a bug report has, and what it does not have."""

import os
import re
import signal
import subprocess
import tarfile
from pathlib import Path

import httpx2

from fleet import MODEL, Up
from processes import ASK_SECONDS, binary, environment, wait_until

SECRET = "correct horse battery"


def report(up: Up, *words: str) -> subprocess.CompletedProcess:
    """The command, without a terminal, and with a secret in its environment."""
    command = [binary(), "report", "--admin", up.socket, *words]
    environ = environment() | {"HF_TOKEN": SECRET}
    # It asks a login shell and the scheduler too.
    options = {"capture_output": True, "text": True, "timeout": 3 * ASK_SECONDS, "check": False}
    return subprocess.run(command, stdin=subprocess.DEVNULL, env=environ, **options)


def test_a_report_has_a_failed_engines_log_and_no_secret(tmp_path: Path):
    up = Up(tmp_path, ["--served-model-name", MODEL, "--sim-step-ms", "5"])
    try:
        body = {"model": MODEL, "prompt": SECRET, "max_tokens": 2}
        httpx2.post(f"{up.edge}/completions", json=body, timeout=30).raise_for_status()
        victim = up.replicas()[0]
        os.kill(victim.engine_pid, signal.SIGKILL)
        wait_until(lambda: up.replicas()[0].restarts > victim.restarts, 30, "the engine is started again")
        path = tmp_path / "report.tar.gz"
        ended = report(up, "--yes", "--output", str(path))
        assert ended.returncode == 0, ended.stderr
        assert path.stat().st_mode & 0o777 == 0o600
        with tarfile.open(path) as archive:
            files = {name.partition("/")[2]: archive.extractfile(name).read().decode() for name in archive.getnames()}
        log = f"logs/{victim.id.replace('/', '-')}.log"
        expected = {"versions.txt", "settings.txt", "doctor.txt", "ps.json", "decisions.json", "metrics.txt", log}
        assert expected <= files.keys(), ended.stdout
        assert f'"id": "{victim.id}"' in files["ps.json"] and "hostler_answers_total" in files["metrics.txt"]
        assert re.search(rf'"model": "{MODEL}"', files["decisions.json"])
        assert all(SECRET not in text for text in files.values())
        assert all(name in ended.stdout for name in expected)
        again = report(up, "--yes", "--output", str(path))
        assert again.returncode == 1 and "is there already" in again.stderr
    finally:
        up.stop()


def test_a_report_is_not_written_where_nobody_can_be_asked(up: Up, tmp_path: Path):
    path = tmp_path / "report.tar.gz"
    ended = report(up, "--output", str(path))
    assert ended.returncode == 1 and "--yes" in ended.stderr, ended.stderr
    assert not path.exists()
