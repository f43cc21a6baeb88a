"""Locks of what a machine makes once: they end with their holder, and never stop anybody for good."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edl_torch.readers.shared import files as module
from edl_torch.readers.shared.files import file_lock
from edl_torch.testing import FakeClock


def lock_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.lock")


def test_nothing_is_left_whether_the_block_ends_well_or_not(tmp_path: Path) -> None:
    with file_lock(tmp_path / "x"):
        assert lock_of(tmp_path / "x").exists()
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / "x"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_two_places_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with file_lock(tmp_path / "x"), file_lock(tmp_path / "y", sleep=_must_not_wait):
        pass


def _must_not_wait(seconds: float) -> None:
    raise AssertionError("waited")


def test_threads_are_inside_one_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with file_lock(tmp_path / "x", sleep=lambda seconds: None):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_a_holder_that_is_killed_lets_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=_hold_for_ever, args=(tmp_path / "x", held), daemon=True)
    process.start()
    assert held.wait(60)
    pauses: list[float] = []

    def kill(seconds: float) -> None:
        pauses.append(seconds)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(60)

    with file_lock(tmp_path / "x", sleep=kill):
        assert len(pauses) == 1, "it was held"


def _hold_for_ever(place: Path, held: Any) -> None:
    with file_lock(place):
        held.set()
        signal.pause()


def test_a_child_that_was_forked_meanwhile_does_not_hold_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    end = context.Event()
    with file_lock(tmp_path / "x"):
        child = context.Process(target=end.wait, daemon=True)
        child.start()
    with file_lock(tmp_path / "x", sleep=_must_not_wait):
        pass
    end.set()
    child.join(60)


def test_patience_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    with caplog.at_level(logging.INFO), file_lock(tmp_path / "x"):
        with file_lock(tmp_path / "x", patience_s=30, clock=clock, sleep=clock.advance):
            assert 30 < clock() - 1000 < 31
        assert lock_of(tmp_path / "x").exists(), "it is the other's"
    said = [record.levelname for record in caplog.records]
    assert said == ["INFO", "WARNING"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with file_lock(tmp_path / "x", sleep=_must_not_wait):
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_there_stops_nobody(tmp_path: Path) -> None:
    with file_lock(tmp_path / "nowhere" / "x", sleep=_must_not_wait):
        assert os.listdir(tmp_path) == []
