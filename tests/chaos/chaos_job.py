"""Carries a plan out: starts a master and trainers, lets the faults happen, and sees the job to its end.

What the job did is judged by `chaos_judge`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos_judge import ChaosError, Judge, Result
from chaos_plan import (
    BATCH,
    EPOCHS,
    GRACE_S,
    LEASE_TIMEOUT_S,
    NETWORK,
    PROGRESS_TIMEOUT_S,
    Fault,
    Kind,
    Plan,
)
from chaos_processes import Launcher, Life, MasterProcess
from proxy import Proxy

from edl_torch.testing import wait_until

ORPHAN_S = 15.0  # torch's workers look for their trainer every 5 s
END_S = 120.0  # from the last fault to the end of the job, on a busy machine


@dataclass(slots=True)
class Run:
    """Carries a plan out."""

    plan: Plan
    folder: Path
    launcher: Launcher
    lives: list[Life] = field(default_factory=list)
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _current: dict[int, Life] = field(default_factory=dict)
    _proxies: list[Proxy] = field(default_factory=list)
    _master: MasterProcess = field(init=False)

    def __post_init__(self) -> None:
        self._master = MasterProcess(
            self.folder,
            f"--lease-timeout-s={LEASE_TIMEOUT_S}",
            f"--grace-s={GRACE_S}",
            f"--progress-timeout-s={PROGRESS_TIMEOUT_S}",
        )

    def result(self) -> Result:
        """Run to the end and judge. Raises ChaosError."""
        began = time.monotonic()
        with ExitStack() as stack:
            stack.callback(self._master.kill)
            self._master.start()
            for slot, nap_s in enumerate(self.plan.naps_s):
                proxy = Proxy(self._master.address, seed=self.plan.seed * 10 + slot)
                self._proxies.append(stack.enter_context(proxy))
                stack.callback(self._end_trainer, slot)
                self._start_trainer(slot, nap_s)
            self._play(began)
            peace = time.monotonic()
            self._finish()
            self._check_orphans()
            now = time.monotonic()
            return self._judge().result(took_s=now - began, tail_s=now - peace)

    # Faults ---------------------------------------------------------------------------------------------

    def _play(self, began: float) -> None:
        """All faults, in the plan's order; where the machine is late all that follows is as late."""
        for fault in self.plan.faults:
            self._at(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]
        while self._queue:
            at_s, _, action = heapq.heappop(self._queue)
            wait_s = began + at_s - time.monotonic()
            time.sleep(max(0.0, wait_s))
            began -= min(0.0, wait_s)
            self._expect(not self._master.fell, "the master ended by itself")
            action()

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._numbers), action))

    def _begin(self, fault: Fault) -> None:
        end = self._carry_out(fault)
        if end is not None:
            self._at(fault.at_s + fault.for_s, end)

    def _carry_out(self, fault: Fault) -> Callable[[], None] | None:
        """Let it begin; returns what ends it."""
        if fault.kind is Kind.MASTER:
            self._master.kill()
            return self._master.start
        if fault.kind in NETWORK:
            return self._break(fault)
        life = self._current[fault.slot]
        self._expect(life.exit_status is None, f"trainer {life.worker_id} ended before the faults did")
        if fault.kind is Kind.STOP:
            life.signal(signal.SIGSTOP)
            return lambda: life.signal(signal.SIGCONT)
        if fault.kind is Kind.HANG:
            life.hang(fault.for_s)
            return lambda: None  # the trainer goes on by itself
        life.kill()
        self._start_trainer(fault.slot, fault.for_s)
        return None

    def _break(self, fault: Fault) -> Callable[[], None]:
        proxy = self._proxies[fault.slot]
        match fault.kind:
            case Kind.HOLD:
                proxy.hold()
            case Kind.REFUSE:
                proxy.refuse()
                proxy.cut()
            case Kind.CUT:
                proxy.cut()
            case kind:
                proxy.delay(0.0, 0.05)
                proxy.cut_at_random(0.05 if kind is Kind.RAGGED else 0.0)
        return lambda: self._mend(proxy)

    def _mend(self, proxy: Proxy) -> None:
        proxy.release()
        proxy.refuse(False)
        proxy.delay(0.0, 0.0)
        proxy.cut_at_random(0.0)

    # Trainers -------------------------------------------------------------------------------------------

    def _start_trainer(self, slot: int, nap_s: float) -> None:
        worker_id = f"t{slot}.{len(self.lives)}"
        job = {
            "address": self._proxies[slot].address,
            "size": self.plan.size,
            "epochs": EPOCHS,
            "batch": BATCH,
            "records_per_shard": self.plan.records_per_shard,
            "shuffle": self.plan.shuffle,
            "seed": self.plan.seed,
            "step_s": self.plan.steps_s[slot],
            "window": self.plan.window,
            "in_order": self.plan.in_order,
            "workers": self.plan.workers[slot],
            "threads": self.plan.threads[slot],
            "nap_s": nap_s,
            "audit_dir": str(self.folder / "audit"),
            "hurry": str(self.folder / "hurry"),
        }
        life = self.launcher.start(slot, worker_id, self.folder / worker_id, job)
        self._current[slot] = life
        self.lives.append(life)

    def _end_trainer(self, slot: int) -> None:
        if slot in self._current:
            self._current[slot].kill()

    def _finish(self) -> None:
        """No more faults: the job must end, soon and well."""
        (self.folder / "hurry").touch()
        deadline = time.monotonic() + END_S
        while any(life.exit_status is None for life in self._current.values()):
            self._expect(not self._master.fell, "the master ended by itself")
            if time.monotonic() > deadline:
                self._hung()
            time.sleep(0.02)
        for life in self._current.values():
            self._expect(life.exit_status == 0, f"trainer {life.worker_id} failed:\n{life.errors}")

    def _check_orphans(self) -> None:
        """A killed trainer's loader workers end by themselves."""
        for life in self.lives:
            wait_until(lambda life=life: not life.processes, timeout_s=ORPHAN_S, what=f"{life} left none")

    def _hung(self) -> None:
        for life in self._current.values():
            life.signal(signal.SIGUSR1)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(life.shown for life in self._current.values()), timeout_s=5.0)
        errors = "\n".join(f"{life.worker_id}:\n{life.errors}" for life in self._current.values())
        self._expect(False, f"not finished {END_S:g} s after the last fault:\n{errors}")

    def _judge(self) -> Judge:
        return Judge(
            plan=self.plan,
            address=self._master.address,
            audit_dir=self.folder / "audit",
            lives=self.lives,
            broken=sum(proxy.broken for proxy in self._proxies),
            master_log=self._master.log,
        )

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise ChaosError(f"{self.plan}\n{what}\nthe master said:\n{self._master.log[-4000:]}")
