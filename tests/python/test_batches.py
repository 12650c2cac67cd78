"""OpenAI's Batch API by OpenAI's SDK, unmodified: the whole course, cancels, refusals, and a router that is killed."""

import io
import json
import shutil
import tempfile
from pathlib import Path

import openai
import pytest

from fleet import MODEL, Router, simulated
from processes import Process, wait_until

# How long a batch of a few hundred short requests takes at most, on a machine that is busy, in seconds.
DONE = 120
ENDED = {"failed", "completed", "expired", "cancelled"}


def line(number: int, tokens: int = 4, **body) -> str:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": f"Number {number}"}], "max_tokens": tokens, **body}
    return json.dumps({"custom_id": f"r-{number}", "method": "POST", "url": "/v1/chat/completions", "body": asked}) + "\n"


def until(client: openai.OpenAI, batch: str, is_so, what: str):
    """Waits until a batch is so, and returns it."""
    seen = []

    def look() -> bool:
        seen[:] = [client.batches.retrieve(batch)]
        return is_so(seen[0])

    wait_until(look, DONE, what, pause=0.1)
    return seen[0]


def answers(client: openai.OpenAI, file: str) -> list[dict]:
    return [json.loads(text) for text in client.files.content(file).text.splitlines()]


class Site:
    """A router with a folder of batches, and one simulated engine."""

    def __init__(self, folder):
        self.folder = folder
        self.variables = {"HOSTLER_ROUTER_BATCHES_DIR": str(folder / "batches"), "HOSTLER_ROUTER_BATCHES_IN_FLIGHT_EACH": "4"}
        self.router = Router("router", folder, variables=self.variables)
        engine = simulated()
        agent = ["agent", "--router", self.router.agents, "--node", "n", "--run-dir", str(folder / "run")]
        self.agent = Process("agent", [*agent, "--log-dir", str(folder / "log"), *engine.command("n")], folder, engine.variables)
        wait_until(lambda: [one.phase for one in self.router.replicas()] == ["ready"], DONE, "the engine is ready", pause=0.1)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.router.edge, api_key="unused", max_retries=0, timeout=30)

    def kill_and_restart(self) -> None:
        killed = self.router
        killed.kill()
        self.router = Router("router-again", self.folder, like=killed, variables=self.variables)

    def stop(self) -> None:
        for process in (self.agent, self.router):
            process.stop()


@pytest.fixture
def site():
    # Engines listen on Unix sockets below this folder, whose paths must stay short.
    folder = Path(tempfile.mkdtemp(prefix="hostler-"))
    running = Site(folder)
    yield running
    running.stop()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_batch_by_the_sdk_ends_with_both_files(site):
    with site.client() as client:
        wrong = line(8).replace(f'"{MODEL}"', '"nothing"')
        content = "".join(map(line, range(8))) + wrong
        file = client.files.create(
            file=("in.jsonl", io.BytesIO(content.encode())),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert (file.purpose, file.filename, file.bytes, file.object) == ("batch", "in.jsonl", len(content), "file")
        assert file.expires_at == file.created_at + 7200
        assert client.files.retrieve(file.id) == file and client.files.content(file.id).text == content
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {"for": "a test"}}
        batch = client.batches.create(input_file_id=file.id, **asked)
        assert (batch.object, batch.input_file_id, batch.metadata) == ("batch", file.id, {"for": "a test"})
        assert batch.expires_at == batch.created_at + 24 * 3600
        ended = until(client, batch.id, lambda batch: batch.status in ENDED, "the batch has ended")
        assert ended.status == "completed" and ended.completed_at and ended.in_progress_at and ended.finalizing_at
        counts = ended.request_counts
        assert (counts.total, counts.completed, counts.failed) == (9, 8, 1)
        assert {one["custom_id"] for one in answers(client, ended.output_file_id)} == {f"r-{number}" for number in range(8)}
        (failed,) = answers(client, ended.error_file_id)
        assert failed["custom_id"] == "r-8" and failed["response"]["status_code"] == 404
        assert [one.id for one in client.batches.list()] == [batch.id]
        assert {one.id for one in client.files.list(purpose="batch_output", limit=1)} == {ended.output_file_id, ended.error_file_id}
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match=file.id):
            client.files.retrieve(file.id)
        with pytest.raises(openai.ConflictError, match="completed"):
            client.batches.cancel(batch.id)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("a.txt", b"a"), purpose="assistants")
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id=file.id, **asked)


def test_a_wrong_file_fails_and_a_long_batch_is_cancelled(site):
    with site.client() as client:
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        file = client.files.create(file=("in.jsonl", (line(0) + line(0) + line(1, stream=True)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, **asked)
        ended = until(client, batch.id, lambda batch: batch.status in ENDED, "the batch has ended")
        assert ended.status == "failed" and ended.failed_at
        assert [(error.code, error.line) for error in ended.errors.data] == [("duplicate_custom_id", 2), ("stream_not_supported", 3)]
        file = client.files.create(file=("in.jsonl", "".join(line(n, 50) for n in range(2000)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, **asked)
        until(client, batch.id, lambda batch: batch.request_counts.completed >= 4, "some answers")
        assert client.batches.cancel(batch.id).status == "cancelling"
        ended = until(client, batch.id, lambda batch: batch.status in ENDED, "the batch has ended")
        assert ended.status == "cancelled" and len(answers(client, ended.output_file_id)) == ended.request_counts.completed


def test_a_batch_goes_on_after_its_router_was_killed(site):
    with site.client() as client:
        file = client.files.create(file=("in.jsonl", "".join(line(n, 1 + n % 5) for n in range(300)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        for least in (40, 150):
            until(client, batch.id, lambda batch: batch.request_counts.completed >= least, f"{least} answers")
            site.kill_and_restart()
        ended = until(client, batch.id, lambda batch: batch.status in ENDED, "the batch has ended")
        assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", 300, 0)
        lines = answers(client, ended.output_file_id)
        by_id = {one["custom_id"]: one["response"]["body"] for one in lines}
        assert len(lines) == len(by_id) == 300
        assert all(by_id[f"r-{n}"]["usage"]["completion_tokens"] == 1 + n % 5 for n in range(300))


def test_up_has_the_batch_api_in_the_users_state(up):
    with openai.OpenAI(base_url=up.edge, api_key="unused", max_retries=0, timeout=30) as client:
        assert client.batches.list(limit=1).object == "list"
        with pytest.raises(openai.NotFoundError, match="No batch found"):
            client.batches.retrieve("batch_1")
