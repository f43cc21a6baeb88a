"""Loops that train a model in shards, over gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import preloaded
import pytest
from shard_program import WORLD

PROGRAM = Path(__file__).with_name("shard_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("shards")
    ranks = [
        preloaded.Popen([sys.executable, "-W", "ignore", str(PROGRAM), str(folder), str(rank)])
        for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0] * WORLD
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize(
    ("loop", "outcome"),
    {
        "nothing": "PROVEN",
        "other_weights_and_back": "PROVEN",
        "other_weights": "DELIVERED",
        "other_weights_unseen_by_torch": "DELIVERED",
    }.items(),
)
def test_what_is_written_into_shards_between_steps_is_not_proven(
    found: list[dict[str, str]], loop: str, outcome: str
) -> None:
    assert [rank[loop] for rank in found] == [outcome] * WORLD


@pytest.mark.parametrize("loop", ["FSDP1", "FSDP1 restored", "FSDP2", "FSDP2 restored"])
def test_an_optimizer_of_shards_attaches_itself(found: list[dict[str, str]], loop: str) -> None:
    """Also after a restore of torch's, which steps it once."""
    assert [rank[loop] for rank in found] == ["PROVEN"] * WORLD


def test_a_second_optimizer_of_shards_that_is_not_attached_is_seen(found: list[dict[str, str]]) -> None:
    assert [rank["two optimizers"] for rank in found] == ["DELIVERED"] * WORLD


def test_saving_fsdp1_on_several_ranks_is_refused(found: list[dict[str, str]]) -> None:
    """torch 2.13 cannot load it: what rank 0 alone has saved, rank 1 asks for."""
    assert all("fully_shard" in rank["refusal"] for rank in found)
