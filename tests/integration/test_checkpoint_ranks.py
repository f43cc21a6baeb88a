"""Checkpoints of gloo ranks without torchrun: saved by two, loaded and saved by three, loaded by one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from master_kit import MakeMaster
from processes import quiet_port
from torchrun_kit import WORKER
from torchrun_worker import EPOCHS, RECORDS

from edl_torch.cli.main import main


def run(folder: Path, master: str, world: int, stop_at: int | None) -> list[dict[str, Any]]:
    """One incarnation of so many ranks; what each wrote down."""
    for old in (folder / "steps").iterdir():
        old.unlink()
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(quiet_port())}
    common |= {"EDL_MASTER_ADDR": master, "OMP_NUM_THREADS": "1", "SAVE_EVERY": "25"}
    if stop_at is not None:
        common["STOP_AT"] = str(stop_at)
    ranks = [
        preloaded.Popen(
            [sys.executable, str(WORKER), str(folder)], env=os.environ | common | {"RANK": str(rank)}
        )
        for rank in range(world)
    ]
    try:
        assert [rank.wait(90) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    files = (folder / "steps").iterdir()
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.long
def test_saved_by_two_restored_by_three_and_by_one(
    tmp_path: Path, start_master: MakeMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "go").touch()
    master = start_master().address
    saved: set[str] = set()
    for world, stop_at in ((2, 50), (3, 75), (1, None)):
        diary = run(tmp_path, master, world, stop_at)
        loaded = {note["loaded"] for note in diary if "loaded" in note}
        assert len(loaded) == 1, "ranks began with different weights"
        assert not saved or loaded == saved
        saved = {note["saved"] for note in diary if "saved" in note}
        assert len(saved) == (stop_at is not None)
    weights = json.loads((tmp_path / "weights.json").read_text())
    assert [[-round(weight) for weight in epoch] for epoch in weights] == [[1] * RECORDS] * EPOCHS
    assert main(["audit", str(tmp_path / "audit")]) == 0, capsys.readouterr().out
