"""Loops that train a model in shards (FSDP2), over gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import preloaded
from shard_program import WORLD

PROGRAM = Path(__file__).with_name("shard_program.py")


def test_what_is_written_into_shards_between_steps_is_not_proven(tmp_path: Path) -> None:
    ranks = [
        preloaded.Popen([sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path), str(rank)])
        for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0] * WORLD
    for rank in range(WORLD):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "nothing": "PROVEN",
            "other_weights_and_back": "PROVEN",
            "other_weights": "DELIVERED",
            "other_weights_unseen_by_torch": "DELIVERED",
        }
