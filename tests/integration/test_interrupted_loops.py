"""A loop that Ctrl-C ends anywhere, and that the same process begins again, as in a notebook."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import edl_torch
from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.audit.verdict import Outcome, audit

RECORDS, BATCH, EPOCHS, TIMES = 40, 4, 2, 8
PACKAGE = str(Path(edl_torch.__file__).parent)
HOOK = "stepped"  # between the step and the note of it nobody knows whether the model has learnt


class Interrupts:
    """SIGINT at a call of a function of this package, chosen by chance among the next so many."""

    def __init__(self, chance: random.Random, within: int) -> None:
        self._chance = chance
        self._within = within
        self._left = 0

    def expect(self) -> None:
        """Let the next one come."""
        self._left = self._chance.randint(1, self._within)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name == HOOK:
            return
        self._left -= 1
        if self._left == 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore:the loop was left:UserWarning")
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("within", [100, 1000])
def test_each_record_is_learnt_once_an_epoch_wherever_ctrl_c_came(
    within: int, num_threads: int, tmp_path: Path
) -> None:
    for seed in range(4):
        print(f"seed {seed}")
        learnt: Any = torch.zeros(RECORDS, requires_grad=True)
        optimizer = torch.optim.SGD([learnt], lr=1.0)
        interrupts = Interrupts(random.Random(seed), within)
        master = LocalMaster()
        with ElasticDataLoader(
            torch.arange(RECORDS),
            BATCH,
            num_epochs=EPOCHS,
            shuffle=True,
            master_client=master,
            audit_dir=tmp_path / str(seed),
            num_threads=num_threads,
        ) as loader:
            loader.attach(optimizer)
            times = TIMES
            while not master.status().datasets or not master.status().datasets[0].finished:
                try:
                    times -= 1
                    if times >= 0:
                        interrupts.expect()
                    for _ in loader.epochs():
                        for batch in loader:
                            optimizer.zero_grad()
                            (-learnt[batch].sum()).backward()
                            optimizer.step()
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.setprofile(None)
        assert learnt.tolist() == [EPOCHS] * RECORDS
        (verdict,) = audit([tmp_path / str(seed)])
        assert verdict.outcome is Outcome.PROVEN
