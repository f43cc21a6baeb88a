"""A job on several hosts of a `Network`: a master with a journal on one, a trainer on each of the others.

It knows no fault; tests break the network between its calls.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from chaos_plan import BATCH
from chaos_processes import Launcher, Life, MasterProcess
from network_hosts import Network

from edl_torch.audit.chain import final_words
from edl_torch.audit.verdict import Verdict, audit
from edl_torch.master.journal import view
from edl_torch.testing import wait_until

RELEASED = re.compile(r" released .* worker=(\S+) .*why=expired", re.MULTILINE)
PORT = 50001
STEP_S = 0.1
PATIENCE_S = 90.0  # a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a job did. `doubled` records were trained on twice; `released` counts who was taken for dead."""

    doubled: int
    released: Counter[str]
    verdict: Verdict

    @property
    def excused(self) -> int:
        """Records that may be doubled: one batch for each time that a living trainer was taken for dead."""
        return BATCH * self.released.total()


class NetworkJob:
    """Runs from `__enter__`, with a trainer on each host but `master`; `finish` sees it to its end.

    `impatient` says how long trainers wait for their master, in seconds, where it is less than a minute.
    """

    def __init__(
        self,
        network: Network,
        launcher: Launcher,
        folder: Path,
        *,
        lease_timeout_s: float,
        grace_s: float,
        impatient: Mapping[str, float] | None = None,
        size: int = 400 * BATCH,  # lasts longer than anybody is away: in a hurry they are soon done
    ) -> None:
        self.size = size
        self._network = network
        self._launcher = launcher
        self._folder = folder
        self._impatient = impatient or {}
        host = network["master"]
        patience = ("--lease-timeout-s", str(lease_timeout_s), "--grace-s", str(grace_s))
        self.master = MasterProcess(
            folder, "--insecure", *patience, address=f"{host.address}:{PORT}", prefix=host.prefix
        )
        self.lives: dict[str, Life] = {}
        self._stack = ExitStack()

    def __enter__(self) -> NetworkJob:
        with ExitStack() as stack:
            stack.callback(self.master.kill)
            self.master.start()
            for slot, name in enumerate(name for name in self._network.hosts if name != "master"):
                self.lives[name] = self._start_trainer(slot, name)
                stack.callback(self.lives[name].kill)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # What a test waits for ------------------------------------------------------------------------------

    def trained(self, *names: str, batches: int) -> None:
        """Wait until each of these trainers was done with so many batches more."""
        goals = {name: len(self.lives[name].batches) + batches for name in names}
        self.wait(
            lambda: all(len(self.lives[name].batches) >= goal for name, goal in goals.items()),
            f"{batches} more batches of {', '.join(names)}",
        )

    def taken_for_dead(self, *names: str) -> None:
        """Wait until the master has released what these trainers held."""
        self.wait(lambda: set(names) <= set(self.released), f"the release of {', '.join(names)}")

    @property
    def released(self) -> Counter[str]:
        """How often the master took which trainer for dead."""
        return Counter(RELEASED.findall(self.master.log))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it. Raises AssertionError with what everybody said."""
        try:
            wait_until(lambda: self._still_up() and condition(), timeout_s=PATIENCE_S, poll_s=0.03, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._all_said()}") from None

    # The end --------------------------------------------------------------------------------------------

    def finish(self, *, failing: tuple[str, ...] = ()) -> Outcome:
        """Let the steps take no time, wait for every trainer's end, and judge. All but `failing` end well."""
        (self._folder / "hurry").touch()
        self.wait(lambda: all(life.exit_status is not None for life in self.lives.values()), "the end")
        for name, life in self.lives.items():
            assert (life.exit_status == 0) == (name not in failing), self._all_said()
        return Outcome(doubled=self._doubled(), released=self.released, verdict=self._verdict())

    def _doubled(self) -> int:
        times = Counter(record for life in self.lives.values() for batch in life.batches for record in batch)
        assert set(times) == {(0, record) for record in range(self.size)}, "a record was never trained on"
        return times.total() - len(times)

    def _verdict(self) -> Verdict:
        """By the trainers' logs and the master's journal."""
        words = final_words(view(self._folder / "state"))
        (verdict,) = audit([self._folder / "audit"], words=words)
        assert verdict.delivered
        assert verdict.acknowledged == self.size
        return verdict

    def _still_up(self) -> bool:
        assert not self.master.fell, self._all_said()
        return True

    def _all_said(self) -> str:
        for life in self.lives.values():
            life.signal(signal.SIGUSR1)
        time.sleep(0.2)  # until their threads are shown
        said = [f"{name} (exit {life.exit_status}): {life.errors}" for name, life in self.lives.items()]
        return "\n".join([f"the master said:\n{self.master.log[-3000:]}", *said])

    def _start_trainer(self, slot: int, name: str) -> Life:
        job = {
            "address": self.master.address,
            "namespace": self._network[name].namespace,
            "master_timeout_s": self._impatient.get(name, 60.0),
            "size": self.size,
            "epochs": 1,
            "batch": BATCH,
            "records_per_shard": 10 * BATCH,
            "shuffle": True,
            "seed": 5,
            "step_s": STEP_S,
            "workers": 0,
            "nap_s": 0.0,
            "audit_dir": str(self._folder / "audit"),
            "hurry": str(self._folder / "hurry"),
        }
        return self._launcher.start(slot, name, self._folder / name, job)
