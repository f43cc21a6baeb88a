"""A loop that a signal ends anywhere: by Ctrl-C, and is begun again, or by a handler that raises."""

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
from edl_torch.errors import ServiceClosed

RECORDS, BATCH, EPOCHS, TIMES = 40, 4, 2, 8
PACKAGE = str(Path(edl_torch.__file__).parent)
HOOK = "stepped"  # between the step and the note of it nobody knows whether the model has learnt


class Interrupts:
    """A signal at a call of a function of this package, chosen by chance among the next so many."""

    def __init__(
        self,
        chance: random.Random,
        within: int,
        number: signal.Signals = signal.SIGINT,
        spared: tuple[str, ...] = (HOOK,),
    ) -> None:
        self._chance = chance
        self._within = within
        self._number = number
        self._spared = spared
        self._left = 0

    def expect(self) -> None:
        """Let the next one come."""
        self._left = self._chance.randint(1, self._within)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name in self._spared:
            return
        self._left -= 1
        if self._left == 0:
            sys.setprofile(None)
            signal.raise_signal(self._number)


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


def learn(loader: ElasticDataLoader, learnt: Any) -> None:
    optimizer = torch.optim.SGD([learnt], lr=1.0)
    loader.attach(optimizer)
    for _ in loader.epochs():
        for batch in loader:
            optimizer.zero_grad()
            (-learnt[batch].sum()).backward()
            optimizer.step()


def made() -> ElasticDataLoader:
    return ElasticDataLoader(
        torch.arange(RECORDS), BATCH, num_epochs=EPOCHS, shuffle=True, master_client=LocalMaster()
    )


def token_after_a_signal(learnt: Any, interrupts: Interrupts) -> dict[str, str] | None:
    """Train until the signal, and save on the way out. Returns None where that is refused."""
    try:
        with made() as loader:
            try:
                interrupts.expect()
                learn(loader, learnt)
            finally:
                sys.setprofile(None)
                token = loader.state_dict()
    except ServiceClosed:
        return None
    except SystemExit:
        return token
    raise AssertionError("the signal never came")


def test_a_token_taken_after_a_handler_raised_is_exact_or_refused() -> None:
    def terminate(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, terminate)
    tokens = []
    try:
        for seed in range(30):
            print(f"seed {seed}")
            learnt: Any = torch.zeros(RECORDS, requires_grad=True)
            # At the beginning of `do` nothing is decided: it is as before the step was noted.
            interrupts = Interrupts(random.Random(seed), 1500, signal.SIGTERM, (HOOK, "do"))
            token = token_after_a_signal(learnt, interrupts)
            tokens.append(token)
            if token is not None:
                with made() as loader:
                    loader.load_state_dict(token)
                    learn(loader, learnt)
                assert learnt.tolist() == [EPOCHS] * RECORDS
    finally:
        signal.signal(signal.SIGTERM, before)
    assert 0 < tokens.count(None) < len(tokens)
