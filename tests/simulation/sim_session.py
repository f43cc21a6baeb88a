"""The shell around the pure trainer of one simulated process: `client.session` without threads and locks.

It does for the trainer what that one does, and decides nothing either.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from sim_hub import PARKED, Hub, Process, Task
from sim_master import LeaveCall, SimMaster
from sim_network import Network, SimPort

from edl_torch.audit.log import AuditLog
from edl_torch.client.description import Description
from edl_torch.client.model import Model
from edl_torch.core.calls import RegisterCall
from edl_torch.core.status import DatasetStatus
from edl_torch.core.token import Token
from edl_torch.errors import EdlError, MasterUnavailable, ServiceClosed, StaleLease
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.state import TrainerConfig
from edl_torch.trainer.trainer import Trainer
from edl_torch.trainer.vocabulary import (
    Action,
    Attend,
    Call,
    Describe,
    Logged,
    LookAround,
    Procedure,
    Register,
    Wait,
    Warn,
)

CLOSE_TIMEOUT_S = 5.0


class SimSession:
    """One process with its trainer. `live` is what the process does."""

    def __init__(
        self,
        name: str,
        worker_id: str,
        description: Description,
        hub: Hub,
        network: Network,
        master: SimMaster,
        audit_dir: Path | None = None,
        *,
        manual: bool = False,
    ) -> None:
        self.id = name
        self.description = description
        self.checkpoints: dict[str, str] = {}  # by folder: the one that this session loaded or saved last
        config = TrainerConfig(
            session=name,
            dataset=description.name,
            batch_size=description.batch_size,
            lookahead=None if manual else 0,
            audited=audit_dir is not None,
            follows_data=description.data_changed is not None,
        )
        self.liveness = Liveness()
        self.trainer = Trainer(config, self.liveness)
        self.process = Process(hub, perform=self._perform, wakes=self._wakes, rests=self._rests)
        self.port = SimPort(self.process, network, master)
        self._worker_id = worker_id
        self._audit = (
            None if audit_dir is None else AuditLog(audit_dir, name, worker_id, clock=lambda: hub.now)
        )
        self._state = self.trainer.state
        self._worker: Task | None = None
        self.model = Model()
        self._parameter: Any = None

    def _wakes(self) -> None:
        self._state.now = self.process.hub.now

    def _rests(self) -> None:
        if self._state.facts:
            facts, self._state.facts = self._state.facts, []
            if self._audit is not None:
                for fact in facts:
                    if not isinstance(fact, Logged):
                        self._audit.write(fact)

    def kill(self) -> None:
        """As SIGKILL: nothing is sent or written down any more."""
        self.process.kill()
        if self._audit is not None and self._audit.path.exists():
            size = self._audit.path.stat().st_size
            self._audit.close()
            os.truncate(self._audit.path, size)

    # Actions ----------------------------------------------------------------------------------------------

    def _perform(self, task: Task, action: Action) -> Any:
        if isinstance(action, Call):
            self.port.call(task, action.request.name(), action.request, action.wait_s)
            return PARKED
        if isinstance(action, Register):
            self.port.call(task, "register", self._registration(again=action.again))
            return PARKED
        if isinstance(action, Attend):
            self.port.attend(self.id, self.liveness, self._wanted)
            return True
        if isinstance(action, Describe):
            beginning = self.description.beginning()
            return "" if beginning is None else beginning.encode()
        if isinstance(action, LookAround):
            return ()
        assert isinstance(action, Warn)  # whom it is meant for is not here
        return None

    def _registration(self, *, again: bool) -> RegisterCall:
        known, sources = self.description, self.description.sources()
        return RegisterCall(
            session=self.id,
            worker_id=self._worker_id,
            batch_size=known.batch_size,
            registration=known.by_name() if again or sources is None else known.in_full(sources),
        )

    def _wanted(self, dataset: str) -> None:
        if dataset == self.description.name:
            self.process.run(self.trainer.wanted())

    # What a service asks its session ----------------------------------------------------------------------

    def begin(self) -> None:
        """Let the trainer do what there is to do beside the loop."""
        self._worker = self.process.start(self.trainer.work())

    def restore(self, token: str | None) -> Procedure[None]:
        """Go back to a token."""
        if token is not None and self._state.registered.plan is None:
            self.description.adopt(Token.decode(token))
        yield from self.trainer.position.restore(token)

    def progress(self) -> Procedure[DatasetStatus]:
        """Return the dataset's progress, once all reports are answered."""
        yield from self.trainer.reporter.flush()
        return (yield from self.trainer.position.progress())

    def look(self, at: str, parameters: npt.NDArray[np.uint8]) -> None:
        """Write down what the model is now, where there is a log."""
        if self._audit is None:
            return
        import torch

        if self._parameter is None:
            self._parameter = torch.zeros(parameters.shape)
        self._parameter.copy_(torch.from_numpy(parameters))
        optimizer = SimpleNamespace(param_groups=[{"params": [self._parameter]}])
        seen = self.model.look(at, [optimizer])
        assert seen is not None
        self._state.facts.append(seen)

    def close(self) -> Procedure[None]:
        """Give back what was not trained on and say goodbye, within `CLOSE_TIMEOUT_S`."""
        deadline, failed = self.process.hub.now + CLOSE_TIMEOUT_S, None
        try:
            yield from self.trainer.close(CLOSE_TIMEOUT_S)
        except (MasterUnavailable, ServiceClosed, StaleLease):
            pass
        except EdlError as error:
            failed = error
        worker = self._worker
        if worker is not None:
            yield Wait(lambda: worker.ended, max(0.0, deadline - self.process.hub.now))
        if self._audit is not None:
            self._rests()
            self._audit.close()
            self._audit = None
        if self._state.registered.plan is not None:
            yield Call(LeaveCall(self.id, self._state.fence.member))
        if failed is not None:
            raise failed
