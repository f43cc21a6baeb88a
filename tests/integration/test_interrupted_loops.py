"""A loop that a signal ends anywhere: by Ctrl-C, and is begun again, or by a handler that raises."""

from __future__ import annotations

import random
import signal
import sys
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from cases import cases

import edl_torch
from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.data.reading.iterations import Iteration
from edl_torch.data.reading.threaded_reading import ThreadedReading
from edl_torch.errors import ServiceClosed

RECORDS, BATCH, EPOCHS, TIMES = 40, 4, 2, 8
PACKAGE = str(Path(edl_torch.__file__).parent)
HOOK, NOTE = "stepped", "do"  # between the two nobody knows whether the model has learnt
FINALISERS = {ThreadedReading.abandon.__code__, Iteration._forget.__code__}  # beside those named so


class Interrupts:
    """A signal at a call of a function of this package, chosen by chance among the next so many."""

    def __init__(
        self,
        chance: random.Random,
        within: int,
        number: signal.Signals = signal.SIGINT,
    ) -> None:
        self._chance = chance
        self._within = within
        self._number = number
        self._left = 0

    def expect(self) -> None:
        """Let the next one come; none of the next 0."""
        self._left = self._chance.randint(min(1, self._within), self._within)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or is_spared(frame):
            return
        self._left -= 1
        if self._left == 0:
            sys.setprofile(None)
            signal.raise_signal(self._number)


def is_spared(frame: FrameType | None) -> bool:
    """Whether it runs after a step of the model, and before the note of it begins; or in a finaliser, or a
    generator that is collected, where Python prints what is raised and goes on."""
    if frame is not None and frame.f_code.co_name in (NOTE, "<genexpr>"):
        return True
    while frame is not None and frame.f_code.co_name not in (HOOK, NOTE, "__del__"):
        if frame.f_code in FINALISERS:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name != NOTE


class Notebook:
    """Somebody who begins a loop again after each Ctrl-C, and anew, from what was saved, where it is refused.

    `learnt` is the model, which remembers how often it has learnt each record.
    """

    def __init__(self, folder: Path, num_threads: int) -> None:
        self.learnt: Any = torch.zeros(RECORDS, requires_grad=True)
        self.begun_anew = 0
        self._folder = folder
        self._num_threads = num_threads
        self._begin()
        self._save()

    def _begin(self) -> None:
        self.loader = ElasticDataLoader(
            torch.arange(RECORDS),
            BATCH,
            num_epochs=EPOCHS,
            shuffle=True,
            master_client=LocalMaster(),
            audit_dir=self._folder,
            num_threads=self._num_threads,
        )
        self._optimizer = torch.optim.SGD([self.learnt], lr=1.0)
        self.loader.attach(self._optimizer)

    def _save(self) -> None:
        self._saved = self.learnt.detach().clone(), self.loader.state_dict()

    def run(self, interrupts: Interrupts) -> bool:
        """Run the cell once. Returns whether all is learnt."""
        try:
            interrupts.expect()
            for _ in self.loader.epochs():
                for batch in self.loader:
                    self._optimizer.zero_grad()
                    (-self.learnt[batch].sum()).backward()
                    self._optimizer.step()
                    self._save()
        except KeyboardInterrupt:
            return False
        except ServiceClosed:
            sys.setprofile(None)
            self._begin_anew()
            return False
        finally:
            sys.setprofile(None)
        return True

    def _begin_anew(self) -> None:
        self.begun_anew += 1
        self.loader.close()
        learnt, token = self._saved
        with torch.no_grad():
            self.learnt.copy_(learnt)
        self._begin()
        self.loader.load_state_dict(token)


@pytest.mark.filterwarnings("ignore:the loop was left:UserWarning")
@cases("within, num_threads", [(100, 0), (1000, 2)], product([100, 1000], [0, 2]))
def test_each_record_is_learnt_once_an_epoch_wherever_ctrl_c_came(
    within: int, num_threads: int, tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    begun_anew = []
    for seed in range(4):
        print(f"seed {seed}")
        notebook = Notebook(tmp_path / str(seed), num_threads)
        interrupts = Interrupts(random.Random(seed), within)
        for _ in range(TIMES):
            notebook.run(interrupts)
        never = Interrupts(random.Random(seed), 0)
        assert notebook.run(never) or notebook.run(never), "once it may be refused"
        notebook.loader.close()
        assert notebook.learnt.tolist() == [EPOCHS] * RECORDS
        (verdict,) = audit([tmp_path / str(seed)])
        assert verdict.outcome is Outcome.PROVEN
        begun_anew.append(notebook.begun_anew)
        assert signal.getsignal(signal.SIGINT) is handler
    assert 0 < sum(begun_anew) < 4 * TIMES


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
            interrupts = Interrupts(random.Random(seed), 1500, signal.SIGTERM)
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
