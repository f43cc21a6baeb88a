"""The journal goes back in time under real trainers: they end with a remedy, and the audit proves nothing.

EDL_CHAOS_SEEDS="17 18" runs other seeds than the usual ones.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_plan import BATCH, EPOCHS
from chaos_processes import Launcher, Life, MasterProcess

from edl_torch.audit.verdict import audit
from edl_torch.testing import wait_until

GIVEN = [int(word) for word in os.environ.get("EDL_CHAOS_SEEDS", "").split()]
SEEDS = GIVEN or [6, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]
SIZE = 1200
LOG = "journal.sqlite3-wal"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(errors=tmp_path_factory.mktemp("launcher") / "log") as launcher:
        yield launcher


def start(launcher: Launcher, master: MasterProcess, folder: Path, name: str, **more: object) -> Life:
    job = {
        "address": master.address,
        "size": SIZE,
        "epochs": EPOCHS,
        "batch": BATCH,
        "records_per_shard": 30,
        "shuffle": True,
        "seed": 5,
        "step_s": 0.01,
        "workers": 0,
        "nap_s": 0.0,
        "audit_dir": str(folder / "audit"),
        "hurry": str(folder / "hurry"),
        **more,
    }
    return launcher.start(0, name, folder / name, job)


def go_back(chance: random.Random, state: Path, copy: Path) -> str:
    """One of the ways in which a journal goes back."""
    way = chance.choice(("the folder", "the folder without its log", "no log", "half a log", "a damaged log"))
    match way:
        case "the folder" | "the folder without its log":
            shutil.rmtree(state)
            shutil.copytree(copy, state)
            if way != "the folder":
                (state / LOG).unlink()
        case "no log":
            (state / LOG).unlink()
        case "half a log":
            os.truncate(state / LOG, (copy / LOG).stat().st_size // 2)
        case _:
            with (state / LOG).open("r+b") as log:
                log.seek((copy / LOG).stat().st_size // 2)
                log.write(chance.randbytes(4096))
    return way


def trained_by(life: Life) -> Counter[tuple[int, int]]:
    return Counter(record for batch in life.batches for record in batch)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_journal_that_went_back_is_never_gone_on_from_in_silence(
    tmp_path: Path, launcher: Launcher, seed: int
) -> None:
    chance = random.Random(seed)
    print(f"EDL_CHAOS_SEEDS={seed}")
    master = MasterProcess(tmp_path, "--lease-timeout-s=3", "--grace-s=0.3")
    master.start()
    lives = [start(launcher, master, tmp_path, f"first.{number}") for number in range(3)]
    state, copy = tmp_path / "state", tmp_path / "copy"
    try:
        until = chance.randint(5, 30)
        wait_until(lambda: all(len(life.batches) > until for life in lives), timeout_s=30)
        master.signal(signal.SIGSTOP)  # so that the copy is of one moment
        shutil.copytree(state, copy)
        master.signal(signal.SIGCONT)
        until += chance.randint(15, 30)
        wait_until(lambda: all(len(life.batches) > until for life in lives), timeout_s=30)
        master.kill()
        print(go_back(chance, state, copy))
        master.start()
        wait_until(lambda: all(life.exit_status is not None for life in lives), timeout_s=60)
        for life in lives:
            assert life.exit_status == 1
            assert "load_state_dict" in life.errors.splitlines()[-1], life.errors
        trained = sum(map(trained_by, lives), Counter[tuple[int, int]]())
        assert trained.total() - len(trained) <= BATCH * len(lives), "lent twice"
        (verdict,) = audit([tmp_path / "audit"])
        assert not verdict.delivered

        lives.append(start(launcher, master, tmp_path, "second", begins_again=True, hurry=str(tmp_path)))
        wait_until(lambda: lives[-1].exit_status is not None, timeout_s=60)
        assert lives[-1].exit_status == 0, lives[-1].errors
    finally:
        for life in lives:
            life.kill()
        master.kill()
    assert trained_by(lives[-1]) == {(epoch, n): 1 for epoch in range(EPOCHS) for n in range(SIZE)}
    (verdict,) = audit([tmp_path / "audit"])
    assert verdict.delivered, verdict
