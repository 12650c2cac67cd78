"""Copies of a model on the node's own disk: made once for all agents of a node, checked, and invisible to clients."""

import dataclasses
import os
import re
from pathlib import Path

import httpx2
import pytest

from fleet import Fleet, Up, simulated
from processes import Process

SIZE = 5_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with two files of weights."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for part in (1, 2):
        (folder / f"model-{part}.safetensors").write_bytes(os.urandom(SIZE))
    return folder


def bytes_read(process: Process) -> list[int]:
    """What each engine's copy took from the model's own place."""
    staged = [line for line in process.log.read_text().splitlines() if "model_staged" in line]
    return [int(found.group(1)) for line in staged if (found := re.search(r"\bread=(\d+)", line))]


def copies(stage: Path) -> list[Path]:
    """The copies in a folder of staged models."""
    return list(stage.glob("hostler-stage-*/*/model"))


def test_two_agents_of_a_node_copy_a_model_once(model, tmp_path):
    stage = tmp_path / "stage"
    options = ("--engine", "simulated", "--model", str(model), "--stage", str(stage))
    fleet = Fleet(dataclasses.replace(simulated("--sim-read-model"), options=options))
    try:
        read = [count for agent in fleet.agents for count in bytes_read(agent)]
        assert sorted(read) == [0, 2 * SIZE + len("{}")], read
        [copy] = copies(stage)
        assert (copy / "model-2.safetensors").read_bytes() == (model / "model-2.safetensors").read_bytes()
        cards = httpx2.get(f"{fleet.routers[0].edge}/models").json()["data"]
        assert {card["root"] for card in cards} == {str(model)}, cards
    finally:
        fleet.stop()


def test_a_damaged_copy_is_mended_and_the_model_keeps_its_name(model, tmp_path):
    stage = tmp_path / "stage"
    options = ["--model", str(model), "--stage", str(stage)]
    first = Up(tmp_path, ["--sim-read-model"], 1, options)
    assert bytes_read(first) == [2 * SIZE + len("{}")]
    first.stop()
    [copy] = copies(stage)
    with (copy / "model-1.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    (tmp_path / "up.stderr").unlink()
    again = Up(tmp_path, ["--sim-read-model"], 1, options)
    try:
        assert bytes_read(again) == [SIZE], again.tail()
        assert (copy / "model-1.safetensors").read_bytes() == (model / "model-1.safetensors").read_bytes()
        question = {"model": str(model), "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = httpx2.post(f"{again.edge}/chat/completions", json=question).json()
        assert answer["model"] == str(model), answer
    finally:
        again.stop()


def test_a_model_that_cannot_be_staged_is_served_where_it_lies(model, tmp_path):
    options = ["--model", str(model), "--stage", str(tmp_path / "stage"), "--stage-bytes", "1000"]
    up = Up(tmp_path, ["--sim-read-model"], 1, options)
    try:
        log = up.log.read_text()
        assert "model_not_staged" in log and 'kind="beyond-bound"' in log, log
        assert not copies(tmp_path / "stage")
    finally:
        up.stop()
