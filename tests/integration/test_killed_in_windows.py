"""Ranks killed with -9 in the middle of a window, and their master too: a model has learnt each record once.

The model remembers, as it lies in the checkpoints; the master has a journal; the audit proves the rest.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from master_kit import MakeMaster
from processes import quiet_port
from torchrun_kit import WORKER
from torchrun_worker import EPOCHS, RECORDS

from edl_torch.cli.main import main
from edl_torch.testing import wait_until

START_S, END_S = 90.0, 150.0


class Ranks:
    """The processes of one life of the job."""

    def __init__(self, folder: Path, master: str, world: int, **settings: str) -> None:
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(quiet_port())}
        common |= {"EDL_MASTER_ADDR": master, "OMP_NUM_THREADS": "1", **settings}
        self._steps = folder / "steps"
        for old in self._steps.iterdir():
            old.unlink()
        self.processes = [
            preloaded.Popen(
                [sys.executable, str(WORKER), str(folder)], env=os.environ | common | {"RANK": str(rank)}
            )
            for rank in range(world)
        ]

    def diary(self) -> list[dict[str, Any]]:
        """All that they have written down."""
        lines = [line for file in self._steps.iterdir() for line in file.read_text().split("\n")[:-1]]
        return [json.loads(line) for line in lines]

    def wait_for_steps(self, count: int) -> None:
        """Until rank 0 has made so many in this life."""

        def made() -> bool:
            assert all(process.poll() is None for process in self.processes), "a rank ended by itself"
            return sum("step" in note for note in self.diary() if note["rank"] == 0) >= count

        wait_until(made, timeout_s=START_S)

    def kill(self) -> None:
        """As `kill -9` does."""
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    (tmp_path / "steps").mkdir()
    lives: list[Ranks] = []

    def start(master: str, world: int, **settings: str) -> Ranks:
        lives.append(Ranks(tmp_path, master, world, **settings))
        return lives[-1]

    yield start
    for ranks in lives:
        ranks.kill()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("worlds", "settings"),
    [
        ((2, 2), {"NUM_THREADS": "2"}),
        pytest.param((3, 2, 1), {}, marks=LONG),
        pytest.param((2, 3, 2), {"LOADER_WORKERS": "1", "NUM_THREADS": "2"}, marks=LONG),
        pytest.param((1, 2, 3), {"LOADER_WORKERS": "2"}, marks=LONG),
    ],
    ids=str,
)
def test_ranks_and_master_killed_in_a_window_lose_and_double_nothing(
    tmp_path: Path,
    make_master: MakeMaster,
    start_ranks: Callable[..., Ranks],
    capsys: pytest.CaptureFixture[str],
    worlds: tuple[int, ...],
    settings: dict[str, str],
) -> None:
    master = make_master("--grace-s", "0.5", durable=True)
    master.start()
    settings = {"SHUFFLE_WINDOW": "4", **settings}
    *killed, last = worlds
    for world in killed:
        ranks = start_ranks(master.address, world, **settings)
        ranks.wait_for_steps(3)
        master.kill()
        master.start()
        ranks.wait_for_steps(7)  # the checkpoint of step 5 is behind
        ranks.kill()
    master.kill()
    master.start()
    (tmp_path / "go").touch()
    ranks = start_ranks(master.address, last, SAVE_EVERY="50", **settings)
    assert [rank.wait(END_S) for rank in ranks.processes] == [0] * last
    assert any(note.get("from_step") for note in ranks.diary()), "it began anew"
    weights = json.loads((tmp_path / "weights.json").read_text())
    assert [[-round(weight) for weight in epoch] for epoch in weights] == [[1] * RECORDS] * EPOCHS
    assert main(["audit", str(tmp_path / "audit")]) == 0
    assert "PROVEN" in capsys.readouterr().out
